"""Models by their hub id: from the local cache or downloaded, with a quick clear error where neither works."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from sakiyomi.core.embedded import EMBEDDED
from sakiyomi.core.errors import LoadError, MemoryLimitError
from sakiyomi.core.memory import readable

_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja"]
_ANSWER_WITHIN = 8.0
"""Seconds to wait for the hub's first answer. A name server that does not answer would otherwise take half a minute."""


def fetch(
    name: str, check: Callable[[Path], object], *, allow_pickle: bool = False, trust_remote_code: bool = False
) -> Path:
    """Folder of a hub model, from the cache or downloaded. Only the files that are needed come.

    Args:
        name: hub id.
        check: called with the folder when only the small files are there; raises if the model cannot be used.
        allow_pickle: also take pickle weights if there are no others.
        trust_remote_code: also take Python files.

    Raises:
        LoadError: no such model, no access, or neither network nor a cached copy.
        MemoryLimitError: the disk has no room for the files.
    """
    # Read by huggingface_hub when it is imported first; where that has happened the user decided it.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants, snapshot_download

    small = [*_SMALL_FILES, *(["*.py"] if trust_remote_code else [])]
    weights = ["*.safetensors", *(["*.bin"] if allow_pickle else [])]
    info = None if constants.is_offline_mode() else _ask(name)
    options: dict[str, Any] = {"ignore_patterns": ["*/*", "consolidated*"]}
    try:
        if info is None:
            return Path(snapshot_download(name, allow_patterns=small + weights, local_files_only=True, **options))
        _check_files(name, info, allow_pickle)
        # By branch, not by info.sha: only then does the cache know what the name stands for when there is no network.
        with _progress():
            check(Path(snapshot_download(name, allow_patterns=small, **options)))
            _check_disk(name, info, Path(constants.HF_HUB_CACHE))
            return Path(snapshot_download(name, allow_patterns=small + weights, **options))
    except (OSError, ValueError) as error:  # huggingface_hub's own errors are of these kinds
        if info is None:
            raise LoadError(_unreachable(name, constants.is_offline_mode())) from error
        raise LoadError(
            f"the download of {name!r} from the hub failed ({error}); try again, or pass a folder"
        ) from error


def check_known(name: str) -> None:
    """Refuse a name that is neither in the local cache nor known to the hub. Imports no torch.

    Raises:
        LoadError: as `fetch` does.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    if constants.is_offline_mode() or _ask(name) is None:
        raise LoadError(_unreachable(name, constants.is_offline_mode()))


def _ask(name: str) -> Any | None:
    """The hub's description of a model; None when the hub cannot be reached in time.

    Raises:
        LoadError: the hub has no such model for this user.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(HfApi().model_info(name, files_metadata=True, timeout=_ANSWER_WITHIN / 2))
        except Exception as error:  # handed over to the caller's thread
            answers.append(error)

    # In a thread, because looking a host name up cannot be given a time limit.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_WITHIN)
    answer = answers[0] if answers else None
    if isinstance(answer, RepositoryNotFoundError):
        raise LoadError(
            f"there is no folder {name!r} and the hub has no model of that name that you may read; check the spelling, "
            f"log in with `hf auth login` if it is private or gated, or name an embedded model ({', '.join(EMBEDDED)})"
        ) from answer
    if isinstance(answer, HfHubHTTPError) and answer.response is not None and answer.response.status_code < 500:
        raise LoadError(f"the hub refused {name!r} ({answer}); check the name and your token") from answer
    return None if isinstance(answer, Exception) else answer


def _check_files(name: str, info: Any, allow_pickle: bool) -> None:
    names = [entry.rfilename for entry in info.siblings or ()]
    if any(file.endswith(".safetensors") for file in names) or allow_pickle:
        return
    held = "only pickle weights" if any(file.endswith(".bin") for file in names) else "no weights"
    raise LoadError(
        f"the hub's {name!r} has {held}, and only safetensors are loaded, because a pickle can run any code when it is "
        "opened; choose another model, or pass allow_pickle=True if you trust this one"
    )


def _check_disk(name: str, info: Any, cache: Path) -> None:
    needed = sum(
        entry.size or 0
        for entry in info.siblings or ()
        if entry.rfilename.endswith(".safetensors") and "/" not in entry.rfilename
    )
    place = cache
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise MemoryLimitError(
            f"{name!r} takes {readable(needed)} on disk and {cache} has room for {readable(free)}; make room, or set "
            "HF_HOME to a larger disk"
        )


def _unreachable(name: str, offline: bool) -> str:
    why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
    return (
        f"there is no folder {name!r}; taken as a hub id it is not in the local cache, and {why}; pass the model's "
        f"folder, connect to the network, or name an embedded model ({', '.join(EMBEDDED)})"
    )


@contextmanager
def _progress() -> Iterator[None]:
    """huggingface_hub's download bars on a terminal only."""
    import huggingface_hub.utils

    bars: Any = huggingface_hub.utils

    if sys.stderr.isatty() or bars.are_progress_bars_disabled():
        yield
        return
    bars.disable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bars()
