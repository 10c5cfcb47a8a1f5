"""Files of retaining heads: a folder with ``config.json`` and ``heads.safetensors``, and the paper's own checkpoints.

Tensors have the names of Locret's checkpoints (github.com/huangyuxiang03/Locret),
``model.layers.{i}.self_attn.fc1.weight`` and ``fc2``. Its loader takes every tensor with ``fc`` in its name, so it can
read our files. Its files are read here; other tensors in them are ignored.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from sakiyomi.cache.policies.retaining.heads import RetainingHeads, RetainingShape
from sakiyomi.cache.policies.retaining.raw import out_features
from sakiyomi.core.checkpoint import RETAINING_FILE as FILE
from sakiyomi.core.checkpoint import read_checkpoint
from sakiyomi.core.digests import tokenizer_digest
from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.trained import PICKLES, Origin, Trained, read_config, read_tensors, trained_config, write_trained

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FILE", "HeadsFile", "fingerprint", "read_heads", "write_heads"]

KIND, WHAT = "retaining_heads", "retaining heads"
NAME = "model.layers.{}.self_attn.fc{}.weight"
_TENSOR = re.compile(r"(?:^|\.)(\d+)\.(?:[^\d.]\w*\.)+fc([12])\.weight$")  # inside an attention: MLPs have such


@dataclass(frozen=True)
class HeadsFile(Trained):
    """Heads as they were found; their recipe has labels, whether the question stands in front (``query_aware``), ...

    Attributes:
        heads: themselves, in the dtype in which they are stored.
    """

    heads: RetainingHeads

    def check(
        self, widths: Sequence[int], kv_heads: Sequence[int], fingerprint: Mapping[str, str] | None = None
    ) -> list[str]:
        """Refuse heads of another model.

        Args:
            widths: of each layer of the model, as `Raw` has them.
            kv_heads: of each layer.
            fingerprint: of the model, as far as it is known.

        Returns:
            What differs between models of the same sizes: "tokenizer", "weights". Such heads work, though perhaps
            worse: a tuned model may use those of the model that it was tuned from.

        Raises:
            UnsupportedError: sizes differ; with both numbers.
        """
        reads = "read {own} values in layer {layer}, and the model's queries, keys and values are {model}"
        scores = "score {own} KV heads in layer {layer}, and the model has {model}"
        shape = self.heads.shape
        sizes = ((reads, shape.widths, widths), (scores, shape.kv_heads, kv_heads))
        return self.compare("heads", sizes, fingerprint)


def fingerprint(model: Any, tokenizer: Any) -> dict[str, str]:
    """Digests of a transformers model and its tokenizer, which differ between models of the same sizes.

    "weights" is a digest of the norms in bf16, so it does not depend on the precision in which a model is loaded, nor
    on quantized or packed matrices. It is missing if the weights are not in memory; "tokenizer" if the tokenizer does
    not give its vocabulary.
    """
    import torch

    found = {}
    with suppress(UnsupportedError):
        found["tokenizer"] = tokenizer_digest(tokenizer)
    given = getattr(model, "given_name", str)  # of a decoder whose parts have other names here
    vectors = {
        f"{given(name)}.{own}": weight
        for name, module in model.named_modules()
        if not out_features(module)  # packed layers hold their biases elsewhere
        for own, weight in module.named_parameters(recurse=False)
        if weight.dim() == 1
    }
    if vectors and all(weight.device.type != "meta" for weight in vectors.values()):
        digest = hashlib.sha256()
        for name in sorted(vectors):
            digest.update(name.encode())
            digest.update(vectors[name].detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
        found["weights"] = digest.hexdigest()
    return found


def read_heads(name: str | Path, *, allow_pickle: bool = False) -> HeadsFile:
    """Read heads: a folder of ours, an embedded name, or a folder or file of Locret's.

    Args:
        name: of it.
        allow_pickle: read ``.bin`` and ``.pt`` files too; tensors and nothing else are taken from them.

    Raises:
        LoadError: something is missing, damaged, or no heads.
        InputError: an embedded name that is not known.
    """
    path = folder_of(name) if isinstance(name, str) else name.expanduser()
    if path.is_dir():
        config, files = read_config(path), _files(path, allow_pickle)
    elif path.is_file():
        config, files = {}, (path,)
    else:
        raise LoadError(f"there is no folder or file {str(path)!r} with retaining heads; check the path")
    tensors = read_tensors(files, WHAT, wanted=_TENSOR.search, allow_pickle=allow_pickle)
    activation = config.get("activation", config.get("hidden_act", "silu"))  # Locret's folders have the model's own
    heads = _assembled(path, tensors, str(activation))
    return HeadsFile.of(config if config.get("kind") == KIND else {}, heads=heads, name=str(name))


def write_heads(heads: RetainingHeads, folder: str | Path, *, config: Any = None, **origin: Unpack[Origin]) -> None:
    """Write heads; both files are there whole or not at all.

    Args:
        heads: to be written, in the dtype that they have.
        folder: is made; what is in it is left, but for the two files that are written.
        config: of the target, whose kind and sizes are noted.
        origin: target, recipe and fingerprint.

    Raises:
        InputError: the recipe holds what JSON does not.
        LoadError: nothing can be written there.
    """
    shape, folder = heads.shape, Path(folder).expanduser()
    said: dict[str, Any] = {"kind": KIND}
    if config is not None:
        text = config.get_text_config()
        said |= {"model_type": config.model_type, "hidden_size": int(text.hidden_size)}
    said |= {
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": _one_or_all(shape.kv_heads),
        "width": _one_or_all(shape.widths),
        "d_r": shape.hidden,
        "activation": shape.activation,
    }
    tensors = {}
    for layer in range(shape.layers):
        for part, linear in ((1, heads.first), (2, heads.second)):
            tensors[NAME.format(layer, part)] = linear.get_parameter(f"{layer}.weight")
    write_trained(folder, FILE, tensors, trained_config(said, **origin), WHAT)


def _one_or_all(values: tuple[int, ...]) -> int | list[int]:
    """One number where all layers have the same."""
    return values[0] if len(set(values)) == 1 else list(values)


# ---------------------------------------------------------------- tensors


def _files(folder: Path, allow_pickle: bool) -> tuple[Path, ...]:
    if (folder / FILE).is_file():
        return (folder / FILE,)
    others = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    pickles = sorted(path for path in folder.iterdir() if path.suffix in PICKLES)
    if not (folder / "model.safetensors.index.json").is_file() and (others or (pickles and allow_pickle)):
        return tuple(others or pickles)
    if pickles and not others:
        return tuple(pickles)  # which are refused
    return read_checkpoint(folder).files  # says what is missing


def _assembled(path: Path, tensors: Mapping[str, Tensor], activation: str) -> RetainingHeads:
    """Heads of single tensors, all of which have to be there."""
    import torch

    parts: dict[tuple[int, int], Tensor] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.search(name)
        assert match is not None
        parts[int(match[1]), int(match[2])] = tensor
    if not parts:
        raise LoadError(f"{path} holds no retaining heads (tensors named ...fc1.weight and ...fc2.weight)")
    layers = 1 + max(layer for layer, _ in parts)
    missing = [(layer, part) for layer in range(layers) for part in (1, 2) if (layer, part) not in parts]
    if missing:
        layer, part = missing[0]
        raise LoadError(f"{path} holds heads of {layers} layers in part: fc{part} of layer {layer} is missing")
    sizes = {tuple(parts[layer, 1].shape)[:1] + tuple(parts[layer, 2].shape)[1:] for layer in range(layers)}
    dtypes = {tensor.dtype for tensor in parts.values()}
    flat = all(tensor.dim() == 2 and tensor.is_floating_point() for tensor in parts.values())
    if not flat or len(dtypes) != 1 or len(sizes) != 1 or len(set(next(iter(sizes)))) != 1:
        raise LoadError(
            f"{path}: the heads of its {layers} layers do not fit together (between fc1 and fc2 there are "
            f"{sorted(map(str, sizes))} values of {sorted(map(str, dtypes))}); expected one number and one dtype"
        )
    shape = RetainingShape(
        tuple(parts[layer, 1].shape[1] for layer in range(layers)),
        tuple(parts[layer, 2].shape[0] for layer in range(layers)),
        int(parts[0, 1].shape[0]),
        activation,
    )
    heads = RetainingHeads(shape, next(iter(dtypes)), "meta")
    for layer in range(layers):
        heads.first[layer].weight = torch.nn.Parameter(parts[layer, 1])
        heads.second[layer].weight = torch.nn.Parameter(parts[layer, 2])
    return heads
