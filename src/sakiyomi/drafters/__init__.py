"""Drafters, by the word before the colon of their spec. A new one is a file here and one line in ``DRAFTERS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sakiyomi.drafters.base import Context, Drafter, Rule
from sakiyomi.errors import InputError

__all__ = ["DRAFTERS", "Context", "Drafter", "Rule", "Surroundings", "make_drafter"]


@dataclass(frozen=True)
class Surroundings:
    """What a drafter may be made from.

    Attributes:
        target: the loaded target (``sakiyomi.loading.Loaded``).
        vocab_size: width of the target's logits.
        load: loads another model by name with the settings of this LLM.
        pack: makes what ``load`` gave ready to run beside the target.
    """

    target: Any
    vocab_size: int
    load: Callable[[str], Any]
    pack: Callable[[Any], Any]


def _model(argument: str, around: Surroundings) -> Drafter:
    from sakiyomi.drafters.cross import CrossDrafter
    from sakiyomi.drafters.model import ModelDrafter
    from sakiyomi.loading import check_cross_pair, check_pair, same_tokenizer, stop_tokens

    if not argument:
        raise InputError('draft "model:" names no model; write model:<folder or hub id>')
    target, draft = around.target, around.load(argument)
    if same_tokenizer(target.tokenizer, draft.tokenizer):
        check_pair(target, draft)
        return ModelDrafter(around.pack(draft), around.vocab_size)
    check_cross_pair(target, draft)
    packed = around.pack(draft)
    inner = ModelDrafter(packed, packed.vocab_size, "cross-model")
    return CrossDrafter(inner, draft.tokenizer, target.tokenizer, stop_tokens(draft.model, draft.tokenizer))


DRAFTERS: dict[str, Callable[[str, Surroundings], Drafter]] = {
    "model": _model,
}


def make_drafter(spec: str, around: Surroundings) -> Drafter | None:
    """The drafter that a spec names; None for "none".

    "auto" takes the draft that belongs to an embedded target, and none otherwise.

    Raises:
        InputError: no such drafter in this version.
    """
    if spec == "auto":
        spec = "model:tales-draft" if around.target.name == "tales" else "none"
    if spec == "none":
        return None
    kind, _, argument = spec.partition(":")
    if kind not in DRAFTERS or "+" in kind:
        known = ", ".join(f'"{name}:<path or id>"' for name in DRAFTERS)
        raise InputError(f'unknown draft {spec!r}; this version has "none", "auto", {known}, or pass a Drafter object')
    return DRAFTERS[kind](argument, around)
