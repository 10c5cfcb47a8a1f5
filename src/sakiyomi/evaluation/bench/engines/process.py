"""Runs another engine in a process: requests and answers are lines of JSON, a failure is one error."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.evaluation.bench.engines.registry import OtherEngine
from sakiyomi.evaluation.bench.runner import TimedRun

WORKER = Path(__file__).with_name("worker.py")
STARTING, WRITING = 900.0, 600.0
"""Seconds that an engine may take to open a model (it may have to convert it first), and for one run."""
_SHOWN = 300  # characters of what a process that failed said last


def python_of(engine: OtherEngine, folder: Path) -> Path:
    """The Python of an engine's environment.

    Raises:
        UnsupportedError: there is none; with the commands that make it.
    """
    place = folder / engine.key
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        raise UnsupportedError(f"not installed; {_how(engine, place)}")
    return python


def _how(engine: OtherEngine, place: Path) -> str:
    return f"python3 -m venv {place} && {place}/bin/pip install {engine.packages}"


class EngineProcess:
    """Another engine with an open model, until ``close``.

    Args:
        engine: which one.
        folder: of the environments.
        task: what it is to open, see the ``start`` of its file: model, draft (None: plain), kind, gamma, threads,
            context (tokens of one request), requests (most at once), folder (for converted models).
        starting, writing: seconds after which the process is ended.

    Attributes:
        settings: what it runs with, as it says.
        drafted: it has a draft model.

    Raises:
        UnsupportedError: there is no environment, or the engine cannot open the model; with how to install it.
    """

    def __init__(
        self,
        engine: OtherEngine,
        folder: Path,
        task: Mapping[str, Any],
        *,
        starting: float = STARTING,
        writing: float = WRITING,
    ) -> None:
        python = python_of(engine, folder)
        self.drafted, self._writing = task["draft"] is not None, writing
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        # Alone with its packages, and a group of its own: an engine may start processes that have to end with it.
        self._process = subprocess.Popen(
            [str(python), "-I", str(WORKER), str(engine.file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            encoding="utf-8",
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": str(task["threads"])},
        )
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.settings: dict[str, Any] = self._ask({"task": dict(task)}, "settings", starting)["settings"]
        except BaseException as error:
            self.close()
            if isinstance(error, UnsupportedError):
                how = _how(engine, folder / engine.key)
                raise UnsupportedError(f"{error} (it is installed by {how})") from error
            raise

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def run(self, batches: Sequence[Sequence[Sequence[int]]], tokens: int) -> TimedRun:
        """Write so many tokens after each prompt; the prompts of a batch at once, the batches one after the other.

        Raises:
            UnsupportedError: the engine cannot do this; or the process died, answered nonsense or was too slow, and has
                been ended.
        """
        found = self._ask({"batches": batches, "tokens": tokens}, "outputs", self._writing)
        try:
            outputs = tuple(tuple(map(int, text)) for text in found["outputs"])
            run = TimedRun(float(found["seconds"]), sum(map(len, outputs)), outputs)
        except (KeyError, TypeError, ValueError) as error:
            raise self._ended(f"answered {_short(json.dumps(found))}, which has no outputs and seconds") from error
        if [len(text) for text in outputs] != [tokens] * sum(map(len, batches)):
            raise self._ended(f"wrote {run.tokens} tokens where {tokens} for each of {sum(map(len, batches))} were due")
        return run

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._log):
            if file is not None and not file.closed:
                file.close()

    def _listen(self) -> None:
        with self._process.stdout as lines:  # type: ignore[union-attr]
            for line in lines:
                self._answers.put(line)
        self._answers.put("")

    def _ask(self, request: Mapping[str, Any], wanted: str, seconds: float) -> dict[str, Any]:
        try:
            stdin: Any = self._process.stdin
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = self._answers.get(timeout=seconds)
        except (BrokenPipeError, ValueError):  # it is gone, or has been ended before
            line = ""
        except queue.Empty:
            raise self._ended(f"gave no answer within {seconds:g} seconds") from None
        if not line:
            code = self._process.wait()
            how = f"died by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise self._ended(f"{how}{self._said()}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise self._ended(f"answered {_short(line)}, which is no JSON") from None
        if not isinstance(answer, dict) or (wanted not in answer and "error" not in answer):
            raise self._ended(f"answered {_short(line)}, which has no {wanted}")
        if "error" in answer:
            raise UnsupportedError(_short(str(answer["error"])))
        return answer

    def _said(self) -> str:
        """The end of what it printed."""
        if self._log.closed:
            return ""
        self._log.seek(0)
        text = _short(self._log.read().decode(errors="replace"), last=True)
        return f": {text}" if text else ""

    def _ended(self, why: str) -> UnsupportedError:
        self.close()
        return UnsupportedError(why)


def _short(text: str, *, last: bool = False) -> str:
    line = " ".join(text.split())
    return line[-_SHOWN:] if last else line[:_SHOWN]
