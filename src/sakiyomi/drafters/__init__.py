"""Drafters, by the word before the colon of their spec. A new one is a file here and one line in ``DRAFTERS``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.drafters.base import Context, Drafter, Rule
from sakiyomi.drafters.merged import MergedDrafter

__all__ = ["DRAFTERS", "Context", "Drafter", "DrafterContext", "Rule", "make_drafter", "parse_drafters"]


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may be made from.

    Attributes:
        target: the loaded target (``sakiyomi.model_executor.loading.Loaded``).
        vocab_size: width of the target's logits.
        load: loads another model by name with the settings of this LLM.
        pack: makes what ``load`` gave ready to run beside the target.
        packed: the target as it runs (``sakiyomi.model_executor.runner.ModelRunner``).
        rounded: makes the target once more, with weights of fewer bits, ready to run beside it.
        answer: what the target says to a request by itself (``drafters.oracle.Answer``).
        allow_pickle: weights may be stored as pickle.
    """

    target: Any
    vocab_size: int
    load: Callable[[str], Any]
    pack: Callable[[Any], Any]
    packed: Any
    rounded: Callable[[str], Any]
    answer: Callable[[Context], Any]
    allow_pickle: bool = False


def _model(argument: str, around: DrafterContext) -> Drafter:
    from sakiyomi.drafters.cross_tokenizer.drafter import CrossDrafter
    from sakiyomi.drafters.model import ModelDrafter
    from sakiyomi.model_executor.loading import check_cross_pair, check_pair, has_encoder, same_tokenizer, stop_tokens

    if not argument:
        raise InputError('draft "model:" names no model; write model:<folder or hub id>')
    target, draft = around.target, around.load(argument)
    if same_tokenizer(target.tokenizer, draft.tokenizer) or has_encoder(target.model.config):
        check_pair(target, draft)
        return ModelDrafter(around.pack(draft), around.vocab_size)
    check_cross_pair(target, draft)
    packed = around.pack(draft)
    inner = ModelDrafter(packed, packed.vocab_size, "cross-model")
    return CrossDrafter(inner, draft.tokenizer, target.tokenizer, stop_tokens(draft.model, draft.tokenizer))


def _oracle(argument: str, around: DrafterContext) -> Drafter:
    from sakiyomi.drafters.oracle import Oracle

    try:
        rate = float(argument) if argument else 1.0
    except ValueError:
        raise InputError(f'draft "oracle:{argument}" has no rate; write oracle:0.8, or oracle for 1') from None
    return Oracle(around.answer, around.vocab_size, rate)


def _early_exit(argument: str, around: DrafterContext) -> Drafter:
    from sakiyomi.drafters.early_exit import EarlyExit
    from sakiyomi.model_executor.early_exit import FirstLayers

    try:
        count = int(argument)
    except ValueError:
        raise InputError(f'draft "early-exit:{argument}" names no layer; write early-exit:<layers to run>') from None
    return EarlyExit(FirstLayers(around.packed, count))


def _self_evicted(argument: str, around: DrafterContext) -> Drafter:
    from sakiyomi.drafters.self_evicted import BUDGET, SelfEvicted

    try:
        budget = int(argument) if argument else BUDGET
    except ValueError:
        raise InputError(f'draft "self-evicted:{argument}"; write self-evicted:<pairs of a head>') from None
    return SelfEvicted(around.packed, budget)


def _self_int8(argument: str, around: DrafterContext) -> Drafter:
    from sakiyomi.drafters.model import ModelDrafter

    if argument:
        raise InputError(f'draft "self-int8:{argument}"; self-int8 takes nothing behind a colon')
    if around.packed.weights.quantization is not None:
        raise InputError(
            "draft self-int8: the target's own weights are rounded, and a rounded copy would not be faster; leave out "
            "quantize, or choose another draft"
        )
    return ModelDrafter(around.rounded("int8"), around.vocab_size, name="self-int8")


def _lookup(argument: str, around: DrafterContext) -> Drafter:
    from sakiyomi.drafters.lookup import MOST, PromptLookup

    return PromptLookup(argument or MOST)


def _suffix(argument: str, around: DrafterContext) -> Drafter:
    from sakiyomi.core.fingerprint import tokenizer_digest
    from sakiyomi.drafters.memory import MemoryFile
    from sakiyomi.drafters.suffix import SuffixDrafter

    if not argument:
        return SuffixDrafter()
    return SuffixDrafter(MemoryFile(argument, tokenizer_digest(around.target.tokenizer), around.vocab_size))


def _ngram(argument: str, around: DrafterContext) -> Drafter:
    from sakiyomi.core.fingerprint import tokenizer_digest
    from sakiyomi.drafters.ngram import NgramDrafter
    from sakiyomi.drafters.ngram_file import read_tables

    if not argument:
        return NgramDrafter(around.vocab_size)
    tables = read_tables(argument, tokenizer_digest(around.target.tokenizer), around.vocab_size)
    return NgramDrafter(around.vocab_size, tables)


