"""Commands that are killed at every step of their writing, and run again: a process of its own, which forks for each.

It reads one JSON object: ``folder`` that is written to, ``base`` that it is a copy of before each run, ``command``,
``resume`` (whether the second run has --resume where there is a checkpoint) and ``most``, how many steps are tried. It
writes one: how many steps there are, and for each that was tried what the second run did.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open

import sakiyomi.train.medusa
import sakiyomi.train.ngram  # noqa: F401
from sakiyomi.cli import app
from sakiyomi.drafters.memory import read_memory
from sakiyomi.train import checkpoint

STEPS = ("open", "os.rename", "os.remove", "os.mkdir", "os.truncate", "os.chmod")
"""Events of ``sys.audit`` that come before something is written."""


def writes(event: str, details: Sequence[Any], folder: str) -> bool:
    """Whether the event changes something in the folder."""
    if event not in STEPS or not any(
        isinstance(part, (str, Path)) and str(part).startswith(folder) for part in details
    ):
        return False
    return event != "open" or bool(details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def run(command: Sequence[str], folder: Path, kill_at: int = 0) -> tuple[int, int]:
    """Run it in a fork; its exit status and its steps. It kills itself before the given one."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        with os.fdopen(read, encoding="utf-8") as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        return status, int(said or 0)
    steps = 0

    def hook(event: str, details: tuple[Any, ...]) -> None:
        nonlocal steps
        if writes(event, details, str(folder)):
            steps += 1
            if steps == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    quiet = os.open(folder.parent / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    code = 1
    try:
        code = app(list(command), standalone_mode=False) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os.write(write, str(steps).encode())
        os._exit(code)


def result(folder: Path) -> dict[str, str]:
    """The tensors that were made, by digest, and what a memory holds; what tells of times is left out."""
    found = {
        str(path.name): str([text.tokens for text in read_memory(path).documents]) for path in folder.glob("*.memory")
    }
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no dictionary
                content = file.get_tensor(name).contiguous().flatten().view(torch.uint8).numpy()
                found[f"{path.relative_to(folder)}: {name}"] = xxhash.xxh3_64_hexdigest(content)
    return found


def main() -> None:
    asked = json.load(sys.stdin)
    torch.set_num_threads(1)
    folder = Path(asked["folder"])
    shutil.copytree(asked["base"], folder)
    status, steps = run(asked["command"], folder)
    told: dict[str, Any] = {"steps": steps, "tried": [], "right": result(folder)}
    if status:
        told["failed"] = (folder.parent / "said").read_text(encoding="utf-8")[-600:]
    else:
        shutil.rmtree(folder)
        tried = sorted(random.Random(0).sample(range(1, steps + 1), min(steps, asked["most"])))
        for step in tried:
            shutil.copytree(asked["base"], folder)
            killed, _ = run(asked["command"], folder, step)
            more = ["--resume"] if asked["resume"] and checkpoint.checkpoints(folder / "checkpoints") else []
            status, _ = run([*asked["command"], *more], folder)
            outcome = {"step": step, "killed": killed == signal.SIGKILL, "again": status, "right": result(folder)}
            outcome["left"] = [str(path) for path in folder.rglob("*.partial")]
            if status:
                outcome["said"] = (folder.parent / "said").read_text(encoding="utf-8")[-600:]
            told["tried"].append(outcome)
            shutil.rmtree(folder)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
