"""Files of merging convolutions: a folder with ``config.json`` and ``convolutions.safetensors``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from sakiyomi.cache.policies.merging.convolutions import Convolutions, MergingShape
from sakiyomi.core.checkpoint import MERGING_FILE as FILE
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.trained import Origin, Trained, read_config, read_tensors, trained_config, write_trained

__all__ = ["FILE", "MergingFile", "read_merging", "write_merging"]

KIND, WHAT = "merging_convolutions", "merging convolutions"


@dataclass(frozen=True)
class MergingFile(Trained):
    """Convolutions as they were found.

    Attributes:
        convolutions: themselves, in the dtype in which they are stored.
    """

    convolutions: Convolutions

    def check(
        self, dims: Sequence[tuple[int, int]], kv_heads: Sequence[int], fingerprint: Mapping[str, str] | None = None
    ) -> list[str]:
        """Refuse convolutions of another model.

        Args:
            dims, kv_heads: of each layer of the model.
            fingerprint: of the model, as far as it is known.

        Returns:
            What differs between models of the same sizes: "tokenizer", "weights".

        Raises:
            UnsupportedError: sizes differ; with both numbers.
        """
        said = (
            "read {own[0]} heads with keys of {own[1]} and values of {own[2]} in layer {layer}, and the model has "
            "{model[0]} with {model[1]} and {model[2]}"
        )
        shape = self.convolutions.shape
        own = [(heads, *pair) for heads, pair in zip(shape.kv_heads, shape.dims, strict=True)]
        model = [(heads, *pair) for heads, pair in zip(kv_heads, dims, strict=True)]
        return self.compare("convolutions", [(said, own, model)], fingerprint)


def read_merging(name: str | Path) -> MergingFile:
    """Read convolutions from their folder.

    Raises:
        LoadError: something is missing, damaged, or no convolutions.
    """
    path = Path(name).expanduser()
    if not (path / FILE).is_file() or not (path / "config.json").is_file():
        raise LoadError(
            f"there are no merging convolutions in {str(path)!r} (config.json and {FILE}); give the folder that "
            "`sakiyomi train lococo` made"
        )
    config, tensors = read_config(path), read_tensors([path / FILE], WHAT)
    if config.get("kind") != KIND:
        raise LoadError(
            f"{path} holds {config.get('kind')!r}, expected {KIND}; give a folder of `sakiyomi train lococo`"
        )
    try:
        dims = tuple((int(key), int(value)) for key, value in config["dims"])
        heads = tuple(map(int, config["num_key_value_heads"]))
        shape = MergingShape(dims, heads, int(config["merged"]), int(config["kernel"]), bool(config["again"]))
        dtype = next(iter(tensors[name].dtype for name in tensors if name.startswith("convolutions.")))
        convolutions = Convolutions(shape, dtype)
        convolutions.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, StopIteration, RuntimeError, InputError) as error:
        said = " ".join(str(error).split())
        raise LoadError(f"{path}: tensors and config.json do not fit together ({said:.200}); get it again") from error
    return MergingFile.of(config, convolutions=convolutions, name=str(name))


def write_merging(convolutions: Convolutions, folder: str | Path, **origin: Unpack[Origin]) -> None:
    """Write convolutions; both files are there whole or not at all.

    Args:
        convolutions: to be written, in the dtype that they have.
        folder: is made.
        origin: target, recipe and fingerprint.

    Raises:
        InputError: the recipe holds what JSON does not.
        LoadError: nothing can be written there.
    """
    shape = convolutions.shape
    sizes = {
        "kind": KIND,
        "dims": [list(dims) for dims in shape.dims],
        "num_key_value_heads": list(shape.kv_heads),
        "merged": shape.merged,
        "kernel": shape.kernel,
        "again": shape.again,
    }
    write_trained(Path(folder).expanduser(), FILE, convolutions.state_dict(), trained_config(sizes, **origin), WHAT)
