"""``exact=True``: not almost, but bit-equal output for every drafter, gamma, tree and batch, in fp32 and in bf16.

Compared are tokens and the bits of the best log probabilities at every place. Without it they differ, in bf16 so much
that tokens do (``test_it_makes_a_difference`` shows that these tests would see it). A failure means that some row's
numbers depend on what else was in its pass.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sakiyomi.kernels.native
from architectures import ALL, VOCAB, model_of, prompt
from drafters import Branching, Fading, Noisy, Scripted, texts_of
from sakiyomi import LLM, SamplingParams, UnsupportedError
from sakiyomi.kernels.native import PackedWeights
from toys import character_tokenizer, save_model

NEW = 16
PROMPTS = [prompt(21, 1), prompt(2, 2), prompt(9, 3), prompt(30, 4), prompt(5, 5)]
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=4)
COUPLED = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=4, temperature=0.9, top_p=0.95, seed=1)


@pytest.fixture(params=["compiled kernels", "plain torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernels the models of a test run on."""
    if request.param == "plain torch":
        monkeypatch.setattr(sakiyomi.kernels.native, "native", lambda: None)
    elif PackedWeights.create() is None:
        pytest.skip("the C++ kernels cannot be compiled here")
    return str(request.param)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = copy.deepcopy(model_of("llama"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.05)
    return save_model(tmp_path_factory.mktemp("draft"), model, TOKENIZER)


def of(name: str, dtype: torch.dtype) -> Any:
    return copy.deepcopy(model_of(name)).to(dtype)


def bits(llm: LLM, params: SamplingParams, chosen: Sequence[int] = range(len(PROMPTS))) -> list[Any]:
    """Tokens and log probabilities of each request."""
    done = llm.generate([PROMPTS[i] for i in chosen], params)
    assert not llm.engine._speculation.broken, "the drafter raised"
    return [(out.token_ids, [entry.top_logprobs for entry in out.trace]) for out in done]


def drafts(texts: list[list[int]], folder: Path | None) -> dict[str, Any]:
    known = texts_of(PROMPTS, texts)
    found: dict[str, Any] = {
        "always": Scripted(known, "always", VOCAB),
        "sometimes": Scripted(known, "sometimes", VOCAB),
        "tree": Branching(known, "always", VOCAB),
        "junk tree": Branching(known, "sometimes", VOCAB),
        "noisy": Noisy(known, "always", VOCAB),
        "fading": Fading(known, "always", VOCAB),
    }
    return found | ({"model": f"model:{folder}"} if folder is not None else {})


FEW = ("junk tree", "noisy")


def check(
    name: str, dtype: torch.dtype, gammas: Sequence[int], kinds: Sequence[str] = (), folder: Path | None = None
) -> None:
    """Everything drafted against plain decoding of one request at a time.

    Without ``kinds`` each of ``FEW`` is tried under one of the two rules, in bf16 under the one and in fp32 under the
    other: what draws a token does not know how wide the numbers were. Of three gammas a kind has one under each rule.
    """
    plain = LLM((of(name, dtype), TOKENIZER), "none", compile=False, exact=True)
    for rule, params in enumerate((GREEDY, COUPLED)):
        # One request at a time; the index in the list is part of the seed's key, so the others come later.
        wanted = bits(plain, params, [0])
        together = bits(plain, params)
        assert together[:1] == wanted, "plain decoding depends on the batch"
        known = drafts([tokens for tokens, _ in together], folder)
        for place, kind in enumerate(kinds or [FEW[(rule + (dtype == torch.float32)) % len(FEW)]]):
            llm = LLM((of(name, dtype), TOKENIZER), known[kind], compile=False, exact=True)
            for gamma in gammas if len(gammas) < 3 else [gammas[(place + rule) % 3]]:
                values = replace(params, gamma=gamma)
                assert bits(llm, values) == together, (kind, gamma, "batch of 5")
                assert bits(llm, values, [0]) == wanted, (kind, gamma, "alone")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_llama(dtype: torch.dtype, path: str, draft_folder: Path) -> None:
    if path == "plain torch":
        check("llama", dtype, (3,), ("always", "junk tree"))
    elif dtype == torch.bfloat16:
        check("llama", dtype, (1, 2, 5), ("always", "sometimes", "tree", "junk tree", "noisy", "fading"))
    else:
        check("llama", dtype, (1, 2, 5), ("always", "junk tree", "noisy", "model"), draft_folder)


OTHERS = ["mistral", "gemma2", "gpt2", "phi3", "olmo2"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str, path: str) -> None:
    """Windows, soft caps, biases, fused projections: each takes another way through the kernels. Of model, kernels and
    dtype every two meet: a model has one dtype in the compiled kernels and the other one in plain torch.
    """
    wide = (OTHERS.index(name) + (path == "plain torch")) % 2
    check(name, torch.float32 if wide else torch.bfloat16, (3,))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts(name: str, path: str) -> None:
    """The kernels sum each row that chose an expert alone; torch's own code does not."""
    if path == "plain torch":
        with pytest.raises(UnsupportedError, match="gathers rows by expert"):
            LLM((of(name, torch.bfloat16), TOKENIZER), "none", compile=False, exact=True)
    else:
        check(name, torch.bfloat16, (1, 3), ("always", "junk tree"))


@pytest.mark.parametrize("name", ["gpt_neox_japanese", "llama4"])
def test_what_cannot_be_exact_says_so(name: str, path: str) -> None:
    """Attention of its own, or experts in code of their own: bit-equal all the same, or refused with a remedy."""
    try:
        LLM((of(name, torch.bfloat16), TOKENIZER), "none", compile=False, exact=True)
    except UnsupportedError as error:
        assert "exact" in str(error)
    else:
        check(name, torch.bfloat16, (3,))


@pytest.mark.few(1)
def test_long_prompts_in_chunks(path: str) -> None:
    """Where the chunks of a prompt begin depends on the prompt alone, so that company does not matter."""
    model = of("mistral", torch.bfloat16)
    long = [prompt(100, 7), prompt(33, 8), prompt(70, 9)]
    llm = LLM((model, TOKENIZER), "none", compile=False, exact=True, chunk_size=32)
    together = [out.token_ids for out in llm.generate(long, GREEDY)]
    for tokens, expected in zip(long, together, strict=True):
        assert llm.generate([tokens], GREEDY)[0].token_ids == expected


@pytest.mark.few(1)
def test_requests_that_come_and_go(path: str) -> None:
    """A request's bits stay the same while others join and leave in the middle."""
    llm = LLM((of("llama", torch.bfloat16), TOKENIZER), "none", compile=False, exact=True, max_batch=3)
    expected = bits(llm, GREEDY, [0])[0][1]
    first = llm.engine.add(PROMPTS[0], GREEDY)
    got, others = [], []
    for number in range(200):
        if number % 5 == 1:
            others.append(llm.engine.add(PROMPTS[1 + number % 4], GREEDY))
        if number % 11 == 7:
            llm.engine.remove(others.pop(0))
        steps = [step for step in llm.engine.step() if step.request == first]
        got += [entry.top_logprobs for step in steps for entry in step.trace]
        if steps and steps[0].finish_reason is not None:
            break
    for request in others:
        llm.engine.remove(request)
    assert got == expected


def test_it_makes_a_difference() -> None:
    """The ground under these tests: without ``exact`` the numbers do depend on the pass, in the plain torch path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sakiyomi.kernels.native, "native", lambda: None)
        model = of("llama", torch.bfloat16)
        wanted = bits(LLM((model, TOKENIZER), "none", compile=False), GREEDY)
        draft = drafts([tokens for tokens, _ in wanted], None)["tree"]
        assert bits(LLM((model, TOKENIZER), draft, compile=False), GREEDY) != wanted


@pytest.mark.thorough
def test_every_architecture_can_be_exact(path: str) -> None:
    """Or says that it cannot; fp32, no draft, the self-test alone."""
    refused = []
    for name in ALL:
        try:
            LLM((model_of(name), TOKENIZER), "none", compile=False, exact=True)
        except UnsupportedError:
            refused.append(name)
    own = {"gptj"}
    experts = {"mixtral", "qwen3_moe", "deepseek_v3"} if path == "plain torch" else set()
    assert set(refused) <= own | experts | {"llama4"}
