"""Sampled output: under the coupled rule a seed means one text, whatever drafts, how far ahead, and in what company.

Equal texts are asserted in fp32 on the CPU, where a row's rounding can flip a choice about once in a million tokens. A
failure means that noise is keyed by something else than (seed, request, position, token), or that a row was scored with
another history than the text's own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor, TypicalLogitsWarper

from architectures import VOCAB, greedy, model_of, prompt
from drafters import Branching, Fading, Noisy, Scripted, texts_of
from sakiyomi import LLM, InputError, SamplingParams
from text_drafters import KINDS, Wide, text_drafter
from toys import character_tokenizer, save_model

NEW = 30
PROMPTS = [prompt(5, 1), prompt(9, 2), prompt(2, 3)]
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
WARPS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "top-k": {"temperature": 1.5, "top_k": 12},
    "top-p": {"temperature": 2.0, "top_p": 0.8},
    "min-p": {"temperature": 2.0, "min_p": 0.05},
    "all": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalty": {"temperature": 2.0, "repetition_penalty": 1.5},
    "bias": {"temperature": 3.0, "logit_bias": {5: 4.0, 6: -100.0}, "bad_words": [[7], [8, 9]]},
    "processors": {
        "temperature": 2.0,
        "logits_processors": [NoRepeatNGramLogitsProcessor(2), TypicalLogitsWarper(0.9)],
    },
}


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True, "temperature": 1.0, "gamma": 3} | values))


def tokens_of(llm: LLM, prompts: Sequence[Sequence[int]], values: SamplingParams) -> list[list[int]]:
    done = llm.generate([list(tokens) for tokens in prompts], values)
    assert not llm.engine._speculation.broken, "the drafter raised"
    return [out.token_ids for out in done]


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = copy.deepcopy(model_of("llama"))
    with torch.no_grad():
        model.lm_head.weight.mul_(0.8)
        model.model.layers[1].mlp.up_proj.weight.mul_(1.05)
    return save_model(tmp_path_factory.mktemp("draft"), model, TOKENIZER)


@cache
def plain(warp: str, seed: int = 11) -> list[list[int]]:
    """The undrafted text of each prompt."""
    return tokens_of(llm("none"), PROMPTS, params(seed=seed, **WARPS[warp]))


@cache
def llm(kind: str, folder: Path | None = None) -> LLM:
    draft: Any = "none" if kind == "none" else f"model:{folder}"
    if kind not in ("none", "model"):
        kinds = {"tree": Branching, "noisy": Noisy, "fading": Fading, "always": Scripted, "never": Scripted}
        skill: Any = kind if kind in ("always", "never") else "sometimes"
        draft = kinds[kind](texts_of(PROMPTS, plain("plain")), skill, VOCAB)
    return LLM((model_of("llama"), TOKENIZER), draft, compile=False)


@pytest.mark.few(5)
@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("kind", ["always", "never", "tree", "noisy", "fading", "model"])
def test_one_seed_one_text(kind: str, gamma: int, draft_folder: Path) -> None:
    """For every drafter and gamma; the scripted ones know this very text, so that much of it is accepted."""
    done = llm(kind, draft_folder).generate(PROMPTS, params(seed=11, gamma=gamma, acceptance="coupled"))
    assert [out.token_ids for out in done] == plain("plain")
    if kind in ("always", "tree", "model"):
        assert all(out.stats.accepted > 3 for out in done)
    if kind == "always":
        assert all(out.stats.acceptance_rate == 1.0 for out in done)


@pytest.mark.parametrize("warp", ["plain", "top-k", "penalty"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_one_text_without_a_draft_model(kind: str, wide: bool, warp: str) -> None:
    """Prompts that end in the very text that the seed writes behind them, so that drafts are right now and then."""
    drafter = text_drafter(kind, VOCAB, [tokens + text for tokens, text in zip(PROMPTS, plain(warp), strict=True)])
    chosen: Any = Wide(drafter) if wide else drafter
    target = LLM((model_of("llama"), TOKENIZER), chosen, compile=False)
    done = target.generate(PROMPTS, params(seed=11, gamma=4, **WARPS[warp]))
    assert not target.engine._speculation.broken, "the drafter raised"
    assert [out.token_ids for out in done] == plain(warp)
    if kind == "tables":
        assert sum(out.stats.accepted for out in done) > 3


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_ratio_rule_repeats_itself_without_a_draft_model(kind: str) -> None:
    """What is proposed depends on the request's own text alone: same seed and gamma, same text, in any company."""
    prompts = [tokens * 3 for tokens in PROMPTS]
    target = LLM((model_of("llama"), TOKENIZER), text_drafter(kind, VOCAB, prompts), compile=False)
    values = params(seed=5, acceptance="ratio")
    first = tokens_of(target, prompts, values)
    assert tokens_of(target, prompts, values) == first
    assert tokens_of(target, prompts[:1], values) == first[:1]


