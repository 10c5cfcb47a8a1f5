"""How many threads compute where other programs want the processors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sakiyomi.core import threads
from sakiyomi.core.threads import EVERY, LONG, SELDOM, ThreadGovernor, begin_with, govern_threads
from system_files import machine_files


class Machine:
    """A clock, and trials that are long where more threads than there is room for take part."""

    def __init__(self, room: int) -> None:
        self.room, self.now, self.trials = room, 1.0, 0

    def trial(self, count: int) -> float:
        assert torch.get_num_threads() == count
        self.trials += 1
        return LONG / 10 if count <= self.room else 3 * LONG

    def run(self, governor: ThreadGovernor, seconds: float) -> int:
        end = self.now + seconds
        while self.now < end:
            governor.check()
            self.now += 0.01
        return torch.get_num_threads()


@pytest.fixture(autouse=True)
def _eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    monkeypatch.setattr(threads, "_chosen", [])
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setattr(threads, "_local", threading.local())
    monkeypatch.setattr(threads, "_others", lambda count: 100)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    yield
    torch.set_num_threads(before)


def governed(room: int) -> tuple[Machine, ThreadGovernor]:
    machine = Machine(room)
    return machine, ThreadGovernor(machine.trial, lambda: machine.now)


def test_a_quiet_machine_is_left_alone_and_seldom_asked() -> None:
    machine, governor = governed(8)
    assert machine.run(governor, 10) == 8
    assert machine.trials <= 10 / EVERY + 1


@pytest.mark.parametrize(("room", "kept"), [(1, 1), (2, 2), (4, 4), (7, 4)])
def test_threads_that_wait_are_given_up_until_there_is_room(room: int, kept: int) -> None:
    machine, governor = governed(room)
    assert machine.run(governor, 3) == kept
    before = machine.trials
    machine.run(governor, 10 * SELDOM)
    assert torch.get_num_threads() == kept and machine.trials - before < 40 + 2 * 10 * SELDOM / EVERY * (kept > 1)
    machine.room = 8
    assert machine.run(governor, SELDOM + 1) == 8


def test_one_other_program_costs_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_others", lambda count: 1)
    machine, governor = governed(7)
    assert machine.run(governor, 3) == 7


def test_one_long_trial_is_no_reason() -> None:
    machine, governor = governed(8)
    seconds = iter([3 * LONG] + [LONG / 10] * 100)
    governor._trial = lambda count: next(seconds)
    assert machine.run(governor, 5) == 8


def test_what_the_program_sets_counts() -> None:
    machine, governor = governed(8)
    machine.run(governor, 1)
    torch.set_num_threads(3)
    assert machine.run(governor, 2) == 3
    torch.set_num_threads(1)
    before = machine.trials
    assert machine.run(governor, 2) == 1 and machine.trials == before


def test_another_thread_begins_with_all_that_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not with what the first one was reduced to, which torch hands on."""
    machine, governor = governed(1)
    assert machine.run(governor, 3) == 1
    monkeypatch.setattr(threads, "_trial", lambda count: 0.0)
    found = []

    def work() -> None:
        monkeypatch.setattr(threads, "EVERY", 0.0)
        for _ in range(4):
            govern_threads()
            threads._local.governor._next = threads._local.governor._widen_at = 0.0
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [8]


@pytest.mark.parametrize(("torchs", "chosen"), [(8, 2), (4, 2), (3, 3), (16, 16)])
def test_only_a_number_of_torchs_own_is_lowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchs: int, chosen: int
) -> None:
    """Eight hyperthreads of four cores, in a container that may use two."""
    machine_files(tmp_path, siblings=["0,4", "1,5", "2,6", "3,7"] * 2, quota="200000 100000")
    monkeypatch.setattr(threads, "usable_cpus", lambda: frozenset(range(8)))
    assert begin_with(torchs, tmp_path) == torchs, "the environment has a number"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert begin_with(torchs, tmp_path) == chosen


def test_the_governor_begins_with_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "begin_with", lambda count: 5)
    machine, governor = governed(8)
    assert machine.run(governor, 10) == 5 and threads._chosen == [5]
    torch.set_num_threads(7)
    assert machine.run(governor, 1) == 7, "set by the program"


def test_a_trial_takes_no_time() -> None:
    assert 0 < min(threads._trial(1) for _ in range(5)) < LONG
