"""Processes that work together: whatever ends one of them is one error, and nobody is waited for in vain."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from sakiyomi.core.errors import InputError, WorkerError
from sakiyomi.core.peers import Peers, launched, start


def ends(peers: Peers, how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "later":
        peers.greet("")
        raise InputError("a file is gone")
    raise InputError("there is no file")


class Unknown:
    """Of a module that another process cannot import."""

    def __reduce__(self) -> Any:
        return (__import__, ("there_is_no_such_module",))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", "by signal SIGKILL"),
        ("refused", "with: there is no file"),
        (Unknown(), "with exit code 1"),
    ],
)
def test_one_that_cannot_begin_is_not_waited_for(how: Any, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    peers = start(2, ends, how)
    with pytest.raises(WorkerError, match=rf"^process 1 of 2 \(counted from 0\) ended {said}; try again$"):
        peers.greet("try again")
    peers.end()
    assert capfd.readouterr().err.count("Error") == (how is not None and not isinstance(how, str))


@pytest.mark.thorough
def test_one_that_ends_later_says_why() -> None:
    peers = start(2, ends, "later")
    peers.greet("")
    assert str(peers.ended("try again")) == "process 1 of 2 (counted from 0) ended with: a file is gone; try again"
    peers.end()


def test_a_process_alone_was_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched() is None
