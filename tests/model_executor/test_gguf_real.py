"""A GGUF file that others made: SmolLM2-135M-Instruct in Q4_1, see ``real_files``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from real_files import GGUF, real
from sakiyomi import LLM, SamplingParams
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.native import PackedEmbedding, PackedLinear, PackedWeights
from sakiyomi.model_executor.loading import load_model

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def file() -> Path:
    return real(GGUF)


def test_a_question_is_answered_from_its_template(file: Path) -> None:
    llm = LLM(str(file), "none")
    asked = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    ids = llm.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    (out,) = llm.generate([list(ids)], SamplingParams(max_new_tokens=40))
    assert "Paris" in out.text and out.finish_reason == "stop"
    layers = [module for module in llm.target.module.modules() if isinstance(module, PackedLinear | PackedEmbedding)]
    if PackedWeights.create() is not None:
        assert layers and all(layer.blocks is not None for layer in layers)


@pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here")
def test_logits_are_near_those_of_its_numbers(file: Path) -> None:
    """Rows in 8 bits: a hundredth of a bit a token."""
    whole, llm = load_model(file, dtype="float32"), LLM(str(file), "none")
    ids = whole.tokenizer("The fox went to the river, and saw " * 6)["input_ids"]
    with torch.no_grad():
        wanted = whole.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    runner = llm.target
    with runner.lock, runner.cache.lent(len(ids)) as slot:
        found = runner.score([SequenceRows(slot, 0, ids, prompt=True)]).logits.float().log_softmax(-1)
    assert float((wanted.exp() * (wanted - found)).sum(-1).mean()) < 0.01
