"""Settings of the training commands: the only home of their defaults.

The command line makes one flag of each field (same name, `help` from the metadata); this module knows nothing of torch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from sakiyomi.core.errors import InputError


def setting(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float = math.inf,
    resume: bool = False,
) -> Any:
    """A setting with its range: at least `least`, or more than `above`, and at most `most`; for tuples each item.

    Args:
        default: of the field.
        help: of its flag.
        least, above, most: the range of a number.
        resume: whether `--resume` may change it, because the finished model does not depend on it.
    """
    bounds = {"least": least, "above": above, "most": most}
    return dataclasses.field(default=default, metadata={"help": help, "resume": resume} | bounds)


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What every training run shares: budget, schedule, checkpoints.

    Raises:
        InputError: a value is outside its range; the message names the field.
    """

    REQUIRED: ClassVar[dict[str, str]] = {"out": "a folder for the model"}

    out: str = setting("", "Folder of the finished model; checkpoints and logs go below it.", resume=True)
    name: str = setting("", "Name of the model on its card; empty: the last part of OUT.", resume=True)
    valid: tuple[str, ...] = setting((), "Held-out file, NAME=FILE; losses are reported under the name. Repeatable.")
    minutes: float = setting(
        75.0, "Training time in minutes of wall clock; the learning rate reaches 0 at its end.", above=0
    )
    tokens: int = setting(
        0, "Training budget in tokens; above 0 it replaces `minutes` (reproducible on any machine).", least=0
    )
    decay_share: float = setting(
        0.4, "Last share of the budget in which the learning rate falls linearly to 0.", above=0, most=1
    )
    warmup_steps: int = setting(30, "Steps of linear warm-up.", least=0)
    finish_minutes: float = setting(
        15.0, "Length of the early decay asked for by SIGUSR1 or by the file OUT/finish.", above=0, resume=True
    )
    row_tokens: tuple[int, ...] = setting(
        (256, 256, 512, 1024), "Row lengths in tokens; step s uses the (s mod n)-th.", least=1
    )
    step_tokens: int = setting(8192, "Tokens of one optimizer step; a multiple of every row length.", least=1)
    clip: float = setting(1.0, "Largest norm of the gradient.", above=0)
    note: tuple[str, ...] = setting(
        (), "Line for the card, such as a data set with its licence. Repeatable.", resume=True
    )
    seed: int = setting(1, "Seed of the initial weights and of the order of the data.", least=0)
    save_minutes: float = setting(
        3.0, "Minutes of training between checkpoints; the last two are kept.", least=0, resume=True
    )
    eval_minutes: float = setting(5.0, "Minutes of training between held-out losses.", least=0, resume=True)
    log_seconds: float = setting(20.0, "Seconds between log lines if stderr is no terminal.", least=0, resume=True)
    compile: bool = setting(True, "Compile the layers with torch.compile where a C++ compiler exists.", resume=True)
    threads: int = setting(0, "CPU threads; 0 takes them all.", least=0, resume=True)
    resume: bool = setting(
        False, "Continue from the newest checkpoint below OUT, with the settings of its first part.", resume=True
    )

    def __post_init__(self) -> None:
        missing = [name for name in self.REQUIRED if not getattr(self, name)]
        if missing:
            wanted = " and ".join(f"{_flag(name)} ({self.REQUIRED[name]})" for name in missing)
            raise InputError(f"{' and '.join(missing)} not given; give {wanted}")
        for field in dataclasses.fields(self):
            _check_range(field, getattr(self, field.name))
        require(bool(self.row_tokens), "row_tokens", self.row_tokens, "at least one length")
        for length in self.row_tokens:
            require(self.step_tokens % length == 0, "step_tokens", self.step_tokens, f"a multiple of {length}")


@dataclass(frozen=True, kw_only=True)
class TextConfig(LoopConfig):
    """A whole model trained on text."""

    REQUIRED: ClassVar[dict[str, str]] = LoopConfig.REQUIRED | {
        "text": "training text, a .jsonl or .txt file (.gz allowed)"
    }

    text: tuple[str, ...] = setting(
        (), "Training file FILE@STABLE:DECAY: its share of the rows before and during the decay. Repeat for more files."
    )
    muon_lr: float = setting(0.02, "Peak learning rate of Muon (2-D matrices of the layers).", least=0)
    adam_lr: float = setting(0.004, "Peak learning rate of AdamW (embeddings and norms).", least=0)
    weight_decay: float = setting(0.05, "Weight decay of the 2-D matrices of the layers.", least=0)


