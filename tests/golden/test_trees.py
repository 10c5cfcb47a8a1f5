"""Trees of a draft model, and trees merged of several drafters: the text is the one without any.

fp32 on the CPU, tiny models. The draft is the target with some noise in its weights, so that it is right often and
wrong often, and its first choice is not always the one that is right.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from architectures import CONFIGS, VOCAB, model_of, prompt, references
from drafters import Branching, Failing, Scripted, texts_of
from sakiyomi import LLM, InputError, SamplingParams
from sakiyomi.core.errors import DraftError
from sakiyomi.core.params import TREES
from sakiyomi.core.tree import Draft
from sakiyomi.drafters import Context
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.runner import ModelRunner
from toys import character_tokenizer

NEW = 24
PROMPTS = [prompt(11, 1), prompt(3, 2), prompt(19, 3)]
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))


def wanted(name: str) -> list[list[int]]:
    return references(name, PROMPTS, NEW)


def noisy(name: str, size: float = 0.08, seed: int = 0) -> ModelRunner:
    model = copy.deepcopy(model_of(name))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return build_runner(model, max_slots=8, compile=False)


class Watched(ModelDrafter):
    """Remembers what it proposed."""

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        drafts = super().propose(contexts, gammas)
        self.drafts = [*getattr(self, "drafts", []), *drafts]
        return drafts


@cache
def llm(name: str = "llama") -> LLM:
    return LLM((model_of(name), TOKENIZER), Watched(noisy(name), VOCAB), compile=False)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True} | values))


def texts(target: LLM, values: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    done = target.generate([list(tokens) for tokens in prompts], values)
    assert not target.engine._speculation.broken, "the drafter raised"
    return [out.token_ids for out in done]


SIZES: list[dict[str, Any]] = [
    {"gamma": 1, "nodes": 4},
    {"gamma": 4, "nodes": 15},
    {"gamma": 6, "nodes": 3},
    {"gamma": 5},
    {"nodes": 9},
    {"gamma": 4, "nodes": "heuristic"},
]


@pytest.mark.few(1)
@pytest.mark.parametrize("tree", [tree for tree in TREES if tree not in ("auto", "chain")])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_tree_gives_the_text(tree: str, size: dict[str, Any]) -> None:
    """Greedy as transformers has it; sampled with a seed as without a draft; in a batch and alone."""
    watched = llm().draft
    assert isinstance(watched, Watched)
    watched.drafts = []
    assert texts(llm(), params(tree=tree, **size)) == wanted("llama")
    assert texts(llm(), params(tree=tree, **size), PROMPTS[1:2]) == wanted("llama")[1:2]
    assert texts(llm(), params(tree=tree, temperature=1.0, seed=3, **size)) == sampled()
    assert any(max(draft.tree.parents.count(i) for i in range(-1, len(draft))) > 1 for draft in watched.drafts)
    for draft in watched.drafts:
        draft.validate(VOCAB)
        assert draft.tree.depth <= size.get("gamma", 16)
        if isinstance(most := size.get("nodes"), int):
            assert len(draft) <= most


@cache
def sampled() -> list[list[int]]:
    plain = LLM((model_of("llama"), TOKENIZER), "none", compile=False)
    return texts(plain, params(temperature=1.0, seed=3))


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONFIGS)
def test_on_every_architecture(name: str) -> None:
    """The draft's own cache holds trees too: rows read a level a pass, and the accepted path kept of them."""
    for values in ({"tree": "best-first", "gamma": 4, "nodes": 12}, {}):
        assert texts(llm(name), params(**values)) == wanted(name)


def test_more_is_accepted_than_of_a_chain() -> None:
    chain, tree = (
        llm().generate([list(tokens) for tokens in PROMPTS], params(gamma=4, **more))
        for more in ({}, {"tree": "best-first", "nodes": 15})
    )
    assert sum(out.stats.rounds for out in tree) < sum(out.stats.rounds for out in chain)


