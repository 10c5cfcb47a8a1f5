"""Settings of tiny encoder-decoder pairs: seconds on one thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edits import EditsConfig
from tones import TonesConfig
from train_toys import story_file

SIZES: dict[str, Any] = {
    "hidden": 32,
    "layers": 1,
    "encoder_layers": 1,
    "heads": 2,
    "intermediate": 48,
    "draft_hidden": 16,
    "draft_heads": 1,
    "draft_encoder_layers": 1,
    "draft_intermediate": 24,
    "warmup_steps": 2,
    "examples": 3,
    "threads": 1,
}


def edits_config(folder: Path, **changes: Any) -> EditsConfig:
    """A pair that corrects text, with a budget of four and three steps."""
    text = story_file(folder / "train.jsonl")
    settings = SIZES | {
        "out": str(folder / "edits"),
        "text": (str(text),),
        "vocab": 300,
        "row_tokens": (32, 64),
        "step_tokens": 256,
        "tokens": 4 * 256,
        "draft_tokens": 3 * 256,
    }
    return EditsConfig.of(**(settings | changes))


def tones_config(folder: Path, **changes: Any) -> TonesConfig:
    """A pair that hears one second, with a budget of four and three steps."""
    text = story_file(folder / "train.jsonl")
    settings = SIZES | {
        "out": str(folder / "tones"),
        "text": (str(text),),
        "seconds": 1,
        "row_tokens": (8,),
        "step_tokens": 32,
        "tokens": 4 * 32,
        "draft_tokens": 3 * 32,
    }
    return TonesConfig.of(**(settings | changes))
