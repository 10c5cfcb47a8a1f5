"""Settings of the recipes that read text: a target, a retriever, a draft, an EAGLE head, a block drafter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from sakiyomi.train.config.base import Group, LlamaSizes, LoopConfig, RunConfig, TextConfig, require, setting

__all__ = [
    "BlockConfig",
    "DraftConfig",
    "EagleConfig",
    "HeadConfig",
    "LayersConfig",
    "MtpConfig",
    "RetrieverConfig",
    "TargetConfig",
    "TaughtConfig",
    "TextRunConfig",
    "UnrolledConfig",
]


MASK_HELP = (
    "Token that stands for one to be guessed; -1: one that the tokenizer does not have, or its padding. No text may "
    "hold it."
)


@dataclass(frozen=True, kw_only=True)
class TextRunConfig(RunConfig):
    """A run that trains a whole model on text."""

    REQUIRED: ClassVar[dict[str, str]] = RunConfig.REQUIRED | {
        "text": "training text, a .jsonl or .txt file (.gz allowed)"
    }

    text: TextConfig = field(default=TextConfig())


@dataclass(frozen=True, kw_only=True)
class WholeSizes(LlamaSizes):
    """Sizes of a model with a vocabulary of its own."""

    vocab: int = setting(4096, "Pieces of the tokenizer to train, special tokens included.", least=1)
    max_positions: int = setting(1024, "Longest context in tokens.", least=1)


@dataclass(frozen=True, kw_only=True)
class TargetConfig(TextRunConfig):
    """A Llama target trained from random weights on text."""

    tokenizer: str = setting("", "Folder of an existing tokenizer; empty: train one on the training text.")
    sizes: WholeSizes = WholeSizes()
    first_layers: int = setting(
        0, "Layers at the start, a divisor of `layers`; more come later; 0: all from the start.", least=0
    )
    grow_at: float = setting(0.45, "Share of the budget at which `first_layers` become `layers`.", least=0, most=1)
    eval_tokens: int = setting(
        16384, "Tokens of each held-out file for the losses during the run.", least=1, resume=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, most, rows = self.sizes.layers, self.sizes.max_positions, self.loop.row_tokens
        if self.first_layers:
            require(layers % self.first_layers == 0, "first_layers", self.first_layers, f"divides {layers}")
        require(max(rows) <= most, "row_tokens", rows, f"at most {most}")


@dataclass(frozen=True, kw_only=True)
class RetrieverConfig(TextRunConfig):
    """A small Llama that finds facts in long texts, trained on tasks made on the fly."""

    HELP: ClassVar[dict[str, str]] = {
        "text": "Training file FILE for filler between the facts and for text. Repeatable.",
        "valid": "Held-out file, NAME=FILE: its loss, and the longest tasks with it as their filler, are measured. "
        "Repeatable.",
        "row_tokens": "Row lengths in tokens, one a stage; 32 at least.",
    }

    loop: LoopConfig = field(
        default=LoopConfig(minutes=60.0, decay_share=0.3, row_tokens=(64, 128, 256, 1024, 4096), step_tokens=4096)
    )
    sizes: WholeSizes = field(
        default=WholeSizes(
            vocab=1024, hidden=128, layers=4, heads=4, intermediate=384, max_positions=8192, rope_theta=500000.0
        )
    )
    stage_shares: tuple[float, ...] = setting(
        (0.15, 0.25, 0.25, 0.2, 0.15), "Share of the budget of each stage, in the order of the row lengths.", above=0
    )
    text_weight: float = setting(0.05, "Weight of the loss of all text beside that of the answers.", least=0)
    note_weight: float = setting(
        0.3,
        "Weight of the loss that has hidden states of values say whether a question in front asks for them.",
        least=0,
    )
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
        rows, most = self.loop.row_tokens, self.sizes.max_positions
        require(min(rows) >= 32, "row_tokens", rows, "32 or more")
        expected = f"{len(rows)} shares, one for each of row_tokens"
        require(len(self.stage_shares) == len(rows), "stage_shares", self.stage_shares, expected)
        longest = max(*rows, *self.eval_lengths)
        require(longest <= most, "max_positions", most, f"{longest} or more")


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Group):
    """What the target writes for its draft to learn from."""

    samples: int = setting(
        4096, "Continuations that the target writes as training text; 0: the given text alone.", least=0
    )
    sample_minutes: float = setting(10.0, "Most minutes that writing them may take.", least=0)
    sample_tokens: int = setting(160, "New tokens of each.", least=1)
    sample_batch: int = setting(32, "Continuations written in one batch.", least=1)
    temperatures: tuple[float, ...] = setting(
        (0.0, 0.0, 1.0), "Temperatures of the batches in turn; 0 is greedy.", least=0
    )
    prompts: tuple[str, ...] = setting((), "Files of the prompts, FILE@SHARE; empty: the training text.")
    sample_share: float = setting(0.5, "Share of the rows that are samples before the decay.", least=0, most=1)
    sample_share_decay: float = setting(0.85, "Share of the rows that are samples during the decay.", least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.temperatures), "temperatures", self.temperatures, "at least one")
        require(bool(self.samples) or not self.prompts, "prompts", self.prompts, "none with --samples 0")


@dataclass(frozen=True, kw_only=True)
class TaughtConfig(TextRunConfig):
    """What learns from a target, on text and on what the target writes."""

    REQUIRED: ClassVar[dict[str, str]] = {"target": "the model to draft for"} | TextRunConfig.REQUIRED

    HELP: ClassVar[dict[str, str]] = {
        "valid": "Held-out file, NAME=FILE; the acceptance is reported under the name. Repeatable; without it some of "
        "the training text is held back.",
        "minutes": "Training time in minutes of wall clock, without the time for samples.",
        "eval_minutes": "Minutes of training between acceptance measurements.",
    }

    target: str = setting(
        "", "The target: embedded name (tales), folder in Hugging Face format, or hub id; any causal LM."
    )
    greedy_weight: float = setting(
        0.5, "Weight of -log q(the target's likeliest token) beside the KL divergence.", least=0
    )
    sampling: SampleConfig = SampleConfig()
    eval_prompts: int = setting(32, "Held-out prompts of each file, of 64 tokens, continued by 128.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.loop.row_tokens) == 1, "row_tokens", self.loop.row_tokens, "one length")


@dataclass(frozen=True, kw_only=True)
class DraftSizes(LlamaSizes):
    """Sizes of a draft; what is 0 follows from the target's (`train.llama.draft_sizes`)."""

    hidden: int = setting(0, "Width of the hidden states; 0: from the target's.", least=0)
    layers: int = setting(
        0, "Layers; the time of a draft step is mostly overhead per layer. 0: from the target's.", least=0
    )
    heads: int = setting(0, "Attention heads; 0: one for 64 numbers of the hidden state.", least=0)
    kv_heads: int = setting(1, "Key/value heads.", least=1)
    intermediate: int = setting(0, "Width of the MLP; 0: 8/3 of the hidden state.", least=0)

    def __post_init__(self) -> None:
        if self.hidden and self.heads:
            super().__post_init__()
        else:
            Group.__post_init__(self)  # what is given has its range all the same


