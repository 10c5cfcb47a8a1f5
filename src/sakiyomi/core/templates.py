"""Renders chat templates in a process of their own, whose time and memory are bounded."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any, NamedTuple

from sakiyomi.core.errors import InputError, LoadError

SECONDS = 5.0
"""CPU time that a template may take."""
MEMORY = 1 << 30
"""Bytes that the process may use."""


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    replies: IO[bytes]


class TemplateProcess:
    """Renders templates. The process starts with the first one, and again after a template has ended it.

    Threads may share it; they take turns.

    Args:
        seconds: of CPU time for one text.
        memory: bytes of the process.
    """

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self._seconds, self._memory = seconds, memory
        self._child: _Child | None = None
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """What a template writes.

        Args:
            template: in Jinja.
            values: by name; those that JSON does not have are written as their type.

        Raises:
            InputError: the template fails, or takes too much time or memory.
        """
        request = json.dumps([template, values], default=_named).encode() + b"\n"
        with self._lock:
            reply = self._answer(request) or self._answer(request)  # somebody else may have ended the process
        if not reply:
            raise self._exceeds(f"{self._memory >> 20} MiB")
        found: dict[str, str] = json.loads(reply)
        if "error" in found:
            raise InputError(f"the chat template fails ({found['error']}); give another one, or none for plain text")
        return found["text"]

    def _answer(self, request: bytes) -> bytes:
        """The answer to a request; b"" if the process ends without one.

        Raises:
            InputError: the template takes too much time.
            LoadError: the process cannot be started.
        """
        if self._child is None:
            self._child = self._started()
        reply, child = b"", self._child
        try:
            with suppress(OSError):
                child.requests.write(request)
                child.requests.flush()
                reply = child.replies.readline()
        except BaseException:  # an interrupt: the reply would be taken for that to the next request
            child.process.kill()
            self.close()
            raise
        if not reply and self.close() == -getattr(signal, "SIGPROF", 0):
            raise self._exceeds(f"{self._seconds:g} s")
        return reply

    @staticmethod
    def _exceeds(limit: str) -> InputError:
        return InputError(f"the chat template takes more than {limit}; give another one, or none for plain text")

    def close(self) -> int | None:
        """End the process; gives the status that it ended with, None if there is none."""
        child, self._child = self._child, None
        if child is None:
            return None
        with suppress(OSError):
            child.requests.close()  # of which it ends
        child.replies.close()
        return child.process.wait()

    def _started(self) -> _Child:
        program = f"from sakiyomi.core.template_child import serve; serve({self._seconds!r}, {self._memory!r})"
        paths = os.pathsep.join(path for path in sys.path if path)
        try:
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", program],
                env=os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise LoadError(
                f"the process that renders chat templates cannot be started ({error}); use no template"
            ) from None
        assert process.stdin is not None and process.stdout is not None
        return _Child(process, process.stdin, process.stdout)

    def _forget(self) -> None:
        self._child, self._lock = None, threading.Lock()


def _named(value: Any) -> str:
    return f"<{type(value).__name__}>"


_SHARED = TemplateProcess()
atexit.register(_SHARED.close)


def rendered_template(template: str, values: Mapping[str, Any]) -> str:
    """What a template writes, by a process that all callers share; see ``TemplateProcess.render``."""
    return _SHARED.render(template, values)