def _medusa(argument: str, around: DrafterContext) -> Drafter:
    from sakiyomi.drafters.medusa import MedusaDrafter

    if not argument:
        raise InputError('draft "medusa:" names no heads; write medusa:<folder>')
    return MedusaDrafter.load(argument, around.packed, allow_pickle=around.allow_pickle)


DRAFTERS: dict[str, Callable[[str, DrafterContext], Drafter]] = {
    "model": _model,
    "medusa": _medusa,
    "self-int8": _self_int8,
    "self-evicted": _self_evicted,
    "early-exit": _early_exit,
    "oracle": _oracle,
    "prompt-lookup": _lookup,
    "suffix": _suffix,
    "ngram": _ngram,
}

FORMS = {
    "model": "model:<path or id>",
    "medusa": "medusa:<heads>",
    "prompt-lookup": "prompt-lookup[:<longest match>]",
    "suffix": "suffix[:<file>]",
    "ngram": "ngram[:<file>]",
    "self-evicted": "self-evicted[:<pairs of a head>]",
    "early-exit": "early-exit:<layers>",
    "oracle": "oracle[:<rate>]",
}
"""How specs are written, for messages."""


def parse_drafters(spec: Any) -> list[str | Drafter]:
    """The specs and objects that ``draft`` names, one each; models are not looked for yet.

    Args:
        spec: a spec, several joined by "+", an object with ``propose``, or a list of these.

    Raises:
        InputError: no such drafter in this version, or something that is none.
    """
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        if not spec:
            raise InputError('draft is an empty list; to generate without a draft pass "none"')
        wrong = [entry for entry in spec if not isinstance(entry, str) and not hasattr(entry, "propose")]
        if wrong:
            raise InputError(f"draft={spec!r} holds {wrong[0]!r}; expected specs, or objects with propose")
        return [part for entry in spec for part in parse_drafters(entry)]
    if isinstance(spec, str):
        parts = _JOINT.split(spec)
        for part in parts:
            if part not in ("none", "auto") and part.partition(":")[0] not in DRAFTERS:
                known = ", ".join(f'"{FORMS.get(name, name)}"' for name in ("none", "auto", *DRAFTERS))
                raise InputError(
                    f"unknown draft {part!r}; this version has {known}, several joined by +, or a Drafter object"
                )
        return [*parts]
    if not hasattr(spec, "propose"):
        raise InputError(
            f"draft={spec!r}; expected a spec such as 'none' or 'model:<path>', or one object with propose"
        )
    missing = [name for name in ("name", "kind") if not hasattr(spec, name)]
    if missing:
        raise InputError(f"the drafter {type(spec).__name__} has no {missing[0]}; it needs name, kind and propose")
    return [spec]


def make_drafter(parts: Sequence[str | Drafter], around: DrafterContext, *, strict: bool = False) -> Drafter | None:
    """The drafter that ``parse_drafters`` found, several of them merged; None for "none".

    "auto" takes the draft that belongs to an embedded target, and none otherwise. ``strict``: a fault of one of several
    is raised.

    Raises:
        InputError: its model or file cannot be used beside this target.
    """
    made = [made for part in parts if (made := _one(part, around)) is not None]
    if len(made) < 2:
        return made[0] if made else None
    taken: set[str] = set()
    for drafter in made:
        if drafter.name in taken:  # traces and streams of uniforms go by the name
            _rename(drafter, taken)
        taken.add(drafter.name)
    # Those that run no model propose first: where they are sure, the others need not be asked.
    return MergedDrafter(sorted(made, key=lambda drafter: hasattr(drafter, "passes")), strict=strict)


def _one(spec: str | Drafter, around: DrafterContext) -> Drafter | None:
    if not isinstance(spec, str):
        return spec
    if spec == "auto":
        spec = "model:tales-draft" if around.target.name == "tales" else "none"
    kind, _, argument = spec.partition(":")
    return None if kind == "none" else DRAFTERS[kind](argument, around)


def _rename(drafter: Drafter, taken: set[str]) -> None:
    number = next(i for i in itertools.count(2) if f"{drafter.name}-{i}" not in taken)
    try:
        drafter.name = f"{drafter.name}-{number}"  # type: ignore[misc]
    except AttributeError:
        raise InputError(f"two drafters are called {drafter.name!r}; give them different names") from None


_JOINT = re.compile(r"\+(?=(?:none|auto|" + "|".join(map(re.escape, DRAFTERS)) + r")(?:[:+]|$))")
"""A + before the name of a drafter; others belong to a path."""
