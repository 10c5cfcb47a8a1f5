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
        packed: the target as it runs (``sakiyomi.model.PackedModel``).
        rounded: makes the target once more, with weights of fewer bits, ready to run beside it.
        answer: what the target says to a request by itself (``drafters.oracle.Answer``).
    """

    target: Any
    vocab_size: int
    load: Callable[[str], Any]
    pack: Callable[[Any], Any]
    packed: Any
    rounded: Callable[[str], Any]
    answer: Callable[[Context], Any]


def _model(argument: str, around: Surroundings) -> Drafter:
    from sakiyomi.drafters.model import ModelDrafter
    from sakiyomi.loading import check_pair

    if not argument:
        raise InputError('draft "model:" names no model; write model:<folder or hub id>')
    loaded = around.load(argument)
    check_pair(around.target, loaded)
    return ModelDrafter(around.pack(loaded), around.vocab_size)


def _oracle(argument: str, around: Surroundings) -> Drafter:
    from sakiyomi.drafters.oracle import Oracle

    try:
        rate = float(argument) if argument else 1.0
    except ValueError:
        raise InputError(f'draft "oracle:{argument}" has no rate; write oracle:0.8, or oracle for 1') from None
    return Oracle(around.answer, around.vocab_size, rate)


def _early_exit(argument: str, around: Surroundings) -> Drafter:
    from sakiyomi.drafters.early_exit import EarlyExit
    from sakiyomi.layers import FirstLayers

    try:
        count = int(argument)
    except ValueError:
        raise InputError(f'draft "early-exit:{argument}" names no layer; write early-exit:<layers to run>') from None
    return EarlyExit(FirstLayers(around.packed, count))


def _self_int8(argument: str, around: Surroundings) -> Drafter:
    from sakiyomi.drafters.model import ModelDrafter

    if argument:
        raise InputError(f'draft "self-int8:{argument}"; self-int8 takes nothing behind a colon')
    if around.packed.rounding is not None:
        raise InputError(
            "draft self-int8: the target's own weights are rounded, and a rounded copy would not be faster; leave out "
            "quantize, or choose another draft"
        )
    return ModelDrafter(around.rounded("int8"), around.vocab_size, name="self-int8")


DRAFTERS: dict[str, Callable[[str, Surroundings], Drafter]] = {
    "model": _model,
    "self-int8": _self_int8,
    "early-exit": _early_exit,
    "oracle": _oracle,
}

FORMS = {"model": "model:<path or id>", "early-exit": "early-exit:<layers>", "oracle": "oracle:<rate>"}
"""How specs are written, for messages."""


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
        known = ", ".join(f'"{FORMS.get(name, name)}"' for name in DRAFTERS)
        raise InputError(f'unknown draft {spec!r}; this version has "none", "auto", {known}, or pass a Drafter object')
    return DRAFTERS[kind](argument, around)
