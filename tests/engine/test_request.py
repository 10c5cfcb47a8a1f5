"""Where a text ends, by hand: in the middle of what a round has brought, and nowhere else. No model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sakiyomi import SamplingParams
from sakiyomi.core.outputs import Step
from sakiyomi.core.tree import Draft, Draw, TokenTree, Verdict
from sakiyomi.engine.inputs import TokenizedPrompt
from sakiyomi.engine.request import Request
from sakiyomi.engine.request_factory import RequestFactory
from sakiyomi.sampling.verifiers import VERIFIERS, Rows
from toys import character_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENIZER = character_tokenizer(LETTERS)
V, END = len(TOKENIZER), 1


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


def request(max_context: int = 1000, **options: Any) -> Request:
    """One whose prompt has three tokens, and whose first token is there."""
    factory = RequestFactory(
        TokenizedPrompt, lambda params: VERIFIERS["greedy"], TOKENIZER, V, frozenset([END]), max_context, False, None
    )
    own = factory.make(ids("xyz"), SamplingParams(**options))
    commit(own, ids("a"))
    return own


def commit(own: Request, run: Sequence[int]) -> Step:
    """A round in which the draft's path was accepted, and the last token follows. Each node of it has a sibling."""
    *path, last = run
    tokens = [token for each in path for token in (0, each)]
    parents = [above for i in range(len(path)) for above in (2 * i - 1, 2 * i - 1)]
    tree = TokenTree(tuple(tokens), tuple(parents))
    draft = Draft(tree, "point_mass", tuple(Draw(node, "d") for node in range(len(tree))))
    rows = Rows(torch.zeros(len(tree) + 1, V), own.sampler, len(own.tokens), tree, own.tokens)
    accepted, refused = (tuple(range(first, len(tree), 2)) for first in (1, 0))
    return own.commit(draft, Verdict(accepted, last, "bonus" if path else "plain", refused), rows)


def test_what_is_committed_is_the_accepted_path() -> None:
    own = request()
    step = commit(own, ids("bcde"))
    assert (step.text, own.output, own.finish_reason) == ("bcde", ids("abcde"), None)
    assert [entry.status for entry in step.trace] == ["accepted"] * 3 + ["bonus"]
    assert (own.stats.tokens, own.stats.accepted, own.stats.rejected) == (5, 3, 3)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize(("end", "options"), [(END, {}), (ids("q")[0], {"stop_token_ids": ids("q")})])
def test_an_end_token_ends_the_text_where_it_stands(place: int, end: int, options: dict[str, Any]) -> None:
    own, run = request(**options), ids("bcde")
    run[place] = end
    step = commit(own, run)
    assert own.output == [*ids("a"), *run[: place + 1]]
    assert (step.finish_reason, step.token_ids) == ("stop", tuple(run[: place + 1]))
    assert own.stats.accepted == min(place + 1, 3)


def test_an_end_token_that_is_to_be_ignored() -> None:
    own = request(ignore_eos=True)
    assert commit(own, [*ids("b"), END, *ids("c")]).finish_reason is None


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_the_length_limit_in_the_middle_of_a_run(count: int) -> None:
    for own in (request(max_new_tokens=count), request(max_context=3 + count)):
        step = commit(own, ids("bcde"))
        assert (own.output, step.finish_reason) == (ids("abcde")[:count], "length")
    assert commit(request(max_new_tokens=6), ids("bcde")).finish_reason is None


@pytest.mark.parametrize(("stop", "text"), [("cd", "ab"), ("ab", ""), ("e", "abcd"), ("ef", None)])
def test_a_stop_string_in_the_middle_of_a_run(stop: str, text: str | None) -> None:
    own = request(stop=stop)
    step = commit(own, ids("bcde"))
    if text is None:
        assert (own.text.text, own.output, step.finish_reason) == ("abcd", ids("abcde"), None)
        return
    assert (own.text.text, step.finish_reason) == (text, "stop")
    assert own.output == ids(text + stop), "with the token that completes it, and no further one"