@pytest.mark.parametrize("gamma", ["heuristic", "auto"])
def test_moving_gammas_do_not_move_the_text(gamma: str, draft_folder: Path) -> None:
    assert tokens_of(llm("model", draft_folder), PROMPTS, params(seed=11, gamma=gamma)) == plain("plain")


@pytest.mark.few(4)
@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("kind", ["always", "tree", "model"])
def test_warpers_see_each_rows_own_history(kind: str, warp: str, draft_folder: Path) -> None:
    """Penalties, bans and processors look at the text so far: for a node of a tree that is its own path. A row that
    were given another history would choose another token.
    """
    assert tokens_of(llm(kind, draft_folder), PROMPTS, params(seed=11, **WARPS[warp])) == plain(warp)


def test_the_warps_matter() -> None:
    """The ground under the test above: every option changes this text, so that a lost one would be seen."""
    texts = [tuple(map(tuple, plain(warp))) for warp in WARPS]
    assert len(set(texts)) == len(texts)


@pytest.mark.thorough
def test_a_seed_does_not_depend_on_the_batch(draft_folder: Path) -> None:
    """Request i of a list uses (seed, i): the first of three gets what it gets alone, whatever the others are."""
    for kind in ("none", "tree", "model"):
        target = llm(kind, draft_folder)
        together = tokens_of(target, PROMPTS, params(seed=5))
        assert tokens_of(target, PROMPTS[:1], params(seed=5)) == together[:1]
        assert tokens_of(target, [PROMPTS[0], PROMPTS[2]], params(seed=5))[0] == together[0]
        assert tokens_of(target, [PROMPTS[0]] * 2, params(seed=5)) != [together[0]] * 2
        for i, tokens in enumerate(PROMPTS):
            request = target.engine.add(tokens, params(seed=5), key=(i,))
            steps = []
            while target.engine.busy:
                steps += target.engine.step()
            assert [t for step in steps if step.request == request for t in step.token_ids] == together[i]


def test_more_requests_than_places(draft_folder: Path) -> None:
    """Who waits for a place gets the same text as who does not."""
    many = [prompt(3 + i, 20 + i) for i in range(7)]
    wide = LLM((model_of("llama"), TOKENIZER), f"model:{draft_folder}", compile=False)
    narrow = LLM((model_of("llama"), TOKENIZER), f"model:{draft_folder}", compile=False, max_batch=2)
    values = params(seed=3, max_new_tokens=12)
    assert tokens_of(narrow, many, values) == tokens_of(wide, many, values)


def test_samples_of_one_prompt(draft_folder: Path) -> None:
    """Sample j of request i uses (seed, i, j): samples differ, and are the same with and without a draft."""
    values = params(seed=8, n=4)
    plainly = llm("none").generate(PROMPTS[:2], values)
    drafted = llm("model", draft_folder).generate(PROMPTS[:2], values)
    texts = [[out.token_ids for out in samples] for samples in plainly]
    assert [[out.token_ids for out in samples] for samples in drafted] == texts
    assert all(len(samples) == 4 for samples in texts)
    assert len({tuple(tokens) for samples in texts for tokens in samples}) == 8


def test_seeds_differ_and_no_seed_is_a_new_one_each_time() -> None:
    texts = {tuple(tokens_of(llm("none"), PROMPTS[:1], params(seed=seed))[0]) for seed in (0, 1, 2**63, -1)}
    assert len(texts) == 4
    assert tokens_of(llm("none"), PROMPTS, params()) != tokens_of(llm("none"), PROMPTS, params())


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["noisy", "model", "always", "tree"])
def test_the_ratio_rule_repeats_itself_at_a_fixed_gamma(kind: str, draft_folder: Path) -> None:
    """Same seed, same drafter, same gamma: same text, in any company."""
    target = llm(kind, draft_folder)
    values = params(seed=5, acceptance="ratio")
    first = tokens_of(target, PROMPTS, values)
    assert tokens_of(target, PROMPTS, values) == first
    assert tokens_of(target, PROMPTS[:1], values) == first[:1]
    if kind in ("noisy", "model"):
        assert tokens_of(target, PROMPTS, params(seed=5, acceptance="ratio", gamma=1)) != first


