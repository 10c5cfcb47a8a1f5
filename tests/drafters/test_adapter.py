"""Drafters that derive from nothing get every member that the engine may ask for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sakiyomi import Draft, SamplingParams
from sakiyomi.core.errors import InputError
from sakiyomi.drafters import Context, Drafter, as_drafter
from sakiyomi.drafters.base import tell
from sakiyomi.drafters.lookup import PromptLookup
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.suffix import SuffixDrafter
from text_drafters import context


class Least:
    """The three members that are asked for."""

    name: str = "least"
    kind = "point_mass"

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        return [Draft.chain([7] * gamma, self.name) for gamma in gammas]


class Most(Least):
    """All others besides, as a drafter had them that was written before there was a class to derive from."""

    model = "a model of its own that is no runner"

    def __init__(self) -> None:
        self.passes, self.forward_seconds, self.prefill_seconds = 0, 0.0, 0.0
        self.heard: list[Any] = []

    def kind_for(self, params: SamplingParams) -> str:
        return "chain" if params.tree == "chain" else "point_mass"

    def inherit(self, context: Context, earlier: Context) -> None:
        self.heard.append((context.id, earlier.id))

    def end(self, context: Context) -> None:
        self.heard.append(context.id)


def test_three_members_are_enough() -> None:
    drafter = as_drafter(Least())  # type: ignore[arg-type]
    assert isinstance(drafter, Drafter) and as_drafter(drafter) is drafter
    assert (drafter.name, drafter.kind, drafter.kind_for(SamplingParams())) == ("least", "point_mass", "point_mass")
    assert (drafter.passes, drafter.forward_seconds, drafter.prefill_seconds) == (0, 0.0, 0.0)
    assert drafter.model is None and not drafter.runs_model and not drafter.prefers_coupled
    request = context([1, 2])
    drafter.inherit(request, request)
    drafter.end(request)
    assert drafter.propose([request], [2])[0].tree.tokens == (7, 7)


def test_other_members_are_the_proposers_own() -> None:
    own = Most()
    drafter = as_drafter(own)  # type: ignore[arg-type]
    own.passes, own.forward_seconds, own.prefill_seconds = 3, 2.0, 0.5  # clocks go on after it was adapted
    assert (drafter.passes, drafter.forward_seconds, drafter.prefill_seconds) == (3, 2.0, 0.5)
    own.forward_seconds = np.float32(1.5)  # type: ignore[assignment]
    assert type(drafter.forward_seconds) is float
    assert drafter.kind_for(SamplingParams(tree="chain")) == "chain"
    assert drafter.runs_model and drafter.prefers_coupled and drafter.model is None
    tell(drafter, "inherit", context([1], number=5), context([1], number=4))
    tell(drafter, "end", context([1], number=4))
    assert own.heard == [(5, 4), 4]
    drafter.name = "least-2"
    assert own.name == "least-2"


def test_what_is_no_drafter_is_refused() -> None:
    class Nameless:
        kind = "point_mass"

        def propose(self, *_: Any) -> list[Draft]:
            return []

    for given, words in ((Nameless(), "no name"), (object(), "no propose")):
        with pytest.raises(InputError, match=words):
            as_drafter(given)  # type: ignore[arg-type]


def test_what_end_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Least):
        def end(self, context: Context) -> None:
            raise RuntimeError("no end")

    with caplog.at_level(logging.WARNING, "sakiyomi"):
        tell(as_drafter(Broken()), "end", context([1]))  # type: ignore[arg-type]
    assert "drafter least failed in end: RuntimeError: no end" in caplog.text
    tell(None, "end", context([1]))


def test_merged_members_are_adapted_and_forget() -> None:
    own = Most()
    merged = MergedDrafter([PromptLookup(), SuffixDrafter(), own])  # type: ignore[list-item]
    assert merged.name == "prompt-lookup+suffix+least" and merged.runs_model
    request = context([1, 2, 3, 1, 2], number=9)
    merged.propose([request], [2])
    assert request.memory
    merged.end(request)
    assert not request.memory and own.heard == [9]
