"""``sakiyomi export``: trained heads in the formats of other tools, a model in stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sakiyomi.cli.common import JsonOption
from sakiyomi.cli.output import progress, say
from sakiyomi.core.errors import InputError
from sakiyomi.core.memory import readable


@dataclass(frozen=True)
class ExportOptions:
    """Heads, and their new format.

    Attributes:
        heads: folder of the heads in any of the formats, or tales-medusa.
        out: folder to create.
        format: medusa (FasterDecoding's, which TGI reads), vllm (its release 0.11 and earlier), or merged (one
            checkpoint with the target).
        target: the model that the heads belong to; needed for merged, and for vllm if they use the target's output
            layer.
        allow_pickle: read heads that are stored as pickle.
    """

    heads: str = field(metadata={"argument": "HEADS"})
    out: str = field(metadata={"argument": "OUT_FOLDER"})
    format: str = "vllm"
    target: str | None = None
    allow_pickle: bool = False


@dataclass(frozen=True)
class StageOptions:
    """The model, and its number of stages.

    Attributes:
        model: folder in Hugging Face format, or the packed copy of one (MODEL/sakiyomi-int8-bfloat16, which
            --quantize int8 leaves there).
        out: folder to create.
        stages: how many.
    """

    model: str = field(metadata={"argument": "MODEL"})
    out: str = field(metadata={"argument": "OUT_FOLDER"})
    stages: int = 2


def stages(options: StageOptions, output: JsonOption) -> None:
    """Split a model into stages, each of which runs in a process of its own.

    OUT_FOLDER is then a target like any other: the command that loads it starts the processes. On several machines
    torchrun does: torchrun --nnodes 2 --nproc-per-node 1 ... -m sakiyomi generate --target OUT_FOLDER "Once". Each
    machine needs its own stage's folder and stages.json.

    Example: sakiyomi export stages models/large models/large-in-two --stages 2
    """
    with progress("cutting"):
        from sakiyomi.core.embedded import folder_of
        from sakiyomi.model_executor.stages import cut

        out = Path(options.out).expanduser()
        layers = cut(Path(folder_of(options.model)), options.stages, out)
    say(f"{out}: stages of {', '.join(map(str, layers))} layers")
    output.emit({"folder": str(out), "layers": layers})


def medusa(options: ExportOptions, output: JsonOption) -> None:
    """Write Medusa heads in the format of another tool.

    Any of the three formats is read and written.

    Example: sakiyomi export medusa tales-medusa OUT_FOLDER --target tales
    """
    if options.format == "merged" and options.target is None:
        raise InputError("format merged holds the target too; give it with --target")
    with progress("reading"):
        from sakiyomi.core.embedded import folder_of
        from sakiyomi.drafters.medusa_heads.backbone import check_heads
        from sakiyomi.drafters.medusa_heads.formats import read_heads, write_heads

        name = options.heads
        found = read_heads(folder_of(name), allow_pickle=options.allow_pickle)
        shape = found.heads.shape
        if options.format == "vllm" and not shape.own and options.target is None:
            raise InputError(
                f"the heads in {name} use the target's output layer, and format vllm holds a copy of it; give the "
                "target with --target"
            )
        out = new_folder(options.out)
        head: Any = None
        base: str | Path | None = options.target or found.base
        if options.target is not None:
            from sakiyomi.model_executor.loading import load_model

            loaded = load_model(options.target, device="cpu")
            head = loaded.model.get_output_embeddings().weight.detach()
            check_heads(found.heads, head.shape[1], head.shape[0], name)
            base = loaded.folder if options.format == "merged" else options.target
        write_heads(found.heads, out, options.format, base=base, head=head)  # type: ignore[arg-type]
        if options.format == "merged":
            loaded.tokenizer.save_pretrained(out)
    say(f"{out}: {shape.heads} heads of {shape.layers} layers as format {options.format}, read from {found.format}")
    summary = {"heads": shape.heads, "layers": shape.layers, "from": found.format, "format": options.format}
    output.emit(summary | {"folder": str(out)})


@dataclass(frozen=True)
class GgufOptions:
    """The model, and the type of its matrices.

    Attributes:
        model: a folder in Hugging Face format, the name of an embedded model, or a GGUF file; or the folder of an
            EAGLE-3 head or a block drafter.
        out: file to create.
        type: of the matrices: Q4_K_M (the usual one), Q5_K_M, Q6_K, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, BF16, F16 or F32.
        target: of a head or block drafter: the model that it belongs to, by default the one that its own configuration
            names.
        allow_pickle: read weights that are stored as pickle.
    """

    model: str = field(metadata={"argument": "MODEL"})
    out: str = field(metadata={"argument": "OUT_FILE"})
    type: str = "Q4_K_M"
    target: str | None = None
    allow_pickle: bool = False


def gguf(options: GgufOptions, output: JsonOption) -> None:
    """Write a model as a GGUF file, which llama.cpp, LM Studio and Ollama run.

    Targets and draft models alike; with --target, EAGLE-3 heads and block drafters, which llama.cpp loads beside their
    target as draft-eagle3, draft-dflash and draft-dspark. The tokenizer is read back and compared before anything is
    written.

    Example: sakiyomi export gguf tales tales.gguf --type Q8_0
    """
    out = Path(options.out).expanduser()
    if out.exists():
        raise InputError(f"{out} exists; name a new file")
    with progress("reading"):
        from sakiyomi.core.draft_specs import kind_of
        from sakiyomi.core.embedded import folder_of
        from sakiyomi.model_executor.gguf.export import check_type, write_gguf
        from sakiyomi.model_executor.loading import load_model

        form = check_type(options.type)
        kind = kind_of(folder_of(options.model))
        if kind in ("eagle", "block"):
            called = _write_head(options, out)
        elif options.target is not None:
            raise InputError(f"{options.model} is no EAGLE head or block drafter; leave out --target")
        else:
            loaded = load_model(options.model, device="cpu", allow_pickle=options.allow_pickle)
            write_gguf(out, loaded.model, loaded.tokenizer, form)
            called = "model"
    size = out.stat().st_size
    say(f"{out}: {called}, {form}, {readable(size)}")
    output.emit({"file": str(out), "kind": called, "type": form, "bytes": size})


def _write_head(options: GgufOptions, out: Path) -> str:
    """Write a head's GGUF file; returns what llama.cpp calls it."""
    from sakiyomi.core.embedded import folder_of
    from sakiyomi.drafters.gguf_heads import write_head
    from sakiyomi.model_executor.loading.folder import read_tokenizer

    folder = folder_of(options.model)
    target = _target_folder(options.target, folder)
    file, config = _read_draft(folder, target, allow_pickle=options.allow_pickle)
    return write_head(out, file, config.get_text_config(), read_tokenizer(target, False), options.type)


