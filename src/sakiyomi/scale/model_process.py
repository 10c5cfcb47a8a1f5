"""A model in a process of its own, with requests over its standard input and output.

The end of the process frees all of the model's memory; engines of several models share no threads, no locks and no
default dtype; and a model that crashes does not affect others.

Frames go both ways: a length, and a pickled pair of a request's number and a value. None ends a reply, or cancels a
request. The first request is to load the model. The process ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, BinaryIO, Self

import psutil

from sakiyomi.core.errors import SakiyomiError
from sakiyomi.engine.config import LLMConfig
from sakiyomi.scale.in_process import Asked, InProcessServer, load_server
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.logs import set_up

logger = logging.getLogger("sakiyomi")
_LENGTH = struct.Struct("!Q")
_FIGURES = "figures"  # asked for in place of a reply; None in its place ends one
_PATIENCE = 5.0  # seconds in which a process must give its figures, or end


class ModelDied(Exception):
    """The process ended before its reply."""


def _frame(number: int, value: Any) -> bytes:
    data = pickle.dumps((number, value))
    return _LENGTH.pack(len(data)) + data


async def _frames(pipe: asyncio.StreamReader) -> AsyncGenerator[tuple[int, Any]]:
    """The frames of a pipe, up to its end."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            (length,) = _LENGTH.unpack(await pipe.readexactly(_LENGTH.size))
            yield pickle.loads(await pipe.readexactly(length))  # of our own child, or of our parent


class ModelProcess:
    """The process, as its parent sees it; made by ``start``."""

    def __init__(self, process: asyncio.subprocess.Process, name: str | None) -> None:
        self._process, self._name, self._stopped = process, name, False
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Queue[Any]] = {}
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
            async for _ in made.ask((model, config)):
                pass
        except BaseException:
            await made.stop()
            raise
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

    async def ask(self, asked: Asked | str | tuple[LLMConfig, ServerConfig]) -> AsyncGenerator[Any]:
        """Parts of a reply. Closing the generator frees the request's slot in the engine.

        Args:
            asked: a request, ``_FIGURES``, or at first what to load.

        Raises:
            SakiyomiError: the model cannot be loaded.
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
        assert self._process.stdout is not None
        async for number, value in _frames(self._process.stdout):
            if number in self._open:
                self._open[number].put_nowait(value)
        code = await self._process.wait()
        if not self._stopped:
            logger.error("the process %d of model %s ended with status %d", self.pid, self._name, code)
        for queue in self._open.values():
            queue.put_nowait(ModelDied(f"its process ended with status {code}"))


# ------------------------------------------------------------ in the process


async def _serve(out: BinaryIO) -> None:
    """Load a model and answer requests until the parent closes the pipe, then end the engine in order."""
    server: InProcessServer | None = None
    tasks: dict[int, asyncio.Task[None]] = {}

    def send(number: int, value: Any) -> None:
        with suppress(BrokenPipeError):  # the parent is gone, and the end of the other pipe follows
            out.write(_frame(number, value))
            out.flush()

    async def answer(number: int, asked: Any) -> None:
        nonlocal server
        try:
            if server is not None and isinstance(asked, Asked):
                async for part in server.events(asked):
                    send(number, part)
            elif server is not None:
                send(number, server.figures())
            else:
                set_up(asked[1].log_format)
                logging.getLogger("sakiyomi.server").setLevel(logging.WARNING)  # the front writes a line a request
                made = await asyncio.to_thread(load_server, *asked)
                gc.freeze()  # as `serve` does
                server = await made.__aenter__()
            send(number, None)
        except SakiyomiError as error:
            send(number, error)
        except Exception as error:
            logger.exception("a request failed")
            send(number, ModelDied(str(error)))
        finally:
            del tasks[number]

    source = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(source)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    async for number, value in _frames(source):
        if value is not None:
            tasks[number] = asyncio.ensure_future(answer(number, value))
        elif number in tasks:
            tasks[number].cancel()
    for task in [*tasks.values()]:
        task.cancel()
    if server is not None:
        await server.__aexit__()


async def main() -> None:
    """The process."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # print() must not write into the frames
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    await _serve(out)
    os._exit(0)  # threads of torch and of the engine are not waited for, nor a model that is still being loaded


if __name__ == "__main__":
    asyncio.run(main())
