"""Settings of the training commands: the only home of their defaults.

The command line makes one flag of each field (same name, `help` from the metadata); this module knows nothing of torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from sakiyomi.errors import InputError


def _field(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What every training run shares: data, budget, schedule, optimizer, checkpoints.

    Raises:
        InputError: a value is outside its range; the message names the field.
    """

    out: str = _field("", "Folder of the finished model; checkpoints and logs go below it.")
    name: str = _field("", "Name of the model on its card; empty: the last part of OUT.")
    text: tuple[str, ...] = _field(
        (), "Training file FILE@STABLE:DECAY: its share of the rows before and during the decay. Repeat for more files."
    )
    valid: tuple[str, ...] = _field((), "Held-out file, NAME=FILE; losses are reported under the name. Repeatable.")
    minutes: float = _field(75.0, "Training time in minutes of wall clock; the learning rate reaches 0 at its end.")
    tokens: int = _field(0, "Training budget in tokens; above 0 it replaces `minutes` (reproducible on any machine).")
    decay_share: float = _field(0.4, "Last share of the budget in which the learning rate falls linearly to 0.")
    warmup_steps: int = _field(30, "Steps of linear warm-up.")
    finish_minutes: float = _field(15.0, "Length of the early decay asked for by SIGUSR1 or by the file OUT/finish.")
    row_tokens: tuple[int, ...] = _field((256, 256, 512, 1024), "Row lengths in tokens; step s uses the (s mod n)-th.")
    step_tokens: int = _field(8192, "Tokens of one optimizer step; a multiple of every row length.")
    muon_lr: float = _field(0.02, "Peak learning rate of Muon (2-D matrices of the layers).")
    adam_lr: float = _field(0.004, "Peak learning rate of AdamW (embeddings and norms).")
    weight_decay: float = _field(0.05, "Weight decay of the 2-D matrices of the layers.")
    clip: float = _field(1.0, "Largest norm of the gradient.")
    note: tuple[str, ...] = _field((), "Line for the card, such as a data set with its licence. Repeatable.")
    seed: int = _field(1, "Seed of the initial weights and of the order of the data.")
    save_minutes: float = _field(3.0, "Minutes of training between checkpoints; the last two are kept.")
    eval_minutes: float = _field(5.0, "Minutes of training between held-out losses.")
    eval_tokens: int = _field(16384, "Tokens of each held-out file for the losses during the run.")
    log_seconds: float = _field(20.0, "Seconds between log lines where stderr is not a terminal.")
    compile: bool = _field(True, "Compile the layers with torch.compile where a C++ compiler exists.")
    threads: int = _field(0, "CPU threads; 0 takes them all.")
    resume: bool = _field(False, "Continue from the newest checkpoint below OUT.")

    def __post_init__(self) -> None:
        _require(bool(self.out), "out", self.out, "a folder")
        _require(bool(self.text), "text", self.text, "at least one training file")
        _require(self.minutes > 0, "minutes", self.minutes, "more than 0")
        _require(self.tokens >= 0, "tokens", self.tokens, "0 or more")
        _require(0 < self.decay_share <= 1, "decay_share", self.decay_share, "in (0, 1]")
        _require(self.finish_minutes > 0, "finish_minutes", self.finish_minutes, "more than 0")
        _require(min(self.row_tokens, default=0) > 0, "row_tokens", self.row_tokens, "positive lengths")
        for length in self.row_tokens:
            _require(self.step_tokens % length == 0, "step_tokens", self.step_tokens, f"a multiple of {length}")
        _require(self.clip > 0, "clip", self.clip, "more than 0")


