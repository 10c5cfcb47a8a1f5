"""Recordings on disk: what the next start of a model needs instead of transformers' class of it.

Importing that class takes nearly half of a small model's start. A recording has the script of a pass, the small tensors
that the model computes itself, and where in the checkpoint everything else lies; the weights stay where they are. It is
kept in the cache folder, and used as long as model, versions and kernels are those it was made with. What was recorded
is proven when it is saved: packed weights made from the checkpoint by the recording alone equal those that ran, and
passes of many row counts give the very logits of the model.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sakiyomi.cache.layout import LayerShape
from sakiyomi.core.checkpoint import Checkpoint, read_checkpoint, read_header
from sakiyomi.core.digests import json_digest, load_tensors, save_tensors
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.files import cache_folder, whole_file
from sakiyomi.core.memory import require_bytes
from sakiyomi.core.messages import one_line
from sakiyomi.core.version import __version__
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.kernels.build import built, native
from sakiyomi.kernels.native import PackedLinear, PackedWeights, packed_tensors
from sakiyomi.kernels.pack import join_siblings
from sakiyomi.model_executor.loading.packed import source_key
from sakiyomi.model_executor.loading.prepared import Prepared
from sakiyomi.model_executor.loading.reader import quiet
from sakiyomi.model_executor.recorded import RecordedConfig, RecordedModel
from sakiyomi.model_executor.traced import trace

if TYPE_CHECKING:
    from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["read_recording", "save_recording"]

logger = logging.getLogger("sakiyomi")
FORMAT = 1
SCRIPT = "script"
MOST = 2 << 30  # bytes of a model that is recorded: of a larger one the class is no great part of a start
LARGEST = 1 << 16  # values of a tensor that the model computes itself; a larger one is no such thing
SETTINGS = {".json", ".model", ".txt", ".jinja", ".tiktoken"}  # files beside the weights
TRIED = (3, 33, 257)  # row counts of prompts, beside those of decoding passes, at which a recording is proven


def place_of(folder: Path, dtype: torch.dtype | None) -> Path:
    """The file of a model's recording, whether or not it exists."""
    key = hashlib.sha256(f"{folder.resolve()} {dtype}".encode()).hexdigest()[:16]
    return cache_folder() / "recorded" / f"{folder.name}-{key}.safetensors"


def _key(folder: Path, checkpoint: Checkpoint) -> str:
    """Of everything that a recording depends on: the model's files, the versions of what runs it, and the kernels."""
    kernels = built()
    states = {path.name: path.stat() for path in folder.iterdir() if path.suffix in SETTINGS}
    return json_digest([
        FORMAT, __version__, torch.__version__, version("transformers"), kernels and kernels.name,
        source_key(folder, checkpoint), {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()},
    ])  # fmt: skip


# ---------------------------------------------------------------- the checkpoint's tensors


class _Source:
    """Tensors of a checkpoint, by name."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._files = {name: path for path in checkpoint.files for name in read_header(path).entries}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __call__(self, name: str, dtype: torch.dtype) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.to(dtype)

    def linear(self, layer: Mapping[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weight (out, in) and bias of a linear layer."""
        weight = self(layer["weight"], dtype)
        bias = self(layer["bias"], dtype) if layer["bias"] else None
        return (weight.T if layer["turned"] else weight), bias


# ---------------------------------------------------------------- writing


def save_recording(runner: ModelRunner, folder: Path, dtype: torch.dtype | None, tokenizer: Any) -> bool:
    """Keep a recording of a model, and say whether it is there now.

    Args:
        runner: runs the model in traced passes; between requests.
        folder: it was read from.
        dtype: that was asked for.
        tokenizer: of the model.
    """
    place = place_of(folder, dtype)
    try:
        with runner.lock, torch.no_grad():
            checkpoint = read_checkpoint(folder)
            if checkpoint.stored_bytes > MOST or runner.weights.encoder is not None or runner.weights.stateful:
                raise UnsupportedError("it is too large, or more than layers with attention and no encoder")
            source = _Source(checkpoint)
            about, script, weights = _record(runner, source)
            about |= {"key": _key(folder, checkpoint), "tokenizer": _tokenizer_class(tokenizer, folder)}
            _prove(runner, about, script, weights)
        tensors = {SCRIPT: torch.frombuffer(bytearray(script), dtype=torch.uint8)}
        with whole_file(place, "the next start takes longer") as fresh:
            save_tensors(fresh, tensors, {"about": json.dumps(about, default=str)})
    except Exception as error:  # whatever it is, the model runs; only the next start takes longer
        logger.info("%s is not recorded: %s", folder, one_line(error))
        return False
    return True