@dataclass(frozen=True, kw_only=True)
class DraftConfig(TaughtConfig):
    """A small Llama draft distilled from a target; the tokenizer and the vocabulary are the target's."""

    HELP: ClassVar[dict[str, str]] = TaughtConfig.HELP | {
        "row_tokens": "Row length in tokens; one only, rows are reused with their labels.",
    }

    loop: LoopConfig = field(
        default=LoopConfig(
            minutes=15.0, decay_share=0.5, row_tokens=(256,), step_tokens=1024, eval_minutes=3.0, compile=False
        )
    )
    init: str = setting(
        "",
        "A model to start from (embedded name, folder or hub id), such as the Llama that `train target --tokenizer "
        "TARGET` makes; the sizes are then its own.",
    )
    sizes: DraftSizes = DraftSizes()
    top: int = setting(
        64, "The target's likeliest tokens kept as labels of a position; one bucket holds the rest.", least=1
    )
    label_share: float = setting(
        0.2,
        "Most of the time that goes to labels, which a large target takes long to make; rows without learn the text "
        "itself. With --tokens all rows have labels.",
        least=0,
        most=1,
        resume=True,
    )
    label_gib: float = setting(2.0, "Memory in GiB for labels that later epochs use again.", least=0, resume=True)
    parallel: int = setting(
        1,
        "Tokens that the draft learns to guess in one pass (PARD): behind the text stand masks, each of which guesses "
        "one; 1: a token a pass.",
        least=1,
        most=16,
    )
    mask: int = setting(-1, MASK_HELP, least=-1)
    gamma: int = setting(4, "Draft tokens a round in the acceptance measurements.", least=1)
    cost: str = setting(
        "measured",
        "Draft step / target step (c) for the expected speed-up: a number, or measured, which times the pair here.",
        resume=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel > 1:
            length, said = self.loop.row_tokens[0], "its default with --parallel"
            require(length >= self.parallel, "row_tokens", length, f"at least parallel {self.parallel}")
            require(self.cost == "measured", "cost", self.cost, said)  # what it brings is measured with the engine
            require(self.gamma == type(self).gamma, "gamma", self.gamma, said)
        else:
            require(self.mask == -1, "mask", self.mask, "its default without --parallel")
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
class HeadConfig(TaughtConfig):
    """A head of decoder layers beside a frozen target, whose hidden states it reads."""

    HELP: ClassVar[dict[str, str]] = TaughtConfig.HELP | {
        "row_tokens": "Row length in tokens; one only.",
        "muon_lr": "Peak learning rate of Muon (matrices of the layers, and what joins hidden states); 0: AdamW trains "
        "them, too.",
        "adam_lr": "Peak learning rate of AdamW (norms, and what else is trained).",
    }

    loop: LoopConfig = field(
        default=LoopConfig(minutes=40.0, decay_share=0.6, row_tokens=(256,), step_tokens=4096, compile=False)
    )
    text: TextConfig = field(default=TextConfig(muon_lr=0.05, adam_lr=0.005, weight_decay=0.0))
    step_decay: float = setting(
        0.8, "Weight of the loss of a token further ahead to that of the one before.", above=0, most=1
    )
    loss: str = setting(
        "ce",
        "What is made small: ce, the cross-entropy with the target's distribution, tv, its total variation distance, "
        "which is the share that is rejected, or lk, -log of the share that is accepted.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.loss in ("ce", "tv", "lk"), "loss", self.loss, "ce, tv or lk")


@dataclass(frozen=True, kw_only=True)
class LayersConfig(HeadConfig):
    """Such a head with layers of its own kind, which reads the outputs of some of the target's layers."""

    reads: tuple[int, ...] = setting(
        (),
        "Layers of the target whose outputs are read, counted from 0; none given: the method's own choice. Repeatable.",
        least=0,
    )
    kv_heads: int = setting(0, "Key/value heads of a layer; 0: as many as the target's.", least=0)
    intermediate: int = setting(0, "Width of a layer's MLP; 0: as the target's.", least=0)


@dataclass(frozen=True, kw_only=True)
class UnrolledConfig(HeadConfig):
    """Such a head that drafts token by token."""

    unroll: int = setting(
        5, "Draft tokens that the head reads with features of its own while it learns, one step each.", least=1, most=16
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.loop.row_tokens[0]
        require(length > self.unroll, "row_tokens", length, f"more than unroll {self.unroll}")


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayersConfig, UnrolledConfig):
    """An EAGLE-3 head on a frozen target: one decoder layer that reads hidden states beside tokens."""

    HELP: ClassVar[dict[str, str]] = HeadConfig.HELP | {
        "adam_lr": "Peak learning rate of AdamW (norms, and the head over the vocabulary).",
        "reads": "Layers of the target whose outputs are read, counted from 0; none given: the method's own choice, 1, "
        "one before the middle, and three before the last. Repeatable.",
    }

    draft_vocab: int = setting(
        0,
        "Tokens that the head proposes, the most frequent ones of the training text; 0: all of the target's.",
        least=0,
    )
    own_head: bool = setting(
        False, "Train the head over the vocabulary, which begins as the target's, too; otherwise it stays that."
    )


@dataclass(frozen=True, kw_only=True)
class MtpConfig(UnrolledConfig):
    """A layer for predicting further tokens of a frozen target, its own or a new one."""

    init: str = setting(
        "",
        "The layer to begin with: a folder with one, or new for a new one; empty: the target's own, where its files "
        "hold one, else a new one.",
    )


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayersConfig):
    """A block drafter on a frozen target: a few decoder layers that guess several tokens in one pass."""

    HELP: ClassVar[dict[str, str]] = HeadConfig.HELP | {
        "reads": "Layers of the target whose outputs are read, counted from 0; none given: the method's own choice, "
        "five evenly from 1 to three before the last. Repeatable.",
    }

    layers: int = setting(2, "Decoder layers.", least=1, most=16)
    guesses: int = setting(7, "Tokens that a pass guesses.", least=1, most=32)
    anchors: int = setting(32, "Tokens of a row, drawn anew for every piece, that a block stands behind.", least=1)
    anchored: bool = setting(
        False,
        "The row of the last token guesses the first one (DSpark); otherwise the first mask does, and the block is one "
        "row longer (DFlash).",
    )
    causal: bool = setting(False, "A row of a block sees those before it alone (JetSpec); otherwise all of them.")
    markov: int = setting(
        0,
        "Rank of a gated table by which the token before changes a guess, so that branches of a tree differ (DSpark's "
        "Markov head); 0: guesses of a pass do not know each other.",
        least=0,
    )
    mask: int = setting(-1, MASK_HELP, least=-1)

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.loop.row_tokens[0]
        require(length > self.guesses, "row_tokens", length, f"more than guesses {self.guesses}")