def test_the_cache_of_the_draft_holds_what_a_fresh_one_would() -> None:
    """The path kept of a tree in the draft's cache is the committed text: a fresh draft goes on with the same tree."""
    drafter = ModelDrafter(noisy("llama"), VOCAB)
    old = LLM((model_of("llama"), TOKENIZER), drafter, compile=False)
    values = params(tree="dynamic", gamma=4, nodes=12, max_new_tokens=20)
    request = old.engine.submit(PROMPTS[0], values)
    proposals = []
    while not request.over:
        old.engine.step()
        if request.output and not request.over:
            fresh = ModelDrafter(drafter.model, VOCAB, "fresh")
            fresh.reader.confidence = drafter.reader.confidence
            context = request.context
            context.nodes, context.worth = 12, None
            proposals.append((drafter.propose([context], [4])[0].tree, fresh.propose([context], [4])[0].tree))
            fresh.end(context)
    assert len(proposals) > 3
    for kept, anew in proposals:
        assert kept == anew


def test_a_user_processor_that_raises_ends_its_request_alone() -> None:
    class Raises:
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        llm().generate([PROMPTS[0]], params(tree="best-first", nodes=5, logits_processors=[Raises()]))
    assert texts(llm(), params(tree="best-first", nodes=5)) == wanted("llama")


# ---------------------------------------------------------------- merged


def scripted(kind: type[Scripted], skill: Any) -> Scripted:
    return kind(texts_of(PROMPTS, wanted("llama")), skill, VOCAB)


def members(name: str) -> list[Any]:
    return {
        "two models": [ModelDrafter(noisy("llama"), VOCAB), ModelDrafter(noisy("llama", 0.12, 1), VOCAB)],
        "model and text": [ModelDrafter(noisy("llama"), VOCAB), scripted(Scripted, "sometimes")],
        "tree and junk": [scripted(Branching, "sometimes"), scripted(Scripted, "never")],
        "three": [ModelDrafter(noisy("llama"), VOCAB), scripted(Scripted, "always"), scripted(Branching, "sometimes")],
    }[name]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["two models", "model and text", "tree and junk", "three"])
def test_merged_drafts_give_the_text(name: str) -> None:
    target = LLM((model_of("llama"), TOKENIZER), members(name), compile=False)
    assert isinstance(target.draft, MergedDrafter)
    for values in ({}, {"gamma": 3}, {"gamma": 3, "nodes": 5}, {"gamma": 4, "tree": "best-first", "nodes": 20}):
        assert texts(target, params(**values)) == wanted("llama"), values
        assert texts(target, params(temperature=1.0, seed=3, **values)) == sampled(), values
    assert not target.engine.busy
    assert not target.draft._faulty


@pytest.mark.thorough
def test_merged_drafts_are_as_good_as_the_best_member() -> None:
    always = LLM((model_of("llama"), TOKENIZER), members("three"), compile=False)
    done = always.generate([list(tokens) for tokens in PROMPTS], params(gamma=4, nodes=15))
    assert all(out.stats.tau > 3.5 for out in done)
    sources = {entry.source for out in done for entry in out.trace}
    assert "always-right" in sources or "model" in sources


def test_one_member_that_fails_does_not_take_the_others_down(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(texts_of(PROMPTS, wanted("llama")), "always", VOCAB)
    target = LLM((model_of("llama"), TOKENIZER), [failing, scripted(Scripted, "sometimes")], compile=False)
    done = target.generate([list(tokens) for tokens in PROMPTS], params(gamma=3))
    assert [out.token_ids for out in done] == wanted("llama")
    assert caplog.text.count("continue without it") == 1
    assert all(out.stats.accepted > 0 for out in done)


def test_strict_raises_what_a_member_did() -> None:
    failing = Failing(texts_of(PROMPTS, wanted("llama")), "always", VOCAB)
    both = [failing, scripted(Scripted, "sometimes")]
    target = LLM((model_of("llama"), TOKENIZER), both, compile=False, strict=True)
    with pytest.raises(DraftError, match="fell off the table"):
        target.generate([list(tokens) for tokens in PROMPTS], params(gamma=3))
    assert not target.engine.busy


def test_equal_names_are_told_apart() -> None:
    target = LLM((model_of("llama"), TOKENIZER), members("two models"), compile=False)
    assert target.draft is not None and target.draft.name == "model+model-2"


def test_specs_of_several() -> None:
    for wrong in ("none+nonsense", ["none", 3], []):
        with pytest.raises(InputError):
            LLM((model_of("llama"), TOKENIZER), wrong, compile=False)  # type: ignore[arg-type]
    assert LLM((model_of("llama"), TOKENIZER), ["none", "none"], compile=False).draft is None
