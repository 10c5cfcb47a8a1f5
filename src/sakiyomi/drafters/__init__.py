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
    from sakiyomi.drafters.model import ModelDrafter
    from sakiyomi.loading import check_pair

    if not argument:
        raise InputError('draft "model:" names no model; write model:<folder or hub id>')
    loaded = around.load(argument)
    check_pair(around.target, loaded)
    return ModelDrafter(around.pack(loaded), around.vocab_size)


def _lookup(argument: str, around: Surroundings) -> Drafter:
    from sakiyomi.drafters.lookup import MOST, PromptLookup

    return PromptLookup(argument or MOST)


def _suffix(argument: str, around: Surroundings) -> Drafter:
    from sakiyomi.drafters.memory import MemoryFile
    from sakiyomi.drafters.suffix import SuffixDrafter
    from sakiyomi.fingerprint import tokenizer_digest

    if not argument:
        return SuffixDrafter()
    return SuffixDrafter(MemoryFile(argument, tokenizer_digest(around.target.tokenizer), around.vocab_size))


def _ngram(argument: str, around: Surroundings) -> Drafter:
    from sakiyomi.drafters.ngram import NgramDrafter
    from sakiyomi.drafters.ngram_file import read_tables
    from sakiyomi.fingerprint import tokenizer_digest

    if not argument:
        return NgramDrafter(around.vocab_size)
    tables = read_tables(argument, tokenizer_digest(around.target.tokenizer), around.vocab_size)
    return NgramDrafter(around.vocab_size, tables)


DRAFTERS: dict[str, Callable[[str, Surroundings], Drafter]] = {
    "model": _model,
    "prompt-lookup": _lookup,
    "suffix": _suffix,
    "ngram": _ngram,
}


FORMS = (
    "model:<path or id>",
    "prompt-lookup",
    "prompt-lookup:<n>",
    "suffix",
    "suffix:<file>",
    "ngram",
    "ngram:<file>",
)
"""Specs, for messages."""


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
        known = ", ".join(f'"{form}"' for form in FORMS)
        raise InputError(f'unknown draft {spec!r}; this version has "none", "auto", {known}, or pass a Drafter object')
    return DRAFTERS[kind](argument, around)
