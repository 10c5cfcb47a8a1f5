"""A spinner for somebody who watches, one at a time; nothing for a pipe, and nothing for small models."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from sakiyomi import LLM
from sakiyomi.core import progress as module
from sakiyomi.core.progress import progress
from sakiyomi.kernels.native import PackedWeights
from toys import save_model, tiny_llama, tiny_tokenizer


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal; not a fixture, because pytest puts its own stderr in place before the test."""
    found = Screen()
    monkeypatch.setattr("sys.stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    # A command that ran in this process before shows the log there too.
    monkeypatch.setattr(logging.getLogger("sakiyomi"), "handlers", [])
    return found


def test_for_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress("working") as status:
        status.update("still working")
    assert pipe.getvalue() == ""


def test_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second spinner would write over the first one: that one says both."""
    screen = watched(monkeypatch)
    with progress("outside") as status:
        with progress("inside") as inner:
            assert inner is status
            assert status.status == "inside"
        assert status.status == "outside"
        with progress("small", size=1000):
            assert status.status == "outside"
    assert not module._shown
    assert "outside" in screen.getvalue()


def test_it_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    watched(monkeypatch)
    with pytest.raises(KeyboardInterrupt), progress("outside"), progress("inside"):
        raise KeyboardInterrupt
    assert not module._shown


@pytest.mark.thorough
@pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here")
def test_what_is_said_while_a_large_model_is_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "model", tiny_llama(), tiny_tokenizer())
    screen = watched(monkeypatch)
    LLM(str(folder), "none", compile=False)
    LLM(str(folder), "none", compile=False, quantize="int4")
    assert screen.getvalue() == "", "small ones are done at once"
    monkeypatch.setattr(module, "_LONG", 1000)
    LLM(str(folder), "none", compile=False, quantize="int8")
    said = screen.getvalue()
    assert "loading" in said and "quantizing" in said
