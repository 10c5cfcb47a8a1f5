"""Programs that start in hundredths of a second: forks of a process that has imported what they need.

An interpreter of its own costs a test 2 to 8 seconds, nearly all of it imports. ``[*warm(), "-c", code]`` stands for
``[sys.executable, "-c", code]``, and takes ``-m``, the path of a script and ``-W`` likewise. What starts is a small
process: it hands its files, arguments, folder and environment to the one with the imports, passes signals on to the
fork, and ends as that ends. For tests of what a program does; not of what it imports, nor of variables that libraries
read when they are imported.

As a script it is the small process, or, with ``--serve``, the one that forks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["warm"]

IMPORTED = (
    "sakiyomi.cli", "sakiyomi.engine.llm", "sakiyomi.model_executor.loading", "torch", "transformers",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama", "transformers.tokenization_utils_tokenizers",
)  # fmt: skip


@cache
def warm() -> tuple[str, ...]:
    """The beginning of a command, in the place of the interpreter; the process that forks ends with this one."""
    if not hasattr(os, "fork"):
        return (sys.executable,)
    import atexit
    import subprocess
    import tempfile

    from processes import own_environment

    folder = tempfile.TemporaryDirectory()
    path = str(Path(folder.name) / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(listener.fileno())],
            stdin=subprocess.PIPE, env=own_environment(), pass_fds=[listener.fileno()],
        )  # fmt: skip

    @atexit.register
    def end() -> None:
        server.communicate()
        folder.cleanup()

    return (sys.executable, "-I", "-S", __file__, path)


def _start(path: str, arguments: list[str]) -> NoReturn:
    """The small process."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        asked = json.dumps([arguments, str(Path.cwd()), dict(os.environ)]).encode()
        socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(asked)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        code = int.from_bytes(server.recv(4), "big", signed=True)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 255)


def _serve(listener: socket.socket) -> None:
    """Fork for every connection, until nobody holds the other end of stdin; returns in the forks, to run a program."""
    import importlib
    import select

    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for who runs the tests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            os._exit(0)
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            return _watch(connection)
        connection.close()


def _watch(connection: socket.socket) -> None:
    """Pass signals on to the program, which is forked here, and tell how it ended; kill it if nobody hears any more."""
    import select

    size, files, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as stream:
        arguments, folder, environment = json.loads(stream.read(int.from_bytes(size, "big")))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ended, alive = os.pipe()
    program = os.fork()
    if not program:
        os.set_inheritable(alive, False)
        connection.close()
        return _become(arguments, folder, environment, files)
    for file in (alive, *files):
        os.close(file)
    while ended not in (ready := select.select([connection, ended], [], [])[0]):
        if ready:
            os.kill(program, (connection.recv(1) or bytes([signal.SIGKILL]))[0])
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with suppress(BrokenPipeError):
        connection.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def _become(arguments: list[str], folder: str, environment: dict[str, str], files: list[int]) -> None:
    """Have the files, folder, environment and arguments of a program of its own."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream: Any = open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        stream.reconfigure(line_buffering=number == 2 or os.isatty(number))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = arguments


def _run() -> None:
    """The program: as the interpreter would, with the arguments in ``sys.argv``."""
    import runpy
    import warnings

    while sys.argv[0] == "-W":
        warnings.simplefilter(sys.argv[1])  # type: ignore[arg-type]
        del sys.argv[:2]
    kind = sys.argv[0]
    if kind == "-c":
        code = sys.argv.pop(1)
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    elif kind == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _serve(socket.socket(fileno=int(sys.argv[2])))
        _run()
    else:
        _start(sys.argv[1], sys.argv[2:])
