"""Means by which a model is made larger without a change of what it computes; see `inflate`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from sakiyomi.core.errors import LoadError
from sakiyomi.core.memory import readable

__all__ = ["ASPECT", "LOUDNESS", "NEW_TOKENS", "Random", "fresh_folder", "gain", "hooked", "save_model", "writer"]

ASPECT = 80
"""Hidden size / layers to aim at; models of 0.1 to 7 billion parameters have 20 to 130."""
LOUDNESS = 0.5
"""Random activations reach so much of the smallest maximum of a row of real ones, on the text they are fitted to."""
NEW_TOKENS = 32
"""Greedy tokens that both models are compared on."""
SHARD = "1GB"
_Key = TypeVar("_Key", bound=Hashable)


def gain(weight: Tensor, factor: int) -> Tensor:
    """Gain of a norm: the first copy of the stream is read, the others are not."""
    return torch.cat((weight, weight.new_zeros((factor - 1) * len(weight))))


def writer(weight: Tensor, columns: int, factor: int, real: bool) -> Tensor:
    """(factor x rows, columns): the same into every copy of the stream, zeros for new columns or a new layer."""
    made = weight.new_zeros(factor * weight.shape[0], columns, dtype=torch.bfloat16)
    if real:
        made[:, : weight.shape[1]] = weight.repeat(factor, 1)
    return made


class Random:
    """Random weights, the same ones in every run.

    Args:
        width: of the large model's residual stream.
    """

    def __init__(self, width: int) -> None:
        self._width, self._generator = width, torch.Generator().manual_seed(0)

    def readers(self, weight: Tensor, rows: int, real: bool = True) -> Tensor:
        """(rows, width) bfloat16 around ``weight``, or, if it is not to be real, of its size alone.

        Random numbers are below half of the largest real one of their row; in new rows, of a mean row.
        """
        limits = weight.abs().amax(1, keepdim=True)
        limits = torch.cat((limits, limits.mean().expand(rows - len(limits), 1))) / 2
        made = torch.empty(rows, self._width, dtype=torch.bfloat16).uniform_(-1, 1, generator=self._generator)
        made *= limits.bfloat16()
        if real:
            made[: weight.shape[0], : weight.shape[1]] = weight
        return made


@contextmanager
def hooked(modules: Mapping[_Key, Any]) -> Iterator[dict[_Key, Tensor]]:
    """What each module reads while the block runs: (T, width), of the first text of a batch."""
    found: dict[_Key, Tensor] = {}

    def keep(key: _Key) -> Any:
        def hook(module: Any, arguments: tuple[Tensor, ...]) -> None:
            found[key] = arguments[0][0]

        return hook

    hooks = [module.register_forward_pre_hook(keep(key)) for key, module in modules.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def save_model(kind: type, state: dict[str, Tensor], shape: Any, generation: Any, folder: Path) -> None:
    """Write weights and configurations of a model of this class."""
    with torch.device("meta"):  # no time and no memory for weights that are replaced
        model: Any = kind(shape)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.generation_config = generation
    model.save_pretrained(folder, max_shard_size=SHARD)
    # The weights are written through a private temporary file; a model folder is there to be read by others.
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)


@contextmanager
def fresh_folder(out: Path, size: int) -> Iterator[Path]:
    """A folder that becomes ``out`` when the block is over, and is removed if it raises."""
    fresh = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        fresh.mkdir(parents=True)
        free = shutil.disk_usage(fresh).free
        if size > free:
            raise LoadError(
                f"{out} needs {readable(size)} on the disk, where {readable(free)} are free; make room there"
            )
        yield fresh
        if out.exists():
            out.rmdir()
        fresh.rename(out)
    except (OSError, SafetensorError) as error:
        raise LoadError(f"cannot write {out}: {error}; make room there, or name another folder") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
