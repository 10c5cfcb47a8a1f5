"""What ``cache=`` says: a policy, what merges beside it, how pairs are quantized, what prompts look at, or where all
pairs lie; joined by "+".
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sakiyomi.cache.mapped_files import MappedFiles
from sakiyomi.cache.policies.base import Policy
from sakiyomi.cache.policies.chance import Random
from sakiyomi.cache.policies.expected import Expected
from sakiyomi.cache.policies.fastgen import FastGen
from sakiyomi.cache.policies.h2o import H2O
from sakiyomi.cache.policies.infllm import InfLLM
from sakiyomi.cache.policies.knorm import KeyDiff, Knorm
from sakiyomi.cache.policies.lococo import LoCoCo
from sakiyomi.cache.policies.locret import Locret
from sakiyomi.cache.policies.minference import PATTERNS, MInference
from sakiyomi.cache.policies.sirllm import SirLLM
from sakiyomi.cache.policies.snapkv import PyramidKV, SnapKV
from sakiyomi.cache.policies.sparse import Sparse
from sakiyomi.cache.policies.streaming import Recency, Streaming
from sakiyomi.cache.policies.tova import TOVA
from sakiyomi.cache.quantized import Packing
from sakiyomi.cache.quantized_levels import LeveledPacking
from sakiyomi.core.errors import InputError
from sakiyomi.core.memory import parse_bytes

__all__ = ["POLICIES", "CacheSpec", "read_budget", "read_cache", "without_place"]

_ALL = (
    Locret,
    InfLLM,
    H2O,
    SnapKV,
    PyramidKV,
    TOVA,
    Expected,
    FastGen,
    SirLLM,
    Knorm,
    KeyDiff,
    Streaming,
    Recency,
    Random,
)
POLICIES: dict[str, Callable[..., Policy]] = {policy.name: policy for policy in _ALL}
"""Which pairs stay, by the name in ``cache=``."""
SPARSE: dict[str, Callable[..., Sparse]] = {MInference.name: MInference}
"""What a prompt's rows look at, likewise."""
MERGERS: dict[str, Callable[..., LoCoCo]] = {"lococo": LoCoCo}
"""What becomes of pairs that go, likewise."""
PACKINGS: dict[str, type[Packing]] = {"quant": Packing, "kvquant": LeveledPacking}
"""How pairs are quantized, likewise, before the bits."""
PLACES: dict[str, Callable[..., MappedFiles]] = {"offload": MappedFiles}
"""Where all pairs lie, likewise."""

_KINDS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "policy": POLICIES,
    "sparse": SPARSE,
    "merger": MERGERS,
    "packing": {f"{name}-{bits}": packing for name, packing in PACKINGS.items() for bits in packing.choices},
    "offloaded": PLACES,
}
_NAMES = sorted((name for kind in _KINDS.values() for name in kind), key=len, reverse=True)
# A file's name may have a plus, too: parts begin with a name that is known, or look like a part.
_BREAK = re.compile(rf"\+(?=(?:{'|'.join(map(re.escape, [*_NAMES, 'full', *PACKINGS]))})(?:[+:\[-]|$))")
_PART = re.compile(r"(?P<name>[a-z0-9-]+)(:(?P<file>[^\[\]]+))?(\[(?P<options>[^\[\]]*)\])?")
_CHOICES = {
    "ranking": ("most", "mean"),
    "positions": ("kept", "reassigned"),
    "where": ("both", "prompt"),
    "pattern": PATTERNS,
}
_SHARES = ("ends", "recent", "stabilizers", "floor")


PAPER = "paper"
"""The option that sets others as a method was published."""


class CacheSpec(NamedTuple):
    """What a spec says; None: everything stays, as it is and in memory, and prompts look at everything."""

    policy: Policy | None = None
    packing: Packing | None = None
    sparse: Sparse | None = None
    offloaded: MappedFiles | None = None


