"""Policies that keep the KV cache within a budget; a new one is a file and a line in ``POLICIES``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from sakiyomi.cache.packed_pairs import BITS, Packing
from sakiyomi.errors import InputError
from sakiyomi.policies.base import Policy, View
from sakiyomi.policies.chance import Random
from sakiyomi.policies.expected import Expected
from sakiyomi.policies.fastgen import FastGen
from sakiyomi.policies.h2o import H2O
from sakiyomi.policies.infllm import InfLLM
from sakiyomi.policies.knorm import KeyDiff, Knorm
from sakiyomi.policies.lococo import LoCoCo
from sakiyomi.policies.locret import Locret
from sakiyomi.policies.pyramidkv import PyramidKV
from sakiyomi.policies.sirllm import SirLLM
from sakiyomi.policies.snapkv import SnapKV
from sakiyomi.policies.streaming import Recency, Streaming
from sakiyomi.policies.tova import TOVA

__all__ = ["POLICIES", "Policy", "View", "make_policy", "read_budget", "read_cache"]

_ALL = (
    *(Locret, InfLLM, H2O, SnapKV, PyramidKV, TOVA, Expected, FastGen),
    *(SirLLM, Knorm, KeyDiff, Streaming, Recency, Random),
)
POLICIES: dict[str, Callable[..., Policy]] = {policy.name: policy for policy in _ALL}
"""By the name in ``cache=``."""

_SPEC = re.compile(r"(?P<name>[a-z0-9-]+)(:(?P<file>[^\[\]]+))?(\[(?P<options>[^\[\]]*)\])?")
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


_PACKED = re.compile(r"((?P<before>.+)\+)?quant-(?P<bits>[^\[\]+]*)(\[(?P<options>[^\[\]]*)\])?(\+(?P<after>.+))?")
_MERGED = re.compile(r"((?P<before>.+)\+)?lococo(:(?P<file>[^\[\]]+?))?(\+(?P<after>quant-.+))?")


def read_cache(spec: str) -> tuple[Policy | None, Packing | None]:
    """What a cache spec says stays, and how it is packed; None for "everything" and "not at all".

    Args:
        spec: "full", a policy (``make_policy``), ``quant-4`` or ``quant-4[residual=64]`` with 8, 4 or 2 bits, or one
            policy and one of those joined by "+". Behind a policy ``lococo:FOLDER``, joined by "+", has a merger; alone
            it stands beside ``h2o``, as in its paper.

    Raises:
        InputError: it is none of that.
    """
    match = _MERGED.fullmatch(spec) if isinstance(spec, str) else None
    if match is not None:
        policy, packing = read_cache("+".join(filter(None, (match["before"] or H2O.name, match["after"]))))
        if match["file"] is None or policy is None or policy.merger is not None:
            raise InputError(
                f"cache={spec!r}; expected lococo:FOLDER with what `sakiyomi train lococo` made, alone or behind one "
                "policy, as h2o+lococo:FOLDER"
            )
        policy.merger = LoCoCo(match["file"])
        return policy, packing
    match = _PACKED.fullmatch(spec) if isinstance(spec, str) else None
    if match is None:
        return make_policy(spec), None
    rest = [part for part in (match["before"], match["after"]) if part]
    if len(rest) > 1 or any(part == "full" or _PACKED.fullmatch(part) for part in rest):
        raise InputError(f"cache={spec!r}; expected at most one policy and one of quant-8, quant-4, quant-2 with it")
    if match["bits"] not in map(str, BITS):
        raise InputError(f"cache={spec!r}: {match['bits']!r} bits; expected quant-8, quant-4 or quant-2")
    residual = Packing.residual_of(match["options"])
    if residual is None:
        raise InputError(
            f"cache={spec!r}: [{match['options']}]; expected a whole number of tokens that stay as they are, as "
            "quant-4[residual=64]"
        )
    return make_policy(rest[0]) if rest else None, Packing(int(match["bits"]), residual)


def make_policy(spec: str) -> Policy | None:
    """The policy of a cache spec; None for "full".

    Args:
        spec: ``name``, with what belongs to it: ``name:file[option=value,...]``.

    Raises:
        InputError: it names none, or an option that it has not.
    """
    if spec == "full":
        return None
    match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    if match is None or match["name"] not in POLICIES:
        raise InputError(
            f"cache={spec!r}; expected full, {', '.join(POLICIES)}, with options as h2o[sinks=4], quant-8, quant-4, "
            "quant-2, or one of each as h2o+quant-4; lococo:FOLDER, h2o+lococo:FOLDER"
        )
    make = POLICIES[match["name"]]
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
    choices = {"positions": ("kept", "reassigned"), "where": ("both", "prompt")}.get(field.name)
    if choices is not None:
        if text not in choices:
            raise InputError(f"cache={spec!r}: {field.name}={text!r}; expected {' or '.join(choices)}")
        return text
    try:
        value: int | float = int(text) if field.type == "int" else float(text)
    except ValueError:
        value = -1
    if value < 0 or (field.name in ("ends", "recent", "stabilizers", "floor") and value >= 1):
        what = "a whole number of 0 or more" if field.type == "int" else "a share from 0 to less than 1"
        raise InputError(f"cache={spec!r}: {field.name}={text!r}; expected {what}")
    return value


def read_budget(budget: int | str) -> tuple[int, bool]:
    """A budget as a number, and whether it is one of bytes.

    Raises:
        InputError: it is neither a number of pairs nor a size as "2GiB".
    """
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget, False
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?b)?\s*", budget.lower()) if isinstance(budget, str) else None
    if match is None or float(match[1]) <= 0:
        raise InputError(f"kv_budget={budget!r}; expected a number of pairs of a head, or bytes as '2GiB'")
    return int(float(match[1]) * _UNITS[match[2] or ""]), match[2] is not None
