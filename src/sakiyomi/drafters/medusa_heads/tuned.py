"""The result of `sakiyomi tune medusa`, stored beside the heads as ``tuned.json`` and used when they are loaded."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sakiyomi.core.digests import sealed, unsealed
from sakiyomi.core.errors import LoadError
from sakiyomi.core.files import whole_file

FILE = "tuned.json"


@dataclass(frozen=True)
class Tuned:
    """The size that was fastest on a machine.

    Attributes:
        heads: heads that are used, one for each level.
        top_k: first guesses of each head that are considered.
        nodes: of the largest tree.
        accuracies: of each head by rank, on held-out text.
        conditions: machine, target and settings under which it was measured.
        table: all sizes that were compared.
    """

    heads: int
    top_k: int
    nodes: int
    accuracies: list[list[float]]
    conditions: dict[str, Any]
    table: list[dict[str, Any]]


def read_tuned(folder: Path) -> Tuned | None:
    """The sizes stored beside the heads; None: there are none.

    Raises:
        LoadError: it is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        found = Tuned(**unsealed(json.loads(path.read_text(encoding="utf-8"))))
        sizes = (found.heads, found.top_k, found.nodes)
        if not all(type(size) is int and size > 0 for size in sizes) or not all(found.accuracies):
            raise ValueError(f"sizes {sizes}")
    except (OSError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise LoadError(
            f"{path} is damaged ({error}); delete it, or run sakiyomi tune medusa to make it anew"
        ) from None
    return found


def write_tuned(folder: Path, tuned: Tuned) -> None:
    """Write the file; if that fails, the old one stays."""
    with whole_file(folder / FILE, "give a folder that can be written") as fresh:
        fresh.write_text(json.dumps(sealed(dataclasses.asdict(tuned)), indent=1) + "\n", encoding="utf-8")
