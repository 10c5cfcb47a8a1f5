"""``import sakiyomi`` is light, and what it promises is there."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

import sakiyomi
from processes import own_environment
from sakiyomi.core import errors

HEAVY = ("torch", "transformers", "numpy", "typer", "rich", "fastapi", "matplotlib", "ray", "huggingface_hub")

PUBLIC = {
    "LLM", "Engine", "SamplingParams", "Generation", "Stats", "TokenTrace", "Step", "TokenTree", "Draft", "Verdict",
    "embedded", "theory", "SakiyomiError", "InputError", "LoadError", "UnsupportedError", "MemoryLimitError",
    "RemovedError", "DivergedError", "DraftError", "__version__", "Audio", "ImagePrompt", "Transcript",
    "TranscriptionParams", "custom_generate",
}  # fmt: skip


def in_new_process(code: str) -> str:
    environment = own_environment()
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, encoding="utf-8", check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "statement",
    [
        "import sakiyomi",
        "from sakiyomi import SakiyomiError, embedded, __version__",
        "from sakiyomi import Generation, Stats, Step, TokenTrace",
        "from sakiyomi import SamplingParams, theory",
        "import sakiyomi; dir(sakiyomi)",
    ],
)
def test_import_is_light(statement: str) -> None:
    allowed = {"numpy"} if "theory" in statement else set()
    loaded = in_new_process(f"{statement}\nimport sys\nprint(*(m for m in {HEAVY!r} if m in sys.modules))")
    assert set(loaded.split()) <= allowed


def test_the_command_line_starts_without_torch() -> None:
    """What `--help` has to import: a command loads the rest when it runs."""
    heavy = ("torch", "transformers", "matplotlib")
    assert not in_new_process(f"import sakiyomi.cli, sys\nprint(*(m for m in {heavy!r} if m in sys.modules))")


def test_all_is_the_public_contract() -> None:
    assert set(sakiyomi.__all__) == PUBLIC
    assert len(sakiyomi.__all__) == len(PUBLIC)
    assert set(dir(sakiyomi)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(sakiyomi, name)
    if inspect.isclass(value):
        assert value.__name__ == name
        assert value.__doc__


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="nonesuch"):
        _ = sakiyomi.nonesuch


def test_version_is_the_installed_one() -> None:
    try:
        assert version("sakiyomi") == sakiyomi.__version__
    except PackageNotFoundError:
        pytest.skip("sakiyomi is not installed in this environment")


def test_error_tree() -> None:
    """One base class, one message, exit codes for the command line; the docstring draws every class."""
    kinds = [errors.SakiyomiError, *errors.SakiyomiError.__subclasses__()]
    assert {"InputError", "LoadError", "WorkerError"} < {kind.__name__ for kind in kinds}
    for kind in kinds:
        error = kind("got 3, expected 2, take one away")
        assert isinstance(error, errors.SakiyomiError)
        assert str(error) == error.message == "got 3, expected 2, take one away"
        assert kind.exit_code == (2 if kind is errors.InputError else 1)
        assert kind.__name__ in (errors.__doc__ or "")
