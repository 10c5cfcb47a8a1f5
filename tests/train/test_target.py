"""The training loop: a tiny run end to end, resume, early finish, growth, checkpoints, schedule."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.train import checkpoint, loop
from sakiyomi.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from sakiyomi.train.llama import grow, new_llama
from sakiyomi.train.progress import Schedule
from sakiyomi.train.target import train_target
from sakiyomi.train.tokenizer import load_tokenizer, train_tokenizer
from train_toys import losses, stop_at, target_config


@pytest.mark.thorough
def test_a_tiny_target_from_end_to_end(tmp_path: Path, pictures: None) -> None:
    config = target_config(tmp_path, tokens=40 * 128, note=("Stories, no licence needed",))
    summary = train_target(config, "sakiyomi train target --out x")
    assert summary["finished"]
    assert summary["steps"] == 40
    assert summary["tokens"] == 40 * 128
    seen = losses(config.loop.out)
    assert sum(seen[-5:]) < 0.8 * sum(seen[:5])
    folder = Path(summary["model"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.config.num_hidden_layers == 2
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    output = model.generate(
        **tokenizer("Once upon", return_tensors="pt", return_token_type_ids=False), max_new_tokens=4
    )
    assert output.shape[0] == 1
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    assert card["held_out"]["stories"]["bits_per_character"] > 0
    assert card["notes"] == ["Stories, no licence needed"]
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "sakiyomi train target --out x" in text
    assert "bits per character" in text
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_tokenizer_folder_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="there is no tokenizer folder"):
        load_tokenizer(tmp_path / "none")


def test_the_card_names_no_picture_that_was_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pictures: None
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    summary = train_target(target_config(tmp_path, tokens=128))
    text = Path(summary["model"], "README.md").read_text(encoding="utf-8")
    assert "loss.png" not in text
    assert "the curve was not drawn: `pip install 'sakiyomi[train]'`" in text
    assert summary["loss_curve"] is None


@pytest.mark.thorough
@pytest.mark.parametrize("growing", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, growing: bool
) -> None:
    changes: dict[str, Any] = {"layers": 4, "first_layers": 2, "grow_at": 0.5} if growing else {}
    whole = target_config(tmp_path, out=str(tmp_path / "whole"), **changes)
    assert train_target(whole)["finished"]
    cut = target_config(tmp_path, out=str(tmp_path / "cut"), **changes)
    for step in (3, 6):
        with monkeypatch.context() as patch:
            stop_at(patch, step, signal.SIGINT)
            summary = train_target(
                cut if step == 3 else target_config(tmp_path, out=cut.loop.out, resume=True, **changes)
            )
        assert not summary["finished"]
        assert summary["step"] == step + 1
    assert train_target(target_config(tmp_path, out=cut.loop.out, resume=True, **changes))["finished"]
    assert losses(cut.loop.out) == losses(whole.loop.out)
    weights = [load_checkpoint(Path(out) / "checkpoints")["model"] for out in (cut.loop.out, whole.loop.out)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["signal", "file"])
def test_an_early_finish_anneals_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    # Half an hour of budget; the early decay of a 40th of a second ends it after a step or a few.
    config = target_config(
        tmp_path, tokens=0, minutes=30.0, finish_minutes=0.0005, layers=4, first_layers=2, grow_at=0.9
    )
    if way == "signal":
        stop_at(monkeypatch, 3, signal.SIGUSR1)
    else:
        Path(config.loop.out).mkdir()
        Path(config.loop.out, "finish").touch()
    summary = train_target(config)
    assert summary["finished"]
    assert summary["steps"] < 30
    assert summary["layers"] == 4, "an early finish grows at once"
    assert not Path(config.loop.out, "finish").exists()


def test_pauses_are_charged_one_minute_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**9, 600))
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(clock))
    summary = train_target(target_config(tmp_path, tokens=0, minutes=3.0))
    assert summary["steps"] == 3
    monkeypatch.setattr(loop.time, "monotonic", time.monotonic)


def test_measuring_takes_a_twentieth_of_the_time_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step and a measurement take as long here; without a limit there would be one after each step."""
    monkeypatch.setattr(loop.time, "monotonic", partial(next, itertools.count()))
    config = target_config(tmp_path, tokens=60 * 128, eval_minutes=0.0)
    assert train_target(config)["steps"] == 60
    progress = load_checkpoint(Path(config.loop.out, "checkpoints"))["progress"]
    assert 2 < len(progress["held_out"]) <= 2 + progress["seconds"] * loop.MEASURING
    monkeypatch.setattr(loop.time, "monotonic", time.monotonic)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch's own modules, and of tensors it looks at
