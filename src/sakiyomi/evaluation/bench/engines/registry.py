"""The engines that row ``peers`` measures beside ours. A new one is a file here and an entry in ``engines.toml``."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.files import cache_folder
from sakiyomi.evaluation.bench.engines import gguf_files
from sakiyomi.model_executor.loading import Loaded
from sakiyomi.model_executor.loading.recording import SHIPPED


def _as_gguf(loaded: Loaded, kind: str) -> Path:
    return gguf_files.gguf_file(loaded, gguf_files.KINDS[kind])


def _as_it_is(loaded: Loaded, kind: str) -> Path:
    if loaded.folder is None or not (loaded.folder / "config.json").is_file():
        raise UnsupportedError(f"{loaded.name} is no folder of a checkpoint, which this engine needs")
    return loaded.folder.resolve()


def _bare(loaded: Loaded, kind: str) -> Path:
    return without_recordings(_as_it_is(loaded, kind))


def without_recordings(folder: Path) -> Path:
    """The folder, or one with links to its files except our recordings of passes, which vLLM would read as weights."""
    recorded = set(folder.glob(SHIPPED.format("*")))
    if not recorded:
        return folder
    bare = converted_folder() / f"{folder.name}-bare-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    bare.mkdir(parents=True, exist_ok=True)
    for path in set(folder.iterdir()) - recorded:
        with suppress(FileExistsError):
            (bare / path.name).symlink_to(path)
    return bare


@dataclass(frozen=True)
class OtherEngine:
    """An engine that runs in an environment of its own.

    Attributes:
        name: as it is shown.
        key: of its environment, ``FOLDER/key``, and of its file here, ``key.py``.
        packages: what pip installs there.
        kinds: weights that it can run: torch's names of dtypes, int8, int4.
        drafts: it can speculate with a draft model.
        checkpoint: the file or folder that it opens, for a model and a kind of weights.
    """

    name: str
    key: str
    packages: str
    kinds: Sequence[str]
    drafts: bool = True
    checkpoint: Callable[[Loaded, str], Path] = _as_it_is

    @property
    def file(self) -> Path:
        """What ``worker.py`` runs."""
        return Path(__file__).with_name(f"{self.key}.py")


def _known() -> Iterator[OtherEngine]:
    """Those of ``engines.toml``."""
    checkpoints = {"folder": _as_it_is, "bare": _bare, "gguf": _as_gguf}
    for own in tomllib.loads(Path(__file__).with_name("engines.toml").read_text(encoding="utf-8"))["engine"]:
        yield OtherEngine(**own | {"checkpoint": checkpoints[own["checkpoint"]]})


ENGINES = tuple(_known())


def environments(folder: str | None) -> Path:
    """Folder of the environments: the user's, or the default one in the cache folder."""
    return cache_folder() / "engines" if folder is None else Path(folder).expanduser().absolute()


def converted_folder() -> Path:
    """Folder for models that engines have converted."""
    return cache_folder() / "converted"