def read_cache(spec: str) -> CacheSpec:
    """What a cache spec says.

    Args:
        spec: "full", or at most one of each, joined by "+": a policy, ``name:file[option=value,...]``, where the option
            ``paper`` sets others as its authors have them; beside it ``lococo:FOLDER`` (alone: beside ``h2o``, as in
            its paper); ``quant-4[residual=64]``, with 8, 4 or 2 bits, or ``kvquant-4``, with 4, 3 or 2;
            ``minference[...]``; ``offload:FOLDER``, only beside that one.

    Raises:
        InputError: it is none of that.
    """
    if spec == "full":
        return CacheSpec()
    found: dict[str, Any] = {}
    for part in _BREAK.split(spec) if isinstance(spec, str) else [""]:
        match = _PART.fullmatch(part)
        kind = next((kind for kind, known in _KINDS.items() if match is not None and match["name"] in known), None)
        if match is None or kind is None or kind in found:
            raise InputError(_expected(spec, match and match["name"]))
        found[kind] = _packing(spec, match) if kind == "packing" else _make(spec, _KINDS[kind][match["name"]], match)
    merger = found.pop("merger", None)
    if merger is not None:
        found.setdefault("policy", H2O()).merger = merger
    if "offloaded" in found and ("policy" in found or "packing" in found):
        raise InputError(
            f"cache={spec!r}: offload keeps all pairs as they are in files, and what is dropped or packed stays in "
            "memory; expected offload alone or with minference, or leave it out"
        )
    return CacheSpec(**found)


def _expected(spec: str, name: str | None) -> str:
    base, _, bits = (name or "").rpartition("-")
    if base in PACKINGS and bits not in (names := [str(bits) for bits in PACKINGS[base].choices]):
        full = [f"{base}-{bits}" for bits in names]
        return f"cache={spec!r}: {bits!r} bits; expected {', '.join(full[:-1])} or {full[-1]}"
    return (
        f"cache={spec!r}; expected full, or at most one policy ({', '.join(POLICIES)}), as h2o[sinks=4], "
        f"one of {', '.join(_KINDS['packing'])}, lococo:FOLDER (of `sakiyomi train lococo`) and minference, joined "
        "as h2o+quant-4, or offload:FOLDER"
    )


def _packing(spec: str, match: re.Match[str]) -> Packing:
    name, _, bits = match["name"].rpartition("-")
    residual = PACKINGS[name].residual_of(match["options"])
    if residual is None or match["file"]:
        raise InputError(
            f"cache={spec!r}: [{match['options']}]; expected a whole number of tokens that stay as they are, as "
            f"{name}-4[residual=64]"
        )
    return PACKINGS[name](int(bits), residual)


def _make(spec: str, make: Callable[..., Any], match: re.Match[str]) -> Any:
    name = match["name"]
    known = {field.name: field for field in dataclasses.fields(make) if field.init}  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    published: Mapping[str, Any] = getattr(make, "published", {})
    if match["file"]:
        if "file" not in known:
            raise InputError(f"cache={spec!r}: {name} takes no file; leave {match['file']!r} out")
        options["file"] = match["file"]
    elif name in MERGERS:
        raise InputError(f"cache={spec!r}; expected {name}:FOLDER with what `sakiyomi train {name}` made")
    for entry in filter(None, (match["options"] or "").split(",")):
        key, _, value = entry.partition("=")
        if entry == PAPER and published:
            options |= published
            continue
        if key not in known or key == "file":
            raise InputError(f"cache={spec!r}: {name} has no option {key!r}; it has {', '.join(known)}")
        options[key] = _value(spec, known[key], value)
    return make(**options)


def _value(spec: str, field: dataclasses.Field[Any], text: str) -> Any:
    choices = _CHOICES.get(field.name)
    if choices is not None:
        if text not in choices:
            raise InputError(f"cache={spec!r}: {field.name}={text!r}; expected {' or '.join(choices)}")
        return text
    try:
        value: int | float = int(text) if field.type == "int" else float(text)
    except ValueError:
        value = -1
    steep = field.name == "pyramid"
    if value < 0 or (steep and 0 < value < 1) or (field.name in _SHARES and value >= 1):
        what = "a whole number of 0 or more" if field.type == "int" else "a share from 0 to less than 1"
        what = "0 (all layers alike), or a number of 1 or more" if steep else what
        raise InputError(f"cache={spec!r}: {field.name}={text!r}; expected {what}")
    return value


def without_place(spec: str) -> str:
    """A spec without where pairs lie: equal where the pairs themselves are."""
    return "+".join(part for part in _BREAK.split(spec) if part.partition(":")[0] not in PLACES) or "full"


def read_budget(budget: int | str) -> tuple[int, bool]:
    """A budget as a number, and whether it is one of bytes.

    Raises:
        InputError: it is neither a number of pairs nor a size as "2GiB".
    """
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget, False
    if not isinstance(budget, str):
        raise InputError(f"kv_budget={budget!r}; expected a number of pairs of a head, or bytes as '2GiB'")
    return parse_bytes(budget, "kv_budget"), any(map(str.isalpha, budget))
