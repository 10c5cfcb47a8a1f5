"""Trees that the compiled kernels grow are those that Python grows."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from random_models import random_llama
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import Draft
from sakiyomi.drafters import Context
from sakiyomi.drafters.draft_length import Costs, TokenValue
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.kernel_rounds import KernelRounds
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.sampler import Sampler

pytestmark = pytest.mark.skipif(native() is None, reason="the kernels are not available")

VOCAB = 500
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.9},
    "coupled, few": {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    "ratio": {"temperature": 0.9, "acceptance": "ratio"},
    "ratio, few": {"temperature": 0.7, "top_k": 9, "min_p": 0.01, "acceptance": "ratio"},
}
CHOICES = [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (0, 1, 1), (0, 1, 1, 0)]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain", "gamma": 5},
    "best-first": {"tree": "best-first", "nodes": 13, "gamma": 4},
    "one node": {"tree": "best-first", "nodes": 1, "gamma": 4},
    "ddtree": {"tree": "ddtree", "nodes": 12, "gamma": 4},
    "dynamic": {"tree": "dynamic", "nodes": 11, "gamma": 6},
    "static": {"tree": "static", "nodes": 9, "gamma": 4},
    "choices": {"tree": CHOICES},
}
MOST = {"chain": 5, "best-first": 13, "one node": 1, "ddtree": 12, "dynamic": 11, "static": 9, "choices": len(CHOICES)}


def drafter(dtype: torch.dtype, width: int, *, native: bool, slots: int = 8) -> ModelDrafter:
    model = build_runner(random_llama(32, 1, 4, 64, VOCAB, dtype, seed=3), max_slots=slots)
    made = ModelDrafter(model, width)
    made.reader._native.grow = partial(grow, made.reader._native.grow, native)  # type: ignore[method-assign]
    return made


GROWN: list[int] = []


def grow(own: Any, native: bool, *arguments: Any) -> int | None:
    found = own(*arguments) if native else None
    GROWN.append(found or 0)
    return found


def context(number: int, params: SamplingParams, rule: Any, worth: TokenValue | None) -> Context:
    tokens = [random.Random(number).randrange(VOCAB) for _ in range(6 + number)]
    made = Context(number, tokens, params, rule, RequestNoise(7, number), frozenset([11, 12]))
    made.nodes = params.nodes if isinstance(params.nodes, int) else len(params.choices) or 5
    made.worth = worth
    return made


def same(a: Draft, b: Draft) -> None:
    assert (a.tree, a.kind) == (b.tree, b.kind)
    for x, y in zip(a.draws, b.draws, strict=True):
        assert (x.node, x.drafter, x.row) == (y.node, y.drafter, y.row)
        assert (x.prob, x.chance) == pytest.approx((y.prob, y.chance), rel=1e-6)
    assert (a.probs is None) == (b.probs is None)
    if a.probs is not None and b.probs is not None:
        assert torch.equal(a.probs, b.probs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_trees_are_those_of_python(rule: str, shape: str) -> None:
    # The target's vocabulary is the draft's own, or padded further, or less far.
    dtype, width = torch.bfloat16 if "few" in rule else torch.float32, VOCAB + 30 * (len(rule + shape) % 3 - 1)
    weighed = rule == "greedy" and shape == "best-first"
    worth = TokenValue(900.0, Costs(lambda rows: 1e-4 + 2e-5 * rows, 1e-4, 1e-4), 4) if weighed else None
    params = SamplingParams(**RULES[rule], **SHAPES[shape])
    kind = rule.partition(",")[0]
    drafts: dict[bool, list[Draft]] = {}
    streams = {}
    for compiled in (False, True):
        GROWN.clear()
        made = drafter(dtype, width, native=compiled)
        made.model.pass_seconds = lambda rows, m=made.model: 2e-5 * m.padded(rows)  # type: ignore
        contexts = [context(number, params, kind, worth) for number in range(3)]
        found = []
        choices = random.Random(1)
        for _ in range(7):
            made.reader.besides = 0.0
            proposed = made.propose(contexts, [5] * 3)
            # The memory of their probabilities is used again.
            found += [replace(draft, probs=None if draft.probs is None else draft.probs.clone()) for draft in proposed]
            for each, draft in zip(contexts, proposed, strict=True):  # some of it is accepted, and a token follows
                node = choices.randrange(-1, len(draft.tree)) if len(draft.tree) else -1
                each.tokens += [*(draft.tree.path_tokens(node) if node >= 0 else []), choices.randrange(13, 400)]
        drafts[compiled] = found
        streams[compiled] = [each.noise.fork(made.name).uniform() for each in contexts]
    assert sum(GROWN) > 7, "the kernels grew nothing"
    assert max(len(draft.tree) for draft in drafts[True]) == MOST[shape] or weighed
    for a, b in zip(drafts[False], drafts[True], strict=True):
        same(a, b)
    assert streams[False] == streams[True]


def test_siblings_are_drawn_without_replacement() -> None:
    made = drafter(torch.float32, VOCAB, native=True)
    params = SamplingParams(temperature=0.5, acceptance="ratio", tree=CHOICES)
    contexts = [context(number, params, "ratio", None) for number in range(4)]
    for _ in range(8):
        GROWN.clear()
        for each, draft in zip(contexts, made.propose(contexts, [5] * 4), strict=True):
            for node in range(-1, len(draft.tree)):
                tokens = [draft.tree.tokens[child] for child in draft.tree.children(node)]
                assert len(set(tokens)) == len(tokens)
            assert len(draft.tree.children(-1)) == 3
            each.tokens.append(7)
    assert sum(GROWN)


def test_requests_in_all_slots_share_native_passes() -> None:
    """No slot is left to compare passes with eager ones: it is done behind a text."""
    made = drafter(torch.float32, VOCAB, native=True, slots=5)
    contexts = [context(number, SamplingParams(tree="chain", gamma=3), "greedy", None) for number in range(5)]
    for _ in range(12):
        GROWN.clear()
        made.propose(contexts, [3] * 5)
        for each in contexts:
            each.tokens.append(7)
    assert GROWN == [3]


def test_rows_that_are_no_numbers_are_refused() -> None:
    made = drafter(torch.float32, VOCAB, native=True)
    one = context(1, SamplingParams(tree="chain", gamma=3), "greedy", None)
    for _ in range(4):
        made.propose([one], [3])
    assert GROWN[-1] == 3
    head = next(layer for name, layer in made.model.module.named_modules() if name == "lm_head")
    for part in head.buffers():
        part.fill_(float("nan"))
    one.tokens.append(5)
    with pytest.raises(InputError, match="no token is left"):
        made.propose([one], [3])


def test_passes_of_many_requests_have_inputs_too() -> None:
    """A recorded model replays all of its row counts, the largest as well: with 128 rows drafting once failed."""
    model = drafter(torch.float32, VOCAB, native=True, slots=40).model
    assert 128 in model.sizes
    model.record()
    assert KernelRounds(model, None, VOCAB).ready([128], lambda: [(None, 0)])
    assert model.recorder is not None
    sizes = sorted(model.recorder.ready)
    assert sizes == list(model.sizes)
    assert [model.replayed(size)[1].shape for size in sizes] == [(1, size) for size in sizes]


def test_what_was_left_out_teaches_nothing_of_others() -> None:
    """Behind a listed token that is worth too little come other places' candidates: their rows are not the text's."""
    params = SamplingParams(tree="best-first", nodes=4, gamma=3)
    made = drafter(torch.float32, VOCAB, native=False)
    one = context(0, params, "greedy", None)
    state = made.reader.begin(one, Sampler(params, VOCAB), made.name, 3, 0, 0)
    assert state is not None
    logits = torch.full((VOCAB,), -9.0)
    for place, best in ((-1, [20, 21, 22]), (0, [30, 31])):
        logits[best] = torch.tensor([9.0, 1.0, 0.5])[: len(best)]
        state.candidates.begin_level()
        state.candidates.floor = 0.01
        state.read(place, logits)
        logits[best] = -9.0
    assert state.candidates.tokens == [20, 30]
    assert len(state.listed[-1][1]) > 2
    state.rows = [0, 1]
    assert state.learn([*one.tokens, 20, 30, 1]) == [0, 1]
    assert state.learn([*one.tokens, 21, 30, 1]) == []
