"""What can be found wrong with a run before any work is done: its files, its folder, and what already lies in it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from sakiyomi.core.errors import InputError
from sakiyomi.train.checkpoint import checkpoints, load_checkpoint
from sakiyomi.train.config import RunConfig
from sakiyomi.train.data import read_records
from sakiyomi.train.writing import writing


def check_run(config: RunConfig, files: Iterable[Path]) -> None:
    """Refuse a run that could not be done, or that would spoil an earlier one.

    Args:
        config: its settings; the folder OUT is made.
        files: all text that it will read. The first record of each is read, the rest when it is needed.

    Raises:
        InputError: OUT is a file, holds checkpoints of an earlier run, or those of other settings with `resume`.
        LoadError: a file cannot be read, OUT cannot be written, or there is nothing to resume.
    """
    for path in dict.fromkeys(files):
        with closing(read_records(path)) as records:
            next(records)
    out = Path(config.loop.out)
    if out.exists() and not out.is_dir():
        raise InputError(f"out is {config.loop.out!r}, which is a file; give a folder with --out")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    if config.loop.resume:
        _check_same(config)
    elif held := checkpoints(out / "checkpoints"):
        raise InputError(
            f"{out / 'checkpoints'} holds checkpoints of an earlier run at step {int(held[-1].stem.split('-')[1])}; "
            "go on with --resume, or choose another --out or delete the folder"
        )


def _check_same(config: RunConfig) -> None:
    """Compare the settings with those of the newest checkpoint: a run goes on as it began."""
    state = load_checkpoint(Path(config.loop.out) / "checkpoints", peek=True)
    given, before = config.flat(), state.get("settings", {})
    if given.keys() != before.keys():
        raise InputError(
            f"the checkpoints in {config.loop.out} are those of another command or version; choose another --out"
        )
    free = {flag.name for flag in config.flags() if flag.metadata["resume"]}
    for name, value in given.items():
        if name not in free and value != before[name]:
            raise InputError(
                f"{name} is {value!r}, and the run in {config.loop.out} was begun with {before[name]!r}; resume it "
                "with the same settings, or begin another one with another --out"
            )
