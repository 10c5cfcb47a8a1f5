"""Parses ``draft=`` with the standard library alone: names of drafters, and what follows their colon."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sakiyomi.core.checkpoint import HEADS_FILE, read_checkpoint, read_header, read_json
from sakiyomi.core.embedded import folder_of, is_embedded_name
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.gguf_files import gguf_file

SPECULATORS = "speculators_model_type"
"""Key of a configuration by vLLM's speculators."""
BLOCK_KINDS = ("dflash", "dflash2", "dspark")
"""Of speculators: block drafters."""
BLOCK_ARCHITECTURES = ("DFlashDraftModel", "Qwen3DSparkModel")
"""Of the method's authors (JetSpec's among them), and of DeepSpec."""
EAGLE_ARCHITECTURE = "LlamaForCausalLMEagle3"
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Model types of drafts that read their target's own keys and values."""
MTP_ARCHITECTURE = "MtpLayer"
"""Of a folder with an MTP layer that is no part of its target's own files."""
EAGLE_NORM = "layers.0.hidden_norm.weight"
"""A tensor that EAGLE-3 heads have and earlier ones do not."""


class Form(NamedTuple):
    """The argument that a drafter's name takes.

    Attributes:
        text: syntax for messages, optional parts in square brackets; "": the name takes no argument.
        what: the argument is, for messages.
        read: parses it; raises ``ValueError`` if it is invalid, ``NotADirectoryError`` if its folder is missing.
        example: of an argument, for messages.
    """

    text: str = ""
    what: str = ""
    read: Callable[[str], Any] = str
    example: str = ":<folder>"