def _record(runner: ModelRunner, source: _Source) -> tuple[dict[str, Any], bytes, dict[str, Tensor]]:
    """What is known of a model, the script of its pass, and the weights that this reads."""
    weights, module = runner.weights, runner.module
    names = {parameter.data_ptr(): name for name, parameter in module.named_parameters() if parameter.numel()}
    modules: dict[str, nn.Module] = dict(module.named_modules())
    layers = {name: child for name, child in modules.items() if isinstance(child, PackedLinear)}
    script, read = _script(runner, names)
    found = {name: module.get_parameter(name) for name in read}
    for name, tensor in found.items():
        if name not in source or not torch.equal(source(name, tensor.dtype), tensor):
            raise UnsupportedError(f"{name} is not in the checkpoint as the model has it")
    embeddings = [name for name, child in modules.items() if isinstance(child, nn.Embedding)]
    config = module.config.to_dict()
    aliases = getattr(module.config, "attribute_map", {})
    about = {
        "kind": type(module).__name__,
        "config": config | {alias: getattr(module.config, own) for alias, own in aliases.items()},
        "generation_config": module.generation_config.to_dict(),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "weights": read,
        "embeddings": [name for name in embeddings if f"{name}.weight" in found],
        "layers": [
            _place(name, layer, source, [f"{name}.weight" for name in embeddings])
            for name, layer in sorted(layers.items(), key=lambda item: item[1].index)
        ],
        "head": next(name for name, layer in layers.items() if layer is weights.head),
        "siblings": weights.siblings,
        "cache": [[shape.heads, shape.key_dim, shape.value_dim, shape.window] for shape in weights.shapes],
    }
    return about, script, found


