"""A draft model that guesses several tokens a pass: the text stays the target's, the guesses are those of the masks."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import VOCAB
from read_ahead import NEW, PROMPTS, TOKENIZER, check_trees, drafted, llm_over, others, params, texts
from sakiyomi import LLM, InputError
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.build import build_runner
from toys import save_model, tiny_llama

MASK = VOCAB - 3
SIZES: list[dict[str, Any]] = [
    {"gamma": 4, "tree": "chain"},
    {"gamma": 5, "tree": "best-first", "nodes": 12},
    {"gamma": 5, "tree": "ddtree", "nodes": 12},
    {"gamma": 3, "tree": "static", "nodes": 9},
    {"tree": [1, 3, 2, 1]},
    {"gamma": "auto"},
]


@cache
def target() -> Any:
    return tiny_llama(vocab=VOCAB, seed=3)


@cache
def draft() -> Any:
    """Somewhat like the target, so that some guesses are right."""
    model = tiny_llama(vocab=VOCAB, seed=3)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data += 0.02 * torch.randn(weight.shape, generator=generator)
    model.config.pard_token = MASK
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("pard"), draft(), TOKENIZER)


def llm_of(spec: str, **options: Any) -> LLM:
    return llm_over(target(), spec, **options)


@torch.no_grad()
def guessed(tokens: list[int], count: int, mask: int = MASK, ahead: int = 0) -> list[int]:
    """The chain behind a text, from one pass of the draft model itself over the text and its masks."""
    ids = torch.tensor([tokens + [mask] * (count - 1 + ahead)])
    found: list[int] = draft()(input_ids=ids).logits[0, -count:].argmax(-1).tolist()
    return found


def test_guesses_are_those_of_the_masks(folder: Path) -> None:
    """And a mask too many, or another token as mask, would be noticed."""
    done = drafted(llm_of(str(folder)))
    assert len(done) > NEW
    assert not others(done, guessed)
    for wrong in ({"mask": 2}, {"ahead": 1}):
        assert others(done, partial(guessed, **wrong)) > len(done) / 2


def test_one_pass_a_round() -> None:
    drafter = ModelDrafter(build_runner(draft(), compile=False), VOCAB, mask=MASK)
    out = LLM((target(), TOKENIZER), drafter, compile=False).generate(PROMPTS[:1], params(gamma=5, tree="chain"))[0]
    assert out.token_ids == texts(target())[0][0]
    assert 0 < drafter.passes <= out.stats.rounds
    assert out.stats.drafted > 3 * drafter.passes


@pytest.mark.few(2)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_trees(size: dict[str, Any], folder: Path) -> None:
    """Greedy as transformers has it, sampled as without a draft."""
    accepted = check_trees(llm_of(f"model:{folder}"), target(), size)
    assert size.get("gamma") == "auto" or accepted > 5


@pytest.mark.skipif(native() is None, reason="traced passes are of the compiled kernels")
def test_traced_and_merged(folder: Path) -> None:
    llm = llm_of(f"model:{folder}+suffix", compile="auto")
    for _ in range(2):
        assert [out.token_ids for out in llm.generate(PROMPTS, params(gamma=4))] == texts(target())[0]


def test_a_mask_that_is_no_token(tmp_path: Path) -> None:
    model = tiny_llama(vocab=VOCAB)
    model.config.pard_token = VOCAB + 9
    with pytest.raises(InputError, match=f"pard_token.*{VOCAB + 9}"):
        llm_of(f"model:{save_model(tmp_path, model, TOKENIZER)}")