def is_block(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a block drafter: of DFlash's authors, DeepSpec, or vLLM's speculators."""
    if SPECULATORS in config:
        return config[SPECULATORS] in BLOCK_KINDS
    named: Sequence[str] = config.get("architectures") or ()
    return "dflash_config" in config or any(name in BLOCK_ARCHITECTURES for name in named)


def is_third_eagle(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of an EAGLE-3 head; check ``is_block`` first."""
    return SPECULATORS in config or EAGLE_ARCHITECTURE in (config.get("architectures") or ())


def is_first_eagle(names: Collection[str]) -> bool:
    """Whether these tensor names are those of EAGLE-1 or 2, whose configurations look like an ordinary model's."""
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= set(names) and EAGLE_NORM not in names


def _tensor_names(folder: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors files, as far as these are intact."""
    try:
        return {name for file in read_checkpoint(folder).files for name in read_header(file).entries}
    except LoadError:
        return set()


_OPTION = re.compile(r"(.*)\[(device|learn)=([^\[\]]*)\]")


class ModelSpec(NamedTuple):
    """The argument of a draft model's spec.

    Attributes:
        name: of the model.
        device: it runs on; None: the target's.
        learn: "": the model does not learn while it drafts; "on": it does, and keeps what it learns in a file in the
            cache folder; else the path of that file.
    """

    name: str
    device: str | None = None
    learn: str = ""


def model_spec(argument: str) -> ModelSpec:
    """Name and options of a draft model, in any order.

    Raises:
        InputError: an option is given twice, or says nothing.
    """
    options: dict[str, str] = {}
    name = argument
    while found := _OPTION.fullmatch(name):
        name, option, value = found.groups()
        if option in options or not value:
            raise InputError(
                f"draft model:{argument} has [{option}={value}]{' once more' if value else ''}; write each option "
                "once, as in model:<path>[learn=on]"
            )
        options[option] = value
    learn = options.get("learn", "off")
    return ModelSpec(name, options.get("device"), "" if learn == "off" else learn)


def _model(text: str) -> ModelSpec:
    found = model_spec(text)
    if not found.name:
        raise ValueError
    return found


def _folder(text: str) -> str:
    if not text:
        raise ValueError
    if not folder_of(text).is_dir():
        raise NotADirectoryError
    return text


def _file(text: str) -> str:
    if not Path(text).expanduser().is_file():
        raise LoadError(f"there is no file {text!r} with n-grams; check the path, or make one: sakiyomi train ngram")
    return text


def _rate(text: str) -> float:
    if not 0.0 <= (rate := float(text)) <= 1.0:
        raise ValueError
    return rate


FORMS = {
    "model": Form(":<path or id>[[device=<device>]][[learn=on|<file>]]", "model", _model, ":<folder or hub id>"),
    "medusa": Form(":<heads>", "Medusa heads", _folder),
    "eagle": Form(":<head>", "EAGLE head", _folder),
    "block": Form(":<block drafter>", "block drafter", _folder),
    "mtp": Form("[:<layer>]", "MTP layer", _folder),
    "assistant": Form(":<assistant>", "Gemma assistant", _folder),
    "self-int8": Form(),
    "self-int4": Form(),
    "self-evicted": Form("[:<pairs of a head>]", "number of pairs", int, ":1024"),
    "early-exit": Form(":<layers>", "layer", int, ":4"),
    "oracle": Form("[:<rate>]", "rate from 0 to 1", _rate, ":0.8"),
    "prompt-lookup": Form("[:<longest match>]"),
    "suffix": Form("[:<file>]"),
    "ngram": Form("[:<file>]", "file", _file),
    "recycle": Form("[:<file>]"),
}
"""Drafters by the name before the colon of their spec; ``drafters.DRAFTERS`` makes them."""


def read_argument(kind: str, text: str) -> Any:
    """The parsed argument of a spec; None: it has none.

    Raises:
        InputError: the argument is invalid.
        LoadError: it is the path of a missing file or folder.
    """
    form = FORMS[kind]
    if text and not form.text:
        raise InputError(f'draft "{kind}:{text}"; {kind} takes nothing behind a colon')
    if not text and not form.text.startswith(":"):
        return None
    if form.read is _folder and (found := _OPTION.fullmatch(text)):
        raise InputError(
            f'draft "{kind}:{text}": [{found[2]}=...] is for draft models, model:<path>[{found[2]}=...]; {kind} runs '
            "where its target runs and stays as it was trained"
        )
    try:
        return form.read(text)
    except ValueError:
        raise InputError(f'draft "{kind}:{text}" names no {form.what}; write {kind}{form.example}') from None
    except NotADirectoryError:
        raise LoadError(
            f"no {form.what} in {str(folder_of(text))!r}: there is no such folder; check the path"
        ) from None


_JOINT = re.compile(r"\+(?=(?:none|auto|" + "|".join(map(re.escape, FORMS)) + r")(?:[:+]|$))")
"""A + before the name of a drafter; any other + belongs to a path."""


def head_names(spec: str) -> list[str]:
    """Names of the heads in a spec of one or several: A and B of "medusa:A+eagle:B"."""
    parts = [(part, *part.partition(":")[::2]) for part in _JOINT.split(spec)]
    return [name if kind in FORMS else part for part, kind, name in parts]


def split_spec(spec: str) -> list[str]:
    """The specs in a text, one by one. A folder, file or embedded name becomes the spec of the drafter that it holds.

    Raises:
        InputError: this version has no such drafter.
    """
    parts = [_named(part) for part in _JOINT.split(spec)]
    for part in parts:
        if part not in ("none", "auto") and part.partition(":")[0] not in FORMS:
            forms = ("none", "auto", *(name + form.text for name, form in FORMS.items()))
            known = ", ".join(f'"{form}"' for form in forms)
            raise InputError(
                f"unknown draft {part!r}; this version has {known}, a folder, a GGUF file, several joined by +, or a "
                "Drafter object"
            )
    return parts


def _named(part: str) -> str:
    """A spec unchanged; for a folder, a GGUF file or an embedded name the spec of the drafter that it holds."""
    if part in ("none", "auto") or part.partition(":")[0] in FORMS:
        return part
    place = model_spec(part).name
    folder = folder_of(place)
    if folder.suffix.lower() == ".gguf" or gguf_file(place) is not None:
        return f"model:{part}"
    return f"{kind_of(folder)}:{part}" if is_embedded_name(place) or folder.is_dir() else part


def kind_of(folder: Path) -> str:
    """The name of the drafter whose files a folder holds; "model" if it holds none of the others."""
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if is_block(config):
        return "block"
    if is_third_eagle(config) or is_first_eagle(_tensor_names(folder)):
        return "eagle"
    if MTP_ARCHITECTURE in (config.get("architectures") or ()):
        return "mtp"
    if config.get("model_type") in ASSISTANTS:
        return "assistant"
    medusa = (folder / HEADS_FILE).is_file() or config.get("model_type") == "medusa" or "medusa_num_heads" in config
    return "medusa" if medusa else "model"
