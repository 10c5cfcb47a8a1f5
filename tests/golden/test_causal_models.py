"""What `sakiyomi models` says of transformers' causal classes is what happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import causal_models
from causal_models import ENCODERS, KINDS, outcome, refusal, rows
from sakiyomi.model_executor.loading.families import NO_TEXT

VERSION, *TABLE = rows()
BY_TYPE = {row["type"]: row for row in TABLE}
SAMPLE = [
    "arcee", "bart", "ctrl", "cwm", "dbrx", "exaone_moe", "gemma4_text", "git", "laguna", "marian", "moshi", "roberta",
    "rwkv", "seed_oss", "xlm",
]  # fmt: skip


def test_every_class_has_a_row() -> None:
    """Of the version that the table names; a newer one has classes that nobody has run."""
    import transformers

    if transformers.__version__ != VERSION["transformers"]:
        pytest.skip(f"the table is that of transformers {VERSION['transformers']}")
    assert {row["type"]: row["class"] for row in TABLE} == KINDS


def test_nothing_is_wrong_and_most_runs() -> None:
    assert {row["state"] for row in TABLE} <= {"runs", "refused"}
    decoders = [row["state"] for row in TABLE if row["type"] not in ENCODERS]
    assert decoders.count("runs") >= 0.95 * len(decoders)
    assert all(row["why"] for row in TABLE if row["state"] != "runs")
    assert {row["type"] for row in TABLE if row["state"] == "refused"} <= set(NO_TEXT)


@pytest.mark.parametrize("kind", sorted(set(NO_TEXT) & set(KINDS)))
def test_what_writes_no_text_is_refused(kind: str) -> None:
    assert BY_TYPE[kind]["why"] == refusal(kind) != "it is not refused"


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", SAMPLE)
def test_a_sample(kind: str) -> None:
    assert outcome(kind) == BY_TYPE[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(SAMPLE)))
def test_all_others(kind: str) -> None:
    assert outcome(kind) == BY_TYPE[kind]


def test_a_wrong_text_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_models.architectures, "greedy", lambda model, tokens, count: [3] * count)
    monkeypatch.setattr(causal_models, "uncached", lambda model, tokens: [4] * causal_models.NEW)
    assert outcome("arcee")["state"] == "wrong"


def test_rows_of_another_version_are_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A few types run with another version would give the whole table its name."""
    table = tmp_path / "models.jsonl"
    before = json.dumps({"transformers": "5.0.0"}) + "\n" + json.dumps({"type": "blt"}) + "\n"
    table.write_text(before, encoding="utf-8")
    monkeypatch.setattr(causal_models, "TABLE", table)
    monkeypatch.setattr(causal_models, "PAGE", tmp_path / "models.md")
    monkeypatch.setattr(causal_models, "rows", lambda: rows(table))
    with pytest.raises(ValueError, match=r"that of .*5\.0\.0.* run all types"):
        causal_models.main(["blt"])
    assert table.read_text(encoding="utf-8") == before
    monkeypatch.setattr(causal_models, "VERSION", {"transformers": "5.0.0"})
    causal_models.main(["blt"])
    head, row = rows(table)
    assert head == {"transformers": "5.0.0"} and row["state"] == "refused"
