"""What the README shows is what works: its commands parse and exist, its Python runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from processes import own_environment
from sakiyomi.core.embedded import embedded
from warm import warm

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if line and not line.startswith("#")]


def test_two_commands_do_the_set_up() -> None:
    assert len([c for c in commands() if c.endswith("sakiyomi demo")]) == 1
    assert len([c for c in commands() if "python -m pytest" in c]) == 1


@pytest.mark.parametrize("command", commands())
def test_command_is_sound(command: str) -> None:
    """They are not run again here (they build an environment): syntax, programs and extras are checked."""
    subprocess.run(["bash", "-n", "-c", command], check=True, capture_output=True)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for part in command.split("&&"):
        words = shlex.split(part)
        assert words[0] in {"python3", ".venv/bin/pip", ".venv/bin/python", ".venv/bin/sakiyomi"}
        for names in re.findall(r"\.\[([\w,]+)\]", part):
            assert set(names.split(",")) <= set(extras)


def test_the_first_screen_is_short() -> None:
    first, *_ = README.partition("\n## ")
    assert len(first.splitlines()) < 50 and len(README.encode()) <= 8000
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


def test_files_that_it_names_exist() -> None:
    for path in re.findall(r"\]\(([\w./-]+)\)|`(src/[\w./-]+)`", README):
        assert (ROOT / (path[0] or path[1])).exists(), path


def test_python_block_runs() -> None:
    embedded("tales")  # its files are part of the package: a LoadError here is a failure
    (code,) = blocks("python")
    environment = own_environment(HF_HUB_OFFLINE="1")
    done = subprocess.run([*warm(), "-c", code], env=environment, capture_output=True, encoding="utf-8", timeout=250)
    assert done.returncode == 0, done.stderr
    assert "tokens per pass" in done.stdout
