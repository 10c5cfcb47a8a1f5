"""No test depends on whose machine it runs on, and no text on the locale."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import own_environment
from sakiyomi.kernels import variants
from surroundings import build_kernels

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "recipes", "benchmarks", "examples", "docs", ".ci")
LOCAL = {
    "cpu_count", "cwd", "expanduser", "getcwd", "getfqdn", "gethostname", "getlogin", "getpreferredencoding",
    "get_terminal_size", "getuser", "home", "localtime", "now", "today",
}  # fmt: skip
"""Functions whose result is another one elsewhere."""
PATHS = ("/home/", "/root/", "/tmp/", "/Users/", "~/")
ALLOWED = {
    ("conftest.py", "cpu_count"): "it decides how many processes run the tests, where the system tells nothing better",
    ("warm.py", "cwd"): "a program begins in the folder of whoever starts it",
    ("test_loading.py", "~/"): "the home folder is one of the test's own",
}


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """With the last name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield node, node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id


def without_encoding(tree: ast.AST) -> Iterator[int]:
    """Lines of calls that read or write text as the locale has it."""
    for call, name in calls(tree):
        given = {word.arg: word.value for word in call.keywords}
        if "encoding" in given or None in given:
            continue
        values = [value.value for value in (*call.args, given.get("mode")) if isinstance(value, ast.Constant)]
        modes = [value for value in values if isinstance(value, str) and set(value) <= set("rwaxbt+")]
        plain = isinstance(call.func, ast.Name)
        if name in ("read_text", "write_text"):
            wrong = len(call.args) < (1 if name == "read_text" else 2)
        elif name in ("open", "fdopen"):  # of paths or files: others' take something else than a mode
            wrong = not any("b" in mode for mode in modes) and (
                plain or name == "fdopen" or bool(modes or not call.args)
            )
        elif name in ("TemporaryFile", "NamedTemporaryFile"):
            wrong = any("b" not in mode for mode in modes)
        else:
            wrong = any(ast.unparse(given[word]) == "True" for word in ("text", "universal_newlines") if word in given)
        if wrong:
            yield call.lineno


def of_this_machine(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that ask what differs between machines, and what they ask."""
    for call, name in calls(tree):
        if name in LOCAL:
            yield call.lineno, name
        if any(word.arg == "shell" for word in call.keywords):
            yield call.lineno, "shell"
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, path) for path in PATHS if node.value.startswith(path))
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            # Part of a path: folders above the checkout, or the environment in it, may have that name.
            part = getattr(node.left, "value", None)
            if isinstance(part, str) and part.strip("/") == "sakiyomi" and part != "sakiyomi":
                yield node.lineno, part


def sources(words: str, *folders: str) -> Iterator[tuple[Path, ast.Module]]:
    """Python files in which a pattern occurs: most have none of these words, and parsing takes long."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if re.search(words, text := path.read_text(encoding="utf-8")):
                yield path, ast.parse(text)


@pytest.mark.thorough
def test_texts_are_utf8_everywhere() -> None:
    words = r"_text\((?!.*encoding)|open\((?!.*encoding)|TemporaryFile|text=True|newlines="
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path, tree in sources(words, *FOLDERS) for line in without_encoding(tree)
    ]
    assert not found, 'without encoding="utf-8", these depend on the locale'


@pytest.mark.thorough
def test_no_test_looks_at_the_machine() -> None:
    words = "|".join([*LOCAL, *PATHS, "shell=", "/sakiyomi", "sakiyomi/"])
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path, tree in sources(words, "tests")
        if path != Path(__file__)
        for line, what in of_this_machine(tree)
        if (path.name, what) not in ALLOWED
    ]
    assert not found, "these differ from machine to machine; use tmp_path and monkeypatch, or say above why not"


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("path.read_text()", True),
        ("path.write_text('a')", True),
        ("path.open()", True),
        ("path.open('w')", True),
        ("open(path)", True),
        ("os.fdopen(1, 'w')", True),
        ("tempfile.TemporaryFile('w+')", True),
        ("subprocess.run(command, text=True)", True),
        ("path.read_text(encoding='utf-8')", False),
        ("path.open('rb')", False),
        ("open(path, 'ab')", False),
        ("page.open(url)", False),
        ("os.open(path, os.O_RDONLY)", False),
        ("tempfile.TemporaryFile()", False),
        ("subprocess.run(command)", False),
    ],
)
def test_the_search_for_the_locale_is_sharp(line: str, wrong: bool) -> None:
    assert list(without_encoding(ast.parse(line))) == [1] * wrong


@pytest.mark.parametrize(
    "line",
    [
        "Path.home()",
        "os.cpu_count()",
        "run('ls', shell=True)",
        "open('/tmp/x')",
        "'/sakiyomi/' in name",
        "date.today()",
    ],
)
def test_the_search_for_the_machine_is_sharp(line: str) -> None:
    assert list(of_this_machine(ast.parse(line)))


def test_what_somebody_has_set_changes_nothing(tmp_path: Path) -> None:
    """And a home folder that cannot be written is no obstacle."""
    code = "from surroundings import *; neutralise(); import json, os; print(json.dumps(dict(os.environ)))"
    (tmp_path / "file").touch()
    gone = {
        "FORCE_COLOR": "1", "GIT_DIR": "x", "HF_TOKEN": "x", "HTTPS_PROXY": "http://127.0.0.1:9", "no_proxy": "x",
        "OPENAI_BASE_URL": "http://127.0.0.1:9", "RANK": "3", "SAKIYOMI_MAX_BATCH": "1",
        "XDG_CACHE_HOME": str(tmp_path / "file"),
    }  # fmt: skip
    other = {"HOME": str(tmp_path / "file" / "home"), "OMP_NUM_THREADS": "7", "SAKIYOMI_REAL": "kept"}
    environment = own_environment(TMPDIR=str(tmp_path)) | gone | other
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, encoding="utf-8", check=True
    )
    found = json.loads(done.stdout)
    assert not gone.keys() & found.keys()
    home = Path(found["HOME"])
    assert home.parent == tmp_path and not home.exists()  # it ends with the run
    assert found["OMP_NUM_THREADS"] == "1" and found["SAKIYOMI_REAL"] == "kept"


def test_kernels_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: ran.append(command))
    monkeypatch.setenv("SAKIYOMI_CACHE_DIR", str(tmp_path))
    name = variants.fitting()
    build_kernels()
    assert len(ran) == (name is not None)
    if name is not None:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / f"{variants.stem(name)}-digest.so").touch()
        build_kernels()
        assert len(ran) == 1