def test_compiled_layers_learn_as_eager_ones_do(tmp_path: Path) -> None:
    if not loop.compiler_found():
        pytest.skip("torch.compile finds no C++ compiler")
    seen = []
    for compiled in (False, True):
        config = target_config(tmp_path, out=str(tmp_path / str(compiled)), compile=compiled)
        assert train_target(config)["finished"]
        seen.append(losses(config.loop.out))
    # The same sums in another order, in bfloat16.
    assert seen[0] == pytest.approx(seen[1], rel=0.01)


def test_resume_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no checkpoint"):
        train_target(target_config(tmp_path, resume=True))


def test_checkpoints_are_whole_and_the_last_two_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, {"step": step})
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002.pt", "step-00000003.pt"]

    def half(state: object, file: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.torch, "save", half)
    with pytest.raises(LoadError, match=r"cannot write .*step-00000004.*disk full"):
        save_checkpoint(tmp_path, 4, {"step": 4})
    assert load_checkpoint(tmp_path)["step"] == 3
    assert not list(tmp_path.glob("*.partial"))
    checkpoints(tmp_path)[-1].write_bytes(b"broken")
    with pytest.raises(LoadError, match="step-00000003"):
        load_checkpoint(tmp_path)


def test_growth_keeps_the_function_and_names_every_source(tmp_path: Path) -> None:
    config = target_config(tmp_path)
    tokenizer = train_tokenizer(
        ["Once upon a time there was a cat. " * 5 + "Tom saw Mia and a big red ball."], 290, 128
    )
    torch.manual_seed(0)
    model = new_llama(config.sizes, tokenizer, layers=2, vocab=290, max_positions=128)
    deep, source = grow(model, 6)
    assert deep.config.num_hidden_layers == len(deep.model.layers) == 6
    nearest = [source[f"model.layers.{layer}.mlp.up_proj.weight"].split(".")[2] for layer in range(6)]
    assert nearest == ["0", "0", "1", "1", "1", "1"]
    assert set(source) == {name for name, _ in deep.named_parameters()}
    ids = torch.arange(40).view(1, 40)
    with torch.no_grad():
        plain, grown = model(ids).logits, deep(ids).logits
    assert torch.allclose(plain, grown, atol=1e-6)
    assert model.config.num_hidden_layers == 2


def test_schedule_warms_up_holds_and_decays_to_zero() -> None:
    schedule = Schedule(warmup_steps=4, decay_from=60, end=100)
    assert [schedule.scale(step, 0) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule.scale(9, 59.9) == 1.0
    assert schedule.scale(9, 80) == pytest.approx(0.5)
    assert schedule.scale(9, 100) == 0.0


def test_an_early_finish_bends_the_schedule_without_a_jump() -> None:
    schedule = Schedule(warmup_steps=1, decay_from=60, end=100)
    schedule.finish(30, 10)
    assert (schedule.decay_from, schedule.end) == (30, 40)
    schedule = Schedule(warmup_steps=1, decay_from=60, end=100)
    before = schedule.scale(9, 70)
    schedule.finish(70, 15)
    assert schedule.scale(9, 70) == pytest.approx(before)
    assert schedule.scale(9, 85) == pytest.approx(0.0)
    schedule.finish(80, 1000)
    assert schedule.end == 85, "a decay is never made longer"


def test_wrong_settings_name_their_flag(tmp_path: Path) -> None:
    for changes, flag in (
        ({"step_tokens": 100}, "--step-tokens"),
        ({"minutes": 0.0, "tokens": 0}, "--minutes"),
        ({"heads": 3}, "--heads"),
        ({"layers": 3, "first_layers": 2}, "--first-layers"),
        ({"row_tokens": (512,), "step_tokens": 512}, "--row-tokens"),
        ({"out": ""}, "--out"),
        ({"text": ()}, "--text"),
    ):
        with pytest.raises(InputError, match=flag):
            target_config(tmp_path, **changes)
