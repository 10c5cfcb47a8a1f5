"""What is refused before a run begins: its settings, its files, its folder, and what an earlier run left there."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.train import target
from sakiyomi.train.commands import TrainTarget
from sakiyomi.train.data import parse_text
from sakiyomi.train.draft import train_draft
from sakiyomi.train.target import load_or_train_tokenizer, train_target
from train_toys import draft_config, stop_at, story_file, target_config, tiny_target


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Writes beyond `limit` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainTarget:
    """A run that was stopped at step 4, to be resumed."""
    config = target_config(tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGINT)
        assert not train_target(config)["finished"]
    return config.changed(resume=True)


def test_an_earlier_runs_checkpoints_are_not_overwritten(cut: TrainTarget) -> None:
    folder = Path(cut.loop.out, "checkpoints")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError, match=r"earlier run at step 4; continue with --resume, or choose another --out"):
        train_target(cut.changed(resume=False, tokens=2 * 128))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 64}, "hidden is 64, and the run in .* was begun with 32"),
        ({"layers": 4}, "layers is 4, and the run in .* was begun with 2"),
        ({"minutes": 1.0, "tokens": 0}, "minutes is 1.0, and the run in .* was begun with 75.0"),
        ({"tokens": 16 * 128}, "tokens is 2048"),
        ({"decay_share": 0.9}, "decay_share is 0.9"),
        ({"warmup_steps": 9}, "warmup_steps is 9"),
        ({"muon_lr": 0.1}, "muon_lr is 0.1"),
        ({"adam_lr": 0.1}, "adam_lr is 0.1"),
        ({"vocab": 299}, "vocab is 299"),
        ({"seed": 3}, "seed is 3"),
    ],
)
def test_a_run_is_resumed_as_it_began(cut: TrainTarget, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train_target(cut.changed(**changes))


def test_what_the_model_does_not_depend_on_may_change(cut: TrainTarget, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    Path(cut.loop.out).rename(moved)
    free = {"name": "x", "note": ("y",), "save_minutes": 1.0, "eval_minutes": 1.0, "log_seconds": 1.0, "eval_tokens": 9}
    summary = train_target(cut.changed(out=str(moved), **free))
    assert summary["finished"]
    assert (summary["name"], summary["notes"]) == ("x", ["y"])


def test_a_run_is_resumed_with_its_own_command_and_text(cut: TrainTarget, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="another command"):
        train_draft(draft_config(tmp_path, tiny_target(tmp_path), out=cut.loop.out, resume=True))
    story_file(Path(cut.text.text[0]), count=61)
    with pytest.raises(LoadError, match="their text has changed"):
        train_target(cut)


def test_a_kept_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    config = target_config(tmp_path)
    Path(config.loop.out).mkdir()
    load_or_train_tokenizer(config, [parse_text(spec) for spec in config.text.text])
    with pytest.raises(InputError, match=r"vocab is 299, and the tokenizer in .* has 300 pieces; give --vocab 300"):
        train_target(config.changed(vocab=299))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"heads": 0}, "heads"),
        ({"kv_heads": 0}, "kv-heads"),
        ({"hidden": 18, "heads": 6}, "heads"),
        ({"step_tokens": 0}, "step-tokens"),
        ({"row_tokens": ()}, "row-tokens"),
        ({"row_tokens": (32, -32)}, "row-tokens"),
        ({"threads": -1}, "threads"),
        ({"seed": -1}, "seed"),
        ({"minutes": float("nan")}, "minutes"),
        ({"minutes": float("inf")}, "minutes"),
        ({"decay_share": 1.5}, "decay-share"),
        ({"layers": 0}, "layers"),
    ],
)
def test_numbers_out_of_range_name_their_flag(tmp_path: Path, changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(InputError, match=f"set --{flag}$"):
        target_config(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"eval_prompts": 0}, "eval-prompts"),
        ({"temperatures": ()}, "temperatures"),
        ({"sample_share": 1.5}, "sample-share"),
        ({"cost": "cheap"}, "cost"),
        ({"cost": "0"}, "cost"),
        ({"cost": "inf"}, "cost"),
        ({"samples": 0, "prompts": ("a.txt",)}, "prompts"),
    ],
)
def test_numbers_of_a_draft_out_of_range_name_their_flag(tmp_path: Path, changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(InputError, match=f"set --{flag}$"):
        draft_config(tmp_path, tmp_path, **changes)


def test_missing_files_are_found_before_the_tokenizer_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "train_tokenizer", None)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": \n', encoding="utf-8")
    for changes, kind, message in (
        ({"valid": ("a=typo.txt",)}, LoadError, "typo.txt"),
        ({"valid": ("typo.txt",)}, InputError, "NAME=FILE"),
        ({"valid": (f"a={bad}",)}, LoadError, "line 2"),
        ({"text": ("typo.txt",)}, LoadError, "typo.txt"),
        ({"text": (f"{bad}@1:0",)}, InputError, "DECAY shares of the files of --text"),
    ):
        with pytest.raises(kind, match=message):
            train_target(target_config(tmp_path, **changes))


def test_out_must_be_a_folder_that_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match=r"README\.md', which is a file"):
        train_target(target_config(tmp_path, out=str(file)))
    assert file.read_text(encoding="utf-8") == "mine"
    with pytest.raises(LoadError, match=r"cannot write .*README\.md/deeper"):
        train_target(target_config(tmp_path, out=str(file / "deeper")))
    with pytest.raises(LoadError, match="cannot write /proc"):
        train_target(target_config(tmp_path, out="/proc/sakiyomi"))


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = target_config(tmp_path, tokens=128)
    with small_files(20_000), pytest.raises(LoadError, match=r"cannot write .*checkpoints.*File too large"):
        train_target(config)
    assert not list(Path(config.loop.out, "checkpoints").glob("*"))
    # The tokenizer is there, the checkpoint too: now the model does not fit.
    monkeypatch.setattr("sakiyomi.train.loop.save_checkpoint", lambda *_: None)
    with small_files(20_000), pytest.raises(LoadError, match=r"cannot write .*model.*too large"):
        train_target(config)
    draft = draft_config(tmp_path, tiny_target(tmp_path))
    with small_files(300), pytest.raises(LoadError, match=r"cannot write .*samples.jsonl.*: .*too large"):
        train_draft(draft)
