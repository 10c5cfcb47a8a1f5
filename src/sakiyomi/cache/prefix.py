"""Prefixes: the keys and values of a text that was read once, for many requests that begin with it.

A document or a system prompt is read, pairs are evicted as the policy says, and the rest is kept in memory or in a
file. Every request that begins with its tokens continues from a copy. Prefixes of another model or another cache
configuration are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.digests import Digests, load_tensors, save_tensors
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.files import whole_file

FORMAT = "1"
REMEDY = "build it again"
LEAST = 8  # least tokens in common that are copied
STEP = 64  # tokens that are compared at once
_KEPT = ("keys.", "values.", "packed.", "state.")


def alike(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two texts, of the same kind of sequence, have in common from the first on."""
    count, most = 0, min(len(tokens), len(others))
    while count < most and tokens[count : count + STEP] == others[count : count + STEP]:
        count += STEP
    while count < most and tokens[count] == others[count]:
        count += 1
    return min(count, most)


@dataclass(frozen=True, eq=False)
class Prefix:
    """Tokens, and what stays of them in a cache.

    Attributes:
        tokens: of the beginning.
        text: that they were made from; empty where they were given as ids.
        recipe: what made it: the model's fingerprint, its dtype and rounding, the cache's policy, budget and chunks.
        tensors: by name, for each layer and head its keys, values, those before them that are quantized, and what the
            policy knows of them.
    """

    tokens: list[int]
    text: str
    recipe: dict[str, str]
    tensors: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        """Of keys and values, and of what other layers keep."""
        return sum(tensor.nbytes for name, tensor in self.tensors.items() if name.startswith(_KEPT))

    @property
    def pairs(self) -> list[list[int]]:
        """Pairs that stay, of each layer's heads."""
        found: dict[int, list[int]] = {}
        for name, tensor in self.tensors.items():
            kind, _, place = name.partition(".")
            if kind == "keys":
                packed = self.tensors.get(f"packed.2.{place}", ())
                found.setdefault(int(place.partition(".")[0]), []).append(len(tensor) + len(packed))
        return [found[layer] for layer in sorted(found)]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it; the file is there whole or not at all.

        Raises:
            LoadError: it cannot be written there.
        """
        path = Path(path).expanduser()
        about = {"format": FORMAT, "text": self.text, "recipe": json.dumps(self.recipe)}
        tensors = {"tokens": torch.tensor(self.tokens, dtype=torch.int32)} | self.tensors
        with whole_file(path, "choose another file") as fresh:
            save_tensors(fresh, tensors, about)

    def check(self, recipe: Mapping[str, str], name: str = "the prefix") -> None:
        """Refuse what was read by another model, or kept in another way.

        Raises:
            InputError: naming what differs, with both values.
        """
        for key, own in recipe.items():
            if self.recipe.get(key) != own:
                raise InputError(
                    f"{name} was made with {key} {self.recipe.get(key)!r}, and this is {own!r}; build it again, or "
                    "load the model as it was"
                )


def read_about(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Text and recipe of a file, and the shapes of its tensors, without reading these.

    Raises:
        LoadError: it is no such file, or damaged.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise LoadError(f"there is no file {str(path)!r}; make one by `sakiyomi cache build`")
    header = Digests.of(path, REMEDY).header
    about, shapes = header.metadata, {name: tuple(entry["shape"]) for name, entry in header.entries.items()}
    if about.get("format") != FORMAT or "tokens" not in shapes:
        raise LoadError(f"{path} is no prefix of this version (format {about.get('format')!r}); {REMEDY}")
    try:
        return {"text": about["text"], "recipe": dict(json.loads(about["recipe"]))}, shapes
    except (KeyError, ValueError, TypeError) as error:
        raise LoadError(f"{path} does not say how it was made ({error!r}); {REMEDY}") from None


def read_prefix(path: str | os.PathLike[str]) -> Prefix:
    """A prefix from its file.

    Raises:
        LoadError: it is no such file, or damaged.
    """
    about, _ = read_about(path)
    tensors = load_tensors(Path(path).expanduser(), REMEDY)
    return Prefix(tensors.pop("tokens").tolist(), about["text"], about["recipe"], tensors)