@dataclass(frozen=True, kw_only=True)
class TargetConfig(LoopConfig):
    """A Llama target trained from random weights on text."""

    tokenizer: str = _field("", "Folder of an existing tokenizer; empty: train one on the training text.")
    vocab: int = _field(4096, "Pieces of the tokenizer, special tokens included.")
    hidden: int = _field(384, "Width of the hidden states.")
    layers: int = _field(12, "Layers of the finished model.")
    heads: int = _field(6, "Attention heads.")
    kv_heads: int = _field(2, "Key/value heads.")
    intermediate: int = _field(1024, "Width of the MLP.")
    max_positions: int = _field(1024, "Longest context in tokens.")
    rope_theta: float = _field(10000.0, "Base of the rotary embedding.")
    first_layers: int = _field(0, "Layers at the start, a divisor of `layers`; more come later; 0: all from the start.")
    grow_at: float = _field(0.45, "Share of the budget at which `first_layers` become `layers`.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self.hidden, self.heads, self.kv_heads)
        _require(self.first_layers >= 0, "first_layers", self.first_layers, "0 or more")
        if self.first_layers:
            _require(self.layers % self.first_layers == 0, "first_layers", self.first_layers, f"divides {self.layers}")
        _require(
            max(self.row_tokens) <= self.max_positions, "row_tokens", self.row_tokens, f"at most {self.max_positions}"
        )


@dataclass(frozen=True, kw_only=True)
class DraftConfig(LoopConfig):
    """A small Llama draft distilled from a target; the tokenizer and the vocabulary are the target's."""

    target: str = _field("", "Folder of the target, any causal LM in Hugging Face format.")
    init: str = _field(
        "",
        "Folder of a Llama to start from, as `train target --tokenizer TARGET` makes it; the sizes are then its own.",
    )
    minutes: float = _field(15.0, "Training time in minutes of wall clock, the time for samples not included.")
    decay_share: float = _field(0.5, "Last share of the budget in which the learning rate falls linearly to 0.")
    row_tokens: tuple[int, ...] = _field((512,), "Row length in tokens; one only, rows are reused with their labels.")
    hidden: int = _field(192, "Width of the hidden states.")
    layers: int = _field(2, "Layers; the time of a draft step is mostly overhead per layer.")
    heads: int = _field(3, "Attention heads.")
    kv_heads: int = _field(1, "Key/value heads.")
    intermediate: int = _field(512, "Width of the MLP.")
    rope_theta: float = _field(10000.0, "Base of the rotary embedding.")
    top: int = _field(64, "The target's likeliest tokens kept as labels of a position; one bucket holds the rest.")
    greedy_weight: float = _field(0.5, "Weight of -log q(the target's likeliest token) beside the KL divergence.")
    label_gib: float = _field(2.0, "Memory in GiB for labels that later epochs use again.")
    samples: int = _field(4096, "Continuations to have the target write; 0 trains on the given text alone.")
    sample_minutes: float = _field(10.0, "At most so many minutes of writing them.")
    sample_tokens: int = _field(160, "New tokens of each.")
    sample_batch: int = _field(128, "Continuations written at a time.")
    temperatures: tuple[float, ...] = _field((0.0, 0.0, 1.0), "Temperatures of the batches in turn; 0 is greedy.")
    prompts: tuple[str, ...] = _field((), "Files of the prompts, FILE@SHARE; empty: the training text.")
    sample_share: float = _field(0.5, "Share of the rows that are samples before the decay.")
    sample_share_decay: float = _field(0.85, "Share of the rows that are samples during the decay.")
    eval_minutes: float = _field(3.0, "Minutes of training between acceptance measurements.")
    eval_prompts: int = _field(32, "Held-out prompts of each file, of 64 tokens, continued by 128.")
    gamma: int = _field(4, "Draft tokens a round in the acceptance measurements.")
    cost: float = _field(0.1, "Draft step / target step (c), for the expected speed-up.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self.hidden, self.heads, self.kv_heads)
        _require(bool(self.target), "target", self.target, "a model folder")
        _require(len(self.row_tokens) == 1, "row_tokens", self.row_tokens, "one length")
        _require(self.top > 0, "top", self.top, "more than 0")
        _require(self.samples >= 0, "samples", self.samples, "0 or more")
        _require(self.sample_batch > 0, "sample_batch", self.sample_batch, "more than 0")
        _require(min(self.temperatures, default=-1) >= 0, "temperatures", self.temperatures, "0 or more each")
        _require(0 <= self.sample_share <= 1, "sample_share", self.sample_share, "in [0, 1]")
        _require(0 <= self.sample_share_decay <= 1, "sample_share_decay", self.sample_share_decay, "in [0, 1]")
        _require(self.gamma > 0, "gamma", self.gamma, "more than 0")


def check_sizes(hidden: int, heads: int, kv_heads: int) -> None:
    """Raise InputError unless the head counts divide as Llama needs them."""
    _require(hidden % heads == 0, "heads", heads, f"a divisor of hidden {hidden}")
    _require(heads % kv_heads == 0, "kv_heads", kv_heads, f"a divisor of heads {heads}")


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise InputError(f"{name} is {value!r}, expected {expected}; set --{name.replace('_', '-')}")
