"""What was trained beside a small model, as wide as its inflated one: heads, block drafters, MTP layers.

They guess the same. The inflated residual stream is ``factor`` copies of the small one, and what a norm gives of it is
the first copy and zeros (see ``inflate``): matrices behind a norm have random weights for the zeros, matrices that read
the stream itself have zeros for the other copies, and what becomes a stream again is written into every copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inflating import Random, gain, inflated_tensor
from sakiyomi.core.draft_specs import split_spec
from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.drafters.block_heads.formats import read_block, write_block
from sakiyomi.drafters.eagle_heads.formats import read_eagle, write_eagle
from sakiyomi.drafters.medusa_heads.backbone import check_heads
from sakiyomi.drafters.medusa_heads.formats import read_heads, write_heads
from sakiyomi.drafters.medusa_heads.heads import MedusaHeads
from sakiyomi.drafters.mtp_layer import read_mtp, write_mtp

__all__ = ["Wider", "read_wider"]

_WIDE = ("intermediate_size", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Wider:
    """Both targets.

    Attributes:
        small, large: their configurations.
        out: folder of the large one, as its heads name it.
    """

    small: Any
    large: Any
    out: Path

    @property
    def factor(self) -> int:
        """Copies of the small stream in the large one."""
        return int(self.large.hidden_size) // int(self.small.hidden_size)

    def place(self, layer: int) -> int:
        """The layer of the large target whose output is that of a layer of the small one."""
        old, new = int(self.small.num_hidden_layers), int(self.large.num_hidden_layers)
        return (layer + 1) * new // old - 1

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Of decoder layers in a head; heads stay as wide as they are."""
        found = {**config, **{name: self.factor * int(config[name]) for name in ("hidden_size", *_WIDE)}}
        found.setdefault("head_dim", int(config["hidden_size"]) // int(config["num_attention_heads"]))
        return found

    def layers(self, tensors: Mapping[str, Tensor], random: Random) -> dict[str, Tensor]:
        """Decoder layers and norms, by their names, of which some first layers read two vectors side by side."""
        return {name: self._layer(name, tensor, random) for name, tensor in tensors.items()}

    def _layer(self, name: str, tensor: Tensor, random: Random) -> Tensor:
        factor, width = self.factor, int(self.small.hidden_size)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return tensor
        if tensor.ndim == 1 or tensor.shape[1] != 2 * width or "down_proj" in name or "o_proj" in name:
            shape = torch.Size([factor * size for size in tensor.shape])
            return inflated_tensor(name, tensor, shape, factor, random, True)
        halves = [random.readers(half.float(), factor * len(tensor)) for half in tensor.split(width, 1)]
        return torch.cat(halves, 1)

    def project(self, weight: Tensor, random: Random | None = None) -> Tensor:
        """(width, n x width): joins n vectors to a stream. They are streams, or, with ``random``, behind norms."""
        parts = weight.split(int(self.small.hidden_size), 1)
        if random is None:
            wide = [
                torch.cat([part, part.new_zeros(len(part), (self.factor - 1) * part.shape[1])], 1) for part in parts
            ]
        else:
            wide = [random.readers(part.float(), len(part)).to(part.dtype) for part in parts]
        return torch.cat(wide, 1).repeat(self.factor, 1)

    def correction(self, name: str, tensor: Tensor, random: Random) -> Tensor:
        """Of a Markov head: what reads the hidden state behind a norm, beside embeddings of its own."""
        width = int(self.small.hidden_size)
        if name.endswith("joint_proj.weight"):  # which has it last
            rest, here = tensor.split([tensor.shape[1] - width, width], 1)
            return torch.cat([rest, self.over_tokens(here, random)], 1)
        if name.endswith("proj.weight"):
            here, rest = tensor.split([width, tensor.shape[1] - width], 1)
            return torch.cat([self.over_tokens(here, random), rest], 1)
        return tensor

    def over_tokens(self, weight: Tensor, random: Random) -> Tensor:
        """(n, width): a head over the vocabulary, or what else reads what stands behind a norm."""
        return random.readers(weight.float(), len(weight))


def read_wider(specs: str, small: Any) -> Iterator[tuple[str, Callable[[Wider, Path], None]]]:
    """What is to become as wide: kind of each, and what writes it to a folder.

    Args:
        specs: folders or specs of heads, joined by +.
        small: configuration of the target that they were trained on.

    Raises:
        InputError: one of them is no head, or two are of one kind.
        UnsupportedError: it belongs to another model, or cannot be widened.
        LoadError: it cannot be read.
    """
    seen = set()
    for spec in split_spec(specs):
        kind, _, name = spec.partition(":")
        if kind not in _READERS or kind in seen:
            known = ", ".join(_READERS)
            said = "is given twice" if kind in seen else f"is none of {known}"
            raise InputError(f"heads is {specs!r}, and {spec} {said}; give one folder of a kind, joined by +")
        seen.add(kind)
        yield kind, _READERS[kind](name, small)


def _rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In bfloat16, as the large target's are."""
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def _refuse(name: str, own: int, small: Any) -> None:
    if own != small.hidden_size:
        raise UnsupportedError(
            f"the head {name} reads hidden states of {own} values, and those of the target have {small.hidden_size}: "
            "it belongs to another model"
        )


def _medusa(name: str, small: Any) -> Callable[[Wider, Path], None]:
    heads = read_heads(folder_of(name)).heads
    check_heads(heads, small.hidden_size, small.vocab_size, name)
    return lambda wider, folder: write_heads(wider_heads(heads, int(wider.large.hidden_size)), folder, base=wider.out)


def _eagle(name: str, small: Any) -> Callable[[Wider, Path], None]:
    file = read_eagle(folder_of(name), small.num_hidden_layers)
    options, stored = file.options, _rounded(file.tensors)
    _refuse(name, options.target_size, small)
    if options.first or options.norm_output or options.norm_before_residual or options.mask is not None:
        raise UnsupportedError(
            f"the head {name} feeds back, or adds, what stands behind a norm, or guesses several tokens a pass; "
            "EAGLE-3 heads as `train eagle` makes them are widened alone"
        )

    def write(wider: Wider, folder: Path) -> None:
        random, tensors = Random(int(wider.large.hidden_size)), dict(stored)
        made = {"fc.weight": wider.project(tensors.pop("fc.weight"), random if options.fc_norm else None)}
        made["lm_head.weight"] = wider.over_tokens(tensors.pop("lm_head.weight"), random)
        if "embed_tokens.weight" in tensors:
            made["embed_tokens.weight"] = tensors.pop("embed_tokens.weight").repeat(1, wider.factor)
        if "input_norm.weight" in tensors:  # behind other norms its rows are first copies and zeros
            parts = tensors.pop("input_norm.weight").split(int(small.hidden_size))
            wide_norm = torch.cat([gain(part.float(), wider.factor) for part in parts])
            made["input_norm.weight"] = wide_norm * (wider.factor**-0.5 if options.fc_norm else 1.0)
        layers = tuple(map(wider.place, options.layers))
        wide = replace(options, layers=layers, target_size=int(wider.large.hidden_size))
        made |= wider.layers(tensors, random)
        write_eagle(folder, replace(file, config=wider.config(file.config), options=wide, tensors=made), str(wider.out))

    return write


def _block(name: str, small: Any) -> Callable[[Wider, Path], None]:
    file = read_block(folder_of(name), small.num_hidden_layers)
    options, whole = file.options, "lm_head.weight" not in file.tensors and file.tokens is None
    _refuse(name, len(file.tensors["fc.weight"]), small)
    if options.confident or options.kernel or options.selected or not whole:
        raise UnsupportedError(
            f"the block drafter {name} has a head over the vocabulary of its own, a confidence head, convolutions or a "
            "selector; those that `train block` makes are widened alone"
        )

    def write(wider: Wider, folder: Path) -> None:
        random, tensors = Random(int(wider.large.hidden_size)), _rounded(file.tensors)
        markov = [key for key in tensors if key.startswith("markov_head.")]
        made = {key: wider.correction(key, tensors.pop(key), random) for key in markov}
        made |= {"fc.weight": wider.project(tensors.pop("fc.weight"))} | wider.layers(tensors, random)
        wide = replace(options, layers=tuple(map(wider.place, options.layers)))
        written = replace(file, config=wider.config(file.config), options=wide, tensors=made)
        write_block(folder, written, str(wider.out), int(wider.large.num_hidden_layers))

    return write


def _mtp(name: str, small: Any) -> Callable[[Wider, Path], None]:
    form, tensors = read_mtp(folder_of(name), small.num_hidden_layers)
    _refuse(name, len(tensors[f"{form.project}.weight"]), small)

    def write(wider: Wider, folder: Path) -> None:
        random, made = Random(int(wider.large.hidden_size)), _rounded(tensors)
        # Both vectors are projected behind norms. The hidden state is itself behind one: the mean square of its first
        # copy and zeros is that of the small one, divided.
        project = wider.project(made.pop(f"{form.project}.weight"), random)
        hidden = gain(made.pop(f"{form.hidden}.weight").float(), wider.factor) * wider.factor**-0.5
        written = {f"{form.project}.weight": project, f"{form.hidden}.weight": hidden, **wider.layers(made, random)}
        write_mtp(folder, form, written, int(wider.large.num_hidden_layers), str(wider.out))

    return write


_READERS = {"medusa": _medusa, "eagle": _eagle, "block": _block, "mtp": _mtp}


@torch.no_grad()
def wider_heads(heads: MedusaHeads, width: int) -> MedusaHeads:
    """Medusa heads that guess the same behind a wider target.

    Its head over the vocabulary reads the old hidden state in the first columns, and zeros in the others: what stands
    beside the old weights there is random. The new rows of a block write nothing: the target's head would read it.
    """
    shape, old = replace(heads.shape, hidden_size=width), heads.shape.hidden_size
    made = MedusaHeads(shape, heads.weights.dtype)
    generator = torch.Generator().manual_seed(width)
    scale = heads.weights.float().std()
    beside = torch.randn(shape.layers, shape.heads, old, width - old, generator=generator) * scale
    made.weights[:, :, :old, :old] = heads.weights
    made.weights[:, :, :old, old:] = beside.to(heads.weights.dtype)
    if made.biases is not None and heads.biases is not None:
        made.biases[..., :old] = heads.biases
    if made.own is not None and heads.own is not None:
        made.own[..., :old] = heads.own
        made.own[..., old:] = (
            torch.randn(*made.own.shape[:2], width - old, generator=generator) * heads.own.float().std()
        )
    made.token_map = heads.token_map
    return made
