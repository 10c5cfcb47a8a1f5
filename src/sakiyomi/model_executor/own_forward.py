"""Models that do not run on our cache: each text goes through the class's own forward, as `generate` calls it.

Their layers keep something that only transformers supports (indexers, compressed blocks, special states), or nothing at
all. So a slot holds the tokens of its text and the cache that the class returned for them. The rows of a pass are read
one request at a time behind the request's text; a tree is read path by path, on a copy of the cache. That is right for
every class, but slower than rows that share a pass, and excludes all options that need keys and values.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sakiyomi.cache.layer_state import LAYER_STATES
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.hf_names import cache_argument
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.model_executor.features import HiddenStateCapture
from sakiyomi.model_executor.positions import position_count, rope_limit
from sakiyomi.model_executor.probe import FAULTS, PROOF, Expectation, proof_text

BY_TEXT = {
    "cached": "new tokens at once",
    "steps": "token by token",
    "whole": "the whole text in each pass",
    "rows": "the whole text for each token",
}
"""How a text is read, the fastest way first: its new tokens at once behind the class's cache, or one by one; the whole
text again in each pass; or the whole text for each row, for classes in which a row depends on the rows behind it.
"""
WAYS = tuple(BY_TEXT)
TAIL = 16  # tokens that are read again at most, to save copies of the cache in every pass


class OwnForward(nn.Module):
    """A model whose forward reads the rows of a pass as the texts of their requests.

    Args:
        inner: the structural copy, as it is.
        way: of ``WAYS``.
        capture: takes the hidden states of passes.

    Attributes:
        why: why the model does not run on our cache.
    """

    why = ""

    def __init__(self, inner: Any, way: str, capture: HiddenStateCapture) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config
        self.reader = TextReader(inner, way, capture)

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        """Token ids (1, N) of the rows of a pass to an object with their ``logits`` (1, N, V)."""
        return SimpleNamespace(logits=self.reader(input_ids))

    def get_output_embeddings(self) -> Any:
        """The head over the vocabulary."""
        return self.inner.get_output_embeddings()

    def set_attn_implementation(self, _: str) -> None:
        """Does nothing: the user's model keeps its attention."""


def ways_of(model: nn.Module) -> tuple[str, ...]:
    """The ways to try for a model."""
    # A mask that keeps the columns with the largest numbers breaks ties by the number of columns.
    chooses = any(hasattr(type(module), "prepare_dynamic_mask") for module in model.modules())
    return WAYS[1:] if chooses else WAYS


def run_by_text(inner: Any, way: str, capture: HiddenStateCapture) -> OwnForward:
    """A model as an ``OwnForward`` whose class has the name of the model's class."""
    kind = type(type(inner).__name__, (OwnForward,), {})
    made: OwnForward = kind(inner, way, capture)
    return made


@torch.no_grad()
def expect_own(inner: Any, vocab_size: int) -> Expectation:
    """The logits of a model's own forward without any cache, for each prefix of the text of the proof.

    Each prefix is read by itself, since in some classes rows attend to later rows. See ``expect``.

    Raises:
        UnsupportedError: the model does not run on the text.
    """
    text = proof_text(inner.config.get_text_config(), vocab_size)[:PROOF]
    try:
        logits = TextReader(inner, "rows", HiddenStateCapture()).read(text, PROOF, {})[0][0]
    except FAULTS as error:
        raise UnsupportedError(f"{type(inner).__name__} does not run on a text without a cache") from error
    return Expectation(logits.float(), {})


class Read(NamedTuple):
    """The state that a class keeps of a text: its tokens, and the arguments of the forward that hold the cache."""

    tokens: list[int]
    past: dict[str, Any]


