"""On a GPU that is not there: drafts, verification, policies and caches, each tensor where the others are."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from pretended_gpu import PLACE, pretended_gpu
from sakiyomi import LLM, SamplingParams
from sakiyomi.kernels import native

pytestmark = pytest.mark.skipif(native.native() is None, reason="the C++ kernels describe passes")
TEXT = "Once upon a time there was a little girl named Lily. She"
# Every operation passes Python here, so that the small model is the target where its own heads are not wanted.
SMALL = "tales-draft"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none", "target": SMALL},
    "draft model": {"draft": "tales-draft"},
    "Medusa heads": {"draft": "tales-medusa"},
    "EAGLE head": {"draft": "eagle:tales-eagle"},
    "early exit": {"draft": "early-exit:1", "target": SMALL},
    "on an evicted cache": {"draft": "self-evicted", "target": SMALL},
    "merged": {"draft": "model:tales-draft+suffix", "target": SMALL},
    "on another GPU": {"draft": "model:tales-draft[device=cuda:1]", "target": SMALL},
    "on the CPU": {"draft": "model:tales-draft[device=cpu]", "target": SMALL},
    "on two other GPUs": {
        "draft": "model:tales-draft[device=cuda:1]+model:tales-draft[device=cuda:2]",
        "target": SMALL,
    },
    "retaining heads": {"draft": "none", "cache": "locret:tales-retaining", "kv_budget": 700},
    "queries observed": {"draft": "tales-draft", "cache": "snapkv", "kv_budget": 700, "target": SMALL},
    "attention observed": {"draft": "none", "cache": "h2o", "kv_budget": 700, "target": SMALL},
    "blocks": {"draft": "none", "cache": "infllm", "kv_budget": 700, "target": SMALL},
    "quantized cache": {"draft": "tales-draft", "cache": "quant-4", "target": SMALL},
    "exact": {"draft": "none", "exact": True, "target": SMALL},
}


@cache
def by_the_cpu(target: str, cache: str, budget: int | None, temperature: float) -> tuple[int, ...]:
    llm = LLM(target, "none", dtype="float32", device="cpu", cache=cache, kv_budget=budget)
    return tuple(llm.generate(TEXT, params(temperature)).token_ids)


def params(temperature: float) -> SamplingParams:
    return SamplingParams(max_new_tokens=6, ignore_eos=True, gamma=3, temperature=temperature, seed=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("way", "temperature"), [*((way, 0.0) for way in WAYS), ("EAGLE head", 0.8), ("on another GPU", 0.8)]
)
def test_everything_lies_where_it_is_needed(way: str, temperature: float) -> None:
    options = {"target": "tales", **WAYS[way]}
    expected = by_the_cpu(options["target"], options.get("cache", "full"), options.get("kv_budget"), temperature)
    with pretended_gpu():
        llm = LLM(dtype="float32", device="cuda", **options)
        assert llm.target.device == PLACE
        out = llm.generate(TEXT, params(temperature))
        assert tuple(out.token_ids) == expected
        assert not llm.engine._speculation.broken
        assert options["draft"] == "none" or out.stats.drafted


@pytest.mark.thorough
def test_what_lies_apart_is_refused() -> None:
    with pretended_gpu():
        there, here = torch.ones(3, device=PLACE), torch.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            there + here
        with pytest.raises(RuntimeError, match=r"found \['cuda:0', 'cuda:1'\]"):
            there + there.to("cuda:1")
        with pytest.raises(RuntimeError, match="not supported"):
            there.numpy()
        there[1:] = here[:2] * 2
        assert there.cpu().tolist() == [1.0, 2.0, 2.0]
