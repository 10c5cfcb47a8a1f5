"""Verdicts of the kernels are those of the rules in Python: path, token, refused nodes, uniforms used, chances."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from sakiyomi import SamplingParams
from sakiyomi.core.tree import DRAFT_KINDS, Draft, DraftKind, Draw, TokenTree
from sakiyomi.kernels.build import native
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.rows import draw_distinct
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers import VERIFIERS, Rows
from sakiyomi.sampling.verifiers.native import Case, verify_all

pytestmark = pytest.mark.skipif(native() is None, reason="the kernels are not available")

RULES = ("greedy", "coupled", "ratio", "block")
WARPS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.2, "top_k": 9},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "all": {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    "edits": {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {3: 1.5, 6: -torch.inf}, "bad_words": [[2]]},
}


def drafted(
    kind: DraftKind, logits: torch.Tensor, sampler: Sampler, choices: random.Random
) -> tuple[Draft, torch.Tensor]:
    """A draft from rows near the target's, (rows, V), as of a model that is nearly as good; and the target's rows."""
    tokens: list[int] = []
    parents: list[int] = []
    draws: list[Draw] = []
    rows: list[torch.Tensor] = []
    below = [-1]
    for _ in range(3):
        level = []
        for parent in below:
            source = sampler.probs(logits[None, len(rows) % len(logits)] + 0.3 * torch.randn(1, logits.shape[1]))[0]
            rows.append(source)
            count = 1 if kind == "chain" else choices.randrange(1, 4)
            if kind == "iid":
                found = [draw_distinct(source.numpy(), 1, choices.random)[0] for _ in range(count)]
            else:
                found = draw_distinct(source.numpy(), count, choices.random)
            for token in found:
                node = next((n for n in range(len(tokens)) if (parents[n], tokens[n]) == (parent, token)), len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(parent)
                    level.append(node)
                chosen = kind == "point_mass" or (kind == "merged" and choices.random() < 0.5)
                draws.append(Draw(node, "d", None if chosen else len(rows) - 1))
        below = level if kind == "chain" else level[:2]
    tree = TokenTree(tuple(tokens), tuple(parents))
    target = torch.stack([logits[0]] + [logits[(node * 7 + 1) % len(logits)] for node in range(len(tree))])
    for node, parent in enumerate(parents):  # some of it is likely
        if choices.random() < 0.5:
            target[parent + 1, tokens[node]] += 3.0
    return Draft(tree, kind, tuple(draws), None if kind == "point_mass" else torch.stack(rows)), target


@pytest.mark.every
@pytest.mark.parametrize("vocab", [8, 700, 5000])
@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("rule", RULES)
def test_verdicts_are_those_of_python(rule: str, warp: str, vocab: int) -> None:
    torch.manual_seed(vocab)
    choices = random.Random(f"{rule} {warp} {vocab}")
    verifier = VERIFIERS[rule]
    given = SamplingParams(**WARPS[warp])
    given = replace(SamplingParams() if warp != "edits" else given, temperature=0.0) if rule == "greedy" else given
    sampler = Sampler(given, vocab)
    kinds: Sequence[DraftKind] = ["chain"] if rule == "block" else sorted(DRAFT_KINDS)
    dtype = torch.bfloat16 if warp == "all" else torch.float32
    accepted = refused = 0
    for turn in range((12 if vocab == 5000 else 40) * (3 if rule == "block" else 1)):
        logits = torch.randn(6, vocab) * 2
        sources = Sampler(SamplingParams(temperature=0.8), vocab) if rule == "greedy" else sampler
        drafts, rows = zip(*(drafted(choices.choice(kinds), logits, sources, choices) for _ in range(4)), strict=True)
        drafts = (*drafts, Draft.empty())
        together = torch.cat([*rows, logits[:1]]).to(dtype)
        cases, expected, first = [], [], 0
        for number, draft in enumerate(drafts):
            own, text = RequestNoise(turn, number), [(7 * turn + 3 * i) % vocab for i in range(5 + number)]
            part = together[first : first + len(draft) + 1]
            verdict = verifier.verify(draft, view := Rows(part, sampler, 5 + number, draft.tree, text), own)
            places = [0, *(node + 1 for node in verdict.path)]
            tokens = [*(draft.tree.tokens[node] for node in verdict.path), verdict.token]
            chance = view.chance if rule == "greedy" else lambda place, token, view=view: float(view.row(place)[token])
            chances = [chance(place, token) for place, token in zip(places, tokens, strict=True)]
            expected.append((verdict, own.counter, chances))
            noise = RequestNoise(turn, number)
            cases.append(Case(draft, first, 5 + number, verifier, Sampler(given, vocab), noise, text))
            first += len(draft) + 1
        for case, verdict, (wanted, counter, chances) in zip(cases, verify_all(cases, together), expected, strict=True):
            assert verdict is not None
            assert verdict == wanted
            assert case.noise.counter == counter
            assert list(verdict.chances) == chances
            accepted, refused = accepted + len(wanted.path), refused + len(wanted.refused)
    assert accepted > 5
    assert refused > (0 if rule == "block" else 5)


def test_what_only_python_judges_is_left_to_it() -> None:
    logits = torch.randn(2, 50)
    params = SamplingParams(temperature=0.8)
    sampler, draft = Sampler(params, 50), Draft.chain([3], "d")

    def judged(rows: torch.Tensor = logits, **changes: Any) -> Any:
        values = {"draft": draft, "row": 0, "position": 4, "verifier": VERIFIERS["ratio"], "sampler": sampler}
        noise = RequestNoise(1)
        before = noise.counter
        (verdict,) = verify_all([Case(**(values | {"noise": noise, "tokens": []} | changes))], rows)
        assert verdict is not None or noise.counter == before
        return verdict

    assert judged() is not None
    assert judged(verifier=VERIFIERS["typical"]) is None
    assert judged(verifier=VERIFIERS["traversal"]) is None
    assert judged(sampler=Sampler(SamplingParams(temperature=0.8, repetition_penalty=1.1), 51)) is None
    assert judged(sampler=Sampler(SamplingParams(temperature=0.8, logits_processors=[lambda *_: None]), 50)) is None
    assert judged(sampler=Sampler(SamplingParams(), 50)) is None  # a rule for distributions, of one-hot rows
    assert judged(draft=Draft.chain([3], "d", torch.full((1, 51), 1 / 51))) is None
    assert judged(logits.double()) is None
    assert judged(logits.where(torch.arange(50) != 7, torch.nan)) is None
    assert judged(torch.full((2, 50), -torch.inf)) is None
    infinite = logits.clone()
    infinite[0, 3] = torch.inf
    assert judged(infinite, verifier=VERIFIERS["greedy"], sampler=Sampler(SamplingParams(), 50)) is None