@pytest.mark.thorough
def test_a_perfect_draft_is_never_refused(tmp_path: Path) -> None:
    """With p = q all rules accept everything; one refusal would show that the two sides warp differently or that the
    draft's rows are not what it drew from.
    """
    folder = save_model(tmp_path, model_of("llama"), TOKENIZER)
    target = LLM((model_of("llama"), TOKENIZER), f"model:{folder}", compile=False)
    for acceptance in ("ratio", "block", "coupled"):
        for warp in ("plain", "top-k", "top-p", "min-p", "penalty", "bias", "processors"):
            done = target.generate(PROMPTS, params(seed=2, acceptance=acceptance, gamma=4, **WARPS[warp]))
            assert [out.stats.acceptance_rate for out in done] == pytest.approx([1.0] * 3, abs=0.02), (acceptance, warp)


def test_which_rule_is_chosen(draft_folder: Path) -> None:
    """A seed means the coupled rule (its text depends on the seed alone); none, with a single drawn chain, block
    verification, whose drafts are those of the ratio rule.
    """
    target = llm("model", draft_folder)
    for values, rule in ((params(), "block"), (params(seed=1), "coupled"), (params(temperature=0.0), "greedy")):
        request = target.engine.add(PROMPTS[0], values)
        state = target.engine.find(request)
        assert state is not None
        assert (state.verifier.name, state.context.rule) == (rule, {"block": "ratio"}.get(rule, rule))
        target.engine.remove(request)


def test_traced_probabilities_are_the_models_own(draft_folder: Path) -> None:
    """``target_prob`` is what the target gave the token after temperature, from its own logits on that very text; a
    wrong row would hardly be near it.
    """
    from architectures import logits_after

    (out,) = llm("model", draft_folder).generate(PROMPTS[:1], params(seed=4, temperature=1.3, gamma=4))
    for i, entry in enumerate(out.trace):
        history = PROMPTS[0] + out.token_ids[:i]
        target = (logits_after(model_of("llama"), history) / 1.3).softmax(-1)[entry.token_id]
        assert entry.target_prob == pytest.approx(float(target), rel=1e-3, abs=1e-6)
        assert (entry.draft_prob is not None) == (entry.status == "accepted")


# ---------------------------------------------------------------- greedy text under transformers' own options


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["none", "always", "tree", "model"])
def test_a_repetition_penalty_as_in_transformers(kind: str, draft_folder: Path) -> None:
    """The history of a penalty is prompt and output, as there."""
    values = params(temperature=0.0, repetition_penalty=1.4)
    wanted = []
    for tokens in PROMPTS:
        ids = torch.tensor([tokens])
        done = model_of("llama").generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            repetition_penalty=1.4,
            pad_token_id=0,
        )
        wanted.append(done[0, len(tokens) :].tolist())
    assert wanted != [greedy(model_of("llama"), tokens, NEW) for tokens in PROMPTS]
    assert tokens_of(llm(kind, draft_folder), PROMPTS, values) == wanted


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["none", "always", "tree", "model"])
def test_no_pair_of_tokens_twice_as_in_transformers(kind: str, draft_folder: Path) -> None:
    """A processor of transformers gives what it gives there, and a banned word never comes."""
    wanted = []
    for tokens in PROMPTS:
        ids = torch.tensor([tokens])
        done = model_of("llama").generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            no_repeat_ngram_size=2,
            bad_words_ids=[[int(model_of("llama").vocab_size) - 1], [20, 21]],
            pad_token_id=0,
        )
        wanted.append(done[0, len(tokens) :].tolist())
    values = params(
        temperature=0.0, logits_processors=[NoRepeatNGramLogitsProcessor(2)], bad_words=[[VOCAB - 1], [20, 21]]
    )
    assert tokens_of(llm(kind, draft_folder), PROMPTS, values) == wanted


def test_a_bad_word_of_two_forms() -> None:
    """A bad word given as text is banned with and without a space before it."""
    text = plain("plain")[0]
    word = TOKENIZER.convert_ids_to_tokens(text[2])
    (out,) = llm("always").generate(PROMPTS[:1], params(seed=11, bad_words=[word]))
    assert text[2] not in out.token_ids


def test_options_about_tokens_that_do_not_exist_are_refused() -> None:
    for values in ({"logit_bias": {VOCAB: 1.0}}, {"bad_words": [[VOCAB]]}):
        with pytest.raises(InputError, match=str(VOCAB)):
            llm("none").generate(PROMPTS[:1], params(**values))
