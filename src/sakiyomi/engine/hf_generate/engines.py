"""Engines for models that belong to somebody else: made once, kept as long as the model, made anew when it changes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from sakiyomi.core.errors import InputError
from sakiyomi.drafters import DRAFTERS, Drafter, DrafterContext, make_drafter, parse_drafters
from sakiyomi.drafters.cross_tokenizer.drafter import CrossDrafter
from sakiyomi.drafters.lookup import MOST, PromptLookup
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.engine.engine import Engine
from sakiyomi.engine.hf_generate.state import ModelState
from sakiyomi.kernels.build import builder
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.loading import (
    Loaded,
    check_cross_pair,
    check_family,
    load_model,
    same_tokenizer,
    stop_tokens,
)
from sakiyomi.model_executor.runner import DRAFT_SIZES, TARGET_SIZES, ModelRunner

__all__ = ["NO_TEXT", "Assistance", "Engines", "Ready"]

logger = logging.getLogger("sakiyomi")
SLOTS = 64
"""Rows of a batch that run at once; more wait."""


class _NoText:
    """In the place of a tokenizer where tokens are all that is wanted."""

    eos_token_id = bos_token_id = None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Nothing."""
        return ""


NO_TEXT = _NoText()


@dataclass(frozen=True)
class Assistance:
    """What is to read ahead.

    Attributes:
        model: a draft model; None: none.
        tokenizers: of the target and of the draft model, where they were given.
        lookup: longest match of prompt lookup; None: it is not wanted.
        early_exit: layers of the target that draft; None: it is not wanted.
        draft: a spec, a Drafter object or a list of them, besides.
        compile, exact: as in ``LLM``.
    """

    model: Any = None
    tokenizers: tuple[Any, Any] = (None, None)
    lookup: int | None = None
    early_exit: int | None = None
    draft: Any = "none"
    compile: str | bool = "auto"
    exact: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What two calls must share to share an engine; of the models themselves nothing."""
        draft = tuple(self.draft) if isinstance(self.draft, list) else self.draft
        return (*self.tokenizers, self.lookup, self.early_exit, draft, self.compile, self.exact)


@dataclass(frozen=True)
class _Packed:
    """A model as it was when it was packed."""

    model: ModelRunner
    state: ModelState


@dataclass(frozen=True)
class Ready:
    """An engine and the packed models that it runs."""

    engine: Engine
    target: ModelRunner
    draft: ModelRunner | None

    def wait(self) -> None:
        """Wait for kernels that are made in the background, and record the passes that any request needs."""
        models = [model for model in (self.target, self.draft) if model is not None]
        if any(model.weights.unsettled for model in models):
            builder().join()
            self.engine.settle()
        for model in models:
            model.record(model.first_sizes)


class Engines:
    """Packed models by the models that they were made from, and engines by target and draft model.

    A packed model holds a copy of the linear layers' weights and shares the others; all drafters of a target use the
    same one. Models are held weakly: what was made from one goes with it.

    Attributes:
        turn: held by whoever runs a round: engines of one model share its cache.
    """

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self._packed: WeakKeyDictionary[Any, dict[tuple[Any, ...], _Packed]] = WeakKeyDictionary()
        self._ready: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[tuple[Any, ...], Ready]]] = WeakKeyDictionary()

    def find(self, model: Any, assistance: Assistance) -> Ready:
        """The engine for these, made if it is not there or if a model has changed since.

        Raises:
            InputError, UnsupportedError: the models, or what is to read ahead, cannot work.
        """
        with self.turn:
            assistant = assistance.model
            how = assistance.compile, assistance.exact
            target = self._pack(model, *how)
            draft = None if assistant is None else self._pack(assistant, assistance.compile, draft=True)
            partners = self._ready.setdefault(model, WeakKeyDictionary())
            kept = partners.setdefault(model if assistant is None else assistant, {})
            ready = kept.get(assistance.key)
            if ready is None or ready.target is not target or ready.draft is not draft:
                ready = kept[assistance.key] = _make(model, assistance, target, draft)
            return ready

    def forget(self, model: Any = None) -> None:
        """Free what was made from a model, or from all."""
        with self.turn:
            if model is None:
                self._packed.clear()
                self._ready.clear()
                return
            self._packed.pop(model, None)
            self._ready.pop(model, None)
            for partners in self._ready.values():
                partners.pop(model, None)

    def _pack(self, model: Any, compile: str | bool, exact: bool = False, *, draft: bool = False) -> ModelRunner:
        kept = self._packed.setdefault(model, {})
        key = (draft, compile, exact)
        found = kept.get(key)
        if found is not None:
            changed = found.state.changed(model)
            if changed is None:
                return found.model
            logger.warning("%s: %s changed since it was packed; it is packed anew", type(model).__name__, changed)
            kept.clear()
        loaded = _loaded(model)
        sizes = DRAFT_SIZES if draft else TARGET_SIZES
        packed = build_runner(loaded.model, max_slots=SLOTS, compile=compile, exact=exact, first_sizes=sizes)
        kept[key] = _Packed(packed, ModelState(model))
        return packed


def _loaded(model: Any, tokenizer: Any = None) -> Loaded:
    return load_model((model, NO_TEXT if tokenizer is None else tokenizer), packed=True, encoder_decoder=True)


def _make(model: Any, assistance: Assistance, target: ModelRunner, draft: ModelRunner | None) -> Ready:
    loaded = _loaded(model, assistance.tokenizers[0])
    parts: list[str | Drafter] = []
    if draft is not None:
        parts.append(_model_drafter(loaded, assistance, target, draft))
    if assistance.lookup is not None:
        parts.append(PromptLookup(assistance.lookup or MOST))
    if assistance.early_exit is not None:
        parts.append(f"early-exit:{assistance.early_exit}")
    parts += parse_drafters(assistance.draft)
    _check(parts, assistance)
    around = DrafterContext(loaded, target.vocab_size, _refuse, _refuse, target, _refuse, _refuse)
    drafter = make_drafter([part for part in parts if part != "auto"], around)
    models = [target] if draft is None else [target, draft]

    def settle() -> None:
        for packed in models:
            packed.settle()

    engine = Engine(target, drafter, NO_TEXT, max_context=target.max_context, exact=assistance.exact, settle=settle)
    return Ready(engine, target, draft)


def _model_drafter(loaded: Loaded, assistance: Assistance, target: ModelRunner, draft: ModelRunner) -> Drafter:
    """A draft model on the same tokens, or, where two tokenizers were given that differ, on the text."""
    name = type(assistance.model).__name__
    check_family(loaded.model.config, assistance.model.config, name)
    own, theirs = assistance.tokenizers
    if own is None or theirs is None or same_tokenizer(own, theirs):
        return ModelDrafter(draft, target.vocab_size)
    other = _loaded(assistance.model, theirs)
    check_cross_pair(loaded, other)
    inner = ModelDrafter(draft, draft.vocab_size, "cross-model")
    return CrossDrafter(inner, theirs, own, stop_tokens(other.model, theirs))


_ELSEWHERE = ("model", "self-int8", "oracle")


def _check(parts: Sequence[str | Drafter], assistance: Assistance) -> None:
    for part in parts:
        kind, _, argument = part.partition(":") if isinstance(part, str) else ("", "", "")
        if kind in _ELSEWHERE:
            here = ", ".join(name for name in DRAFTERS if name not in _ELSEWHERE)
            raise InputError(
                f"draft={part!r} with custom_generate; here are {here} and Drafter objects: pass a draft model as "
                "assistant_model=, or use sakiyomi.LLM"
            )
        if kind in ("suffix", "ngram") and argument and assistance.tokenizers[0] is None:
            raise InputError(f"draft={part!r} reads a file that belongs to a tokenizer; pass the target's tokenizer=")


def _refuse(*_: Any) -> Any:
    raise AssertionError("refused before")
