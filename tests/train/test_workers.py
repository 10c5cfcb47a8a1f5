"""Several processes are one run: the same losses, checkpoints that do not know how many there were, one error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from retrieval_rows import ANSWER, KNOWN
from retriever import answers_and_text
from sakiyomi.core.errors import InputError
from sakiyomi.core.peers import Peers
from sakiyomi.train import loop
from sakiyomi.train.checkpoint import load_checkpoint
from sakiyomi.train.commands import TrainMedusa
from sakiyomi.train.medusa import train_medusa
from sakiyomi.train.optim import Muon
from sakiyomi.train.target import train_target
from sakiyomi.train.workers import ALONE, started
from train_toys import losses, stories, story_file, target_config, tiny_target

GROWING: dict[str, Any] = {"layers": 4, "first_layers": 2, "grow_at": 0.5}


@pytest.mark.thorough
def test_two_are_the_same_run_as_one_and_go_on_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = target_config(tmp_path, out=str(tmp_path / "whole"), **GROWING)
    assert train_target(whole)["finished"]
    cut: dict[str, Any] = {"out": str(tmp_path / "cut"), **GROWING}
    with monkeypatch.context() as patch:
        original = loop.Loop._step

        def stepping(self: loop.Loop) -> float:
            if self.progress.step == 5:
                os.kill(os.getpid(), signal.SIGINT)  # heard by the first alone
            return original(self)

        patch.setattr(loop.Loop, "_step", stepping)
        summary = train_target(target_config(tmp_path, workers=2, **cut))
    assert not summary["finished"]
    assert summary["step"] == 6
    assert train_target(target_config(tmp_path, resume=True, **cut))["finished"]
    # In bf16 every process rounds its own part of a gradient; see the heads below for float32.
    assert losses(cut["out"]) == pytest.approx(losses(whole.loop.out), abs=2e-3)
    weights = [load_checkpoint(Path(out) / "checkpoints")["model"] for out in (cut["out"], whole.loop.out)]
    assert weights[0].keys() == weights[1].keys()


@pytest.mark.thorough
def test_in_float32_two_are_one_to_the_sixth_digit(tmp_path: Path) -> None:
    """Muon's iterations in bfloat16 would tell the order of a sum apart: losses differ by 1e-2 then."""
    settings: dict[str, Any] = {"tokens": 24 * 128, "precision": "no", "muon_lr": 0.05}
    one, two = (target_config(tmp_path, out=str(tmp_path / str(n)), workers=n, **settings) for n in (1, 2))
    for config in (one, two):
        assert train_target(config)["finished"]
    assert losses(two.loop.out) == pytest.approx(losses(one.loop.out), abs=1e-5)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_muon_is_that_of_torch(shape: tuple[int, int]) -> None:
    """In bfloat16 bit for bit; in float32 within what bfloat16 rounds."""
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape)) for _ in range(3)]
    for weight in made[1:]:
        weight.data.copy_(made[0].data)
    optimizers = [
        torch.optim.Muon([made[0]], lr=0.1, weight_decay=0.05, momentum=0.95),
        Muon([made[1]], 0.1, 0.05, torch.bfloat16),
        Muon([made[2]], 0.1, 0.05),
    ]
    for _ in range(4):
        grad = torch.randn(shape)
        for weight, optimizer in zip(made, optimizers, strict=True):
            weight.grad = grad.clone()
            optimizer.step()
    assert torch.equal(made[0], made[1])
    assert (made[0] - made[2]).abs().max() < 0.02
    assert not torch.equal(made[0], made[2])
    optimizers[1].load_state_dict(optimizers[0].state_dict())  # checkpoints of earlier versions


@pytest.mark.thorough
def test_heads_count_what_all_workers_count(tmp_path: Path) -> None:
    """Half of the positions, chosen among all; of chats some rows have few that count. Without rounding to bf16."""
    target, data = tiny_target(tmp_path), tmp_path / "chats.jsonl"
    chats = [
        [{"from": "human", "value": text[: 40 + 60 * (i % 3)]}, {"from": "gpt", "value": text[40:]}]
        for i, text in enumerate(stories(30))
    ]
    data.write_text("".join(json.dumps({"conversations": chat}) + "\n" for chat in chats), encoding="utf-8")

    def run(workers: int) -> tuple[list[float], list[list[float]]]:
        settings: dict[str, Any] = {"out": str(tmp_path / str(workers)), "target": str(target), "data": (str(data),)}
        settings |= {"valid": (f"stories={story_file(tmp_path / 'valid.jsonl', 6, 1)}",), "heads": 2, "tokens": 6 * 128}
        settings |= {"row_tokens": (32,), "step_tokens": 128, "warmup_steps": 2, "eval_prompts": 2, "lr": 0.01}
        settings |= {"compile": False, "threads": 1, "device": "cpu", "precision": "no", "positions": 0.5}
        assert train_medusa(TrainMedusa.of(**settings, workers=workers))["finished"]
        lines = (tmp_path / str(workers) / "heads.jsonl").read_text(encoding="utf-8").splitlines()
        return losses(settings["out"]), [json.loads(line)["loss"] for line in lines]

    alone, together = run(1), run(2)
    assert together[0] == pytest.approx(alone[0], abs=1e-5)
    assert np.array(together[1]) == pytest.approx(np.array(alone[1]), abs=2e-5)


