"""Settings of the recipes that train something beside a target: Medusa heads, retaining heads, convolutions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

from sakiyomi.train.config.base import Group, LoopConfig, RunConfig, require, setting

__all__ = ["AnsweredConfig", "LococoConfig", "MedusaConfig", "RetainingConfig"]


@dataclass(frozen=True, kw_only=True)
class JointConfig(Group):
    """How the target is trained together with its heads, if it is."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        for own in dataclasses.fields(self):
            value = getattr(self, own.name)
            require(self.joint or value == own.default, own.name, value, "its default without --joint")


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(RunConfig):
    """Medusa heads on a frozen target, or trained together with it."""

    REQUIRED: ClassVar[dict[str, str]] = (
        {"target": "the model to guess ahead for"}
        | RunConfig.REQUIRED
        | {"data": "training text or chats, a .jsonl, .json or .txt file (.gz allowed)"}
    )

    HELP: ClassVar[dict[str, str]] = {
        "valid": "Held-out file, NAME=FILE; the target answers its prompts, and heads are measured on that. "
        "Repeatable; without it some of the training data is held back.",
        "row_tokens": "Row length in tokens; one only, rows come again.",
        "compile": "Compile the layers of a frozen target with torch.compile where a C++ compiler exists; with --joint "
        "they are not.",
    }

    loop: LoopConfig = field(default=LoopConfig(minutes=20.0, decay_share=0.6, row_tokens=(512,)))
    target: str = setting("", "The target: embedded name (tales), folder in Hugging Face format, or hub id.")
    data: tuple[str, ...] = setting(
        (),
        "Training file FILE@STABLE:DECAY: its share of the rows before and during the decay. Texts, chats in "
        "ShareGPT's form, of which what the assistant says is learnt, or what `train distill-data` wrote. "
        "Repeat for more files.",
    )
    heads: int = setting(4, "Number of heads: tokens that are proposed behind the target's own.", least=1, most=16)
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
        1.0, "Share of a batch's positions that heads are trained on, drawn anew for each batch.", above=0, most=1
    )
    lr: float = setting(0.001, "Peak learning rate of the heads, or of the target where both are trained.", least=0)
    weight_decay: float = setting(0.0, "Weight decay.", least=0)
    joint: JointConfig = JointConfig()
    cache_gib: float = setting(
        0.0,
        "Disk space in GiB below OUT to keep hidden states of rows that are used again; 0 keeps none.",
        least=0,
        resume=True,
    )
    device: str = setting("auto", "Where to train: auto, cpu, cuda or cuda:N.", resume=True)
    precision: str = setting(
        "auto",
        "Precision of the passes: bf16, fp16, no (float32, the target's too), or auto: bf16, but no on a processor "
        "that does not multiply bf16, which is several times slower there.",
        resume=True,
    )
    eval_prompts: int = setting(24, "Held-out prompts of each file, continued by up to 128 tokens.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, joint = self.loop.row_tokens, self.joint.joint
        require(len(rows) == 1, "row_tokens", rows, "one length")
        require(rows[0] > max(self.heads + 1, 7), "row_tokens", rows, f"more than {max(self.heads + 1, 7)}")
        require(self.precision in ("auto", "bf16", "fp16", "no"), "precision", self.precision, "auto, bf16, fp16 or no")
        require(not joint or not self.cache_gib, "cache_gib", self.cache_gib, "0 where the target changes")


@dataclass(frozen=True, kw_only=True)
class AnsweredLoop(LoopConfig):
    """A loop whose budget may be steps."""

    minutes: float = setting(0.0, "Training time in minutes of wall clock; above 0 it replaces `steps`.", least=0)
    tokens: int = setting(
        0, "Training budget in tokens, padding included (a step has STEP_TOKENS); above 0 it replaces `steps`.", least=0
    )
    row_tokens: tuple[int, ...] = setting(
        (10240,),
        "Most tokens of a prompt with its answer; of longer prompts the middle is left out. Step s uses the (s mod "
        "n)-th; those beyond the target's positions mean its positions.",
        least=32,
    )
    step_tokens: int = setting(
        10240, "Rows of one step times their longest length; a multiple of every row length.", least=1
    )


@dataclass(frozen=True, kw_only=True)
class AdamConfig(Group):
    """AdamW."""

    lr: float = setting(0.0005, "Peak learning rate.", least=0)
    beta1: float = setting(0.9, "AdamW's first beta.", least=0, most=0.9999)
    beta2: float = setting(0.95, "AdamW's second beta.", least=0, most=0.99999)
    weight_decay: float = setting(0.01, "Weight decay.", least=0)


@dataclass(frozen=True, kw_only=True)
class AnsweredConfig(RunConfig):
    """What trains beside a frozen target on prompts with answers, which its cache is kept small for."""

    REQUIRED: ClassVar[dict[str, str]] = {"target": "the model whose keys and values are to be kept or dropped"} | (
        RunConfig.REQUIRED
    )

    HELP: ClassVar[dict[str, str]] = {
        "valid": "Held-out file, NAME=FILE; its prompts are measured on. Repeatable; without it some of the training "
        "data is held back.",
        "warmup_steps": "Further steps of linear warm-up.",
    }

    loop: LoopConfig = field(default=AnsweredLoop(warmup_steps=0, decay_share=1 / 3))
    target: str = setting("", "The target: embedded name (tales), folder in Hugging Face format, or hub id.")
    data: tuple[str, ...] = setting(
        (),
        "Training file FILE@STABLE:DECAY of prompts with answers: instruction and output (LongAlpaca), prompt and "
        "answer, chats in ShareGPT's form, of which the last reply is the answer, what `train distill-data` wrote, "
        "or plain texts, whose last part is the answer; its share of the rows before and during the decay. Repeat for "
        "more files.",
    )
    tasks: str = setting(
        "", "Synthetic questions about long texts, made during the run, by name and share: passkey,number@0.5,kv@2."
    )
    filler: str = setting(
        "",
        "File of texts (.jsonl or .txt, .gz allowed) in whose sentences the tasks hide what they ask for; empty: a few "
        "sentences over and over.",
    )
    steps: int = setting(3000, "Training budget in steps.", least=1)
    warmup_share: float = setting(
        2 / 3, "First share of the budget in which the learning rate rises linearly from 0.", least=0, most=1
    )
    answer_tokens: int = setting(512, "Most tokens of an answer.", least=1)
    query_aware: bool = setting(False, "Put the question in front of the prompt, too (Locret-Q).")
    query_tokens: int = setting(
        100, "Last tokens of a prompt that count as its question, where the data names none.", least=1
    )
    adam: AdamConfig = AdamConfig()
    device: str = setting("auto", "Where to train: auto, cpu, cuda or cuda:N.", resume=True)
    precision: str = setting(
        "auto",
        "Precision of the passes: bf16, no (float32, the target's too), or auto: bf16, but no on a processor that "
        "does not multiply bf16, which is several times slower there.",
        resume=True,
    )
    eval_rows: int = setting(16, "Held-out rows of each file or task.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.data or self.tasks), "data", self.data, "a file of prompts with answers, or --tasks")
        require(bool(self.tasks) or not self.filler, "filler", self.filler, "its default without --tasks")
        require(self.precision in ("auto", "bf16", "no"), "precision", self.precision, "auto, bf16 or no")
        require(
            self.query_aware or self.query_tokens == type(self).query_tokens,
            "query_tokens",
            self.query_tokens,
            "its default without --query-aware",
        )
        if not self.loop.minutes and not self.loop.tokens:
            tokens = self.steps * self.loop.step_tokens
            object.__setattr__(self, "loop", dataclasses.replace(self.loop, tokens=tokens))


@dataclass(frozen=True, kw_only=True)
class RetainingConfig(AnsweredConfig):
    """Retaining heads (Locret) on a frozen target. The defaults are the paper's."""

    HELP: ClassVar[dict[str, str]] = AnsweredConfig.HELP | {
        "clip": "Largest absolute value of an entry of the gradient.",
        "compile": "Compile the heads and their loss with torch.compile where a C++ compiler exists.",
    }

    loop: LoopConfig = field(default=AnsweredLoop(warmup_steps=0, decay_share=1 / 3, clip=0.5, compile=False))
    width: int = setting(
        0, "Width of the heads' own layer; 0: 1024 for targets of hidden states from 2048 on, 256 for others.", least=0
    )
    labels: str = setting(
        "logits",
        "What heads predict of the rows' attention to a token: logits, its largest logit (the paper's), or chances, "
        "the logarithm of its largest probability.",
    )
    queries: str = setting(
        "answer",
        "Rows whose attention counts: answer, those of the answer's tokens (the paper's), or writing, those that "
        "predict them, one position earlier.",
    )
    smooth: float = setting(0.0025, "Weight of the squared difference of neighbours' scores in each layer.", least=0)
    huber: float = setting(1.0, "Difference from which on the loss is linear (beta of the smooth L1 loss).", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.labels in ("logits", "chances"), "labels", self.labels, "logits or chances")
        require(self.queries in ("answer", "writing"), "queries", self.queries, "answer or writing")


@dataclass(frozen=True, kw_only=True)
class LococoConfig(AnsweredConfig):
    """Convolutions (LoCoCo) that merge what a cache within a budget drops, beside a frozen target."""

    HELP: ClassVar[dict[str, str]] = AnsweredConfig.HELP | {
        "compile": "Compile the loss over the vocabulary with torch.compile where a C++ compiler exists."
    }

    loop: LoopConfig = field(
        default=AnsweredLoop(warmup_steps=0, decay_share=0.9, row_tokens=(1024,), step_tokens=4096, compile=False)
    )
    adam: AdamConfig = field(default=AdamConfig(lr=0.005, weight_decay=0.0))
    steps: int = setting(300, "Training budget in steps; the paper has 200 to 1000.", least=1)
    warmup_share: float = setting(
        0.1, "First share of the budget in which the learning rate rises linearly from 0.", least=0, most=1
    )
    precision: str = setting("no", "Precision of the passes: bf16, no (float32), or auto.", resume=True)
    scores: str = setting(
        "h2o", "Policy that chooses which pairs stay, as --cache takes it, such as h2o or locret:HEADS."
    )
    kv_budget: int = setting(
        128, "KV pairs that each head keeps at an eviction boundary, merged ones included.", least=2
    )
    merged: int = setting(16, "Merged pairs among these; the paper uses one in eight.", least=1)
    chunk_size: int = setting(256, "Tokens of a prompt between two eviction boundaries.", least=1)
    kernel: int = setting(21, "Neighbouring pairs that one weight depends on (kernel size); an odd number.", least=1)
    again: bool = setting(
        True,
        "Merge merged pairs again at the next boundary, as in the paper; otherwise a merged pair is kept as long as "
        "the pair that it was merged into would be.",
    )
    norm: float = setting(
        0.5, "Share of other pairs in a merged one before training; the paper has 0.5.", least=0, most=1
    )
    text_weight: float = setting(
        0.0,
        "Weight of the loss on prompt tokens behind the first eviction boundary, beside that on the answer; 1 suits "
        "plain texts.",
        least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.kernel % 2 == 1, "kernel", self.kernel, "an odd number")
        require(self.merged < self.kv_budget, "merged", self.merged, f"less than kv_budget {self.kv_budget}")
        least = min(self.loop.row_tokens)
        require(self.chunk_size < least, "chunk_size", self.chunk_size, f"less than the shortest row, {least}")
