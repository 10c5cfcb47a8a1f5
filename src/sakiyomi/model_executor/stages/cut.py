"""Cuts a model's folder into one folder a stage, each a small model of some of its layers.

Every stage is a complete folder in Hugging Face format, with its layers counted from 0, so that it is loaded, checked
and run like any model. Later stages do not need embeddings and head: theirs have a vocabulary of `TINY` tokens.
"""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.core.checkpoint import LAYER, read_checkpoint, read_json
from sakiyomi.core.digests import file_digest, save_tensors
from sakiyomi.core.errors import InputError, LoadError, UnsupportedError
from sakiyomi.core.gguf_files import gguf_file
from sakiyomi.core.model_folder import STAGES
from sakiyomi.model_executor.loading.families import has_encoder, read_config
from sakiyomi.model_executor.loading.packed import ABOUT, WEIGHTS, is_packed, json_seal
from sakiyomi.model_executor.loading.reader import without_weights
from sakiyomi.model_executor.structural_copy import layer_kinds, layer_list

TINY = 8


def is_cut(folder: object) -> bool:
    """Whether this is the path of a folder of stages."""
    return isinstance(folder, str | Path) and (Path(folder) / STAGES).is_file()


def stage_count(folder: Path) -> int:
    """Stages in a folder that ``cut`` has written.

    Raises:
        LoadError: another version wrote it.
    """
    about = read_json(folder / STAGES)
    if about.get("format") != 1:
        raise LoadError(f"{folder / STAGES} has format {about.get('format')!r}, expected 1; cut the model anew")
    return len(about["stages"])


def stage_folder(folder: Path, number: int) -> Path:
    """The folder of one stage."""
    return folder / f"stage-{number}"


def cut(folder: Path, count: int, out: Path) -> list[int]:
    """Cut a model.

    Args:
        folder: in Hugging Face format, packed or not.
        count: of stages.
        out: a folder that is new or empty.

    Returns:
        Layers of each stage.

    Raises:
        InputError: there are fewer layers than stages, or `out` is not empty.
        UnsupportedError: its layers are not one list, or depend on each other; or it is a GGUF file.
    """
    if gguf_file(str(folder)) is not None:
        raise UnsupportedError(
            f"{folder} is a GGUF file, which is not cut into stages; pass the model's folder in Hugging Face format"
        )
    config = read_config(folder)
    whole = _without_weights(config)
    layers = int(config.num_hidden_layers)
    if not 2 <= count <= layers:
        raise InputError(f"stages is {count}, and {folder} has {layers} layers; give a number from 2 to {layers}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty folder; name a new one")
    bounds = [layers * number // count for number in range(count + 1)]
    for number in range(count):
        chosen = range(bounds[number], bounds[number + 1])
        place = stage_folder(out, number)
        place.mkdir(parents=True)
        _write_stage(folder, place, config, whole, chosen, first=number == 0)
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    about = {"format": 1, "model": folder.name, "stages": sizes}
    (out / STAGES).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return sizes


def _without_weights(config: Any) -> Any:
    if has_encoder(config) or config.get_text_config() is not config:
        raise UnsupportedError("stages: the model is not one stack of layers over text; choose another")
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return without_weights(plain)


def _write_stage(folder: Path, place: Path, config: Any, whole: Any, chosen: range, *, first: bool) -> None:
    settings = _settings(config, chosen, first=first)
    part_config = type(config).from_dict(copy.deepcopy(settings))
    part = _without_weights(part_config)
    layers = int(config.num_hidden_layers)
    kinds = layer_kinds(whole.get_submodule(layer_list(whole, layers, "stages")))
    kinds_here = layer_kinds(part.get_submodule(layer_list(part, len(chosen), "stages")))
    if [kinds[layer] for layer in chosen] != kinds_here:
        raise UnsupportedError(f"stages: layers of {type(whole).__name__} are others where fewer come before them")
    ends = {} if first else _ends(whole)

    def renamed(name: str) -> str | None:
        """The name of a tensor or layer in its stage; None: it is not in this stage."""
        if found := LAYER.search(f"{name}."):
            layer = int(found[1])
            return f"{name[: found.start(1)]}{layer - chosen.start}{name[found.end(1) :]}" if layer in chosen else None
        return None if any(name == end or name.startswith(f"{end}.") for end in ends) else name

    tensors = {new: tensor for name, tensor in _stored(folder) if (new := renamed(name))}
    random = torch.Generator().manual_seed(0)  # with zeros a self-test would prove nothing
    dtype = next(iter(tensors.values())).dtype
    tensors |= {name: torch.randn(shape, generator=random).to(dtype) for name, shape in _tiny(part, ends)}
    for path in folder.iterdir():
        own = path.suffix == ".safetensors" or path.name in ("config.json", ABOUT) or path.name.endswith(".index.json")
        if path.is_file() and not own:
            shutil.copy(path, place)
    if is_packed(folder):
        settings["quantization_config"]["layers"] = sorted(
            new for name in settings["quantization_config"]["layers"] if (new := renamed(name))
        )
    (place / "config.json").write_text(json.dumps(settings, indent=1, default=str), encoding="utf-8")
    save_tensors(place / "model.safetensors", tensors)
    if is_packed(folder):
        _write_packed(folder, place, renamed, chosen)


def _settings(config: Any, chosen: range, *, first: bool) -> dict[str, Any]:
    """The configuration of a stage."""
    layers = int(config.num_hidden_layers)
    settings: dict[str, Any] = copy.deepcopy(config.to_dict())
    for name, value in settings.items():
        if isinstance(value, list) and len(value) == layers:
            settings[name] = [value[layer] for layer in chosen]
    counts = [
        name for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if settings.get(name) == layers
    ]
    settings |= dict.fromkeys(counts, len(chosen))
    if not first:
        settings |= {"vocab_size": TINY, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return settings


def _ends(model: nn.Module) -> list[str]:
    """Names of embeddings and head."""
    parts = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    return [name for name, module in model.named_modules() if any(module is part for part in parts)]


def _tiny(part: nn.Module, ends: Any) -> Iterator[tuple[str, torch.Size]]:
    """Tensors of small embeddings and head that replace the whole model's."""
    seen: set[int] = set()
    for name, tensor in part.named_parameters(remove_duplicate=True):
        if name.rpartition(".")[0] in ends and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.shape


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    paths = [folder / "model.safetensors"] if is_packed(folder) else read_checkpoint(folder).files
    for path in paths:
        if path.suffix != ".safetensors":
            raise UnsupportedError(f"stages: {path} is no safetensors file; save the model as one first")
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name)


def _write_packed(folder: Path, place: Path, renamed: Callable[[str], str | None], chosen: range) -> None:
    """Write the packed weights of a stage, and its metadata."""
    from safetensors import safe_open

    about = read_json(folder / ABOUT)
    about.pop("digest")
    about["layers"] = {new: layer for name, layer in about["layers"].items() if (new := renamed(name))}
    groups = [[renamed(name) for name in group] for group in about["siblings"]]
    about["siblings"] = [group for group in groups if all(group)]
    about["cache"] = [about["cache"][layer] for layer in chosen]
    about["report"] = None  # of the whole model
    about["files"] = {path.name: file_digest(path) for path in sorted(place.iterdir())}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        names = ((name, renamed(name.rpartition(".")[0])) for name in file.keys())  # noqa: SIM118
        tensors = {f"{new}.{name.rpartition('.')[2]}": file.get_tensor(name) for name, new in names if new}
    save_tensors(place / WEIGHTS, tensors)
    (place / ABOUT).write_text(json.dumps(json_seal(about), indent=1), encoding="utf-8")