@dataclass(frozen=True, kw_only=True)
class TargetConfig(TextConfig):
    """A Llama target trained from random weights on text."""

    tokenizer: str = setting("", "Folder of an existing tokenizer; empty: train one on the training text.")
    vocab: int = setting(4096, "Pieces of the tokenizer to train, special tokens included.", least=1)
    hidden: int = setting(384, "Width of the hidden states.", least=1)
    layers: int = setting(12, "Layers of the finished model.", least=1)
    heads: int = setting(6, "Attention heads.", least=1)
    kv_heads: int = setting(2, "Key/value heads.", least=1)
    intermediate: int = setting(1024, "Width of the MLP.", least=1)
    max_positions: int = setting(1024, "Longest context in tokens.", least=1)
    rope_theta: float = setting(10000.0, "Base of the rotary embedding.", above=0)
    first_layers: int = setting(
        0, "Layers at the start, a divisor of `layers`; more come later; 0: all from the start.", least=0
    )
    grow_at: float = setting(0.45, "Share of the budget at which `first_layers` become `layers`.", least=0, most=1)
    eval_tokens: int = setting(
        16384, "Tokens of each held-out file for the losses during the run.", least=1, resume=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self.hidden, self.heads, self.kv_heads)
        if self.first_layers:
            require(self.layers % self.first_layers == 0, "first_layers", self.first_layers, f"divides {self.layers}")
        require(
            max(self.row_tokens) <= self.max_positions, "row_tokens", self.row_tokens, f"at most {self.max_positions}"
        )


@dataclass(frozen=True, kw_only=True)
class RetrieverConfig(TextConfig):
    """A small Llama that finds facts in long texts, trained on tasks made on the fly."""

    text: tuple[str, ...] = setting((), "Training file FILE for filler between the facts and for text. Repeatable.")
    valid: tuple[str, ...] = setting(
        (),
        "Held-out file, NAME=FILE: its loss, and the longest tasks with it as their filler, are measured. Repeatable.",
    )
    minutes: float = setting(60.0, "Training time in minutes of wall clock.", above=0)
    decay_share: float = setting(
        0.3, "Last share of the budget in which the learning rate falls linearly to 0.", above=0, most=1
    )
    row_tokens: tuple[int, ...] = setting((64, 128, 256, 1024, 4096), "Row lengths in tokens, one a stage.", least=32)
    stage_shares: tuple[float, ...] = setting(
        (0.15, 0.25, 0.25, 0.2, 0.15), "Share of the budget of each stage, in the order of the row lengths.", above=0
    )
    step_tokens: int = setting(4096, "Tokens of one optimizer step; a multiple of every row length.", least=1)
    text_weight: float = setting(0.05, "Weight of the loss of all text beside that of the answers.", least=0)
    note_weight: float = setting(
        0.3, "Weight of how well values in the text say whether a question in front asks for them.", least=0
    )
    vocab: int = setting(1024, "Pieces of the tokenizer to train, special tokens included.", least=1)
    hidden: int = setting(128, "Width of the hidden states.", least=1)
    layers: int = setting(4, "Layers.", least=1)
    heads: int = setting(4, "Attention heads.", least=1)
    kv_heads: int = setting(2, "Key/value heads.", least=1)
    intermediate: int = setting(384, "Width of the MLP.", least=1)
    max_positions: int = setting(8192, "Longest context in tokens.", least=1)
    rope_theta: float = setting(500000.0, "Base of the rotary embedding.", above=0)
    eval_prompts: int = setting(
        16, "Prompts of each task for the accuracies during the run, at the length of the stage.", least=1, resume=True
    )
    final_prompts: int = setting(
        50, "Prompts of each task, length and form for the accuracies on the card.", least=1, resume=True
    )
    eval_lengths: tuple[int, ...] = setting(
        (1024, 2048, 4096), "Lengths in tokens of the prompts for the accuracies on the card.", least=256, resume=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self.hidden, self.heads, self.kv_heads)
        require(
            len(self.stage_shares) == len(self.row_tokens),
            "stage_shares",
            self.stage_shares,
            f"{len(self.row_tokens)} shares, one for each of row_tokens",
        )
        longest = max(*self.row_tokens, *self.eval_lengths)
        require(longest <= self.max_positions, "max_positions", self.max_positions, f"{longest} or more")


