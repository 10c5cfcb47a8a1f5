"""Drafts of another tokenizer: the text is the target's own, whatever the tokenizers are and however good the draft.

Random models show that nothing of the draft gets into the text. A draft that knows the text (`Knowing`) shows that its
text arrives as the target's own tokens: were they cut otherwise, they would be refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sakiyomi import LLM, SamplingParams, UnsupportedError
from sakiyomi.core.tree import Draft, Draw, TokenTree
from sakiyomi.drafters import Context
from sakiyomi.drafters.cross_tokenizer.alignment import Lexicon
from sakiyomi.drafters.cross_tokenizer.drafter import CrossDrafter
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.model_executor.build import build_runner
from sakiyomi.sampling.rng import RequestNoise
from toys import (
    byte_fallback_tokenizer,
    character_tokenizer,
    save_model,
    tiny_llama,
    tiny_tokenizer,
    unigram_tokenizer,
    word_piece_tokenizer,
)

TOKENIZERS = {
    "byte-level": tiny_tokenizer,
    "SentencePiece": byte_fallback_tokenizer,
    "unigram": unigram_tokenizer,
    "characters": character_tokenizer,
    "word pieces": word_piece_tokenizer,
}
PROMPTS = ["a", "abc xyz.", "the fox あい😀 abc", "abc\n\nabc山"]
NEW = 16
VOCAB = 320


@cache
def pair(kind: str, seed: int) -> tuple[Any, Any]:
    """A random model of 320 rows and a tokenizer of that kind."""
    return tiny_llama(VOCAB, seed=seed, eos_token_id=None), TOKENIZERS[kind]()


@cache
def plain(kind: str) -> LLM:
    return LLM(pair(kind, 0), "none", compile=False)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Another model with each of the tokenizers, as folders."""
    root = tmp_path_factory.mktemp("drafts")
    return {kind: save_model(root / kind, *pair(kind, 1)) for kind in TOKENIZERS}


def prompts_of(llm: LLM) -> list[list[int]]:
    """The prompts that its tokenizer can say; a word-piece tokenizer without these words says unknown ones."""
    return [tokens for text in PROMPTS if (tokens := llm.tokenizer(text)["input_ids"])]


@cache
def drafting(target: str, draft: str) -> LLM:
    return LLM(pair(target, 0), draft, compile=False)


OF_DRAFTS = {name: getattr(SamplingParams(), name) for name in ("gamma", "tree", "nodes")}
"""Without these the same is asked of a text."""


@cache
def undrafted(target: str, params: SamplingParams) -> list[Any]:
    return [*plain(target).generate(prompts_of(plain(target)), params)]


def both(target: str, draft: str, params: SamplingParams) -> tuple[list[Any], list[Any], LLM]:
    """With a draft and without."""
    llm = drafting(target, draft)
    done = [*llm.generate(prompts_of(llm), params)]
    assert not llm.engine._speculation.broken, "the drafter raised"
    return done, undrafted(target, replace(params, **OF_DRAFTS)), llm


