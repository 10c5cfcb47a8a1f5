"""The drafter that reads what the target's rows rank, and what the engine tells it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from architectures import greedy
from sakiyomi import LLM, SamplingParams
from sakiyomi.core.tree import TokenTree
from sakiyomi.drafters import Context
from sakiyomi.drafters.base import Ranked
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.recycle import KEPT, PRIORS, Chances, RecycleDrafter, RecycleReader, TokenGraph
from sakiyomi.drafters.suffix import SuffixDrafter
from text_drafters import context
from toys import tiny_llama, tiny_tokenizer

V = 64
MODEL = tiny_llama(vocab=V, layers=1, dim=32, initializer_range=0.4)
TOKENIZER = tiny_tokenizer(V)
PROMPTS = [[5, 9, 2, 7, 11], [5, 9, 2, 40], [3, 30]]


class Spy(RecycleDrafter):
    """Keeps every text whose next tokens it was told, with these."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[list[int], Ranked]] = []
        self.refused = 0

    def rank(self, context: Context, tree: TokenTree, rows: Sequence[Ranked]) -> None:
        paths: list[list[int]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        for path, ranked in zip([[], *paths], rows, strict=True):
            self.told.append(([*context.tokens, *path], ranked))
        super().rank(context, tree, rows)


def many(**more: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": 24, "ignore_eos": True, "gamma": 3, "nodes": 6} | more))


@pytest.mark.parametrize("merged", [False, True])
def test_a_drafter_is_told_what_every_row_ranks_first(merged: bool) -> None:
    """The rows of refused nodes, too, in a batch."""
    spy = Spy()
    llm = LLM(
        (MODEL, TOKENIZER), MergedDrafter([SuffixDrafter(), spy]) if merged else spy, dtype="float32", strict=True
    )
    done = llm.generate(PROMPTS, many())
    assert [out.token_ids for out in done] == [greedy(MODEL, prompt, 24) for prompt in PROMPTS]
    stats = [out.stats for out in done]
    assert len(spy.told) == sum(each.rounds + 1 + each.drafted for each in stats)
    assert sum(each.drafted - each.accepted for each in stats) > 10
    for text, (tokens, logs) in spy.told:
        with torch.no_grad():
            right = MODEL(torch.tensor([text])).logits[0, -1].log_softmax(-1)
        assert len(tokens) == KEPT
        assert torch.allclose(right[list(tokens)], torch.tensor(logs), atol=1e-3)
        assert min(logs) >= right.topk(KEPT).values[-1] - 1e-3


def test_what_one_request_showed_is_proposed_to_the_next() -> None:
    llm = LLM((MODEL, TOKENIZER), "recycle", dtype="float32", strict=True)
    first, second = (llm.generate([PROMPTS[0]], many(max_new_tokens=48))[0] for _ in range(2))
    assert first.token_ids == second.token_ids == greedy(MODEL, PROMPTS[0], 48)
    assert second.stats.tau > max(1.5, first.stats.tau)


def test_with_a_seed_the_text_is_that_without_a_draft() -> None:
    values = many(temperature=0.8, seed=3, acceptance="coupled")
    texts = [
        [out.token_ids for out in LLM((MODEL, TOKENIZER), draft, dtype="float32", exact=True).generate(PROMPTS, values)]
        for draft in ("none", "recycle", "suffix+recycle")
    ]
    assert texts[0] == texts[1] == texts[2]


def test_two_last_tokens_are_looked_up_before_one() -> None:
    graph = TokenGraph()
    graph.put((1, 2), ([7, 8], [-0.1, -3.0]))
    graph.put((9, 2), ([8, 5], [-0.2, -2.0]))
    assert [token for token, _ in graph.get((1, 2))] == [7, 8, 5]
    assert [token for token, _ in graph.get((4, 2))] == [8, 5]
    assert graph.get((2, 4)) == []
    kinds = {kind for place in ((1, 2), (4, 2)) for _, kind in graph.get(place)}
    assert len(kinds) == 5
    assert max(kinds) < len(PRIORS)


def test_a_graph_forgets_what_was_not_seen_for_longest() -> None:
    graph = TokenGraph(most=2)
    for last in (1, 2, 1, 3):
        graph.put((0, last), ([last], [0.0]))
    assert [bool(graph.get((0, last))) for last in (1, 2, 3)] == [True, False, True]


def test_chances_follow_what_was_right() -> None:
    graph, known = TokenGraph(), Chances(PRIORS)
    graph.put((0, 1), ([2, 3], [math.log(0.5), math.log(0.3)]))
    for _ in range(300):
        reader = RecycleReader(graph, known)
        reader.read([0, 1])
        tree = reader.guess(context([0, 1], nodes=4), 2)
        reader.read([3])
    assert tree.tokens == [3]
    assert tree.chances[0] > 0.9