@dataclass(frozen=True, kw_only=True)
class DraftConfig(TextConfig):
    """A small Llama draft distilled from a target; the tokenizer and the vocabulary are the target's."""

    REQUIRED: ClassVar[dict[str, str]] = {"target": "the model to draft for"} | TextConfig.REQUIRED

    target: str = setting(
        "", "The target: embedded name (tales), folder in Hugging Face format, or hub id; any causal LM."
    )
    init: str = setting(
        "",
        "A Llama to start from (embedded name, folder or hub id), as `train target --tokenizer TARGET` makes it; the "
        "sizes are then its own.",
    )
    valid: tuple[str, ...] = setting(
        (),
        "Held-out file, NAME=FILE; the acceptance is reported under the name. Repeatable; without it some of the "
        "training text is held back.",
    )
    minutes: float = setting(15.0, "Training time in minutes of wall clock, without the time for samples.", above=0)
    decay_share: float = setting(
        0.5, "Last share of the budget in which the learning rate falls linearly to 0.", above=0, most=1
    )
    row_tokens: tuple[int, ...] = setting(
        (512,), "Row length in tokens; one only, rows are reused with their labels.", least=1
    )
    hidden: int = setting(192, "Width of the hidden states.", least=1)
    layers: int = setting(2, "Layers; the time of a draft step is mostly overhead per layer.", least=1)
    heads: int = setting(3, "Attention heads.", least=1)
    kv_heads: int = setting(1, "Key/value heads.", least=1)
    intermediate: int = setting(512, "Width of the MLP.", least=1)
    rope_theta: float = setting(10000.0, "Base of the rotary embedding.", above=0)
    top: int = setting(
        64, "The target's likeliest tokens kept as labels of a position; one bucket holds the rest.", least=1
    )
    greedy_weight: float = setting(
        0.5, "Weight of -log q(the target's likeliest token) beside the KL divergence.", least=0
    )
    label_gib: float = setting(2.0, "Memory in GiB for labels that later epochs use again.", least=0, resume=True)
    samples: int = setting(4096, "Continuations to have the target write; 0 trains on the given text alone.", least=0)
    sample_minutes: float = setting(10.0, "At most so many minutes of writing them.", least=0)
    sample_tokens: int = setting(160, "New tokens of each.", least=1)
    sample_batch: int = setting(128, "Continuations written at a time.", least=1)
    temperatures: tuple[float, ...] = setting(
        (0.0, 0.0, 1.0), "Temperatures of the batches in turn; 0 is greedy.", least=0
    )
    prompts: tuple[str, ...] = setting((), "Files of the prompts, FILE@SHARE; empty: the training text.")
    sample_share: float = setting(0.5, "Share of the rows that are samples before the decay.", least=0, most=1)
    sample_share_decay: float = setting(0.85, "Share of the rows that are samples during the decay.", least=0, most=1)
    eval_minutes: float = setting(3.0, "Minutes of training between acceptance measurements.", least=0, resume=True)
    eval_prompts: int = setting(32, "Held-out prompts of each file, of 64 tokens, continued by 128.", least=1)
    gamma: int = setting(4, "Draft tokens a round in the acceptance measurements.", least=1)
    cost: str = setting(
        "measured",
        "Draft step / target step (c) for the expected speed-up: a number, or measured, which times the pair here.",
        resume=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self.hidden, self.heads, self.kv_heads)
        require(len(self.row_tokens) == 1, "row_tokens", self.row_tokens, "one length")
        require(bool(self.temperatures), "temperatures", self.temperatures, "at least one")
        require(bool(self.samples) or not self.prompts, "prompts", self.prompts, "none with --samples 0")
        if self.cost != "measured":
            require(0 < self.given_cost < math.inf, "cost", self.cost, "measured, or a number above 0")

    @property
    def given_cost(self) -> float:
        """The cost as a number; not a number where it is to be measured, or cannot be meant."""
        try:
            return float(self.cost)
        except ValueError:
            return math.nan


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(LoopConfig):
    """Medusa heads on a frozen target, or trained together with it."""

    REQUIRED: ClassVar[dict[str, str]] = (
        {"target": "the model to guess ahead for"}
        | LoopConfig.REQUIRED
        | {"data": "training text or chats, a .jsonl, .json or .txt file (.gz allowed)"}
    )

    target: str = setting("", "The target: embedded name (tales), folder in Hugging Face format, or hub id.")
    data: tuple[str, ...] = setting(
        (),
        "Training file FILE@STABLE:DECAY: its share of the rows before and during the decay. Texts, chats in "
        "ShareGPT's form, of which what the assistant says is learnt, or what `train distill-data` wrote. "
        "Repeat for more files.",
    )
    valid: tuple[str, ...] = setting(
        (),
        "Held-out file, NAME=FILE; the target answers its prompts, and heads are measured on that. Repeatable; without "
        "it some of the training data is held back.",
    )
    minutes: float = setting(20.0, "Training time in minutes of wall clock.", above=0)
    decay_share: float = setting(
        0.6, "Last share of the budget in which the learning rate falls linearly to 0.", above=0, most=1
    )
    row_tokens: tuple[int, ...] = setting((512,), "Row length in tokens; one only, rows come again.", least=8)
    heads: int = setting(4, "Heads: tokens that are guessed behind the target's own.", least=1, most=16)
    layers: int = setting(1, "Residual blocks of each head.", least=1, most=8)
    own_head: bool = setting(
        False, "Give each head a head over the vocabulary of its own (version 1) instead of the target's (version 2)."
    )
    head_decay: float = setting(
        0.8,
        "Weight of a head's loss to that of the head before: 0.8 is the paper's, 1.0 the first release's.",
        above=0,
        most=1,
    )
    positions: float = setting(
        1.0, "Share of a batch's positions from which heads learn, drawn anew for each batch.", above=0, most=1
    )
    lr: float = setting(0.001, "Peak learning rate of the heads, or of the target where both are trained.", least=0)
    weight_decay: float = setting(0.0, "Weight decay.", least=0)
    joint: bool = setting(
        False, "Medusa-2: train the target too, by low-rank adapters that are merged into a copy of it at the end."
    )
    lora_rank: int = setting(16, "Rank of the adapters.", least=1)
    lora_alpha: float = setting(32.0, "Scale of the adapters: alpha / rank.", above=0)
    heads_first: float = setting(
        0.3, "Share of the budget in which heads are trained alone before both are.", least=0, most=1
    )
    head_lr_times: float = setting(
        4.0, "Learning rate of the heads to that of the target, where both are trained.", above=0
    )
    heads_weight: float = setting(0.2, "Weight of the heads' loss where both are trained.", above=0)
    cache_gib: float = setting(
        0.0,
        "Disk space in GiB below OUT for hidden states of rows that come again; 0: none are kept.",
        least=0,
        resume=True,
    )
    compile: bool = setting(
        True,
        "Compile the layers of a frozen target with torch.compile where a C++ compiler exists; with --joint they are "
        "not.",
        resume=True,
    )
    device: str = setting("auto", "Where to train: auto, cpu, cuda or cuda:N.", resume=True)
    precision: str = setting("bf16", "Precision of the passes: bf16, fp16 or no (float32).", resume=True)
    eval_prompts: int = setting(24, "Held-out prompts of each file, continued by up to 128 tokens.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.row_tokens) == 1, "row_tokens", self.row_tokens, "one length")
        require(self.row_tokens[0] > self.heads + 1, "row_tokens", self.row_tokens, f"more than {self.heads + 1}")
        require(self.precision in ("bf16", "fp16", "no"), "precision", self.precision, "bf16, fp16 or no")
        require(not self.joint or not self.cache_gib, "cache_gib", self.cache_gib, "0 where the target changes")
        for name in ("lora_rank", "lora_alpha", "heads_first", "head_lr_times", "heads_weight"):
            unused = not self.joint and getattr(self, name) != getattr(type(self), name)
            require(not unused, name, getattr(self, name), "its default without --joint")


@dataclass(frozen=True, kw_only=True)
class AnsweredConfig(LoopConfig):
    """What trains beside a frozen target on prompts with answers, which its cache is kept small for."""

    REQUIRED: ClassVar[dict[str, str]] = {"target": "the model whose keys and values are to be kept or dropped"} | (
        LoopConfig.REQUIRED
    )

    target: str = setting("", "The target: embedded name (tales), folder in Hugging Face format, or hub id.")
    data: tuple[str, ...] = setting(
        (),
        "Training file FILE@STABLE:DECAY of prompts with answers: instruction and output (LongAlpaca), prompt and "
        "answer, chats in ShareGPT's form, of which the last reply is the answer, what `train distill-data` wrote, "
        "or texts, which answer themselves; its share of the rows before and during the decay. Repeat for more files.",
    )
    tasks: str = setting(
        "", "Questions about long texts that are made on the way, by name and share: passkey,number@0.5,kv@2."
    )
    valid: tuple[str, ...] = setting(
        (),
        "Held-out file, NAME=FILE; its prompts are measured on. Repeatable; without it some of the training data is "
        "held back.",
    )
    steps: int = setting(3000, "Training budget in steps.", least=1)
    minutes: float = setting(0.0, "Training time in minutes of wall clock; above 0 it replaces `steps`.", least=0)
    tokens: int = setting(
        0, "Training budget in places of rows (a step has STEP_TOKENS); above 0 it replaces `steps`.", least=0
    )
    warmup_share: float = setting(
        2 / 3, "First share of the budget in which the learning rate rises linearly from 0.", least=0, most=1
    )
    warmup_steps: int = setting(0, "Steps of linear warm-up besides.", least=0)
    decay_share: float = setting(
        1 / 3, "Last share of the budget in which the learning rate falls linearly to 0.", above=0, most=1
    )
    row_tokens: tuple[int, ...] = setting(
        (10240,),
        "Most tokens of a prompt with its answer; of longer prompts the middle is left out. Step s uses the (s mod "
        "n)-th; those beyond the target's positions mean its positions.",
        least=32,
    )
    step_tokens: int = setting(
        10240, "Rows of one step times their most tokens; a multiple of every row length.", least=1
    )
    answer_tokens: int = setting(512, "Most tokens of an answer.", least=1)
    query_aware: bool = setting(False, "The question also stands in front of the prompt (Locret-Q).")
    query_tokens: int = setting(
        100, "Last tokens of a prompt that count as its question, where the data names none.", least=1
    )
    lr: float = setting(0.0005, "Peak learning rate.", least=0)
    beta1: float = setting(0.9, "AdamW's first beta.", least=0, most=0.9999)
    beta2: float = setting(0.95, "AdamW's second beta.", least=0, most=0.99999)
    weight_decay: float = setting(0.01, "Weight decay.", least=0)
    device: str = setting("auto", "Where to train: auto, cpu, cuda or cuda:N.", resume=True)
    precision: str = setting("bf16", "Precision of the passes: bf16 or no (float32).", resume=True)
    eval_rows: int = setting(16, "Held-out rows of each file or task.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.data or self.tasks), "data", self.data, "a file of prompts with answers, or --tasks")
        require(self.precision in ("bf16", "no"), "precision", self.precision, "bf16 or no")
        require(
            self.query_aware or self.query_tokens == type(self).query_tokens,
            "query_tokens",
            self.query_tokens,
            "its default without --query-aware",
        )
        if not self.minutes and not self.tokens:
            object.__setattr__(self, "tokens", self.steps * self.step_tokens)


@dataclass(frozen=True, kw_only=True)
class RetainingConfig(AnsweredConfig):
    """Retaining heads (Locret) on a frozen target. The defaults are the paper's."""

    width: int = setting(
        0, "Width of the heads' own layer; 0: 1024 for targets of hidden states from 2048 on, 256 for others.", least=0
    )
    labels: str = setting(
        "logits",
        "What is learnt of the rows' attention to a token: logits (the paper's), or chances, their log-probabilities.",
    )
    queries: str = setting(
        "answer",
        "Whose attention: answer, the rows of the answer's tokens (the paper's), or writing, the rows that write them, "
        "one place earlier.",
    )
    smooth: float = setting(0.0025, "Weight of the squared difference of neighbours' scores in each layer.", least=0)
    huber: float = setting(1.0, "Difference from which on the loss is linear (beta of the smooth L1 loss).", above=0)
    clip: float = setting(0.5, "Largest absolute value of an entry of the gradient.", above=0)
    compile: bool = setting(
        False, "Compile the heads and their loss with torch.compile where a C++ compiler exists.", resume=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.labels in ("logits", "chances"), "labels", self.labels, "logits or chances")
        require(self.queries in ("answer", "writing"), "queries", self.queries, "answer or writing")


@dataclass(frozen=True, kw_only=True)
class LococoConfig(AnsweredConfig):
    """Convolutions (LoCoCo) that merge what a cache within a budget drops, beside a frozen target."""

    steps: int = setting(300, "Training budget in steps; the paper has 200 to 1000.", least=1)
    warmup_share: float = setting(
        0.1, "First share of the budget in which the learning rate rises linearly from 0.", least=0, most=1
    )
    decay_share: float = setting(
        0.9, "Last share of the budget in which the learning rate falls linearly to 0.", above=0, most=1
    )
    row_tokens: tuple[int, ...] = setting(
        (1024,),
        "Most tokens of a prompt with its answer; of longer prompts the middle is left out. Step s uses the (s mod "
        "n)-th; those beyond the target's positions mean its positions.",
        least=32,
    )
    step_tokens: int = setting(
        4096, "Rows of one step times their most tokens; a multiple of every row length.", least=1
    )
    scores: str = setting(
        "h2o", "What says which pairs stay: a policy as `cache` takes it, such as h2o or locret:HEADS."
    )
    kv_budget: int = setting(128, "Pairs of a head that stay at a border, merged ones included.", least=2)
    merged: int = setting(16, "Of those the merged ones; the paper has an eighth of them.", least=1)
    chunk_size: int = setting(256, "Tokens of a prompt from border to border.", least=1)
    kernel: int = setting(21, "Pairs side by side that a weight depends on; odd.", least=1)
    again: bool = setting(
        True,
        "Merge what was merged before into others at the next border, as in the paper; else it stays as long as the "
        "pair would that it was merged into.",
    )
    norm: float = setting(
        0.5, "Share of other pairs in a merged one before training; the paper has 0.5.", least=0, most=1
    )
    text_weight: float = setting(
        0.0,
        "Weight of the loss of a prompt's tokens behind its first border, beside that of the answer; with 1 texts are "
        "learnt as texts.",
        least=0,
    )
    lr: float = setting(0.005, "Peak learning rate.", least=0)
    weight_decay: float = setting(0.0, "Weight decay.", least=0)
    precision: str = setting("no", "Precision of the passes: bf16 or no (float32).", resume=True)
    compile: bool = setting(
        False, "Compile the loss over the vocabulary with torch.compile where a C++ compiler exists.", resume=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.kernel % 2 == 1, "kernel", self.kernel, "an odd number")
        require(self.merged < self.kv_budget, "merged", self.merged, f"less than kv_budget {self.kv_budget}")
        least = min(self.row_tokens)
        require(self.chunk_size < least, "chunk_size", self.chunk_size, f"less than the shortest row, {least}")


@dataclass(frozen=True, kw_only=True)
class DistillDataConfig:
    """What a target itself answers, as training data of its drafts and heads.

    Raises:
        InputError: a value is outside its range; the message names the field.
    """

    out: str = setting("", "The .jsonl file; the same command goes on with it where it was stopped.")
    target: str = setting("", "The target: embedded name (tales), folder in Hugging Face format, or hub id.")
    data: tuple[str, ...] = setting(
        (), "Prompts FILE@SHARE: beginnings of texts, or the users' turns of chats in ShareGPT's form. Repeatable."
    )
    samples: int = setting(4096, "Answers to have written.", least=1)
    minutes: float = setting(60.0, "At most so many minutes of writing.", above=0)
    tokens: int = setting(160, "New tokens of each at most.", least=1)
    batch: int = setting(128, "Answers written at a time.", least=1)
    temperatures: tuple[float, ...] = setting(
        (0.0, 0.0, 1.0), "Temperatures of the batches in turn; 0 is greedy.", least=0
    )
    device: str = setting("auto", "Where to run: auto, cpu, cuda or cuda:N.")
    seed: int = setting(1, "Seed of prompts and samples.", least=0)

    def __post_init__(self) -> None:
        for name, what in (("out", "a .jsonl file"), ("target", "the model that writes"), ("data", "files of prompts")):
            require(bool(getattr(self, name)), name, getattr(self, name), what)
        require(self.out.endswith(".jsonl"), "out", self.out, "a file that ends in .jsonl")
        require(bool(self.temperatures), "temperatures", self.temperatures, "at least one")
        for field in dataclasses.fields(self):
            _check_range(field, getattr(self, field.name))


@dataclass(frozen=True, kw_only=True)
class NgramConfig:
    """Tables of n-grams, counted in text or in what a target writes.

    Raises:
        InputError: a value is outside its range; the message names the field.
    """

    out: str = setting("", "The file of the tables, .safetensors; `ngram:OUT` drafts from it.")
    text: tuple[str, ...] = setting((), "Training file, .jsonl or .txt (.gz allowed). Repeat for more files.")
    valid: tuple[str, ...] = setting(
        (), "Held-out file, NAME=FILE; alpha is measured on it. Repeatable; without it some of the text is held back."
    )
    target: str = setting(
        "", "The target: embedded name (tales), folder, or hub id. With it alpha is measured, and it can write samples."
    )
    tokenizer: str = setting("", "Folder of the tokenizer, where no target is given.")
    order: int = setting(4, "Tokens of the longest n-gram.", least=1, most=5)
    least: int = setting(2, "Runs of three tokens and more are kept if they went on so as often as this.", least=1)
    keep: int = setting(8, "Most frequent continuations kept of each run.", least=1, most=64)
    samples: int = setting(
        0, "Continuations of the text's beginnings to have the target write and count instead of the text.", least=0
    )
    sample_tokens: int = setting(160, "New tokens of each.", least=1)
    temperature: float = setting(0.0, "Temperature of the samples; 0 is greedy.", least=0)
    positions: int = setting(2048, "Held-out tokens of each file on which alpha is measured.", least=1)
    seed: int = setting(1, "Seed of the samples, and of what is held back.", least=0)

    def __post_init__(self) -> None:
        for name, what in (("out", "a file for the tables"), ("text", "training text")):
            require(bool(getattr(self, name)), name, getattr(self, name), what)
        require(bool(self.target) != bool(self.tokenizer), "target", self.target, "this or tokenizer, and not both")
        require(bool(self.target) or not self.samples, "samples", self.samples, "0 without a target that writes them")
        for field in dataclasses.fields(self):
            _check_range(field, getattr(self, field.name))


def check_sizes(hidden: int, heads: int, kv_heads: int) -> None:
    """Raise InputError unless the widths divide as Llama needs them."""
    require(hidden % heads == 0, "heads", heads, f"a divisor of hidden {hidden}")
    # The rotary embedding turns the two halves of a head against each other.
    require(hidden // heads % 2 == 0, "heads", heads, f"heads of an even width, not {hidden // heads}")
    require(heads % kv_heads == 0, "kv_heads", kv_heads, f"a divisor of heads {heads}")


def _check_range(field: dataclasses.Field[Any], value: Any) -> None:
    least, above, most = (field.metadata[name] for name in ("least", "above", "most"))
    if least is None and above is None:
        return
    expected = f"{least:g} or more" if least is not None else f"more than {above:g}"
    expected += f", at most {most:g}" if most < math.inf else ""
    for number in value if isinstance(value, tuple) else (value,):
        low = number >= least if least is not None else number > above
        require(low and number <= most and math.isfinite(number), field.name, value, expected)


def require(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise InputError that names the setting, its value and what was expected, unless the condition holds."""
    if not condition:
        raise InputError(f"{name} is {value!r}, expected {expected}; set {_flag(name)}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