class TextReader(nn.Module):
    """Reads one text. ``TextState`` replaces its ``forward``, to read the texts of the slots.

    Args:
        inner, way, capture: see ``OwnForward``.
    """

    inner: Any

    def __init__(self, inner: Any, way: str, capture: HiddenStateCapture) -> None:
        super().__init__()
        vars(self)["inner"] = inner  # not as a child: its modules are listed elsewhere
        self.way, self.capture = way, capture
        config = inner.config.get_text_config()
        self._limit, self.positions = rope_limit(config), position_count(config)

    def read(self, tokens: list[int], fresh: int, past: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
        """Read the last tokens of a text behind the others.

        Args:
            tokens: the whole text.
            fresh: number of tokens to read, at least 1.
            past: cache of the tokens before those, changed in place; empty: all tokens are read.

        Returns:
            Logits (fresh, V) and captured hidden states (fresh, hidden) of those rows, and the new cache.
        """
        beyond = len(tokens) - self._limit
        if 0 < beyond <= fresh and self.way != "rows":  # there all positions have other factors
            parts = [self.read(tokens[: self._limit], fresh - beyond, past)[0]] if beyond < fresh else []
            found, past = self._forward(tokens, beyond, {})
            return [torch.cat(rows) for rows in zip(*parts, found, strict=True)], past
        ends = range(len(tokens) - fresh + 1, len(tokens) + 1)
        if self.way == "rows" or (self.way == "steps" and past and fresh > 1):
            parts = []
            for end in ends:
                found, past = self._forward(tokens[:end], 1, past)
                parts.append(found)
            return [torch.cat(rows) for rows in zip(*parts, strict=True)], past
        return self._forward(tokens, fresh, past)

    def _forward(self, tokens: list[int], fresh: int, past: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
        """The class's own forward, with the arguments that its ``generate`` passes."""
        from transformers import DynamicCache
        from transformers.generation.utils import ALL_CACHE_NAMES

        inner = self.inner
        ids = torch.tensor([tokens], device=inner.device)
        caches = self.way in ("cached", "steps")
        given: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "use_cache": caches}
        if "position_ids" in inspect.signature(inner.forward).parameters:
            positions = inner._prepare_position_ids_for_generation(ids, given)
            given |= {} if positions is None else {"position_ids": positions}
        if caches and not past and inner._supports_default_dynamic_cache():
            given[cache_argument(inner)] = DynamicCache(config=inner.config.get_text_config(decoder=True))
        length = {"next_sequence_length": fresh} if past else {}
        inputs = inner.prepare_inputs_for_generation(ids, is_first_iteration=not past, **length, **given, **past)
        if inner._supports_logits_to_keep():
            inputs["logits_to_keep"] = fresh
        self.capture.begin()
        out = inner(**inputs, return_dict=True)
        # Of several streams (ProphetNet) the first makes the logits.
        rows = [out.logits, *(state[:, 0] if state.ndim == 4 else state for state in self.capture.take())]
        if not caches:
            return [part[0, -fresh:] for part in rows], {}
        after = inner._update_model_kwargs_for_generation(out, given)
        kept = {name: after[name] for name in ALL_CACHE_NAMES if after.get(name) is not None}
        if not kept:
            raise UnsupportedError(f"{type(inner).__name__} keeps no cache")
        return [part[0, -fresh:] for part in rows], kept


@dataclass
class _Text:
    """The text of a slot.

    Attributes:
        tokens: all tokens that were written, including the rows of the last pass.
        live: cache of the tokens that were read last.
        anchor: cache of fewer tokens, to which rows can be rolled back.
    """

    tokens: list[int] = field(default_factory=list)
    live: Read | None = None
    anchor: Read | None = None

    def longest(self, count: int) -> Read | None:
        """The cache of the longest prefix of at most so many tokens."""
        known = [read for read in (self.live, self.anchor) if read is not None and len(read.tokens) <= count]
        known = [read for read in known if self.tokens[: len(read.tokens)] == read.tokens]
        return max(known, key=lambda read: len(read.tokens), default=None)


class TextState:
    """The texts of a cache's slots: see ``ModuleState``. A text can be resumed at every length, by reading it again.

    Args:
        reader: of the model.
        slots: of the cache.
    """

    def __init__(self, reader: TextReader, slots: int) -> None:
        self._reader = reader
        self._texts = [_Text() for _ in range(slots)]

    @property
    def bytes(self) -> int:
        """Bytes allocated now."""
        held = [read.past for text in self._texts for read in (text.live, text.anchor) if read is not None]
        return sum({id(tensor): tensor.nbytes for tensor in _tensors(held, set())}.values())

    def begin(self, plan: BatchPlan) -> None:
        """Does nothing: a pass that runs twice reads the same tokens."""

    def clear(self, slot: int) -> None:
        """A text begins in this slot."""
        self._texts[slot] = _Text()

    def reserve(self, slot: int, columns: int) -> None:
        """Does nothing: the cache of the class grows with its text."""

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """Keep these rows, ascending, of the pass that wrote behind `length` tokens, and drop the others."""
        tokens = self._texts[slot].tokens
        tokens[length:] = [tokens[length + row] for row in rows]

    def resumable(self, slot: int, length: int) -> int:
        """Every length."""
        return length

    def roll_back(self, slot: int, length: int) -> None:
        """Drop the tokens behind so many."""
        del self._texts[slot].tokens[length:]

    def fork(self, slot: int, other: int, first: int, length: int) -> None:
        """Copy the first `length` tokens of another slot, with their cache."""
        theirs = self._texts[other]
        read = theirs.longest(length)
        self._texts[slot] = _Text(theirs.tokens[:length], copy.deepcopy(read))

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """The tokens; their cache is made again by reading them."""
        return {"tokens": torch.tensor(self._texts[slot].tokens[:length])}

    def restore(self, slot: int, length: int, known: Mapping[str, Tensor]) -> None:
        """Fill an empty slot with a ``snapshot``."""
        self._texts[slot] = _Text(known["tokens"].tolist())

    def forward(self, rows: Sequence[Tensor], fixed: Sequence[Tensor], plan: BatchPlan) -> Tensor:
        """Logits (1, N, V) of rows with ids (1, N); hidden states go to the reader's capture."""
        ids, made = rows[0], list[Tensor]()

        def put(places: list[int], found: Sequence[Tensor]) -> None:
            if not made:
                made.extend(part.new_zeros(1, ids.shape[1], part.shape[-1]) for part in found)
            for out, part in zip(made, found, strict=True):
                out[0, places] = part

        for i, (slot, first, count, length, _) in enumerate(plan.table):
            text, part = self._texts[slot], plan.parts[i]
            text.tokens[length:] = part.tokens
            for leaf in _leaves(part):
                columns = plan.path(i, leaf).tolist()
                found = self._read(text, columns, stays=count == 1 and not part.done, prompt=part.prompt)
                own = [j for j, column in enumerate(columns) if column >= length]
                put([first + columns[j] - length for j in own], [rows[own] for rows in found])
        if not made:  # a trial pass, which may have more rows than the model has positions
            size, most = ids.shape[1], self._reader.positions
            for first in range(0, size, most):
                some = ids[0, first : first + most].tolist()
                put(list(range(first, first + len(some))), self._reader.read(some, len(some), {})[0])
        self._reader.capture.give(made[1:])
        return made[0]

    def _read(self, text: _Text, columns: list[int], *, stays: bool, prompt: bool = False) -> list[Tensor]:
        """Logits and hidden states of a path, a row of each for each of its columns.

        Args:
            text: of the slot.
            columns: of the path; all before the first lie on it, too.
            stays: the path will most probably be kept.
            prompt: it is a chunk of a prompt, which is always kept.
        """
        begin, path, stays = columns[0], [text.tokens[column] for column in columns], stays or prompt
        # ``generate`` reads a prompt at once; token by token a class may round differently.
        known = None if prompt and self._reader.way == "steps" else text.longest(begin)
        at = 0 if known is None else len(known.tokens)
        if known is not None and not stays and begin - at > TAIL:
            self._read(text, list(range(at, begin)), stays=True)
            known, at = text.live, begin
        tokens, past = text.tokens[:begin] + path, {} if known is None else known.past
        chain = columns == list(range(begin, begin + len(columns)))
        moves = (
            stays
            and known is text.live
            and (len(path) > 1 or (text.anchor is not None and begin - len(text.anchor.tokens) < TAIL))
        )
        if moves:
            text.live = None  # until it has been read
        elif known is not None:
            past = copy.deepcopy(past)
            text.anchor = known
        found, past = self._reader.read(tokens, len(tokens) - at, past)
        if past and (stays or chain):
            text.live = Read(tokens, past)
        return [part[-len(path) :] for part in found]


def _leaves(part: SequenceRows) -> list[int]:
    """Rows of a segment, counted from its first, that no other one follows."""
    count = len(part.tokens)
    if part.parents is None:
        return [count - 1]
    followed = set(part.parents)
    return [row for row in range(count) if part.done + row not in followed]


def _tensors(held: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors in an object and in its attributes and items."""
    if isinstance(held, Tensor):
        yield held
    elif id(held) not in seen:
        seen.add(id(held))
        if isinstance(held, Mapping):
            inside = list(held.values())
        else:
            inside = list(held) if isinstance(held, list | tuple) else list(getattr(held, "__dict__", {}).values())
        for value in inside:
            yield from _tensors(value, seen)


LAYER_STATES["TextReader"] = TextState
