"""``sakiyomi import``: models of other tools in Hugging Face format."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sakiyomi.cli.common import JsonOption
from sakiyomi.cli.export import new_folder
from sakiyomi.cli.output import progress, say


@dataclass(frozen=True)
class Ct2Options:
    """The model, and where it goes.

    Attributes:
        model: folder with model.bin, config.json and tokenizer.json.
        out: folder to create.
    """

    model: str = field(metadata={"argument": "MODEL"})
    out: str = field(metadata={"argument": "OUT_FOLDER"})


@dataclass(frozen=True)
class GgmlOptions:
    """The model, and where it goes.

    Attributes:
        model: the file, ggml-*.bin.
        out: folder to create.
    """

    model: str = field(metadata={"argument": "FILE"})
    out: str = field(metadata={"argument": "OUT_FOLDER"})


def ct2(options: Ct2Options, output: JsonOption) -> None:
    """Write a Whisper model of CTranslate2, as faster-whisper uses it, in Hugging Face format.

    Weights are written in float16; those that were rounded to 8 bits stay as they were rounded.

    Example: sakiyomi import ct2 faster-whisper-tiny whisper-tiny
    """
    _import("ct2_whisper", options, output)


def ggml(options: GgmlOptions, output: JsonOption) -> None:
    """Write a Whisper model of whisper.cpp in Hugging Face format.

    Weights are written in float16, quantized ones (Q4_0 to Q8_0, K formats) as the numbers that they stand for. The
    tokenizer is made of the file's tokens.

    Example: sakiyomi import ggml ggml-tiny.bin whisper-tiny
    """
    _import("ggml_whisper", options, output)


def _import(reader: str, options: Ct2Options | GgmlOptions, output: JsonOption) -> None:
    """Import by this module of ``loading``, and say what it was."""
    with progress("reading"):
        module = importlib.import_module(f"sakiyomi.model_executor.loading.{reader}")
        out = new_folder(options.out)
        config: dict[str, Any] = module.import_whisper(Path(options.model).expanduser(), out)
    layers = f"{config['encoder_layers']} + {config['decoder_layers']} layers of width {config['d_model']}"
    say(f"{out}: whisper, {layers}, {config['vocab_size']} tokens")
    output.emit({"folder": str(out), "config": config})
