"""The tables of the article on Locret: systems as published, what fits, 4 bits, and heads of another model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sakiyomi.cache.policies import read_cache
from sakiyomi.cache.policies.base import View
from sakiyomi.core.errors import InputError, LoadError, UnsupportedError
from sakiyomi.evaluation.bench.long.config import LocretConfig
from sakiyomi.evaluation.bench.long.locret import run


@pytest.mark.thorough
def test_all_tables_come_from_one_measurement(tmp_path: Path) -> None:
    config = LocretConfig(
        tasks=("passkey",), lengths=("512",), count=1, seeds=("0",), chunk_size=128, memory=False, budget="1/2"
    )
    rows = {row.name: row for row in run(config, pictures=str(tmp_path))}
    assert list(rows) == ["fits", "long", "systems", "speed", "quantized", "combined"]
    systems = ["FullAttn", "InfLLM", "HF-2bits", "SirLLM", "MInference", "Locret"]
    assert [line["name"] for line in rows["systems"].lines] == systems == [line["name"] for line in rows["speed"].lines]
    # As published its blocks and beginnings are larger than this budget.
    assert [line["state"] for line in rows["systems"].lines] == ["", "refused", "", "", "", ""]
    fits = {line["name"]: line for line in rows["fits"].lines}
    assert fits["FullAttn"]["kv GB"] == 512 * 2 * 4 * 2 * 32 * 2 / 1e9  # layers, key heads, dims, bfloat16
    assert fits["InfLLM"]["elsewhere GB"] == fits["FullAttn"]["kv GB"]
    assert fits["HF-2bits"]["kv GB"] < fits["FullAttn-4bits"]["kv GB"] < fits["FullAttn"]["kv GB"]
    right = {line["name"]: line for line in rows["quantized"].lines}
    assert right["FullAttn"]["minus_delta"] == right["FullAttn"]["M"] - right["FullAttn"]["M-4bits"]
    assert rows["combined"].lines[0]["Combination"] is None and "--lococo" in rows["combined"].notes[0]
    assert list(tmp_path.glob("kept-locret*.png"))


def test_what_cannot_be_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"(read|score) .* values? in layer|heads"):
        run(LocretConfig(heads="tales-retaining"))
    with pytest.raises(InputError, match="none were published for 'retriever'"):
        LocretConfig(heads="official")
    with pytest.raises(InputError, match="no retaining heads are known for 'tales-draft'"):
        LocretConfig(target="tales-draft")
    with pytest.raises(InputError, match="settings is 'best'"):
        LocretConfig(settings="best")
    assert LocretConfig(target="microsoft/Phi-3-mini-128k-instruct", heads="official").heads_name.startswith("hyx21/")
    with pytest.raises(LoadError, match="no heads 'none'"):
        run(LocretConfig(heads="none"))


def test_published_settings_scale_with_the_budget() -> None:
    locret = read_cache("locret:retriever-retaining[paper]").policy
    assert locret is not None and locret.where == "prompt"
    assert (locret.beside, locret.last_of(6000), locret.least_of(6000)) == (100, 0, 2500)
    sirllm = read_cache("sirllm[paper,sinks=8]").policy
    assert sirllm is not None
    assert (sirllm.sinks, sirllm.last_of(17388), sirllm.positions) == (8, 1000, "reassigned")
    packing, sparse = read_cache("quant-2[paper]").packing, read_cache("minference[paper]").sparse
    assert packing is not None and packing.residual == 128
    assert (sparse.vertical, sparse.slash) == (1000, 6096)  # type: ignore[union-attr]
    with pytest.raises(InputError, match="add where=prompt"):
        read_cache("locret:retriever-retaining[beside=40]")
    for spec in ("h2o[paper]", "kvquant-2[paper]"):
        with pytest.raises(InputError, match="paper"):
            read_cache(spec)


def test_blocks_are_ranked_as_published() -> None:
    """By the product of mean query and mean representative, where the usual ranking takes the row that looks most."""
    generator = torch.Generator().manual_seed(1)
    policy = read_cache("infllm[block=4,representatives=2,ranking=mean]").policy
    assert policy is not None
    keys, queries = torch.randn(2, 16, 8, generator=generator), torch.randn(5, 2 * 3 * 8, generator=generator)
    scores = torch.rand(2, 16, generator=generator)
    view = View(
        layer=0, heads=slice(0, 2), all_heads=2, prompt=16, length=16, budget=8, new_count=16, moved=0,
        places=torch.arange(16).expand(2, -1), keys=keys, values=keys, observations=queries, neg_log_prob=None,
        previous_scores=scores[:, :0],
    )  # fmt: skip
    ranked = policy.rank(view, scores)
    wanted = []
    for block in range(4):
        total = 0.0
        for head in range(2):
            own = slice(4 * block, 4 * block + 4)
            best = scores[head, own].topk(2).indices
            mean = queries.view(5, 2, 3, 8)[:, head].mean((0, 1))
            total += float(mean @ keys[head, own][best].mean(0))
        wanted += [total] * 4
    torch.testing.assert_close(ranked, torch.tensor(wanted).expand(2, -1))
