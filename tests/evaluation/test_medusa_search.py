"""`sakiyomi tune medusa` and `sakiyomi export medusa`: what they find, keep and refuse."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import rows as script
from medusa_toys import new_heads
from sakiyomi import InputError, LoadError
from sakiyomi.cli import app
from sakiyomi.drafters.medusa_heads.formats import read_heads, write_heads
from sakiyomi.drafters.medusa_heads.ranks import Ranks
from sakiyomi.drafters.medusa_heads.tuned import FILE, read_tuned
from sakiyomi.evaluation.bench import suites
from sakiyomi.evaluation.bench.config import BenchConfig
from sakiyomi.evaluation.tuning.config import TuneConfig
from sakiyomi.evaluation.tuning.medusa_search import search, tune
from sakiyomi.model_executor.loading import load_model
from train_toys import story_file, tiny_target


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, heads for it in two kinds, and held-out text."""
    folder = tmp_path_factory.mktemp("tune")
    target = tiny_target(folder)
    model = load_model(str(target), dtype="float32", device="cpu").model
    write_heads(new_heads(model, heads=2), folder / "heads", base=str(target))
    write_heads(new_heads(model, heads=2, own=True), folder / "own", base=str(target))
    story_file(folder / "valid.jsonl", count=6, seed=1)
    return folder


@pytest.fixture
def heads(place: Path, tmp_path: Path) -> Path:
    """Heads of the test's own: what it finds is kept in their folder."""
    return Path(shutil.copytree(place / "heads", tmp_path / "heads"))


def config_of(place: Path, **changes: Any) -> TuneConfig:
    given = {"heads": str(place / "heads"), "target": str(place / "tiny"), "valid": str(place / "valid.jsonl")}
    return TuneConfig(**(given | {"prompts": 3, "new_tokens": 24, "max_nodes": 7} | changes))


@pytest.mark.thorough
def test_the_best_size_is_kept_beside_the_heads(place: Path, heads: Path) -> None:
    (heads / FILE).write_text("{", encoding="utf-8")  # a damaged one of before is in nobody's way
    found = tune(config_of(place, heads=str(heads)))
    tuned = read_tuned(heads)
    assert tuned is not None
    rows = found["table"]
    assert rows[0]["nodes"] == 0
    assert rows[0]["speedup"] == 1.0
    assert found["best"] == max(rows, key=lambda row: row["tokens_per_second"])
    assert (tuned.heads, tuned.nodes) == (max(1, found["best"]["heads"]), max(1, found["best"]["nodes"]))
    assert set(found["measured"]) == {"plain", "fixed", "default", "texts", "equal"}
    assert found["measured"]["plain"]["tau"] == 1.0
    assert found["conditions"]["heads_ms"] > 0
    json.dumps(found)


def test_the_search_weighs_tau_against_rounds() -> None:
    """Wider trees where rows are free, none where a round with heads costs more than it brings."""
    rng = np.random.default_rng(0)
    ranks = Ranks([rng.choice([0, 1, 2, 9], size=(400, 3), p=[0.6, 0.2, 0.1, 0.1]).astype(np.int16)])
    free = search(ranks, {0: 1.0, 3: 1.01, 7: 1.02, 15: 1.03})
    assert max(free, key=lambda row: row["tokens_per_second"])["nodes"] == 15
    dear = search(ranks, {0: 1.0, 3: 3.0, 7: 5.0, 15: 9.0})
    assert max(dear, key=lambda row: row["tokens_per_second"])["nodes"] == 0
    for row in free[1:]:
        assert row["tau"] == pytest.approx(row["expected_tau"], rel=0.12), "ranks of this table are independent"
        assert row["heads"] <= 3


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"valid": ""}, InputError, "valid is not given"),
        ({"prompts": 0}, InputError, "prompts is 0"),
        ({"new_tokens": 1}, InputError, "new_tokens is 1"),
        ({"max_nodes": 63}, InputError, "no tree has more than 31"),
        ({"heads": "/nowhere"}, LoadError, "no such folder"),
        ({"valid": "/nowhere.jsonl"}, LoadError, "nowhere"),
        ({"new_tokens": 125}, InputError, "no prompt of 8 to"),
    ],
)
def test_what_cannot_be_tuned(changes: dict[str, Any], kind: type[Exception], words: str, place: Path) -> None:
    with pytest.raises(kind, match=words):
        tune(config_of(place, **changes))
    assert not (place / "heads" / FILE).exists()


@pytest.mark.thorough
def test_the_commands(place: Path, heads: Path) -> None:
    given = {name: value for name, value in dataclasses.asdict(config_of(place)).items() if value and name != "heads"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    arguments = ["tune", "medusa", str(heads), *flags, "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "tokens_per_second" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["file"].endswith(FILE)
    for name in ("heads", "own"):
        out = place / f"vllm-{name}"
        done = CliRunner().invoke(
            app, ["export", "medusa", str(place / name), str(out), "--target", str(place / "tiny")]
        )
        assert done.exit_code == 0, done.output
        assert read_heads(out).format == "vllm"
    merged = place / "merged"
    arguments = ["export", "medusa", str(place / "heads"), str(merged), "--format", "merged", "--target"]
    assert CliRunner().invoke(app, [*arguments, str(place / "tiny")]).exit_code == 0
    assert torch.equal(
        load_file(merged / "model.safetensors")["medusa_head.1.0.linear.weight"],
        read_heads(place / "heads").heads.weights[0, 1],
    )
    alone = CliRunner().invoke(app, ["export", "medusa", str(place / "heads"), str(place / "x"), "--format", "merged"])
    assert alone.exit_code == 2
    again = CliRunner().invoke(app, [*arguments, str(place / "tiny")])
    assert again.exit_code == 2
    assert "not an empty folder" in str(again.exception or again.output) + again.output


@pytest.mark.thorough
def test_bench_rows(place: Path) -> None:
    config = BenchConfig(
        target=str(place / "tiny"),
        draft=f"model:{place / 'tiny'}",
        heads=str(place / "own"),
        dtype="float32",
        prompts=str(place / "valid.jsonl"),
        count=2,
        repeats=1,
        max_new_tokens=12,
        prompt_tokens=16,
        compile=False,
    )
    found = suites.measure("medusa", config, rows=script.ROWS)
    names = [line["name"] for line in found.lines]
    assert names[:4] == ["T=0: plain", "T=0: draft model", "T=0: medusa", "T=0: medusa+suffix+ngram"]
    assert len(names) == 12
    assert all(line["equal"] for line in found.lines[:4])
    assert found.lines[0]["draft_mb"] == 0 < found.lines[2]["draft_mb"]
    found = suites.measure("typical", config)
    assert found.lines[0]["TV"] == found.lines[1]["TV"] == 0
    assert all(0 < line["TV"] < 1 for line in found.lines[2:])
    assert "lossy" in found.notes[-1]
    with pytest.raises(InputError, match="give their folder with --heads"):
        suites.run(dataclasses.replace(config, heads=None, rows=("typical",)))