def test_answers_of_all_workers_are_counted() -> None:
    """The mean over two workers is the loss of all rows, though one of them has most of the answers."""
    hidden, head = torch.randn(2, 6, 8), torch.randn(5, 8)
    labels = torch.randint(0, 5, (2, 6))
    roles = torch.tensor([[ANSWER, ANSWER, ANSWER, KNOWN, 0, 0], [ANSWER, KNOWN, KNOWN, KNOWN, KNOWN, KNOWN]])
    counts = torch.tensor([4.0, 10.0])
    whole = answers_and_text(0.3, hidden, head, labels, roles, counts)
    parts = [
        answers_and_text(0.3, hidden[row : row + 1], head, labels[row : row + 1], roles[row : row + 1], counts / 2)
        for row in range(2)
    ]
    assert float(sum(parts) / 2) == pytest.approx(float(whole), rel=1e-5)


def test_rows_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="4 rows of 32 tokens, which 3 workers cannot share evenly; set --step-tokens"):
        train_target(target_config(tmp_path, workers=3))
    given = Peers(0, 2, 2, torch.distributed.HashStore())
    with pytest.raises(InputError, match="workers is 3, and torchrun has started 2"), started(3, given, print):
        pass


TORCHRUN = """
import sys
import torch.distributed as dist
if sys.argv[1:] == ["connected"]:
    dist.init_process_group("gloo")
from sakiyomi.core.peers import launched
from sakiyomi.train.workers import started
import torch
with started(1, launched(), print) as workers:
    workers.connect()
    own = torch.tensor([1.0 + workers.number])
    first, second = torch.nn.Parameter(torch.full((2,), workers.number + 5.0)), torch.nn.Parameter(torch.ones(1))
    if workers.number:
        second.grad = torch.tensor([4.0])
    loss = workers.collect([first, second], own[0])
    workers.spread([first, second])
    found = [workers.told(float(own)), workers.mean(own).tolist(), workers.gathered(own).tolist(), first.tolist()]
    found += [workers.divisor(own - 1).tolist(), workers.part(6)]
    if workers.leads:
        found += [first.grad, second.grad.tolist(), float(loss)]
    sys.stdout.write(f"{workers.number} {found}\\n")  # in one piece: both write to one pipe
assert dist.is_initialized() is (sys.argv[1:] == ["connected"])
if dist.is_initialized():
    dist.destroy_process_group()  # else torch may abort at the end
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["", "connected"])
def test_torchrun_s_processes_find_each_other(how: str, tmp_path: Path) -> None:
    """Or have found each other before, as Ray's TorchTrainer has it: then they stay connected."""
    (tmp_path / "run.py").write_text(TORCHRUN, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "run.py", how]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    shared = "[[1.0], [1.5], [1.0, 2.0], [5.0, 5.0], [0.5], "
    assert sorted(done.stdout.splitlines()) == [
        f"0 {shared}slice(0, 3, None), None, [2.0], 1.5]",
        f"1 {shared}slice(3, 6, None)]",
    ]


def test_a_run_in_another_thread_hears_no_signals(tmp_path: Path) -> None:
    """As Ray's TorchTrainer runs it: Python takes handlers of signals in the main thread alone."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(train_target, target_config(tmp_path, tokens=2 * 128)).result()["finished"]


def test_alone_nothing_is_exchanged() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert ALONE.told(1.0, 2.0) == [1.0, 2.0]
    assert ALONE.part(5) == slice(0, 5)
    assert ALONE.divisor(torch.tensor([0, 3])).tolist() == [1.0, 3.0]
    assert ALONE.collect([weight], torch.tensor(2.0)) == 2.0
    assert weight.grad is None
