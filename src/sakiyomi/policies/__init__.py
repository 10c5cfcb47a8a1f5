"""Policies that keep the KV cache within a budget, and those by which prompts are read in part; a new one is a file and
a line in ``POLICIES`` or ``SPARSE``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sakiyomi.cache.leveled_pairs import LeveledPacking
from sakiyomi.cache.packed_pairs import Packing
from sakiyomi.errors import InputError
from sakiyomi.kernels.sparse import Sparse
from sakiyomi.memory import parse_bytes
from sakiyomi.policies.base import Policy, View
from sakiyomi.policies.chance import Random
from sakiyomi.policies.expected import Expected
from sakiyomi.policies.fastgen import FastGen
from sakiyomi.policies.h2o import H2O
from sakiyomi.policies.infllm import InfLLM
from sakiyomi.policies.knorm import KeyDiff, Knorm
from sakiyomi.policies.locret import Locret
from sakiyomi.policies.minference import PATTERNS, MInference
from sakiyomi.policies.pyramidkv import PyramidKV
from sakiyomi.policies.sirllm import SirLLM
from sakiyomi.policies.snapkv import SnapKV
from sakiyomi.policies.streaming import Recency, Streaming
from sakiyomi.policies.tova import TOVA

__all__ = ["POLICIES", "SPARSE", "Policy", "View", "make_policy", "read_budget", "read_cache", "read_sparse"]

_ALL = (
    *(Locret, InfLLM, H2O, SnapKV, PyramidKV, TOVA, Expected, FastGen),
    *(SirLLM, Knorm, KeyDiff, Streaming, Recency, Random),
)
POLICIES: dict[str, Callable[..., Policy]] = {policy.name: policy for policy in _ALL}
"""By the name in ``cache=``."""
SPARSE: dict[str, Callable[..., Sparse]] = {MInference.name: MInference}
"""Likewise."""

Made = TypeVar("Made")
_SPEC = re.compile(r"(?P<name>[a-z0-9-]+)(:(?P<file>[^\[\]]+))?(\[(?P<options>[^\[\]]*)\])?")
_SHARES = ("ends", "recent", "stabilizers", "floor")
PACKINGS: dict[str, type[Packing]] = {"quant": Packing, "kvquant": LeveledPacking}
"""By the name in ``cache=``, before the bits."""
_PACKED = re.compile(
    r"((?P<before>.+)\+)?(?P<name>quant|kvquant)-(?P<bits>[^\[\]+]*)(\[(?P<options>[^\[\]]*)\])?(\+(?P<after>.+))?"
)


def read_sparse(spec: str) -> tuple[Sparse | None, str]:
    """What a cache spec says prompts look at, None for everything; and the rest of it, for ``read_cache``.

    Args:
        spec: "minference" or "minference[vertical=100]", alone or joined by "+" with what ``read_cache`` takes.

    Raises:
        InputError: it names two, or an option that they have not.
    """
    parts = spec.split("+") if isinstance(spec, str) else []
    sparse = [part for part in parts if re.split(r"[:\[]", part)[0] in SPARSE]
    if not sparse:
        return None, spec
    if len(sparse) > 1:
        raise InputError(f"cache={spec!r}; expected one of {', '.join(SPARSE)} at most, once")
    rest = "+".join(part for part in parts if part not in sparse)
    return _make(sparse[0], SPARSE), rest or "full"


def read_cache(spec: str) -> tuple[Policy | None, Packing | None]:
    """What a cache spec says stays, and how it is packed; None for "everything" and "not at all".

    Args:
        spec: "full", a policy (``make_policy``), ``quant-4`` or ``quant-4[residual=64]`` with 8, 4 or 2 bits, or one
            policy and one of those joined by "+"; or ``kvquant-4``, likewise, with 4, 3 or 2 bits.

    Raises:
        InputError: it is none of that.
    """
    match = _PACKED.fullmatch(spec) if isinstance(spec, str) else None
    if match is None:
        return make_policy(spec), None
    rest = [part for part in (match["before"], match["after"]) if part]
    if len(rest) > 1 or any(part == "full" or _PACKED.fullmatch(part) for part in rest):
        raise InputError(f"cache={spec!r}; expected at most one policy and one of quant-8, quant-4, quant-2 with it")
    packing = PACKINGS[match["name"]]
    names = [f"{match['name']}-{bits}" for bits in packing.choices]
    if match["bits"] not in map(str, packing.choices):
        raise InputError(f"cache={spec!r}: {match['bits']!r} bits; expected {', '.join(names[:-1])} or {names[-1]}")
    residual = packing.residual_of(match["options"])
    if residual is None:
        raise InputError(
            f"cache={spec!r}: [{match['options']}]; expected a whole number of tokens that stay as they are, as "
            f"{match['name']}-4[residual=64]"
        )
    return make_policy(rest[0]) if rest else None, packing(int(match["bits"]), residual)


def make_policy(spec: str) -> Policy | None:
    """The policy of a cache spec; None for "full".

    Args:
        spec: ``name``, with what belongs to it: ``name:file[option=value,...]``.

    Raises:
        InputError: it names none, or an option that it has not.
    """
    return None if spec == "full" else _make(spec, POLICIES)


def _make(spec: str, registry: Mapping[str, Callable[..., Made]]) -> Made:
    match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    if match is None or match["name"] not in registry:
        raise InputError(
            f"cache={spec!r}; expected full, {', '.join((*POLICIES, *SPARSE))}, with options as h2o[sinks=4], quant-8, "
            "quant-4, quant-2, or one of each as h2o+quant-4; or kvquant-4, kvquant-3, kvquant-2"
        )
    make = registry[match["name"]]
    known = {field.name: field for field in dataclasses.fields(make) if field.init}  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    if match["file"]:
        if "file" not in known:
            raise InputError(f"cache={spec!r}: {match['name']} takes no file; leave {match['file']!r} out")
        options["file"] = match["file"]
    for entry in filter(None, (match["options"] or "").split(",")):
        key, _, value = entry.partition("=")
        if key not in known or key == "file":
            raise InputError(f"cache={spec!r}: {match['name']} has no option {key!r}; it has {', '.join(known)}")
        options[key] = _value(spec, known[key], value)
    return make(**options)


def _value(spec: str, field: dataclasses.Field[Any], text: str) -> Any:
    known = {"positions": ("kept", "reassigned"), "where": ("both", "prompt"), "pattern": PATTERNS}
    choices = known.get(field.name)
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
