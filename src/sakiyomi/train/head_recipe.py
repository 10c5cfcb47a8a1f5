"""What recipes share that train a head beside a frozen target, whose hidden states are computed on the way.

What the target gives for a row is kept on disk and read again in later epochs. Each piece of a batch passes through the
head, its gradient is accumulated, and its activations are freed.
"""

from __future__ import annotations

import functools
import gc
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.drafters.medusa_heads.ranks import Ranks
from sakiyomi.train.acceptance import DEPTH, MEASURING, Continuations, measured, measured_on, ranked, worth
from sakiyomi.train.checkpoint import writing
from sakiyomi.train.config import HeadConfig, HeadLayers, StepOptions
from sakiyomi.train.draft_vocab import check_draft_vocab, frequent
from sakiyomi.train.export import Result, model_folder
from sakiyomi.train.half import HalfCopy
from sakiyomi.train.hidden import Lesson, Lessons, TargetStates, layer_config
from sakiyomi.train.kept_rows import KeptRows
from sakiyomi.train.losses import soft_loss
from sakiyomi.train.plot import plot_heads
from sakiyomi.train.progress import HeadLog
from sakiyomi.train.taught import Taught
from sakiyomi.train.unrolled_attention import attend

PIECE = 1024
"""Tokens of one piece of a batch, whose activations are held at a time."""
STEPS_OF_ALL = 2
"""Draft steps that all rows of a batch learn."""
Settings = TypeVar("Settings", bound=HeadConfig)


