"""The seam of attention backends: a further one is a class and a line in `BACKENDS`; and how few calls lie between.

The backend here touches no file but this one: each row alone, over its own path, in plain matrix products.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import sakiyomi
from architectures import CONFIGS, VOCAB, greedy, model_of, prompt
from sakiyomi import LLM, SamplingParams
from sakiyomi.cache.cross_attention import SourceCache
from sakiyomi.cache.slots import SlotCache
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.model_executor import attention
from sakiyomi.model_executor.attention.registry import AttentionBackend, BackendNeeds
from toys import tiny_tokenizer

PACKAGE = Path(sakiyomi.__file__).parent
TOKENIZER = tiny_tokenizer(VOCAB)
PROMPTS = [prompt(9), prompt(30, 1), prompt(4, 2)]


class RowByRow(AttentionBackend):
    """Attention with a loop over rows and heads."""

    operator: ClassVar[str] = "test_row_by_row"
    running: ClassVar[RowByRow | None] = None

    def __init__(self, needs: BackendNeeds, cache: SlotCache, sources: SourceCache | None = None) -> None:
        self.cache, self.count = cache, 0

    @classmethod
    def serves(cls, needs: BackendNeeds) -> bool:
        return not (needs.evicts or needs.encoder)

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float, softcap: float, window: int) -> Tensor:
        own = RowByRow.running
        assert own is not None
        own.count += 1
        out = q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])
        group = q.shape[1] // k.shape[1]
        for i, (slot, first, rows, length, _) in enumerate(own.plan.table):
            keys, values = own.cache.keys[layer][slot], own.cache.values[layer][slot]
            keys[:, length : length + rows] = k[0, :, first : first + rows]
            values[:, length : length + rows] = v[0, :, first : first + rows]
            for row in range(rows):
                path = own.plan.path(i, row)
                seen = [*range(int(path[0])), *path.tolist()][-window if window else 0 :]
                for head in range(q.shape[1]):
                    scores = (keys[head // group, seen] @ q[0, head, first + row]) * scaling
                    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                    out[0, first + row, head] = scores.softmax(0) @ values[head // group, seen]
        return out

    def begin(self, plan: BatchPlan, size: int) -> None:
        RowByRow.running, self.plan, self.count = self, plan, 0

    def calls(self) -> int:
        return self.count


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BACKENDS", [RowByRow, *attention.BACKENDS])


@pytest.mark.few(2)
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "gpt2"])
def test_a_registered_backend_writes_the_same_text(name: str) -> None:
    assert name in CONFIGS
    model = model_of(name)
    llm = LLM((model, TOKENIZER), "prompt-lookup", compile=False)
    assert isinstance(llm.target.backend, RowByRow)
    done = llm.generate(PROMPTS, SamplingParams(max_new_tokens=16, ignore_eos=True, gamma=3))
    assert [out.token_ids for out in done] == [greedy(model, tokens, 16) for tokens in PROMPTS]
    assert sum(out.stats.drafted for out in done)


@pytest.mark.usefixtures("registered")
def test_what_it_does_not_serve_goes_to_the_next() -> None:
    llm = LLM((model_of("llama"), TOKENIZER), "none", cache="streaming", kv_budget=40, chunk_size=16, compile=False)
    assert not isinstance(llm.target.backend, RowByRow)


@pytest.mark.parametrize("draft", ["none", "prompt-lookup"])
def test_few_frames_lie_between_generate_and_the_forward(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate`, `Engine.complete`, `.step`, for prompts `Prefill.run`, `ModelRunner.score`, `.run`."""
    llm = LLM((model_of("llama"), TOKENIZER), draft, compile=False)
    forward, seen = llm.target.module.forward, []

    def watched(**given: Any) -> Any:
        frames = traceback.extract_stack()
        own = [frame.name for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
        seen.append(own)
        return forward(**given)

    monkeypatch.setattr(llm.target.module, "forward", watched)
    llm.generate(PROMPTS[:1], SamplingParams(max_new_tokens=8, ignore_eos=True, gamma=2))
    outer, inner = ("generate", "complete", "step"), ("score", "run")
    assert [tuple(frames) for frames in seen[:1]] == [(*outer, "run", *inner)]
    assert {tuple(frames) for frames in seen[1:]} == {(*outer, *inner)}