def _script(runner: ModelRunner, names: Mapping[int, str]) -> tuple[bytes, list[str]]:
    """A traced pass up to the head, its weights as further inputs; and their names, in this order."""
    capture, module = runner.weights.capture, runner.module

    def forward(ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        capture.begin()
        module(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False, logits_to_keep=keep)
        return capture.take()[0]

    runner.begin(BatchPlan([]), 8)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    graph = trace(forward, module, ids, ids.clone(), torch.tensor([0, 5])).graph.copy()
    torch._C._jit_pass_dce(graph)
    read: list[str] = []
    for node in list(graph.nodes()):
        if node.kind() != "prim::Constant" or node.output().type().kind() != "TensorType":
            continue
        value = node.t("value")
        if value.data_ptr() in names:
            given = graph.addInput()
            given.setType(node.output().type())
            node.output().replaceAllUsesWith(given)
            node.destroy()
            read.append(names[value.data_ptr()])
        elif value.numel() > LARGEST:
            raise UnsupportedError(f"a tensor of {value.numel()} values belongs to no layer")
    if len(set(read)) < len(read):
        raise UnsupportedError("a weight is read in two places")
    graph.lint()
    buffer = io.BytesIO()
    with _undeprecated():
        torch.jit.save(torch._C._create_function_from_graph("forward", graph), buffer)
    return buffer.getvalue(), read


def _place(name: str, layer: PackedLinear, source: _Source, embeddings: list[str]) -> dict[str, Any]:
    """Where a packed layer's weight and bias are in the checkpoint; tied weights are those of an embedding.

    Raises:
        UnsupportedError: nothing there gives what the kernels read.
    """
    held = layer.tensors()
    for weight in (f"{name}.weight", *embeddings):
        for turned in (False, True):
            bias = f"{name}.bias" if "bias" in held else None
            place = {"name": name, "weight": weight, "turned": turned, "bias": bias}
            if weight in source and (bias is None or bias in source):
                given, added = source.linear(place, layer.weight.dtype)
                if given.shape != (layer.out_features, layer.in_features):
                    continue
                made = packed_tensors(given, added, 16)
                if made.keys() == held.keys() and all(torch.equal(made[part], held[part]) for part in made):
                    return place
    raise UnsupportedError(f"{name} is not in the checkpoint as the model has it")


def _tokenizer_class(tokenizer: Any, folder: Path) -> list[str]:
    """Module and name of a tokenizer's class, by which it is read without asking transformers what it is.

    Raises:
        UnsupportedError: that would give another tokenizer.
    """
    kind = type(tokenizer)
    if not kind.__module__.startswith("transformers."):
        raise UnsupportedError(f"its tokenizer {kind.__name__} is none of transformers' own")
    with quiet():
        found = kind.from_pretrained(folder, local_files_only=True)
    same = found.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    if not same or repr(found) != repr(tokenizer) or found.chat_template != tokenizer.chat_template:
        raise UnsupportedError(f"{kind.__name__} reads another tokenizer from the folder")
    return [kind.__module__, kind.__name__]


def _prove(runner: ModelRunner, about: Mapping[str, Any], script: bytes, weights: Mapping[str, Tensor]) -> None:
    """Compare passes of the recorded model, around the layers that run, with those of the model itself.

    Raises:
        UnsupportedError: their logits differ.
    """
    layers = {name: child for name, child in runner.module.named_modules() if isinstance(child, PackedLinear)}
    recorded = _model(about, script, weights, layers, whole=lambda model: model)
    own = runner.module
    for rows in (*runner.sizes, *TRIED):
        if rows > runner.max_context:
            continue
        tokens = [1 + (7 * i) % (runner.vocab_size - 1) for i in range(rows)]
        found: list[Tensor] = []
        for keep in (None, torch.tensor([rows - 1])):
            for module in (own, recorded):
                with runner.cache.lent(rows) as slot, runner.eagerly():
                    runner.module = module
                    try:
                        plan = BatchPlan([SequenceRows(slot, 0, tokens)])
                        found.append(runner.run(plan, rows, keep=keep).logits.clone())
                    finally:
                        runner.module = own
        if not torch.equal(found[0], found[1]) or not torch.equal(found[2], found[3]):
            raise UnsupportedError(f"its recorded pass of {rows} rows gives other logits")


# ---------------------------------------------------------------- reading


def read_recording(
    folder: Path, dtype: torch.dtype | None, whole: Callable[[], Any], fits: Callable[[Any], object]
) -> tuple[RecordedModel, Prepared, Any] | None:
    """A model from its recording, what is known of it, and its tokenizer; None where there is no recording of it now.

    Args:
        folder: of the model.
        dtype: that was asked for.
        whole: loads the transformers model, for what wants its modules.
        fits: see ``load_model``.
    """
    place = place_of(folder, dtype)
    if not place.is_file() or built() is None or native() is None:
        return None
    try:
        about = json.loads(read_header(place).metadata["about"])
        checkpoint = read_checkpoint(folder)
        if about["key"] != _key(folder, checkpoint):
            return None
        script = load_tensors(place)[SCRIPT].numpy().tobytes()
        kind: Any = getattr(import_module(about["tokenizer"][0]), about["tokenizer"][1])
        with quiet():
            tokenizer = kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever it is, loading the model itself will say it in its own words
        logger.info("%s: the recording is not used: %s", folder, one_line(error))
        with suppress(OSError):
            place.unlink()
        return None
    fits(RecordedConfig(**about["config"]))
    model, prepared = _assembled(about, script, checkpoint, functools.partial(_filled, whole))
    return model, prepared, tokenizer


def _assembled(
    about: Mapping[str, Any], script: bytes, checkpoint: Checkpoint, whole: Callable[[RecordedModel], Any]
) -> tuple[RecordedModel, Prepared]:
    """The model with its weights, packed, and what is known of it."""
    dtype = getattr(torch, about["dtype"])
    size = checkpoint.bytes_as(dtype.itemsize)
    require_bytes(size, repr(checkpoint.files[0].parent.name), remedy="free memory, or choose a smaller model")
    table = PackedWeights.create()
    assert table is not None, "the kernels are there"
    source = _Source(checkpoint)
    weights = {name: source(name, dtype) for name in about["weights"]}
    layers = {layer["name"]: table.add_linear(*source.linear(layer, dtype)) for layer in about["layers"]}
    for group in about["siblings"]:
        join_siblings(table, [layers[name] for name in group])
    cpu = torch.device("cpu")
    shapes = [LayerShape(heads, key, value, cpu, window) for heads, key, value, window in about["cache"]]
    return _model(about, script, weights, layers, whole), Prepared(table, shapes, None, about["siblings"])


def _model(
    about: Mapping[str, Any],
    script: bytes,
    weights: Mapping[str, Tensor],
    layers: Mapping[str, PackedLinear],
    whole: Callable[[RecordedModel], Any],
) -> RecordedModel:
    with _undeprecated():
        run = torch.jit.load(io.BytesIO(script))
    return RecordedModel(
        RecordedConfig(**about["config"]),
        RecordedConfig(**about["generation_config"]),
        run,
        weights,
        about["embeddings"],
        layers,
        about["head"],
        whole,
    ).eval()


@contextmanager
def _undeprecated() -> Iterator[None]:
    """Without torch's advice to export programs instead of scripts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        yield


def _filled(whole: Callable[[], Any], recorded: RecordedModel) -> Any:
    """The transformers model around a recorded one's packed layers."""
    model = whole().eval()
    for name, layer in recorded.layers.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer)
    return model