def dealt(sizes: Sequence[Any]) -> list[Any]:
    """Every pair of tokenizers, for what becomes of a text depends on both, with one of the sizes: how far is read
    ahead is another matter. Every tokenizer, as target and as draft, meets every size.
    """
    return [
        pytest.param(target, draft, sizes[(row + column) % len(sizes)], id=f"{target}-{draft}")
        for row, target in enumerate(TOKENIZERS)
        for column, draft in enumerate(TOKENIZERS)
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize(("target", "draft", "gamma"), dealt([1, 2, 5]))
def test_greedy_text_is_the_targets_own(drafts: dict[str, Path], target: str, draft: str, gamma: int) -> None:
    params = SamplingParams(max_new_tokens=NEW, gamma=gamma, ignore_eos=True)
    done, wanted, llm = both(target, f"model:{drafts[draft]}", params)
    assert [out.token_ids for out in done] == [out.token_ids for out in wanted]
    assert [out.text for out in done] == [out.text for out in wanted]
    assert llm.draft is not None
    assert llm.draft.name == ("model" if target == draft else "cross")


@pytest.mark.few(2)
@pytest.mark.parametrize("draft", TOKENIZERS)
@pytest.mark.parametrize("target", TOKENIZERS)
def test_sampled_text_is_that_of_the_seed_alone(drafts: dict[str, Path], target: str, draft: str) -> None:
    """The coupled rule: the same seed gives the same text with a draft and without."""
    params = SamplingParams(max_new_tokens=NEW, gamma=3, ignore_eos=True, temperature=1.0, top_p=0.95, seed=11)
    done, wanted, _ = both(target, f"model:{drafts[draft]}", params)
    assert [out.token_ids for out in done] == [out.token_ids for out in wanted]


TREES: list[dict[str, Any]] = [
    {"tree": "best-first", "gamma": 3, "nodes": 12},
    {"tree": "dynamic", "gamma": 4, "nodes": 3},
    {"tree": "static", "gamma": 2, "nodes": 7},
    {"gamma": "auto"},
]


def test_every_tokenizer_meets_every_tree() -> None:
    met = [param.values for param in dealt(TREES)]
    every = {(kind, str(size)) for kind in TOKENIZERS for size in TREES}
    for place in (0, 1):
        assert {(values[place], str(values[2])) for values in met} == every


@pytest.mark.thorough
@pytest.mark.parametrize(("target", "draft", "size"), dealt(TREES))
def test_trees_give_the_targets_own_text(
    drafts: dict[str, Path], target: str, draft: str, size: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, and sampled with a seed; no tree is larger than asked for, and most pairs really branch."""
    proposed: list[Draft] = []
    propose = CrossDrafter.propose

    def watched(drafter: CrossDrafter, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        found = propose(drafter, contexts, gammas)
        proposed.extend(found)
        return found

    monkeypatch.setattr(CrossDrafter, "propose", watched)
    values = {"max_new_tokens": NEW, "ignore_eos": True} | size
    for params in (SamplingParams(**values), SamplingParams(**values, temperature=1.0, seed=5)):
        done, wanted, llm = both(target, f"model:{drafts[draft]}", params)
        assert [out.token_ids for out in done] == [out.token_ids for out in wanted]
    if target == draft:
        return  # no other tokenizer: a tree of the model's own
    for each in proposed:
        each.validate(len(llm.tokenizer))
        assert len(each) <= size.get("nodes", 15)
        assert each.tree.depth <= (size["gamma"] if "nodes" in size else 16)
    if {target, draft}.isdisjoint({"characters", "word pieces"}) and size.get("nodes", 0) > 3:
        assert any(len(set(each.tree.parents)) < len(each) for each in proposed)


class Knowing:
    """In the place of the draft model: it knows the text, in tokens of its own, and counts what it is asked.

    Args:
        text: whole, prompt included.
        lexicon: of the draft's tokenizer.
        wrong: every so many-th token is another one; 0: none is.
    """

    forward_seconds = prefill_seconds = 0.0

    def __init__(self, text: str, lexicon: Lexicon, wrong: int = 0, most: int = 10_000) -> None:
        self.text, self.lexicon, self.wrong = text.encode(), lexicon, wrong
        self.model = SimpleNamespace(max_context=most)
        self.longest = 0

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        return [self._one(context, gamma) for context, gamma in zip(contexts, gammas, strict=True)]

    def rewind(self, context: Context, length: int) -> None:
        assert 0 <= length <= len(context.tokens)

    def inherit(self, context: Context, earlier: Context) -> None:
        pass

    def move(self, source: Context, destination: Context, length: int) -> None:
        assert source.tokens[:length] == destination.tokens[:length]

    def end(self, context: Context) -> None:
        pass

    def _one(self, context: Context, gamma: int) -> Draft:
        """Its text; in a tree with a wrong token beside each that is right."""
        found = self._chain(context, gamma)
        if context.nodes <= gamma:
            return found
        tokens, parents = [], []
        for depth, token in enumerate(found.tree.tokens):
            place = 2 * (depth - 1) if depth else -1
            tokens += [token, next(i for i, piece in enumerate(self.lexicon.pieces) if piece and i != token)]
            parents += [place, place]
        draws = tuple(Draw(node, "knowing", None, 0.8 if node % 2 == 0 else 0.1) for node in range(len(tokens)))
        return Draft(TokenTree(tuple(tokens), tuple(parents)), "point_mass", draws)

    def _chain(self, context: Context, gamma: int) -> Draft:
        self.longest = max(self.longest, len(context.tokens))
        said = self.lexicon.bytes_of(context.tokens).removeprefix(b" ")
        place = self.text.find(said)
        assert place >= 0, "the draft reads another text than the target wrote"
        rest = self.text[place + len(said) :].decode(errors="ignore")
        tokens = self.lexicon.encode("a" + rest)[len(self.lexicon.encode("a")) :][:gamma]
        if self.wrong:
            tokens = [7 if (len(context.tokens) + i) % self.wrong == 0 else t for i, t in enumerate(tokens)]
        draws = tuple(Draw(node, "knowing", None, 0.5) for node in range(len(tokens)))
        return Draft(TokenTree.chain(tokens), "point_mass", draws)


@pytest.mark.parametrize("wrong", [0, 5])
@pytest.mark.parametrize("draft", ["byte-level", "SentencePiece", "unigram"])
def test_a_draft_that_knows_the_text_is_believed(draft: str, wrong: int) -> None:
    """Its text comes as the target's tokens, bytes and all."""
    target = pair("byte-level", 0)
    text = "the fox 😀 山へ the end. " * 6
    tokens = target[1](text)["input_ids"]
    lexicon = Lexicon.of(TOKENIZERS[draft]())
    inner = Knowing(text, lexicon, wrong)
    cross = CrossDrafter(inner, TOKENIZERS[draft](), target[1])  # type: ignore[arg-type]
    theirs = Lexicon.of(target[1])
    accepted = drafted = 0
    for place in range(3, len(tokens) - 6):
        context = _context(tokens[:place])
        (found,) = cross.propose([context], [4])
        assert context.tokens == tokens[:place], "the committed tokens have changed"
        found.validate(len(target[1]))
        right = 0
        while right < len(found) and found.tree.tokens[right] == tokens[place + right]:
            right += 1
        accepted, drafted = accepted + right, drafted + len(found)
        if not wrong:
            assert theirs.bytes_of(tokens[place:]).startswith(theirs.bytes_of(found.tree.tokens)), "another text"
        assert all(draw.prob is not None and 0 < draw.prob <= 1 for draw in found.draws)
    # Where the draft's text ends, its last tokens would be others if it went on.
    assert accepted > (0.2 if wrong else 0.85) * drafted


@pytest.mark.parametrize("draft", ["byte-level", "SentencePiece", "unigram"])
def test_of_a_tree_every_path_is_said(draft: str) -> None:
    """The right text is in it, as the target's own tokens, and is believed more than what stands beside it."""
    _, tokenizer = pair("byte-level", 0)
    text = "the fox 😀 山へ the end. " * 4
    tokens = tokenizer(text)["input_ids"]
    inner = Knowing(text, Lexicon.of(TOKENIZERS[draft]()))
    cross = CrossDrafter(inner, TOKENIZERS[draft](), tokenizer)  # type: ignore[arg-type]
    right = branching = 0
    places = range(3, len(tokens) - 6)
    for place in places:
        context = _context(tokens[:place])
        context.params, context.nodes = SamplingParams(tree="best-first", nodes=12), 12
        (found,) = cross.propose([context], [4])
        found.validate(len(tokenizer))
        assert len(found) <= 12
        assert found.tree.depth <= 4
        below: dict[int, float] = {}
        for draw, parent in zip(found.draws, found.tree.parents, strict=True):
            assert draw.prob is not None
            below[parent] = below.get(parent, 0.0) + draw.prob
        assert max(below.values()) < 1.001, "chances of siblings add up to more than certainty"
        nodes = [-1]
        for token in tokens[place : place + 3]:
            nodes += [node for node in found.tree.children(nodes[-1]) if found.tree.tokens[node] == token]
        right += len(nodes) == 4
        branching += len(found.tree.children(-1)) > 1
        cross.end(context)
    assert right > 0.7 * len(places)
    assert branching > 0.5 * len(places)


def test_one_request_that_grows_is_drafted_as_a_fresh_one() -> None:
    """What the drafter keeps from round to round changes nothing, wherever the rounds cut the text."""
    _, tokenizer = pair("byte-level", 0)
    text = "the fox 😀 山へ the end, and 12345 went on. " * 4
    tokens = tokenizer(text)["input_ids"]
    lexicon = Lexicon.of(unigram_tokenizer())
    cross = CrossDrafter(Knowing(text, lexicon), unigram_tokenizer(), tokenizer)  # type: ignore[arg-type]
    growing = _context(tokens[:5])
    for place in range(5, len(tokens) - 8, 3):
        growing.tokens[:] = tokens[:place]
        (kept,), (fresh,) = (cross.propose([context], [5]) for context in (growing, _context(tokens[:place])))
        assert kept.tree == fresh.tree


@pytest.mark.parametrize("draft", ["byte-level", "unigram", "characters"])
def test_what_the_drafts_cache_keeps_is_right(draft: str) -> None:
    """A real cache from round to round, tokens taken back and asked for again, against a fresh one each round."""
    model, tokenizer = pair(draft, 1)
    packed = build_runner(model, compile=False)
    _, theirs = pair("SentencePiece" if draft == "byte-level" else "byte-level", 0)
    cross = CrossDrafter(ModelDrafter(packed, packed.vocab_size), tokenizer, theirs)
    tokens = theirs("the fox 😀 abc xyz. あい! the river was there and went. " * 3)["input_ids"]
    growing = _context(tokens[:5])
    with torch.no_grad():
        for place in (5, 6, 8, 9, 13, 14, 20, 21, 22, 23, 30, 44, 45, 46, 60):
            growing.tokens[:] = tokens[:place]
            fresh = _context(tokens[:place])
            (kept,), (new,) = (cross.propose([context], [5]) for context in (growing, fresh))
            assert kept.tree == new.tree, place
            assert [draw.prob for draw in kept.draws] == pytest.approx([draw.prob for draw in new.draws], rel=1e-3)
            cross.end(fresh)


def test_a_draft_with_a_short_context_forgets_the_beginning() -> None:
    """It reads on with what fits, and proposes to the end."""
    _, tokenizer = pair("byte-level", 0)
    text = "".join(f"{i} foxes went to the sea. " for i in range(40))
    tokens = tokenizer(text)["input_ids"]
    inner = Knowing(text, Lexicon.of(character_tokenizer(" 0123456789abcdefghijklmnopqrstuvwxyz.")), most=64)
    cross = CrossDrafter(inner, character_tokenizer(" 0123456789abcdefghijklmnopqrstuvwxyz."), tokenizer)  # type: ignore[arg-type]
    context = _context(tokens[:4])
    for place in range(4, len(tokens) - 8, 2):
        context.tokens[:] = tokens[:place]
        (found,) = cross.propose([context], [2])
        assert found.tree.tokens[:1] == tuple(tokens[place : place + 1])
    assert 32 <= inner.longest <= 64


def test_the_drafts_end_is_the_targets_end() -> None:
    _, tokenizer = pair("byte-level", 0)
    lexicon = Lexicon.of(unigram_tokenizer())

    class Ending(Knowing):
        def _one(self, context: Context, gamma: int) -> Draft:
            found = [*super()._one(context, gamma).tree.tokens, 1][:gamma]
            return Draft.chain(found, "ending")

    cross = CrossDrafter(Ending("the fox", lexicon), unigram_tokenizer(), tokenizer, stop_ids=(1,))  # type: ignore[arg-type]
    tokens = tokenizer("the")["input_ids"]
    (found,) = cross.propose([_context(tokens)], [8])
    assert found.tree.tokens == (*tokenizer(" fox")["input_ids"], tokenizer.eos_token_id)
    (found,) = cross.propose([_context(tokens, stop_ids=frozenset())], [8])
    assert found.tree.tokens == tuple(tokenizer(" fox")["input_ids"])


def _context(tokens: Sequence[int], stop_ids: frozenset[int] = frozenset({0})) -> Context:
    return Context(0, list(tokens), SamplingParams(), "greedy", RequestNoise(0), stop_ids)


def test_the_users_draft_model_is_as_it_was(drafts: dict[str, Path]) -> None:
    """Its weights, its settings and its tokenizer's answers."""
    from sakiyomi.model_executor.loading import load_model

    loaded = load_model(drafts["unigram"])
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    settings, text = loaded.model.config.to_dict(), loaded.tokenizer("the fox")["input_ids"]
    both("byte-level", f"model:{drafts['unigram']}", SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    again = load_model(drafts["unigram"])
    assert all(value.equal(before[name]) for name, value in again.model.state_dict().items())
    assert again.model.config.to_dict() == settings
    assert loaded.tokenizer("the fox")["input_ids"] == text


@pytest.mark.thorough
def test_requests_together_and_a_conversation(drafts: dict[str, Path]) -> None:
    """Places in the draft's cache are taken over, and free in the end."""
    llm = LLM(pair("byte-level", 0), f"model:{drafts['unigram']}", compile=False, max_batch=2)
    alone = plain("byte-level")
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, gamma=3)
    texts = ["the fox", "abc", "おじいさんは", "a smile 😀"]
    assert [o.token_ids for o in llm.generate(texts, params)] == [o.token_ids for o in alone.generate(texts, params)]
    with llm.conversation() as talk:
        prompt = llm.tokenizer("the fox")["input_ids"]
        for _ in range(3):
            out = talk.generate(prompt, params)
            assert out.token_ids == alone.generate([prompt], params)[0].token_ids
            prompt = [*prompt, *out.token_ids, *llm.tokenizer(" and")["input_ids"]]
    cache = llm.draft.model.cache  # type: ignore[union-attr]
    assert len({cache.take() for _ in range(2)}) == 2, "a place was not given back"


def test_a_tokenizer_that_does_not_say_its_text_is_refused(drafts: dict[str, Path]) -> None:
    model, _ = pair("byte-level", 0)
    numbers = SimpleNamespace(eos_token_id=None, bos_token_id=None, decode=lambda ids, **_: "")
    with pytest.raises(UnsupportedError, match=r"tokenizers differ.*target has no get_vocab"):
        LLM((model, numbers), f"model:{drafts['unigram']}", compile=False)


def test_a_draft_with_too_few_rows_for_its_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "short", tiny_llama(200), byte_fallback_tokenizer())
    with pytest.raises(UnsupportedError, match=r"rows for 200 tokens"):
        LLM(pair("byte-level", 0), f"model:{folder}", compile=False)
