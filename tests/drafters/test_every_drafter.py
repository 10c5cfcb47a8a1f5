"""Every name that ``draft=`` takes: greedy text is that of transformers, samples have the target's distribution, and
what cannot be meant is refused. A new drafter has a line in ``TOYS`` and one in ``REFUSED``.

The distribution is tested by fewer samples than in ``tests/statistical``, where the drafters have tests of their own: a
right drafter fails once in a million choices of the seed, which is fixed; one that tells a wrong distribution is found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from architectures import greedy
from assistant_toys import assistant_folder, new_assistant, new_target
from block_toys import deepspec_folder, new_block
from eagle_toys import new_head, speculators_folder
from medusa_toys import new_heads
from mtp_toys import new_toy, target_folder
from sakiyomi import LLM, SakiyomiError, SamplingParams
from sakiyomi.core.draft_specs import FORMS
from sakiyomi.core.tree import Draft
from sakiyomi.drafters.medusa_heads.formats import write_heads
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.build import build_runner
from statistical.harness import LEVEL, p_value
from toys import character_tokenizer, save_model, tiny_llama

V = 5
LENGTH = 3  # the token of the prompt's pass, a drafted one, and what follows it
SAMPLES = 1000
PROMPT = [3, 1, 4, 1, 3, 1, 2, 4, 3, 1, 4, 4, 3, 1]  # of which something is found again, with several continuations
TOKENIZER = character_tokenizer("abc")


@cache
def model(seed: int = 0, layers: int = 1) -> Any:
    return tiny_llama(vocab=V, layers=layers, dim=16, seed=seed, initializer_range=0.5)


def medusa(folder: Path) -> tuple[Any, str]:
    write_heads(new_heads(model(), heads=2, scale=0.3), folder)
    return model(), f"medusa:{folder}"


def eagle(folder: Path) -> tuple[Any, str]:
    speculators_folder(folder, new_head(model(), tokens=[0, 1, 2, 4], layers=(0, 0, 0), sharp=0.1))
    return model(), f"eagle:{folder}"


def block(folder: Path) -> tuple[Any, str]:
    deepspec_folder(folder, new_block(model(), sharp=0.3, seed=7, layers=(0, 0), size=3, anchored=True))
    return model(), f"block:{folder}"


def mtp(folder: Path) -> tuple[Any, str]:
    toy = new_toy("mimo", vocab_size=V, num_hidden_layers=1, hidden_size=16, num_attention_heads=2)
    toy.model.lm_head.weight.data *= 0.3
    target_folder(folder, toy, TOKENIZER)
    return toy.model, "mtp"


def assistant(folder: Path) -> tuple[Any, str]:
    target = new_target(vocab_size=V)
    target.lm_head.weight.data *= 0.3
    save_model(folder, target, TOKENIZER)
    return target, f"assistant:{assistant_folder(folder / 'assistant', new_assistant(target))}"


TOYS: dict[str, Callable[[Path], tuple[Any, str]]] = {
    "model": lambda folder: (model(), f"model:{save_model(folder, model(1), TOKENIZER)}"),
    "medusa": medusa,
    "eagle": eagle,
    "block": block,
    "mtp": mtp,
    "assistant": assistant,
    "self-int8": lambda _: (model(), "self-int8"),
    "self-int4": lambda _: (model(), "self-int4"),
    "self-evicted": lambda _: (model(), "self-evicted:64"),
    "early-exit": lambda _: (model(layers=2), "early-exit:1"),
    "oracle": lambda _: (model(), "oracle:0.6"),
    "prompt-lookup": lambda _: (model(), "prompt-lookup"),
    "suffix": lambda _: (model(), "suffix"),
    "ngram": lambda _: (model(), "ngram"),
    "recycle": lambda _: (model(), "recycle"),
}
"""A target and the spec of its draft, made in a folder; the target of "mtp" and "assistant" is written there, too."""

REFUSED = {
    "model": ("model:", "names no model"),
    "medusa": ("medusa:no/heads", "no such folder"),
    "eagle": ("eagle:no/head", "no such folder"),
    "block": ("block:no/drafter", "no such folder"),
    "mtp": ("mtp:no/layer", "no such folder"),
    "assistant": ("assistant:no/assistant", "no such folder"),
    "self-int8": ("self-int8:4", "takes nothing behind a colon"),
    "self-int4": ("self-int4:4", "takes nothing behind a colon"),
    "self-evicted": ("self-evicted:few", "names no number of pairs"),
    "early-exit": ("early-exit:first", "names no layer"),
    "oracle": ("oracle:1.5", "0 to 1"),
    "prompt-lookup": ("prompt-lookup:long", "prompt-lookup:long"),
    "suffix": ("suffix:no/folder/file", "no/folder"),
    "ngram": ("ngram:no/file", "no file"),
    "recycle": ("recycle:no/folder/file", "no/folder"),
}
"""A spec that cannot be met, and what its error says."""


def made(name: str, folder: Path) -> tuple[Any, LLM]:
    """The target of a drafter's toy, and an LLM of both."""
    target, spec = TOYS[name](folder)
    loaded = str(folder) if name in ("mtp", "assistant") else (target, TOKENIZER)
    return target, LLM(loaded, spec, dtype="float32", max_batch=41, strict=True)  # the oracle needs a place


