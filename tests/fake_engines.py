"""Other engines for tests: a file of this Python in the place of an engine and its environment."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from sakiyomi.evaluation.bench.engines.registry import OtherEngine

GOOD = """
    import time

    def start(task):
        print("a library says hello")

        def write(batch, tokens):
            time.sleep(0.01)
            return [[(sum(prompt) + i) % 300 for i in range(tokens)] for prompt in batch]

        return write, {"version": "1.0", "threads": task["threads"]}
"""


@dataclass(frozen=True)
class Fake(OtherEngine):
    """An engine whose file is somewhere else."""

    path: Path = Path()

    @property
    def file(self) -> Path:
        return self.path


def fake(folder: Path, text: str, key: str = "fake", python: str | None = None) -> Fake:
    """An engine with an environment in this folder; ``python``: a shell script in the place of its Python."""
    programs = folder / key / "bin"
    programs.mkdir(parents=True)
    if python is None:
        (programs / "python").symlink_to(sys.executable)
    else:
        (programs / "python").write_text(f"#!/bin/sh\n{python}\n", encoding="utf-8")
        (programs / "python").chmod(0o755)
    path = folder / f"{key}.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return Fake(f"Engine {key}", key, f"{key}-package", ("float32",), path=path)
