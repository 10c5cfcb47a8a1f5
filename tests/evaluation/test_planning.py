"""`sakiyomi plan`: what it derives from numbers, what it refuses, what it draws."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from sakiyomi import InputError, theory
from sakiyomi.cli import app
from sakiyomi.evaluation.tuning.planning import PlanConfig, plan


def test_the_published_case() -> None:
    """Leviathan et al. 2023, table 2, T5-small on En-De: gamma 7, 3.16 times at alpha .75 and c .02."""
    found = plan(PlanConfig((0.75,), c=0.02))
    assert found["lines"][7]["speedup"] == pytest.approx(3.16, abs=0.016)
    assert found["gamma"] == theory.optimal_gamma(0.75, 0.02)
    assert found["speedup"] == pytest.approx(theory.speedup(0.75, found["gamma"], 0.02))
    assert found["lines"][0]["speedup"] == found["lines"][0]["tokens"] == 1.0


def test_passes_that_are_not_free() -> None:
    """Float32 on a CPU, as it was measured: the second row costs as much as eight."""
    found = plan(PlanConfig((0.8,), c=0.05, v=("2=1.88", "5=1.78", "8=1.99", "16=2.49"), overhead=0.05))
    line = found["lines"][1]
    assert line["v"] == 1.88
    assert line["speedup"] == pytest.approx(1.8 / (0.05 + 1.88 + 0.05))
    assert line["flat"] == pytest.approx(theory.speedup(0.8, 1, 0.05))
    assert line["speedup"] < 1.0 < found["speedup"] < found["lines"][8]["flat"]
    assert plan(PlanConfig((0.4,), c=0.2, v=("2=1.88",)))["gamma"] == 0


def test_places_differ() -> None:
    found = plan(PlanConfig((0.9, 0.5), c=0.1))
    assert found["lines"][2]["tokens"] == pytest.approx(1 + 0.9 + 0.45)


def test_a_machine() -> None:
    """Bytes over bandwidth until operations bound; batches share weights, and their rows fill the pass sooner."""
    sizes: dict[str, Any] = {"target_size": "7B", "draft_size": "70M", "bandwidth": "14GB", "operations": "140G"}
    found = plan(PlanConfig((0.8,), **sizes))
    assert found["c"] == pytest.approx(0.01)
    assert found["c_hat"] == pytest.approx(0.01)
    assert found["plain_ms"] == pytest.approx(1000.0)
    # 14 G operations a row: ten rows take the second that the weights take.
    assert found["lines"][9]["v"] == 1.0
    assert found["lines"][10]["v"] == pytest.approx(1.1)
    assert found["lines"][4]["traffic_bytes"] == pytest.approx((14e9 + 4 * 0.14e9) / theory.expected_tokens(0.8, 4))
    eight = plan(PlanConfig((0.8,), batch=8, **sizes))
    assert eight["lines"][1]["v"] == pytest.approx(1.6)
    assert eight["gamma"] < found["gamma"]
    kept = plan(PlanConfig((0.8,), kv_per_token="1MiB", context=1000, **sizes))
    assert kept["lines"][0]["traffic_bytes"] == pytest.approx(14e9 + 1000 * 2**20)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alpha": (1.2,)}, "alpha is 1.2"),
        ({"alpha": (float("nan"),)}, "alpha is nan"),
        ({"alpha": ()}, "alpha is not given"),
        ({"c": None}, "c is not given"),
        ({"c": -1.0}, "c is -1"),
        ({"v": ("4:2",)}, "v is '4:2'"),
        ({"v": ("4=0",)}, "v is '4=0'"),
        ({"v": ("1=2", "4=3")}, "1=1 by definition"),
        ({"c_hat": -0.1}, "c_hat is -0.1"),
        ({"max_gamma": 10**9}, "max_gamma is 1000000000"),
        ({"batch": 0}, "batch is 0"),
        ({"max_gamma": 0}, "max_gamma is 0"),
        ({"context": -1}, "context is -1"),
        ({"overhead": -0.5}, "overhead is -0.5"),
        ({"target_size": "big"}, "target_size is 'big'"),
        ({"target_size": "0"}, "target_size is '0'"),
        ({"target_size": "7B", "draft_size": "0"}, "draft_size is '0'"),
        ({"target_size": "7B", "bandwidth": "0"}, "bandwidth is '0'"),
        ({"target_size": "7B", "bandwidth": "7GB", "operations": "0"}, "operations is '0'"),
        ({"target_size": "7B", "context": 5}, "give all three"),
        ({"target_size": "7B", "kv_per_token": "1KiB"}, "give all three"),
        ({"context": 5, "kv_per_token": "1KiB"}, "give all three"),
        ({"target_size": "7B", "bandwidth": "fast"}, "bandwidth is 'fast'"),
        ({"target_size": "7B", "bits": 0.0}, "bits is 0"),
        ({"draft_size": "7M"}, "without target_size"),
        ({"bandwidth": "7GB"}, "without target_size"),
        ({"operations": "7T"}, "without bandwidth"),
    ],
)
def test_what_cannot_be_meant(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        plan(PlanConfig(**({"alpha": (0.8,), "c": 0.1} | changes)))


@pytest.mark.thorough
def test_the_command(tmp_path: Path) -> None:
    arguments = ["plan", "--alpha", "0.8", "--alpha", "0.7", "--c", "0.05", "--max-gamma", "6", "--json"]
    picture = tmp_path / "curves.png"
    done = CliRunner().invoke(app, [*arguments, "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert "best gamma 6" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["gamma"] == 6
    assert picture.read_bytes().startswith(b"\x89PNG")
    wrong = CliRunner().invoke(app, ["plan", "--alpha", "2", "--c", "0.1"])
    assert wrong.exit_code == 2
    assert "alpha is 2" in wrong.output + str(wrong.exception)
    nowhere = CliRunner().invoke(app, [*arguments, "--plot", str(tmp_path / "no" / "x.png")])
    assert nowhere.exit_code == 2
    none = CliRunner().invoke(app, ["plan", "--alpha", "0.2", "--c", "0.5"])
    assert "do not speculate" in none.stdout


GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL) for line in block.splitlines()]


@pytest.mark.few(7)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_guide(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that plan are run; others, which take minutes, are read as the command line reads them, and not run."""
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(command)
    assert program == "sakiyomi"
    if words[0] == "plan":
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        assert ("best gamma" in done.stdout) != ("do not speculate" in done.stdout)
    else:
        found: Any = get_command(app)
        while words and words[0] in getattr(found, "commands", {}):
            found = found.commands[words.pop(0)]
        assert found.name in ("tune", "spec", "merge", "compare")
        with found.make_context(found.name, words):  # raises where a flag is not known, or its value is none
            pass


def test_python_of_the_guide() -> None:
    """Values stand behind the calls as comments."""
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    names: dict[str, object] = {}
    checked = 0
    for line in filter(None, block.splitlines()):
        value = eval(line.partition("#")[0], names) if "import" not in line else exec(line, names)
        found = re.search(r"#\s+(\d+(?:\.\d+)?)\b", line)
        if found:
            assert value == pytest.approx(float(found[1]), abs=0.006)
            checked += 1
    assert checked >= 5