def test_every_name_is_here() -> None:
    assert list(TOYS) == list(REFUSED) == list(FORMS)


@pytest.mark.parametrize("name", TOYS)
def test_greedy_text_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    target, llm = made(name, tmp_path)
    prompts = [PROMPT, PROMPT[:5]]
    done = llm.generate(prompts, SamplingParams(max_new_tokens=16, ignore_eos=True, gamma=3))
    assert [out.token_ids for out in done] == [greedy(target, prompt, 16) for prompt in prompts]
    assert sum(out.stats.drafted for out in done) > 0


@pytest.mark.parametrize("name", TOYS)
def test_passes_of_a_drafter_are_recorded(name: str, tmp_path: Path) -> None:
    """A head whose output is what it reads, since the target's own head follows, too."""
    if native() is None:
        pytest.skip("passes are recorded in the kernels")
    _, llm = made(name, tmp_path)
    if llm.draft is None or llm.draft.model is None:
        pytest.skip("it runs no model")
    llm.generate([PROMPT], SamplingParams(max_new_tokens=40, ignore_eos=True, gamma=3))
    assert llm.draft.model.mode == "recorded"


def p_of(llm: LLM, target: Any, rule: str) -> float:
    """Of the joint distribution of the first tokens, by chi-square."""
    values = {"max_new_tokens": LENGTH, "ignore_eos": True, "temperature": 1.0, "gamma": 2, "acceptance": rule}
    seen = np.zeros(V**LENGTH, dtype=np.int64)
    drafted = 0
    for seed in range(SAMPLES // 40):
        for out in llm.generate([PROMPT], SamplingParams(n=40, seed=seed, **values))[0]:
            drafted += out.stats.drafted
            seen[sum(token * V**i for i, token in enumerate(reversed(out.token_ids)))] += 1
    assert drafted > SAMPLES // 3
    joint = np.ones(1)
    for depth in range(LENGTH):
        texts = [PROMPT + list(text) for text in itertools.product(range(V), repeat=depth)]
        with torch.no_grad():
            rows = target(input_ids=torch.tensor(texts)).logits[:, -1].double().softmax(-1).numpy()
        joint = (joint[:, None] * rows).reshape(-1)
    p, distance = p_value(seen, joint / joint.sum())
    print(f"{llm.draft.name if llm.draft else ''}, {rule}: p = {p:.3g}, TV = {distance:.4f}")
    return p


@pytest.mark.parametrize("name", TOYS)
def test_samples_have_the_targets_distribution(name: str, tmp_path: Path) -> None:
    target, llm = made(name, tmp_path)
    # An oracle knows the text that a seed gives, and the ratio rule's text is not the seed's alone.
    assert p_of(llm, target, "coupled" if name == "oracle" else "ratio") > LEVEL


class Overconfident(ModelDrafter):
    """Broken: draws at temperature 1 and tells another distribution, as if it had drawn at temperature 2."""

    def propose(self, contexts: Any, gammas: Any) -> list[Draft]:
        drafts = super().propose(contexts, gammas)
        for draft in drafts:
            if draft.probs is not None:
                draft.probs.sqrt_().div_(draft.probs.sum(-1, keepdim=True))
        return drafts


def test_a_broken_drafter_is_found() -> None:
    """So many samples are enough to see it."""
    llm = LLM((model(), TOKENIZER), Overconfident(build_runner(model(1), max_slots=51), V), max_batch=50, strict=True)
    assert p_of(llm, model(), "ratio") < LEVEL


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_refused(name: str) -> None:
    spec, message = REFUSED[name]
    with pytest.raises(SakiyomiError, match=message):
        LLM((model(), TOKENIZER), spec)
