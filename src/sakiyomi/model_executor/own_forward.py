"""Models that do not run on our cache: each text goes through the class's own forward, as `generate` calls it.

Their layers keep something that transformers alone knows (indexers, compressed blocks, states of kinds that no other
class has), or nothing at all. So a slot holds the tokens of its text and what the class itself has returned of them. Of
the rows of a pass those of one request are read behind its text, a tree path by path, on a copy: right for whatever
class, slower than rows that share a pass, and without all that asks for keys and values.
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
text anew in each pass; or anew for each row, where a row that is followed by others is another one.
"""
WAYS = tuple(BY_TEXT)
TAIL = 16  # tokens that are read again at most, rather than that each pass copied what is kept of the text


class OwnForward(nn.Module):
    """A model whose forward reads the rows of a pass as the texts of their requests.

    Args:
        inner: the structural copy, as it is.
        way: of ``WAYS``.
        capture: takes the hidden states of passes.

    Attributes:
        why: what speaks against our cache.
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
        """Attention stays what the user's model has."""


def ways_of(model: nn.Module) -> tuple[str, ...]:
    """The ways that may be tried for a model."""
    # Where a mask keeps the columns with the largest numbers, equal ones are told apart by how many columns there are.
    chooses = any(hasattr(type(module), "prepare_dynamic_mask") for module in model.modules())
    return WAYS[1:] if chooses else WAYS


def run_by_text(inner: Any, way: str, capture: HiddenStateCapture) -> OwnForward:
    """A model as ``OwnForward``, under the name of its class."""
    kind = type(type(inner).__name__, (OwnForward,), {})
    made: OwnForward = kind(inner, way, capture)
    return made


@torch.no_grad()
def expect_own(inner: Any, vocab_size: int) -> Expectation:
    """What a model's own forward gives without any cache for each beginning of the text of the proof, see ``expect``.

    Beginnings by themselves, since some classes have rows look at what comes behind them.

    Raises:
        UnsupportedError: it does not run on it.
    """
    text = proof_text(inner.config.get_text_config(), vocab_size)[:PROOF]
    try:
        logits = TextReader(inner, "rows", HiddenStateCapture()).read(text, PROOF, {})[0][0]
    except FAULTS as error:
        raise UnsupportedError(f"{type(inner).__name__} does not run on a text without a cache") from error
    return Expectation(logits.float(), {})


class Read(NamedTuple):
    """What the class keeps of a text: its tokens, and the arguments of its forward that hold the rest."""

    tokens: list[int]
    past: dict[str, Any]


class TextReader(nn.Module):
    """Reads one text. Its ``forward`` is that of the slots' texts, see ``TextState``.

    Args:
        inner, way, capture: see ``OwnForward``.
    """

    inner: Any

    def __init__(self, inner: Any, way: str, capture: HiddenStateCapture) -> None:
        super().__init__()
        vars(self)["inner"] = inner  # whose modules are listed elsewhere
        self.way, self.capture = way, capture
        config = inner.config.get_text_config()
        self._limit, self.positions = rope_limit(config), position_count(config)

    def read(self, tokens: list[int], fresh: int, past: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
        """Read the last tokens of a text behind the others.

        Args:
            tokens: of the whole text.
            fresh: so many are to be read, at least 1.
            past: of the tokens before those, changed by this; empty: all are read.

        Returns:
            Logits (fresh, V) and captured hidden states (fresh, hidden) of those rows, and what is kept of the text.
        """
        beyond = len(tokens) - self._limit
        if 0 < beyond <= fresh and self.way != "rows":  # there all positions have other factors: it is read anew
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
        """The class's own forward, with the arguments that its ``generate`` gives it."""
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
        # Of several streams (prophetnet) the first one makes the logits.
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
        tokens: those that were written, the rows of the last pass among them.
        live: what the class keeps of as many tokens as were read last.
        anchor: of some tokens before those, where rows may be taken back to.
    """

    tokens: list[int] = field(default_factory=list)
    live: Read | None = None
    anchor: Read | None = None

    def longest(self, count: int) -> Read | None:
        """What is kept of a beginning of the first so many tokens."""
        known = [read for read in (self.live, self.anchor) if read is not None and len(read.tokens) <= count]
        known = [read for read in known if self.tokens[: len(read.tokens)] == read.tokens]
        return max(known, key=lambda read: len(read.tokens), default=None)


class TextState:
    """The texts of a cache's slots: see ``ModuleState``. A text can be resumed at every length, by reading it anew.

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
        """Nothing has to be done: a pass that runs twice reads the same."""

    def clear(self, slot: int) -> None:
        """A text begins in this slot."""
        self._texts[slot] = _Text()

    def reserve(self, slot: int, columns: int) -> None:
        """Nothing has to be done: what a class keeps grows with its text."""

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """Of the pass that wrote rows behind `length` tokens keep these, ascending, and drop the others."""
        tokens = self._texts[slot].tokens
        tokens[length:] = [tokens[length + row] for row in rows]

    def resumable(self, slot: int, length: int) -> int:
        """Every length."""
        return length

    def roll_back(self, slot: int, length: int) -> None:
        """Forget what lies behind so many tokens."""
        del self._texts[slot].tokens[length:]

    def fork(self, slot: int, other: int, first: int, length: int) -> None:
        """Copy from another slot what it holds at `length` tokens."""
        theirs = self._texts[other]
        read = theirs.longest(length)
        self._texts[slot] = _Text(theirs.tokens[:length], copy.deepcopy(read))

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """The tokens: what the class keeps is read anew."""
        return {"tokens": torch.tensor(self._texts[slot].tokens[:length])}

    def restore(self, slot: int, length: int, known: Mapping[str, Tensor]) -> None:
        """Fill an empty slot with what ``snapshot`` gave."""
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
        if not made:  # a trial of what a pass costs, which may have more rows than the model has positions
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
            stays: the path will be kept, most probably.
            prompt: it is a chunk of a prompt, and will be kept.
        """
        begin, path, stays = columns[0], [text.tokens[column] for column in columns], stays or prompt
        # ``generate`` reads a prompt at once, which a class that is read token by token may round otherwise.
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
    """All tensors within an object, and within what it holds."""
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
