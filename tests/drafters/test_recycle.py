"""The drafter that reads what the target's rows rank, and what the engine tells it."""

from __future__ import annotations

import gc
import json
import math
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from architectures import greedy
from sakiyomi import LLM, SamplingParams
from sakiyomi.cli import app
from sakiyomi.core.errors import LoadError
from sakiyomi.core.tree import Draft, TokenTree
from sakiyomi.drafters import Context
from sakiyomi.drafters.base import Ranked
from sakiyomi.drafters.graph_file import GraphFile, read_graph
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.ngram_file import run_number
from sakiyomi.drafters.recycle import KEPT, PRIORS, Chances, RecycleDrafter, RecycleReader, TokenGraph
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.engine.pace import Pace
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.features import PassOutput
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
    rows = sum(each.rounds + 1 + each.drafted for each in stats)
    assert rows - len(done) <= len(spy.told) <= rows, "a text's last token has no room for a draft"
    assert sum(each.drafted - each.accepted for each in stats) > 10
    for text, (tokens, logs) in spy.told:
        with torch.no_grad():
            right = MODEL(torch.tensor([text])).logits[0, -1].log_softmax(-1)
        assert len(tokens) == KEPT
        assert torch.allclose(right[list(tokens)], torch.tensor(logs), atol=1e-3)
        assert min(logs) >= right.topk(KEPT).values[-1] - 1e-3


@pytest.mark.skipif(native() is None, reason="the kernels are not available")
def test_rounds_in_which_it_rests_are_those_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They rank nothing, and take no longer than plain decoding."""
    monkeypatch.setattr(Pace, "undrafted", property(lambda pace: True))
    spy = Spy()
    llm = LLM((MODEL, TOKENIZER), spy, dtype="float32", strict=True)
    llm.wait()
    out = llm.generate([PROMPTS[0]], many(gamma="auto", nodes="auto"))[0]
    assert out.token_ids == greedy(MODEL, PROMPTS[0], 24)
    assert len(spy.told) == 1, "behind the prompt"


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


def test_the_longest_known_context_counts() -> None:
    graph = TokenGraph()
    graph.put((0, 1, 2), ([7, 8], [-0.1, -3.0]))
    graph.put((5, 9, 2), ([8, 5], [-0.2, -2.0]))
    found = [graph.get(place) for place in ((0, 1, 2), (3, 1, 2), (4, 4, 2), (2,), (0, 2, 4))]
    assert [[token for token, _ in guesses] for guesses in found] == [[7, 8], [7, 8], [8, 5], [8, 5], []]
    kinds = [{kind for _, kind in guesses} for guesses in found]
    assert len(kinds[0] | kinds[1] | kinds[2]) == 6
    assert max(map(max, kinds[:4])) < len(PRIORS)


def test_a_graph_forgets_what_was_not_seen_for_longest() -> None:
    graph = TokenGraph(most=2)
    for last in (1, 2, 1, 3):
        graph.put((last,), ([last], [0.0]))
    assert [bool(graph.get((last,))) for last in (1, 2, 3)] == [True, False, True]


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


def file_of(path: Path, most: int = 4) -> GraphFile:
    return GraphFile(path, "a" * 64, 100, most, 2)


def test_what_was_ranked_is_kept_in_a_file(tmp_path: Path) -> None:
    """It is private and bounded, takes what several processes add, and is one tokenizer's."""
    path = tmp_path / "graph"
    drafters = [RecycleDrafter(file_of(path)) for _ in range(2)]
    for number, drafter in enumerate(drafters):
        one = context([1, 2 + number])
        drafter.propose([one], [1])
        drafter.rank(one, TokenTree(), [([7, 8], [-0.5, -1.5])])
        drafter.end(one)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {*read_graph(path).after[-1]} == {run_number((2,)), run_number((3,))}
    fresh = RecycleDrafter(file_of(path))
    (draft,) = fresh.propose([context([9, 3], nodes=1)], [1])
    assert draft.tree.tokens == (7,)
    for last in range(10, 20):
        fresh.rank(context([1, last]), TokenTree(), [([7, 8], [-0.5, -1.5])])
    del fresh  # what is left is written when the drafter goes
    gc.collect()
    assert [*read_graph(path).after[-1]] == [run_number((last,)) for last in range(16, 20)]
    with pytest.raises(LoadError, match="of another tokenizer"):
        RecycleDrafter(GraphFile(path, "b" * 64, 100, 4, 2))
    with pytest.raises(LoadError, match="tokens that the target does not know"):
        RecycleDrafter(GraphFile(path, "a" * 64, 8, 4, 2))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(LoadError, match="is damaged"):
        RecycleDrafter(file_of(path))


def test_a_file_is_shown_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "graph"
    llm = LLM((MODEL, TOKENIZER), f"recycle:{path}", dtype="float32")
    llm.generate([PROMPTS[0]], many())
    shown = CliRunner().invoke(app, ["memory", "show", str(path), "--json"])
    found = json.loads(shown.stdout.splitlines()[-1])
    assert found["contexts"][2] >= found["contexts"][1] >= found["contexts"][0] > 5
    assert CliRunner().invoke(app, ["memory", "clear", str(path)]).exit_code == 0
    assert not path.exists()


def test_measurements_can_have_it_forget() -> None:
    llm = LLM((MODEL, TOKENIZER), MergedDrafter([SuffixDrafter(), RecycleDrafter()]), dtype="float32")
    taus = []
    for _ in range(3):
        taus.append(llm.generate([PROMPTS[0]], many(max_new_tokens=48))[0].stats.tau)
        if len(taus) == 2:
            assert llm.draft is not None
            llm.draft.forget()
    assert taus[2] == taus[0] < taus[1]


def test_a_row_that_is_not_a_number_says_nothing() -> None:
    spy = Spy()
    llm = LLM((MODEL, TOKENIZER), spy, dtype="float32", strict=True)
    request = llm.engine.submit(PROMPTS[0], many())
    output = PassOutput(torch.full((1, V), math.nan), {})
    llm.engine._speculation.give_ranks(request, Draft.empty(), output, 0)
    assert not spy.told
    llm.engine.remove(request.id)