class HeadRecipe(Taught[Settings]):
    """A head learns to predict the target from its hidden states, several tokens ahead.

    Attributes:
        reads: layers of the target whose outputs the head reads; none: it reads what the target's head reads.
        head: that learns.
        working: what the passes run: the head, or its copy in bfloat16.
        known: tokens that the head proposes; None: all.
        layers: decoder layers of it.
        states: of the target.
        positions_ahead: tokens that it predicts, each with a loss of its own.
    """

    kind: ClassVar[str]
    """What stands before the head's folder in a draft."""
    marked = True
    head: nn.Module
    working: Any
    known: Tensor | None = None
    reads: tuple[int, ...] = ()
    layers = 1
    positions_ahead: int

    @abstractmethod
    def new_head(self) -> nn.Module:
        """The untrained head."""

    @abstractmethod
    def losses(self, ids: Tensor, lesson: Lesson, step: int) -> Tensor:
        """Mean loss of each position ahead on (B, T + 1) tokens, in nats or, for "tv", as a share."""

    def shared(self) -> Sequence[Tensor]:
        """Tensors of the head that belong to the target and are no parameters."""
        return ()

    @abstractmethod
    def ranks(self, texts: Continuations) -> Ranks:
        """Where the target's own greedy tokens stand among the head's guesses: by place, and how far ahead."""

    @abstractmethod
    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> tuple[str, Mapping[str, Tensor]]:
        """Write the head; what it is, for the card, and what was written.

        Args:
            folder: is made.
            tensors: all parameters, as they are written; some are the target's.
        """

    # ------------------------------------------------------------ a run

    def make(self) -> nn.Module:
        """See `Recipe`."""
        config = self.config
        self.head = self.new_head()
        self.half = HalfCopy(self.head, self.shared()) if self.passes == "bf16" else None
        self.working = self.head if self.half is None else self.half.module
        self.states = TargetStates(self.target, self.reads)
        kept = KeptRows(Path(config.loop.out), int(config.cache_gib * 2**30))
        self.lessons = Lessons(self.states, self.known, config.top, kept)
        self.log = HeadLog(self.workers.log(Path(config.loop.out) / "steps.jsonl"), config.loop.resume)
        shares = config.step_decay ** torch.arange(self.positions_ahead)
        self.shares = shares / shares.sum()
        return self.head

    def loss(self, model: Any, rows: Tensor) -> Tensor:
        """See `Recipe`; a piece of the batch at a time."""
        step, size = self.loop.progress.step, max(1, PIECE // self.config.loop.row)
        ids = torch.where(rows < 0, ~rows, rows)
        lesson = self._lesson(ids, rows >= 0)
        each = torch.zeros(self.positions_ahead)
        starts = range(0, len(ids), size)
        first = (step * self.workers.count + self.workers.number) * len(starts)
        if self.half is not None:
            self.half.take()
        for place, at in enumerate(starts):
            piece = ids[at : at + size]
            own = self.losses(piece, lesson.part(slice(at, at + size)), first + place) * (len(piece) / len(ids))
            with torch.autocast(ids.device.type, enabled=False):
                (own @ self.shares).backward()
            torch.clear_autocast_cache()  # copies of weights belong to a graph that is gone
            if self.half is not None:
                self.half.give()
            each += own.detach()
        self.log.add(step, self.workers.mean(each))
        return (each * self.shares).sum()

    def _lesson(self, ids: Tensor, counted: Tensor) -> Lesson:
        """What the target gives for (B, T + 1) tokens, of which only some count; those after others are learnt.

        The likeliest token gets `greedy_weight` more.
        """
        found, weight = self.lessons(ids), self.config.greedy_weight
        found.probs[..., 0] += weight
        found.probs.div_(1 + weight)
        # What comes after the last token is not known; most often it counts as that one does.
        found.counts.logical_and_(torch.cat([counted[:, 1:], counted[:, -1:]], 1))
        return found

    def hooks(self) -> AbstractContextManager[object]:
        """See `Recipe`."""
        stack = ExitStack()
        stack.enter_context(closing(self.lessons))
        stack.enter_context(closing(self.log))
        return stack

    def measures(self, model: Any) -> dict[str, dict[str, float]]:
        """See `Recipe`."""
        return {name: measured(self.ranks(texts)) for name, texts in self.held_out.items()}

    def finish(self) -> Result:
        """See `Recipe`."""
        config, folder = self.config, model_folder(self.config)
        with torch.no_grad():
            for weight in self.head.parameters():  # as they are written: what is measured is what is used
                weight.copy_(weight.bfloat16())
        ranks = {name: self.ranks(texts) for name, texts in self.held_out.items()}
        accuracies = {name: found.accuracies() for name, found in ranks.items()}
        with writing(folder):
            about, written = self.write(folder, {n: w.detach().bfloat16() for n, w in self.head.named_parameters()})
            plot_heads(self.log.curve(), accuracies, folder / "accuracy.png", "position")
        measures = {name: measured(found) for name, found in ranks.items()}
        del self.target, self.states, self.lessons  # two targets need not fit
        gc.collect()
        draft = f"{self.kind}:{folder}"
        if config.speed:
            self.reporter.note(MEASURING)
            for name, values in worth(config.target, draft, self.held_out, config.loop.compile).items():
                measures[name] |= values
        more = {
            "about": about,
            "parameters": sum(tensor.numel() for tensor in written.values()),
            "measured_on": measured_on(config.target),
            "held_back": self.held_back,
            "base": config.target,
            "use": f"sakiyomi generate --target {config.target} --draft {draft} 'Once upon a time'",
        }
        return Result(self.head, self.layers, measures, self.loop.epochs(self.sources), more)


class LayersRecipe(HeadRecipe[Settings]):
    """A head with layers of its own kind, which reads the outputs of some of the target's layers.

    Attributes:
        sizes: of the head's decoder layers, as transformers has them.
    """

    @abstractmethod
    def usual_reads(self, layers: int) -> tuple[int, ...]:
        """The method's own choice of layers of a target that has so many."""

    def check_target(self) -> None:
        """See `Taught`."""
        super().check_target()
        asked, count = self.config.group(HeadLayers), int(self.target.config.get_text_config().num_hidden_layers)
        self.reads = asked.reads or tuple(min(max(layer, 0), count - 1) for layer in self.usual_reads(count))
        if max(self.reads) >= count:
            raise InputError(
                f"reads is {self.reads}, and {self.config.target} has {count} layers; set --reads to 0 .. {count - 1}"
            )
        check_draft_vocab(asked.draft_vocab, self.config.target, self.vocab)
        self.sizes = layer_config(self.target, kv_heads=asked.kv_heads, intermediate=asked.intermediate)
        heads, kv_heads = self.sizes["num_attention_heads"], self.sizes["num_key_value_heads"]
        if heads % kv_heads:
            raise InputError(
                f"kv_heads is {kv_heads}, expected a divisor of the target's {heads} heads; set --kv-heads"
            )

    def make(self) -> nn.Module:
        """See `Recipe`."""
        wanted = self.config.group(HeadLayers).draft_vocab
        self.known = frequent(wanted, self.sources, self.texts, self.vocab)
        return super().make()


# ---------------------------------------------------------------- heads that draft token by token


class Unrolled(nn.Module):
    """A head that is run step by step over whole texts, with the target's features and then with its own.

    In step k every token is read with the feature that the head itself gave in step k - 1, as the k-th draft token
    after one with a feature of the target (training-time test; Li et al. 2025, arXiv 2503.01840, section 3.2).
    """

    @abstractmethod
    def forward(self, ids: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
        """What the head over the vocabulary reads in every step.

        Args:
            ids: (B, T) tokens.
            states: (B, T, joined) the target's for the token before each.
            steps: at most; row t of step k is that of the token t as k-th draft token: rows before k mean nothing.

        Yields:
            (B, T, hidden) of each step.
        """

    @abstractmethod
    def weight(self) -> Tensor:
        """Of the head over the vocabulary, (tokens, hidden)."""


class UnrolledRecipe(HeadRecipe[Settings]):
    """Such a head learns to predict the target."""

    head: Unrolled

    def check_target(self) -> None:
        """See `Taught`."""
        super().check_target()
        self.positions_ahead = self.config.group(StepOptions).unroll

    def losses(self, ids: Tensor, lesson: Lesson, step: int) -> Tensor:
        """See `HeadRecipe`; later steps are learnt on half of the rows, for they cost as much and weigh less."""
        deep = -(-len(ids) // 2)
        found = self._unrolled(ids[:deep], lesson.part(slice(deep)), self.positions_ahead)
        if deep < len(ids):
            first = self._unrolled(ids[deep:], lesson.part(slice(deep, None)), min(STEPS_OF_ALL, self.positions_ahead))
            for ahead, loss in enumerate(first):
                found[ahead] = found[ahead].lerp(loss, 1 - deep / len(ids))
        return torch.stack(found)

    def _unrolled(self, ids: Tensor, lesson: Lesson, steps: int) -> list[Tensor]:
        """Mean loss of each of so many steps."""
        head, found = self.working, []
        wanted, places = (part[:, 1:].flatten(0, 1) for part in (lesson.probs, lesson.places))
        for ahead, hidden in enumerate(head(ids[:, 1:], lesson.joined[:, :-1], steps)):
            weights = lesson.counts[:, 1:].float()
            weights[:, :ahead] = 0
            read = hidden.flatten(0, 1)
            found.append(soft_loss(read, head.weight(), wanted, weights.flatten(), self.config.loss, tokens=places))
        return found

    def ranks(self, texts: Continuations) -> Ranks:
        """See `HeadRecipe`."""
        return rank_continuations(self.head, self.states, self.known, texts)


NAME = "sakiyomi_unrolled"
"""Attention of a step, by transformers' name for it."""
STEPS = "sakiyomi_steps"
"""Attribute of a module that attends: keys and values of the steps so far."""


def attend_in_steps(module: Any) -> None:
    """Switch a model to the attention of a step; each pass of its layers is one, see `STEPS`.

    Raises:
        UnsupportedError: its class keeps its own attention.
    """
    _register()
    try:
        module.set_attn_implementation(NAME)
    except ValueError:
        raise own_attention(module) from None


def own_attention(module: Any) -> UnsupportedError:
    """The error for a head whose class does not call the attention that it was switched to."""
    return UnsupportedError(f"{type(module).__name__} keeps its own attention: no head of it can be trained here")


@functools.cache
def _register() -> None:
    # What it appends to is no matter of a compiled graph.
    AttentionInterface.register(NAME, torch.compiler.disable(_attend))
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **more: Any
) -> tuple[Tensor, None]:
    """One step, of (B, heads, T, width): (B, T, heads, width)."""
    if more.get("softcap") is not None or more.get("s_aux") is not None:
        raise UnsupportedError("the target's attention has a soft cap or sinks: no MTP layer can be trained here")
    scaling = more.get("scaling")
    query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    mixed = attend(query.to(value.dtype), key.to(value.dtype), value, *getattr(module, STEPS))
    return mixed.transpose(1, 2), None


def behind(rows: Tensor, count: int) -> Tensor:
    """Each row's values in the place of the row so many further on; (..., T, width)."""
    return F.pad(rows, (0, 0, count, 0))[..., : rows.shape[-2], :] if count else rows


def rank_continuations(head: Unrolled, states: TargetStates, tokens: Tensor | None, texts: Continuations) -> Ranks:
    """Where the target's own greedy tokens stand among the guesses, where all tokens between are drafted rightly.

    That is all that counts in greedy text.
    """

    def guess(ids: Tensor, first: int) -> Iterator[Tensor]:
        joined, _ = states(ids)
        for step, hidden in enumerate(head(ids[:, 1:], joined[:, :-1], DEPTH)):
            rows = hidden[0, first - 1 + step : -1]  # row r is that of the token r + 1, and predicts the next one
            yield F.linear(rows, head.weight().to(rows.dtype))

    return ranked(head, texts, DEPTH, guess, tokens)
