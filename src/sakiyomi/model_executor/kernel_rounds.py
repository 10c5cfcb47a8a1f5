"""Rounds in the compiled kernels: what they keep of requests, and the passes that they describe (`kernels/round.h`).

Passes of models that have a program (`program.py`) run there; the others run here.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sakiyomi.core.errors import MemoryLimitError
from sakiyomi.core.outputs import FinishReason
from sakiyomi.core.tree import VerdictKind
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.build import loaded
from sakiyomi.kernels.native import HALF, numbers, pointer
from sakiyomi.model_executor.attention.registry import PassForward
from sakiyomi.model_executor.features import states_by_layer
from sakiyomi.model_executor.program import Program
from sakiyomi.model_executor.row_layers import RowLayers
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.verifiers.native import KINDS

logger = logging.getLogger("sakiyomi")
OFTEN = 8  # rounds after which passes' clocks are read again
MOST_ROUNDS = 8  # of a call, as most_rounds in round.h
_PASSES = 256  # as most_passes there
_FULL_PASSES = 4  # of the target: there is room for what so many of the largest commit
_SPAN = 5  # numbers of `Span` in round.h
_HEAD = 12  # numbers before the tokens of a request, see Rounds::write in round.h
_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")

Places = Sequence[tuple[int | None, int]]
"""Of each model a slot and how many tokens it holds, behind which passes may be compared; None: there is none."""


class Committed(NamedTuple):
    """What a round has committed of a request, see `Rounds::write` in `round.h`.

    Attributes:
        used: how many of the tokens count.
        reason: why the text ends there; None: it does not end.
        nodes, depth: of the draft.
        kind: of the target's own token.
        held: tokens that the draft model has read.
        stream, drawn: states of the streams of uniforms of the verdicts and of the candidates.
        tokens: the accepted ones, and the target's own.
        path, refused: accepted and refused nodes.
        chances: what the target gave the tokens.
        probs: what the draft gave the accepted ones.
        wishes: a tree is worth its time beside what was found in the text.
        members: of a draft that was found in texts, and has perhaps grown, too: who guessed each accepted token.
        places: for each place in the tree that the target came to, which of its candidates it chose (-1: none), and
            their scores.
    """

    used: int
    reason: FinishReason | None
    nodes: int
    depth: int
    kind: VerdictKind
    held: int
    stream: int
    drawn: int
    wishes: bool
    tokens: list[int]
    path: list[int]
    refused: list[int]
    chances: list[float]
    probs: list[float]
    members: list[int]
    places: list[tuple[int, Sequence[float]]]


class Span(NamedTuple):
    """What a round took.

    Attributes:
        whole: seconds of all of it.
        scoring: seconds inside the target's pass.
        passes: of the draft model.
        seconds: inside these.
        besides: seconds outside of them, up to the target's pass.
    """

    whole: float
    scoring: float
    passes: int
    seconds: float
    besides: float


class Further(NamedTuple):
    """How many rounds like the first one may follow it in a call, see `Further` in `round.h`.

    Attributes:
        rounds: at most.
        seconds: that the call has taken, after which none begins.
        until: tokens that each request may have before one.
    """

    rounds: int = 0
    seconds: float = 0.0
    until: Any = None


ALONE = Further()
"""None follows."""


@dataclass(frozen=True)
class FedRows:
    """What the passes of a head read and give beside tokens and logits.

    Attributes:
        width: of features.
        given: (rows, width) where a pass reads a hidden state for each row; written before the pass. None: its rows
            read tokens alone.
        layer: whose captured output is the feature of a row, which the rows of its children read.
        vocab: tokens that the model proposes.
        tokens: (vocab,) the target's token for each; None: they are the same.
        said: makes logits of features; None: the pass gives them.
    """

    width: int
    given: Tensor | None
    layer: int
    vocab: int
    tokens: Tensor | None
    said: RowLayers | None = None


@dataclass(frozen=True)
class MaskRows:
    """How a draft model guesses several tokens in a pass, at masks behind the text: see `Masks` in `growth.h`.

    Attributes:
        token: that stands for one to be guessed.
        feature: gives the feature of a mask, (1, width); None: rows read tokens alone.
        block: it is a block drafter: a pass reads the last token and masks.
        rows: of a block; 0: as few as are wanted.
        first: row of a block's first guess.
        sees_all: rows of a block see all of it.
        pairs: makes keys and values of the text, of a block drafter.
        bias: of a guess by the token before it; None: guesses do not depend on it.
        rated: it says, too, how likely the first guess is to be accepted.
    """

    token: int
    feature: Callable[[], Tensor] | None = None
    block: bool = False
    rows: int = 0
    first: int = 0
    sees_all: bool = False
    pairs: RowLayers | None = None
    bias: RowLayers | None = None
    rated: bool = False


@dataclass(frozen=True)
class HeardStates:
    """What a head reads of the target's passes.

    Attributes:
        layers: of the target, whose outputs it reads side by side.
        width: of each of them.
        last: it reads those of the last committed token alone.
        features: makes of them what the rows of its own passes read; None: nothing is made of them.
        slots: of a head that is no model, makes the logits of all its slots.
        count: of the slots.
        vocab, tokens: see ``FedRows``.
    """

    layers: Sequence[int]
    width: int
    last: bool = False
    features: RowLayers | None = None
    slots: RowLayers | None = None
    count: int = 0
    vocab: int = 0
    tokens: Tensor | None = None


class Around(NamedTuple):
    """What the kernels run around the passes of a draft model or head; each None: there is nothing of the kind."""

    fed: FedRows | None = None
    masks: MaskRows | None = None
    heard: HeardStates | None = None

    @property
    def layers(self) -> list[RowLayers]:
        """All layers in it."""
        return [part for part, _ in self._parts() if part is not None]

    @property
    def able(self) -> bool:
        """Whether the kernels run all of them, which make as much of a row as is read."""
        parts = [(part, made) for part, made in self._parts() if part is not None]
        return all(part.packed() is not None and (not made or part.made == made) for part, made in parts)

    def within(self, width: int) -> bool:
        """Whether all tokens that are proposed are among so many."""
        maps = [part.tokens for part in (self.fed, self.heard) if part is not None and part.tokens is not None]
        return all(bool(tokens.min() >= 0) and bool(tokens.max() < width) for tokens in maps)

    def _parts(self) -> Iterator[tuple[RowLayers | None, int]]:
        """All layers, and how many numbers they make of a row; 0: as they like."""
        fed, masks, heard = self
        vocab = fed.vocab if fed is not None else 0
        if fed is not None:
            yield fed.said, vocab
        if masks is not None:
            yield masks.pairs, 0
            yield masks.bias, vocab
        if heard is not None:
            yield heard.features, fed.width if fed is not None else 0
            yield heard.slots, heard.count * heard.vocab


NOTHING = Around()
_FED, _MASKS = struct.Struct("=5q"), struct.Struct("=6q")  # Fed and Masks in growth.h, up to their layers
_NONE = bytes(40)  # no Layers


class KernelRounds:
    """Rounds of a draft model and a target in the kernels.

    Args:
        draft: grows trees; None: nothing grows.
        target: scores drafts; None: a round ends with its trees.
        width: V of the target.
        around: what is run around the draft model's passes.
        leaving: called before what is known of requests is lost.

    Attributes:
        around: see above.
        kernels, number: the library, and the number of the object there; 0: there is none yet.
        generation: how often it was made; each time it knows no requests.
    """

    def __init__(
        self,
        draft: ModelRunner | None,
        target: ModelRunner | None,
        width: int,
        *,
        around: Around = NOTHING,
        leaving: Callable[[], None] = lambda: None,
    ) -> None:
        self.models = [model for model in (draft, target) if model is not None]
        self.kernels: Any = None
        self.number = self.generation = 0
        self._draft, self._target, self._width, self.around = draft, target, width, around
        self._leaving, self._layers = leaving, around.layers
        self._made_for: list[Any] = []
        self._rows = [0] * len(self.models)  # passes of up to so many rows were proven right
        self._passes: dict[int, tuple[PassForward, Tensor, Tensor]] = {}  # as the kernels name them
        self._checked: set[int] = set()
        self._unreadable = False
        self._results: tuple[Any, Any, Any] = (), (), ()
        self._logits: Tensor | None = None  # of the target's pass in the last round; None: it was run in the kernels
        self._states: tuple[Tensor, ...] = ()  # of the target's pass in the last round
        self._since, self._held = 0, list[Any]()
        self._feature: Tensor | None = None

    def __del__(self) -> None:
        number, self.number = self.number, 0  # Ctrl-C may come between two lines: never freed twice
        if number:
            self.kernels.sk_free_rounds(number)

    def committed(self, count: int, rounds: int) -> list[Committed]:
        """What the last rounds have committed of so many requests, a round after the other."""
        ints, doubles, _ = self._results
        return _read(ints[2 : ints[0]], doubles[: ints[1]], count * rounds)

    def features(self, rows: int) -> dict[int, Tensor]:
        """Hidden states of the target's pass in the last round, which are handed over.

        Args:
            rows: of the pass.
        """
        assert self._target is not None
        states, self._states = self._states, ()
        layers = self._target.weights.capture.layers
        return states_by_layer(layers[: len(states)], states, rows)

    def logits(self) -> Tensor:
        """Of the target's pass in the last round, (1, rows or more, V). They are overwritten in the next one."""
        if self._logits is not None:
            return self._logits
        model, rows = self.models[-1], self._last_pass() // 2
        size = rows * model.vocab_size * model.dtype.itemsize
        memory = (ctypes.c_char * size).from_address(self.kernels.sk_logits(self.number))
        return torch.frombuffer(memory, dtype=model.dtype).view(1, rows, model.vocab_size)

    def heard_by(self, number: int, length: int) -> Tensor:
        """What a request has heard of the target's passes since it was seated, a row for each token: its features; of a
        head that makes none the states of the last token; of a block drafter those whose pairs are not written yet.

        Args:
            number: of the request.
            length: tokens that were committed to it. Behind Ctrl-C the kernels may have some more, which do not count.
        """
        place, more, (fed, _, heard) = ctypes.c_void_p(), ctypes.c_int64(), self.around
        with self.models[-1].lock:
            size = self.kernels.sk_heard(self.number, number, ctypes.byref(place), ctypes.byref(more))
        if size < 0 or heard is None:
            raise RuntimeError("features of committed tokens cannot be made")
        width = heard.width * len(heard.layers) if fed is None or heard.features is None else fed.width
        dtype = self.models[-1].dtype
        if not size:
            return torch.empty(0, width, dtype=dtype)
        assert place.value is not None
        memory = (ctypes.c_char * size).from_address(place.value)
        found = torch.frombuffer(memory, dtype=dtype).view(-1, width)
        return found[: max(0, len(found) - (more.value - length))].clone()

    def _last_pass(self) -> int:
        """The last round's last pass, as the kernels name it."""
        times = self._results[2]
        return int(times[_SPAN * MOST_ROUNDS + 2 * int(times[0])])

    def _states_of(self, code: int) -> tuple[Tensor, ...]:
        """Copies of the hidden states of a pass that was run in the kernels, which keep them until its next run."""
        program = self._passes[code][0]
        assert isinstance(program, Program)
        made = [torch.empty(1, code // 2, width, dtype=dtype) for width, dtype in program.rows[1:]]
        self.kernels.sk_states(self.number, (ctypes.c_void_p * len(made))(*[each.data_ptr() for each in made]))
        return tuple(made)

    def ready(self, rows: Sequence[int], places: Callable[[], Places]) -> bool:
        """Whether the kernels may describe passes of up to so many rows of each model; see ``ModelRunner.describable``.

        Args:
            rows: by model.
            places: by model, where passes may be compared.
        """
        if self._unreadable or not all(model.describable() for model in self.models):
            return False
        made = self._made_for == self._versions()
        if made and self.holds(rows):
            return True
        return self._make(list(map(max, rows, self._rows)) if made else rows, places())

    def holds(self, rows: Sequence[int]) -> bool:
        """Whether what was made has passes of so many rows of each model."""
        return rows[0] <= self._rows[0] and rows[-1] <= self._rows[-1]

    def _make(self, rows: Sequence[int], places: Places) -> bool:
        kernels = loaded()
        if kernels is None or not all(model.dtype in HALF for model in self.models):
            return False
        found = [_proven(*each) for each in zip(self.models, rows, places, strict=True)]
        if found[-1] and not found[0]:
            self.models[0].record()  # a draft that is seldom asked; its passes are compared in the next round
        self._leaving()  # before layers are made anew, which the old object runs
        if not all(found) or not self.around.able or not self.around.within(self._width):
            return False
        self.generation += 1  # if what follows is interrupted, nobody uses the old object
        self._made_for = []
        self.__del__()
        self._passes.clear()
        self._checked.clear()
        tables = [numbers([0, self._width, 0, 0])] * 2
        for model, sizes in zip(self.models, found, strict=True):
            passes = {size: model.replayed(size) for size in sizes}
            which = int(model is self._target)
            inputs = [ids.data_ptr() for _, ids, _ in passes.values()]
            vocab = self._vocab(model)
            programs = [_program(each, self._width_of(model), model.dtype) for each, _, _ in passes.values()]
            session = model.backend.session
            assert session is not None, "see `describable`"
            about = session, vocab, HALF[model.dtype], len(passes)
            tables[which] = numbers([*about, *passes, *inputs, *programs])
            self._passes |= {2 * size + which: each for size, each in passes.items()}
        most = self._target.sizes[-1] if self._target is not None else 0
        # Each row of a round has a token, and may be a place with no more candidates than there are rows.
        room = _FULL_PASSES * most
        ints, doubles = numbers([0] * (2 + (_HEAD + 9) * room)), (ctypes.c_double * ((2 + most) * room))()
        times = (ctypes.c_double * (2 + _SPAN * MOST_ROUNDS + 2 * _PASSES))()
        self._results = ints, doubles, times
        self.kernels = kernels
        self.number = kernels.sk_rounds(tables[1], tables[0], ints, doubles, room, times)
        self._feed()
        self._rows = [_compared(model, count) for model, count in zip(self.models, rows, strict=True)]
        self._made_for, self._held = self._versions(), [part.held for part in self._layers]
        return True

    def _versions(self) -> list[Any]:
        """What is replaced when the object has to be made anew."""
        return [*[model.recorder for model in self.models], *[part.version for part in self._layers]]

    def _feed(self) -> None:
        """Say what is run around the draft model's passes."""
        fed, masks, heard = self.around
        set_up, number = self.kernels, self.number
        if fed is not None:
            assert self._draft is not None
            state = self._draft.weights.capture.layers.index(fed.layer)
            place = (0, 0, 0) if fed.given is None else (fed.given.data_ptr(), len(fed.given), fed.given[0].nbytes)
            set_up.sk_fed(number, _FED.pack(*place, state, pointer(fed.tokens) or 0) + _code(fed.said))
        if masks is not None:
            self._feature = None if masks.feature is None else masks.feature().contiguous()  # held
            about = masks.token, pointer(self._feature) or 0, masks.block, masks.rows, masks.first, masks.sees_all
            rated = int(masks.rated).to_bytes(8, sys.byteorder)
            set_up.sk_masks(number, _MASKS.pack(*about) + _code(masks.pairs) + _code(masks.bias) + rated)
        if heard is not None and self._target is not None:
            captured = self._target.weights.capture.layers
            bytes_ = heard.width * self._target.dtype.itemsize
            which = [captured.index(layer) for layer in heard.layers] + [bytes_] * len(heard.layers)
            read = len(heard.layers), numbers(which), heard.last, _code(heard.features)
            slots = heard.count, _code(heard.slots), heard.vocab, pointer(heard.tokens)
            set_up.sk_hears(number, *read, *slots)

    def run(
        self,
        count: int,
        asked: bytes,
        level: Any,
        scored: Any = None,
        *,
        states: bool = False,
        further: Further = ALONE,
    ) -> list[Span]:
        """A round of `count` requests, and perhaps some more. The models' clocks and seconds include their passes.

        Args:
            count: of requests.
            asked: of each, see `Asked` in `round.h`.
            level: seconds of the draft model's passes by rows, where trees are weighed.
            scored: seconds of the target's pass by nodes, likewise.
            states: hidden states of the target's pass are wanted, see ``features``: there is one round.
            further: rounds that may follow.

        Returns:
            What each round took; none: nothing was committed: a row holds no numbers, or a pass failed.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.run(count, asked, level, scored, states=states, further=further)
        kernels, now = self.kernels, time.perf_counter
        held: list[Tensor] = []
        fresh: set[int] = set()
        self._states, self._logits = (), None
        # Layers are a model's of the two, or the target's where trees grow alone.
        beside = self._layers[0].host.lock if self._layers else self.models[0].lock
        with self.models[0].lock, self.models[-1].lock, beside:
            code = kernels.sk_round(self.number, count, asked, level, scored, *further)
            while code > 0:
                replay, ids, positions = self._passes[code]
                recorder = self._model(code).recorder
                assert recorder is not None
                recorder.fresh, began = False, now()
                logits, given = replay(ids, positions)
                spent = now() - began
                held.append(logits)  # the kernels may look at it again
                if code % 2:
                    self._logits, self._states = logits, given if states else ()
                if recorder.fresh:  # it was captured first
                    fresh.add(code)
                if code not in self._checked and not self._readable(code, logits):
                    return []
                read, about = self.around.heard if code % 2 else self.around.fed, None
                if read is not None:
                    given = tuple([state.contiguous() for state in given])
                    about = (ctypes.c_void_p * len(given))(*[state.data_ptr() for state in given])
                code = kernels.sk_pass(self.number, code, logits.data_ptr(), about, spent)
            if states and not code and self._logits is None:
                # Now: the next pass of any session overwrites them.
                self._states = self._states_of(self._last_pass())
        return [] if code else self._count(fresh)

    def _model(self, code: int) -> ModelRunner:
        return self.models[-1 if code % 2 else 0]

    def _vocab(self, model: ModelRunner) -> int:
        """Width of the logits of a model's passes."""
        fed = self.around.fed
        return model.vocab_size if fed is None or model is self._target else fed.vocab

    def _width_of(self, model: ModelRunner) -> int:
        """Width of what a model's passes give first: logits, or what their logits are made of."""
        fed = self.around.fed
        return self._vocab(model) if fed is None or fed.said is None or model is self._target else fed.width

    def _readable(self, code: int, logits: Tensor) -> bool:
        """Whether logits of a pass are as the kernels read them."""
        model = self._model(code)
        if logits.dtype == model.dtype and logits.is_contiguous() and logits.shape[-1] == self._width_of(model):
            self._checked.add(code)
            return True
        logger.debug("no rounds in the kernels: logits are %s of width %d", logits.dtype, logits.shape[-1])
        self._unreadable = True
        return False

    def _count(self, fresh: Collection[int]) -> list[Span]:
        """Add up what passes took, of which these were captured first; see ``run``."""
        times, models = self._results[2], self.models
        count, rounds = int(times[0]), int(times[1])
        first, since = 2 + _SPAN * MOST_ROUNDS, self._since
        self._since += rounds
        # A clock is read now and then: its mean hardly moves.
        read = since < OFTEN or since // OFTEN < self._since // OFTEN
        spent_by: dict[int, float] = {}
        for at in range(first, first + 2 * count, 2):
            code = int(times[at])
            if code > 0:
                spent = times[at + 1]
                models[-(code % 2)].forward_seconds += spent
                if read or code in fresh:
                    spent_by[code] = spent
        for code, spent in spent_by.items():
            models[-(code % 2)].clock.add(code // 2, True, spent, fresh=code in fresh)
        spans = []
        for at in range(2, 2 + _SPAN * rounds, _SPAN):
            whole, before, inside, scoring, passes = times[at : at + _SPAN]
            spans.append(Span(whole, scoring, int(passes), inside, before - inside))
        return spans


def _read(whole: Sequence[int], real: Sequence[float], count: int) -> list[Committed]:
    """What `Rounds::write` in `round.h` has left of so many verdicts."""
    found, at, done = list[Committed](), 0, 0
    for _ in range(count):
        used, ended, nodes, depth, accepted, refused, kind, held, stream, drawn, guessed, wishes = whole[
            at : at + _HEAD
        ]
        at += _HEAD
        path, others, guessers = at + accepted + 1, at + 2 * accepted + 1, at + 2 * accepted + 1 + refused
        end = guessers + guessed
        lists = whole[at:path], whole[path:others], whole[others:guessers]
        weights = real[done : done + accepted + 1], real[done + accepted + 1 : done + 2 * accepted + 1]
        at, done, places = end + 1, done + 2 * accepted + 1, []
        for _ in range(whole[end]):
            rank, listed = whole[at : at + 2]
            scores = real[done : done + listed] if listed > 1 else ()
            places.append((rank, scores))
            at, done = at + 2, done + len(scores)
        about = used, _REASONS[ended], nodes, depth, KINDS[kind], held, stream, drawn, bool(wishes)
        found.append(Committed._make((*about, *lists, *weights, whole[guessers:end], places)))
    return found


def _proven(model: ModelRunner, rows: int, place: tuple[int | None, int]) -> list[int]:
    """Row counts of passes that were compared with eager ones, the largest at least so many; empty: there is none.

    Args:
        model: whose passes they are.
        rows: of the largest pass.
        place: see ``Places``.
    """
    recorder, (slot, length) = model.recorder, place
    assert recorder is not None, "see `describable`"
    for size in model.sizes if rows <= model.sizes[-1] else ():
        if size not in recorder.ready and recorder.has(size):
            try:
                if model.cache.free or model.cache.extra:
                    with model.cache.lent(size) as lent:
                        model.score([SequenceRows(lent, 0, [0] * size)])
                elif slot is not None and length + size <= model.max_context:
                    model.cache.reserve(slot, length + size)
                    model.score([SequenceRows(slot, length, [0] * size)])
            except MemoryLimitError:
                logger.debug("no memory to compare a pass of %d rows", size)
        if size >= rows:
            break
    # A size that was not compared, for want of memory, is passed over: the next larger one is taken.
    sizes = list(filter(recorder.ready.__contains__, model.sizes))
    return sizes if sizes and sizes[-1] >= rows else []


def _compared(model: ModelRunner, rows: int) -> int:
    """Rows up to which passes of all sizes are as right as they get: at least so many, which were asked for."""
    assert model.recorder is not None
    most, recorder = model.padded(rows), model.recorder
    for size in model.sizes:
        if size > most and recorder.has(size) and size not in recorder.ready:
            break
        most = max(most, size)
    return most


def _program(replay: PassForward, vocab: int, dtype: torch.dtype) -> int:
    """The number of a program that gives logits of this width as the kernels read them; 0: Python runs these passes."""
    if isinstance(replay, Program) and replay.gives(vocab, dtype):
        return replay.number
    return 0


def _code(layers: RowLayers | None) -> bytes:
    """Layers as the kernels take them."""
    return _NONE if layers is None else layers.packed() or _NONE