def _target_folder(name: str | None, folder: Path) -> Path:
    """The folder of the target of a head, by default the one that the head's own configuration names.

    Raises:
        InputError: there is none.
    """
    from sakiyomi.core.embedded import folder_of
    from sakiyomi.core.trained import BASE, read_config

    target = name or (read_config(folder) if folder.is_dir() else {}).get(BASE)
    if target is None or not (folder_of(target) / "config.json").is_file():
        raise InputError(f"the target is {target!r}, expected the folder of a model; give it with --target")
    return folder_of(target)


def _read_draft(folder: Path, target: Path, *, allow_pickle: bool) -> tuple[Any, Any]:
    """An EAGLE head or a block drafter in a folder, and the configuration of its target."""
    from sakiyomi.core.draft_specs import is_block
    from sakiyomi.core.trained import read_config
    from sakiyomi.drafters.block_heads.formats import read_block
    from sakiyomi.drafters.eagle_heads.formats import read_eagle
    from sakiyomi.model_executor.loading.families import read_config as model_config

    about = model_config(target)
    read = read_block if folder.is_dir() and is_block(read_config(folder)) else read_eagle
    return read(folder, int(about.get_text_config().num_hidden_layers), allow_pickle=allow_pickle), about


@dataclass(frozen=True)
class SpeculatorsOptions:
    """The draft, and its target.

    Attributes:
        head: folder of an EAGLE-3 head or a block drafter in any of the formats.
        out: folder to create.
        target: the model that it belongs to, a folder or an embedded name; by default the one that its own
            configuration names.
        allow_pickle: read weights that are stored as pickle.
    """

    head: str = field(metadata={"argument": "HEAD"})
    out: str = field(metadata={"argument": "OUT_FOLDER"})
    target: str | None = None
    allow_pickle: bool = False


def speculators(options: SpeculatorsOptions, output: JsonOption) -> None:
    """Write an EAGLE-3 head or a block drafter in the format of vLLM's speculators.

    vLLM and SGLang load the folder as it is. It names the target by its path, where speculators look for the embedding.

    Example: sakiyomi export speculators HEAD OUT_FOLDER --target FOLDER
    """
    with progress("reading"):
        from sakiyomi.core.embedded import folder_of
        from sakiyomi.drafters.speculators_files import write_speculators

        folder = folder_of(options.head)
        out = new_folder(options.out)
        path = _target_folder(options.target, folder)
        file, about = _read_draft(folder, path, allow_pickle=options.allow_pickle)
        kind = write_speculators(out, file, str(path.resolve()), list(about.architectures or ()))
    say(f"{out}: {kind} for {path}, read from {folder}")
    output.emit({"folder": str(out), "kind": kind, "target": str(path), "tensors": len(file.tensors)})


def new_folder(name: str) -> Path:
    """A folder to create.

    Raises:
        InputError: it exists and is not empty.
    """
    out = Path(name).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty folder; name a new one")
    return out
