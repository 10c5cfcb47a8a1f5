"""What the guides and examples show is what works."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from sakiyomi.core.embedded import embedded
from sakiyomi.core.errors import LoadError
from sakiyomi.core.tree import DRAFT_KINDS
from sakiyomi.drafters.base import Context
from sakiyomi.sampling.verifiers.base import Rule
from warm import warm

ROOT = Path(__file__).resolve().parents[1]
TRANSFORMERS = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "add-a-drafter.md").read_text(encoding="utf-8")


def run(*arguments: str) -> str:
    try:
        embedded("tales")
    except LoadError:
        pytest.skip("the model tales has not been trained in this checkout")
    command = [*warm(), *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_drafter_of_ones_own() -> None:
    *_, same, figures = run(str(ROOT / "examples" / "own_drafter.py"), "--quick").splitlines()
    assert same == "the same text without it: True"
    tau, share = re.findall(r"[\d.]+", figures)
    assert float(tau) > 1.1 and float(share) > 5


def test_the_guides_code_runs() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    body = code.partition("class Echo:\n")[2].partition("\nllm =")[0]
    assert len([line for line in body.splitlines() if line.strip()]) <= 10
    assert 0.0 <= float(run("-c", code)) <= 1.0


def test_generate_of_transformers() -> None:
    shown = run(str(ROOT / "examples" / "transformers_generate.py"), "--quick")
    assert shown.splitlines()[-1] == "greedy, the same tokens as transformers alone: True"
    (code,) = re.findall(r"^```python\n(.*?)^```", TRANSFORMERS, re.DOTALL | re.MULTILINE)
    eager = code.replace("=sakiyomi.custom_generate", "=sakiyomi.custom_generate.using(compile=False)")
    assert eager != code  # graphs would be compiled for two texts
    assert run("-c", eager).startswith("['Once upon a time")


def test_the_guide_knows_all_kinds_rules_and_files() -> None:
    for name in DRAFT_KINDS:
        assert f"| `{name}` |" in GUIDE
    for name in get_args(Rule):
        assert f'`"{name}"`' in GUIDE
    for name in Context.__dataclass_fields__:
        assert f"`{name}`" in GUIDE or name in ("id", "noise")
    for path in re.findall(r"`((?:tests|src)/[\w./-]+)`", GUIDE):
        assert (ROOT / path).exists(), path
