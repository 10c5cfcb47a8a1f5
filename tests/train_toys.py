"""Tiny text, models and settings for the training tests: seconds on one thread."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from architectures import widen
from sakiyomi.train.checkpoint import load_checkpoint
from sakiyomi.train.commands import TrainDraft, TrainTarget
from sakiyomi.train.llama import new_llama, save_model
from sakiyomi.train.loop import Loop
from sakiyomi.train.settings import Settings
from sakiyomi.train.tokenizer import train_tokenizer

NAMES = ("Tom", "Mia", "Ben", "Sue", "Max", "Lily")
THINGS = ("ball", "tree", "cat", "boat", "hat", "stone", "bird", "cake")


def stories(count: int, seed: int = 0) -> list[str]:
    """Small stories with a little variety."""
    rng = random.Random(seed)
    return [
        f"Once upon a time {rng.choice(NAMES)} had a {rng.choice(THINGS)}. One day {rng.choice(NAMES)} saw the "
        f"{rng.choice(THINGS)} and said, “Look at my {rng.choice(THINGS)}!” They played with the {rng.choice(THINGS)} "
        f"all day, and then {rng.choice(NAMES)} went home."
        for _ in range(count)
    ]


def story_file(path: Path, count: int = 60, seed: int = 0) -> Path:
    """The stories as a .jsonl file."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in stories(count, seed)), encoding="utf-8")
    return path


def target_config(folder: Path, **changes: Any) -> TrainTarget:
    """A target of two tiny layers and a budget of a few steps."""
    text = story_file(folder / "train.jsonl")
    valid = story_file(folder / "valid.jsonl", count=10, seed=1)
    settings: dict[str, Any] = {
        "out": str(folder / "target"),
        "text": (str(text),),
        "valid": (f"stories={valid}",),
        "tokens": 8 * 128,
        "row_tokens": (32, 64),
        "step_tokens": 128,
        "warmup_steps": 2,
        "vocab": 300,
        "hidden": 32,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "intermediate": 48,
        "max_positions": 128,
        "compile": False,
        "threads": 1,
    }
    return TrainTarget.of(**(settings | changes))


def tiny_target(folder: Path, positions: int = 128) -> Path:
    """An untrained target of 300 pieces in Hugging Face form."""
    torch.manual_seed(0)
    config = target_config(folder)
    tokenizer = train_tokenizer(stories(60), config.sizes.vocab, config.sizes.max_positions)
    model = new_llama(config.sizes, tokenizer, vocab=len(tokenizer), max_positions=positions)
    save_model(folder / "tiny", model, tokenizer)
    return folder / "tiny"


def tiny_gpt2(folder: Path) -> Path:
    """An untrained target of another architecture: learned positions, no `model.layers`."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(stories(60), 300, 128)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=128, eos_token_id=0, bos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "gpt2")
    return folder / "gpt2"


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """As without matplotlib: drawing takes longer than training."""
    patch.setattr("sakiyomi.train.plot._panels", lambda *widths: (None, []))


def question_file(path: Path, count: int = 40, seed: int = 0, **more: str) -> Path:
    """Stories, a question about each, and its answer."""
    lines = []
    for i, text in enumerate(stories(count, seed)):
        name = NAMES[i % len(NAMES)]
        lines.append(json.dumps({"prompt": f"{text} Who went home?", "answer": f" {name} went home."} | more) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def wide_target(folder: Path) -> Path:
    """A tiny target whose attention looks at some tokens more than at others, as a trained one's does."""
    path = tiny_target(folder)
    model = AutoModelForCausalLM.from_pretrained(path)
    widen(model)
    model.save_pretrained(path)
    return path


def losses(out: str) -> list[float]:
    """The loss of every step, from the newest checkpoint."""
    return [entry[3] for entry in load_checkpoint(Path(out) / "checkpoints")["progress"]["losses"]]


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Send this process a signal within the given step."""
    original = Loop._step

    def stepping(self: Loop) -> float:
        if self.progress.step == step:
            os.kill(os.getpid(), number)
        return original(self)

    monkeypatch.setattr(Loop, "_step", stepping)


def draft_config(folder: Path, target: Path, **changes: Any) -> TrainDraft:
    """A draft of two tiny layers, two batches of samples and a budget of a few steps."""
    text = story_file(folder / "train.jsonl")
    valid = story_file(folder / "valid.jsonl", count=10, seed=1)
    settings: dict[str, Any] = {
        "out": str(folder / "draft"),
        "target": str(target),
        "text": (str(text),),
        "valid": (f"stories={valid}",),
        "tokens": 8 * 64,
        "row_tokens": (32,),
        "step_tokens": 64,
        "hidden": 16,
        "heads": 2,
        "intermediate": 24,
        "samples": 8,
        "sample_batch": 4,
        "sample_tokens": 8,
        "eval_prompts": 2,
        "top": 8,
        "cost": "0.1",
        "compile": False,
        "threads": 1,
    }
    return TrainDraft.of(**(settings | changes))


def flags(config: Settings, *, leave_out: tuple[str, ...] = ()) -> list[str]:
    """The command line that gives `config`."""
    given: list[str] = []
    values = config.flat()
    for own in config.flags():
        value, flag = values[own.name], "--" + own.name.replace("_", "-")
        if own.name in leave_out or value == own.default:
            continue
        if isinstance(value, bool):
            given.append(flag if value else f"--no-{flag[2:]}")
        else:
            for item in value if isinstance(value, tuple) else (value,):
                given += [flag, str(item)]
    return given
