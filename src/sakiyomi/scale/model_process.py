"""A model in a process of its own, with requests over its standard input and output.

The end of the process frees all of the model's memory; engines of several models share no threads, no locks and no
default dtype; and a model that crashes does not affect others.

Frames go both ways: a length, and a pickled pair of a request's number and a value. The first frame has the settings of
the model; the answer to it says that it is loaded, or why not. The process ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, BinaryIO, Self

import psutil

from sakiyomi.core.errors import SakiyomiError
from sakiyomi.engine.config import LLMConfig
from sakiyomi.scale.in_process import Asked, load_server
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.logs import set_up

logger = logging.getLogger("sakiyomi")
_LENGTH = struct.Struct("!Q")
_READY = 0  # number of the first frames
_FIGURES = "figures"  # asked for in place of a reply; None in its place ends one
_PATIENCE = 5.0  # seconds in which a process must give its figures, or end


class ModelDied(Exception):
    """The process ended before its reply."""


def _frame(number: int, value: Any) -> bytes:
    data = pickle.dumps((number, value))
    return _LENGTH.pack(len(data)) + data


class ModelProcess:
    """The process, as its parent sees it; made by ``start``."""

    def __init__(self, process: asyncio.subprocess.Process, name: str | None) -> None:
        self._process, self._name, self._stopped = process, name, False
        self._numbers = itertools.count(_READY + 1)
        self._open: dict[int, asyncio.Queue[Any]] = {_READY: asyncio.Queue()}
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, model: LLMConfig, config: ServerConfig) -> Self:
        """Load a model.

        Raises:
            SakiyomiError: it cannot be loaded.
            ModelDied: the process ended meanwhile.
        """
        # A process group of its own: Ctrl-C goes to the parent alone, which ends it.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        made = cls(process, config.served_name)
        try:
            made._send(_READY, (model, config))
            found = await made._open[_READY].get()
            if found is not None:
                raise found
        except BaseException:
            await made.stop()
            raise
        del made._open[_READY]
        return made

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return not self._reading.done()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def bytes(self) -> int:
        """Memory that it holds."""
        with suppress(psutil.Error):
            return int(psutil.Process(self.pid).memory_info().rss)
        return 0

    async def figures(self) -> dict[str, Any]:
        """See ``InProcessServer.figures``.

        Raises:
            ModelDied, TimeoutError: the process does not answer.
        """
        async with asyncio.timeout(_PATIENCE), aclosing(self.ask(_FIGURES)) as values:
            async for found in values:
                return dict(found)
        raise ModelDied

    async def stop(self) -> None:
        """End the process; its requests fail."""
        self._stopped = True
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await self._reading

    async def ask(self, asked: Asked | str) -> AsyncGenerator[Any]:
        """Parts of a reply. Closing the generator frees the request's slot in the engine.

        Args:
            asked: a request, or ``_FIGURES``.

        Raises:
            ModelDied: the process ended.
        """
        if not self.alive:
            raise ModelDied
        number, queue = next(self._numbers), asyncio.Queue[Any]()
        self._open[number] = queue
        self._send(number, asked)
        try:
            while (found := await queue.get()) is not None:
                if isinstance(found, Exception):
                    raise found
                yield found
            del self._open[number]
        finally:
            if self._open.pop(number, None) is not None:
                self._send(number, None)

    def _send(self, number: int, value: Any) -> None:
        pipe = self._process.stdin
        if pipe is not None and not pipe.is_closing():
            pipe.write(_frame(number, value))

    async def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = _LENGTH.unpack(await pipe.readexactly(_LENGTH.size))
                number, value = pickle.loads(await pipe.readexactly(length))  # of our own child
                if number in self._open:
                    self._open[number].put_nowait(value)
        code = await self._process.wait()
        if not self._stopped and _READY not in self._open:
            logger.error("the process %d of model %s ended with status %d", self.pid, self._name, code)
        for queue in self._open.values():
            queue.put_nowait(ModelDied(f"its process ended with status {code}"))


# ------------------------------------------------------------ in the process


class _Asked:
    """Frames that come in, and frames that go out."""

    def __init__(self, source: BinaryIO, out: BinaryIO) -> None:
        self._source, self._out = source, out
        self._loop = asyncio.get_running_loop()
        self.loaded = False
        self.frames: asyncio.Queue[tuple[int, Any] | None] = asyncio.Queue()
        threading.Thread(target=self._listen, name="asked", daemon=True).start()

    def _listen(self) -> None:
        frame: tuple[int, Any] | None = (_READY, None)
        while frame is not None:
            head = self._source.read(_LENGTH.size)
            frame = pickle.loads(self._source.read(*_LENGTH.unpack(head))) if len(head) == _LENGTH.size else None
            if frame is None and not self.loaded:
                os._exit(0)  # loading may take minutes, and the parent is gone
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.frames.put_nowait, frame)

    def send(self, number: int, value: Any) -> None:
        """Write one frame."""
        with suppress(BrokenPipeError):  # the parent is gone, and the end of the other pipe follows
            self._out.write(_frame(number, value))
            self._out.flush()


async def _serve(source: BinaryIO, out: BinaryIO) -> None:
    pipes = _Asked(source, out)
    first = await pipes.frames.get()
    if first is None:
        return
    model, config = first[1]
    set_up(config.log_format)
    logging.getLogger("sakiyomi.server").setLevel(logging.WARNING)  # a line a request is what the front writes
    try:
        made = await asyncio.to_thread(load_server, model, config)
    except SakiyomiError as error:
        pipes.send(_READY, error)
        return
    async with made as server:
        pipes.loaded = True
        pipes.send(_READY, None)
        tasks: dict[int, asyncio.Task[None]] = {}

        async def answer(number: int, asked: Any) -> None:
            try:
                if isinstance(asked, Asked):
                    async for part in server.events(asked):
                        pipes.send(number, part)
                else:
                    pipes.send(number, server.figures())
                pipes.send(number, None)
            except Exception as error:
                logger.exception("a request failed")
                pipes.send(number, ModelDied(str(error)))
            finally:
                tasks.pop(number, None)

        while (frame := await pipes.frames.get()) is not None:
            number, asked = frame
            if asked is not None:
                tasks[number] = asyncio.ensure_future(answer(number, asked))
            elif number in tasks:
                tasks[number].cancel()
        for task in [*tasks.values()]:
            task.cancel()


def main() -> None:
    """The process."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # print() must not write into the frames
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve(sys.stdin.buffer, out))
    out.flush()
    os._exit(0)  # threads of torch and of the engine are not waited for


if __name__ == "__main__":
    main()
