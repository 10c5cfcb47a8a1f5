"""Drafts that learn to guess several tokens a pass: which rows see what, what is measured, and a run end to end."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sakiyomi import LLM, InputError, SamplingParams
from sakiyomi.core.checkpoint import read_json
from sakiyomi.core.outputs import Stats
from sakiyomi.model_executor.loading import load_model
from sakiyomi.train.acceptance import CHAIN, Continuations, measured
from sakiyomi.train.commands import TrainDraft
from sakiyomi.train.draft import train_draft
from sakiyomi.train.parallel import MaskedRows, mask_token, rank_parallel
from toys import tiny_llama
from train_toys import draft_config, losses, stop_at, tiny_target

COUNT, MASK = 5, 7


def parallel_config(folder: Path, target: Path, **changes: Any) -> TrainDraft:
    """Five tokens a pass."""
    return draft_config(folder, target, **({"parallel": COUNT, "cost": "measured", "samples": 0} | changes))


# ---------------------------------------------------------------- rows


@torch.no_grad()
@pytest.mark.parametrize("broken", ["", "places", "masks"])
def test_a_row_sees_what_it_will_when_drafts_are_wanted(broken: str) -> None:
    """Each mask gives what a pass over the text up to its token, and masks behind it, gives; wrong rows do not."""
    model: Any = tiny_llama()
    ids = torch.randint(8, 320, (2, 20), generator=torch.Generator().manual_seed(1))
    rows = MaskedRows.drawn(20, COUNT, np.random.default_rng(1))
    if broken == "places":
        rows.places = torch.arange(len(rows.places))
    elif broken == "masks":  # masks see those of other tokens, too
        rows._seen[..., 20:] |= rows.depths[20:] <= rows.depths[:, None]
    found = rows.read(model, ids, MASK)
    worst = 0.0
    for row in range(len(rows.depths)):
        depth = int(rows.depths[row])
        end = row + 1 if not depth else int(rows.places[row]) - depth + 1
        plain = torch.cat([ids[:, :end], ids.new_full((2, depth), MASK)], 1)
        expected = model.model(input_ids=plain).last_hidden_state[:, -1]
        worst = max(worst, float((found[:, row] - expected).abs().max()))
    assert (worst < 1e-4) != bool(broken)


def test_shares_of_masks_are_those_of_the_paper() -> None:
    rows = MaskedRows.drawn(1007, 8, np.random.default_rng(0))
    counts = torch.bincount(rows.depths).tolist()
    assert counts == [1007, 700, 490, 343, 240, 200, 200, 200]
    anchors = [set((rows.places - rows.depths)[rows.depths == depth].tolist()) for depth in range(8)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(anchors))
    assert int(rows.places.max()) < 1007


# ---------------------------------------------------------------- a run


@pytest.mark.thorough
def test_from_end_to_end(tmp_path: Path, pictures: None) -> None:
    """It learns, its measures are those of the engine, and its folder drafts at once, exactly."""
    target = tiny_target(tmp_path)
    config = parallel_config(tmp_path, target, tokens=40 * 64)
    summary = train_draft(config, "the command")
    steps = losses(config.loop.out)
    assert sum(steps[-8:]) < sum(steps[:8])
    folder = Path(summary["model"])
    assert read_json(folder / "config.json")["pard_token"] == 1  # the padding
    values = summary["held_out"]["stories"]
    assert {"position_1", f"position_{COUNT}", "tau_chain_4", "speedup_greedy", "tree_tau_sampled"} <= values.keys()
    assert "all draft tokens before it being right" in (folder / "README.md").read_text(encoding="utf-8")
    llm = LLM(config.target, f"model:{folder}", compile=False, strict=True, dtype="float32")
    prompts = [list(range(5, 25)), list(range(40, 60))]
    params = SamplingParams(max_new_tokens=40, gamma=CHAIN, tree="chain", ignore_eos=True)
    done = llm.generate(prompts, params)
    plain = LLM(config.target, "none", compile=False, dtype="float32").generate(prompts, params)
    assert [out.token_ids for out in done] == [out.token_ids for out in plain]
    texts = Continuations(prompts, [out.token_ids for out in done], [], 40, frozenset())
    draft = load_model(str(folder), dtype="float32", device="cpu").model
    found = measured(rank_parallel(draft, 1, COUNT, texts))
    assert found[f"tau_chain_{CHAIN}"] == pytest.approx(Stats.total(out.stats for out in done).tau)


@pytest.mark.thorough
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakiyomi.train.draft.worth", lambda *_: {})
    target = tiny_target(tmp_path)
    train_draft(parallel_config(tmp_path, target, out=str(tmp_path / "whole")))
    parts = parallel_config(tmp_path, target, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGINT)
        assert not train_draft(parts)["finished"]
    assert train_draft(parts.changed(resume=True))["finished"]
    assert losses(str(tmp_path / "parts")) == losses(str(tmp_path / "whole"))
    folders = (str(tmp_path / name / "model") for name in ("whole", "parts"))
    one, other = (load_model(folder, dtype="float32", device="cpu").model for folder in folders)
    named: dict[str, Tensor] = dict(other.named_parameters())
    assert all(torch.equal(weight, named[name]) for name, weight in one.named_parameters())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"row_tokens": (4,)}, "row_tokens is 4.*parallel 5"),
        ({"cost": "0.1"}, "cost is '0.1'.*with --parallel"),
        ({"gamma": 3}, "gamma is 3.*with --parallel"),
        ({"parallel": 1, "mask": 3}, "mask is 3.*without --parallel"),
        ({"mask": 300}, "mask is 300.*300 tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        train_draft(parallel_config(tmp_path, tiny_target(tmp_path), **wrong))


def test_masks_are_tokens_that_no_text_holds(tmp_path: Path) -> None:
    tokenizer = load_model(str(tiny_target(tmp_path)), dtype="float32", device="cpu").tokenizer
    assert mask_token(-1, tokenizer, 310) == 309
    assert mask_token(-1, tokenizer, 300) == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert mask_token(17, tokenizer, 300) == 17
    tokenizer.pad_token = tokenizer.eos_token
    with pytest.raises(InputError, match="set --mask"):
        mask_token(-1, tokenizer, 300)
