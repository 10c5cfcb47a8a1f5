"""Runs another engine in the environment where it is installed. Needs nothing but Python and that engine.

    python -I worker.py ENGINE_FILE

One line of JSON in, one out. ``{"task": ...}`` opens a model, see ``EngineProcess``; the answer has ``settings``: what
the engine runs with. ``{"batches": [[prompt, ...], ...], "tokens": n}`` has it write n tokens after each prompt (token
ids): the prompts of a batch at once, the batches one after the other; the answer has ``outputs``, token ids for each
prompt, and ``seconds``, which do not include the lines. What fails is answered with ``error``.

An engine file has ``start(task)``, which gives a function that writes n tokens after each prompt of a batch, and the
settings. If it has ``convert(model, kind, out)``, the command that this gives is run once for each version of a model,
and the task names the converted folders.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO


def serve(file: str, asked: TextIO, answers: TextIO) -> None:
    """Answer line by line until there is none left."""
    engine = runpy.run_path(file)
    write: Any = None
    for line in asked:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            if "task" in request:
                task = request["task"]
                if "convert" in engine:
                    task |= {
                        name: task[name] and converted(engine["convert"], task[name], task["kind"], task["folder"])
                        for name in ("model", "draft")
                    }
                write, settings = engine["start"](task)
                answer = {"settings": settings}
            else:
                began, outputs = time.perf_counter(), []
                for batch in request["batches"]:
                    outputs += write(batch, request["tokens"])
                answer = {"outputs": outputs, "seconds": time.perf_counter() - began}
        except Exception as error:  # whatever an engine raises: the answer is the one place where it is told
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def converted(convert: Any, model: str, kind: str, folder: str) -> str:
    """The folder of a model as the engine reads it; written once for each version of its files."""
    source = Path(model)
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(source.glob("*.*"))]
    state = [model, files, convert(model, kind, ""), sys.prefix]
    place = Path(folder) / f"{source.name}-{kind}-{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]}"
    if not place.is_dir():
        fresh = place.with_name(f".{place.name}.tmp")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        # In a process of its own: what it takes in memory and threads is gone when the model is measured.
        done = subprocess.run(
            convert(model, kind, str(fresh)), capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        if done.returncode:
            raise RuntimeError(f"{model} cannot be converted: {done.stderr.strip()[-200:]}")
        fresh.rename(place)
    return str(place)


if __name__ == "__main__":
    # What libraries print goes where their errors go: standard output is for answers alone.
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, own)
    os._exit(0)  # an engine's threads may never end by themselves
