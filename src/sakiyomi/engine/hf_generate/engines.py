"""Engines for a user's own models: made once, kept as long as the model, made anew when it changes."""

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
from sakiyomi.engine.model_pool import wait
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.loading import (
    Loaded,
    check_cross_pair,
    check_family,
    load_model,
    same_tokenizer,
    stop_tokens,
)
from sakiyomi.model_executor.positions import ENDLESS, position_count, rope_limit
from sakiyomi.model_executor.runner import ModelRunner

logger = logging.getLogger("sakiyomi")
SLOTS = 64
"""Rows of a batch that run at once; more wait."""


class _NoText:
    """Takes the place of a tokenizer where only tokens are wanted."""

    eos_token_id = bos_token_id = None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Nothing."""
        return ""


NO_TEXT = _NoText()


@dataclass(frozen=True)
class Assistance:
    """What drafts, besides a draft model, and how passes run; calls of the same models that agree share an engine.

    Attributes:
        tokenizers: of the target and of the draft model, where they were given.
        lookup: longest match of prompt lookup; None: no prompt lookup.
        early_exit: layers of the target that draft; None: no early exit.
        draft: further drafters, as of ``LLM``.
        compile, exact: as in ``LLM``.
    """

    tokenizers: tuple[Any, Any] = (None, None)
    lookup: int | None = None
    early_exit: int | None = None
    draft: Any = "none"
    compile: str | bool = "auto"
    exact: bool = False


@dataclass(frozen=True)
class Ready:
    """An engine and the packed models that it runs: the target, and a draft model if there is one."""

    engine: Engine
    models: list[ModelRunner]

    def wait(self) -> None:
        """Wait for kernels that are made in the background, and record the passes that any request needs."""
        wait(self.engine, self.models)


class Engines:
    """Packed models by the models that they were made from, and engines by target and draft model.

    A packed model holds a copy of the linear layers' weights and shares the others; all drafters of a target use the
    same one. Models are held weakly: what was made from a model is freed with it.

    Attributes:
        turn: a lock for the time of a round: engines of one model share its cache.
    """

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self._packed: WeakKeyDictionary[Any, dict[tuple[Any, ...], ModelRunner]] = WeakKeyDictionary()
        self._ready: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Assistance, Ready]]] = WeakKeyDictionary()

    def find(self, model: Any, assistant: Any, assistance: Assistance) -> Ready:
        """The engine for these, made if it is not there or if a model has changed since.

        Raises:
            InputError, UnsupportedError: the models or the drafter cannot work.
        """
        with self.turn:
            models = [self._pack(model, assistance.compile, assistance.exact)]
            if assistant is not None:
                models.append(self._pack(assistant, assistance.compile, draft=True))
            partners = self._ready.setdefault(model, WeakKeyDictionary())
            kept = partners.setdefault(model if assistant is None else assistant, {})
            ready = kept.get(assistance)
            if ready is None or ready.models != models:
                ready = kept[assistance] = Ready(_make(model, assistant, assistance, models), models)
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
        if key in kept:
            changed = kept[key].weights.changed()
            if changed is None:
                return kept[key]
            logger.warning("%s: %s changed since it was packed; it is packed anew", type(model).__name__, changed)
            kept.clear()
        loaded = _loaded(model)
        config = loaded.model.config.get_text_config()
        # Its own ``generate`` goes as far as a stretched rotary embedding reaches, without being asked.
        most = min(position_count(config, ENDLESS), rope_limit(config))
        kept[key] = build_runner(loaded.model, max_slots=SLOTS, compile=compile, exact=exact, max_context=most)
        return kept[key]


def _loaded(model: Any, tokenizer: Any = None) -> Loaded:
    return load_model((model, NO_TEXT if tokenizer is None else tokenizer), packed=True, encoder_decoder=True)


def _make(model: Any, assistant: Any, assistance: Assistance, models: Sequence[ModelRunner]) -> Engine:
    loaded, target = _loaded(model, assistance.tokenizers[0]), models[0]
    parts: list[str | Drafter] = []
    if assistant is not None:
        parts.append(_model_drafter(loaded, assistant, assistance.tokenizers, target, models[1]))
    if assistance.lookup is not None:
        parts.append(PromptLookup(assistance.lookup or MOST))
    if assistance.early_exit is not None:
        parts.append(f"early-exit:{assistance.early_exit}")
    parts += parse_drafters(assistance.draft)
    _check(parts, assistance)
    context = DrafterContext(target=loaded, packed=target, vocab_size=target.vocab_size)
    drafter = make_drafter([part for part in parts if part != "auto"], context)

    def settle() -> None:
        for packed in models:
            packed.settle()

    return Engine(target, drafter, NO_TEXT, max_context=target.max_context, exact=assistance.exact, settle=settle)


def _model_drafter(
    loaded: Loaded, assistant: Any, tokenizers: tuple[Any, Any], target: ModelRunner, draft: ModelRunner
) -> Drafter:
    """A draft model on the same tokens, or, where two tokenizers were given that differ, on the text."""
    check_family(loaded.model.config, assistant.config, type(assistant).__name__)
    own, theirs = tokenizers
    if own is None or theirs is None or same_tokenizer(own, theirs):
        return ModelDrafter(draft, target.vocab_size)
    other = _loaded(assistant, theirs)
    check_cross_pair(loaded, other)
    inner = ModelDrafter(draft, draft.vocab_size, "cross-model")
    return CrossDrafter(inner, theirs, own, stop_tokens(other.model, theirs))


_ELSEWHERE = ("model", "self-int8", "self-int4", "oracle")


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
