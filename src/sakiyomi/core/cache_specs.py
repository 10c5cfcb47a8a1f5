"""Parses ``cache=`` with the standard library alone: names, the path behind a colon, options and the budget.

``cache/policies/specs.py`` makes policies of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.memory import parse_bytes

Kind = Literal["policy", "sparse", "merger", "packing", "offloaded"]
PATTERNS = ("vertical-slash", "a-shape", "block-sparse", "auto")
PAPER = "paper"
"""The option that sets others as a method was published."""


class Option(NamedTuple):
    """An option of a cache spec.

    Attributes:
        expected: for messages.
        read: parses its value; raises ``ValueError`` if it is invalid.
    """

    expected: str
    read: Callable[[str], Any]


class CacheForm(NamedTuple):
    """Syntax of one name in ``cache=``.

    Attributes:
        kind: a spec has at most one part of each.
        options: by their names.
        published: whether it has the option ``paper``.
        file: whether a path may follow, behind a colon.
        made_by: the command that makes what the path names; the path is then required. "": it is optional.
    """

    kind: Kind
    options: Mapping[str, Option]
    published: bool = False
    file: bool = False
    made_by: str = ""


class CachePart(NamedTuple):
    """One part of a cache spec; parts are joined by "+".

    Attributes:
        kind: of its name.
        name: a key of ``CACHE_FORMS``.
        file: path after the colon; "": none.
        options: names and values in the given order; the value of ``paper`` is None.
    """

    kind: Kind
    name: str
    file: str
    options: tuple[tuple[str, Any], ...]


def _number(expected: str, kind: type[int] | type[float], fits: Callable[[float], bool]) -> Option:
    def read(text: str) -> int | float:
        value = kind(text)
        if not fits(value):
            raise ValueError
        return value

    return Option(expected, read)


def _choice(*names: str) -> Option:
    return Option(" or ".join(names), lambda text: names[names.index(text)])


_COUNT = _number("a whole number of 0 or more", int, lambda value: value >= 0)
_ROWS = _number("a whole number of 1 or more", int, lambda value: value >= 1)
_SHARE = _number("a share from 0 to less than 1", float, lambda value: 0 <= value < 1)
_STEEP = _number("0 (all layers alike), or a number of 1 or more", float, lambda value: value == 0 or value >= 1)
_EVERY = {
    "sinks": _COUNT,
    "local": _COUNT,
    "recent": _SHARE,
    "ends": _SHARE,
    "pyramid": _STEEP,
    "positions": _choice("kept", "reassigned"),
    "where": _choice("both", "prompt"),
}
_WINDOW = {"window": _COUNT, "kernel": _COUNT}
_RESIDUAL = {"residual": _COUNT}


def _policy(options: Mapping[str, Option] | None = None, published: bool = False) -> CacheForm:
    return CacheForm("policy", _EVERY | dict(options or {}), published)


CACHE_FORMS: dict[str, CacheForm] = {
    "locret": _policy({"stabilizers": _SHARE, "beside": _COUNT}, True)._replace(file=True, made_by="train retaining"),
    "infllm": _policy({"block": _COUNT, "representatives": _COUNT, "ranking": _choice("most", "mean")}, published=True),
    "h2o": _policy(),
    "snapkv": _policy(_WINDOW),
    "pyramidkv": _policy(_WINDOW),
    "tova": _policy(),
    "expected": _policy({"ahead": _COUNT, "floor": _SHARE}),
    "fastgen": _policy(),
    "sirllm": _policy(published=True),
    "knorm": _policy(),
    "keydiff": _policy(),
    "streaming": _policy(),
    "recency": _policy(),
    "random": _policy({"seed": _COUNT}),
    "minference": CacheForm(
        "sparse", {"block": _ROWS, "pattern": _choice(*PATTERNS), "vertical": _COUNT, "slash": _COUNT}, True
    ),
    "lococo": CacheForm("merger", {}, file=True, made_by="train lococo"),
    **{f"quant-{bits}": CacheForm("packing", _RESIDUAL, True) for bits in (8, 4, 2)},
    **{f"kvquant-{bits}": CacheForm("packing", _RESIDUAL) for bits in (4, 3, 2)},
    "offload": CacheForm("offloaded", {}, file=True),
}
"""By the name in ``cache=``; ``cache/policies/specs.py`` makes them."""


def _names(kind: Kind) -> list[str]:
    return [name for name, form in CACHE_FORMS.items() if form.kind == kind]


_PACKED = sorted({name.rpartition("-")[0] for name in _names("packing")})
# A file's name may have a plus, too: parts begin with a name that is known, or look like a part.
_KNOWN = [*sorted(CACHE_FORMS, key=len, reverse=True), "full", *_PACKED]
_BREAK = re.compile(rf"\+(?=(?:{'|'.join(map(re.escape, _KNOWN))})(?:[+:\[-]|$))")
_PART = re.compile(r"(?P<name>[a-z0-9-]+)(:(?P<file>.+?))?(\[(?P<options>[^\[\]]*)\])?")


def parse_cache(spec: str) -> list[CachePart]:
    """The parts of a cache spec; an empty list for "full", which keeps everything.

    Args:
        spec: "full", or at most one of each, joined by "+": a policy, ``name:file[option=value,...]``, where the option
            ``paper`` sets others as its authors have them; beside it ``lococo:FOLDER`` (alone: beside ``h2o``, as in
            its paper); ``quant-4[residual=64]``, with 8, 4 or 2 bits, or ``kvquant-4``, with 4, 3 or 2;
            ``minference[...]``; ``offload:FOLDER``, only beside that one.

    Raises:
        InputError: the spec is invalid.
    """
    if spec == "full":
        return []
    found: list[CachePart] = []
    for text in _BREAK.split(spec) if isinstance(spec, str) else [""]:
        match = _PART.fullmatch(text)
        form = CACHE_FORMS.get(match["name"]) if match is not None else None
        if match is None or form is None or any(part.kind == form.kind for part in found):
            raise InputError(_expected(spec, match["name"] if match is not None else ""))
        found.append(_part(spec, match, form))
    kinds = {part.kind for part in found}
    if "offloaded" in kinds and kinds & {"policy", "merger", "packing"}:
        raise InputError(
            f"cache={spec!r}: offload keeps all pairs as they are in files, and what is dropped or packed stays in "
            "memory; expected offload alone or with minference, or leave it out"
        )
    return found


def _expected(spec: str, name: str) -> str:
    base, _, bits = name.rpartition("-")
    packings = _names("packing")
    if (full := [packing for packing in packings if packing.startswith(f"{base}-")]) and name not in full:
        return f"cache={spec!r}: {bits!r} bits; expected {', '.join(full[:-1])} or {full[-1]}"
    return (
        f"cache={spec!r}; expected full, or at most one policy ({', '.join(_names('policy'))}), as h2o[sinks=4], "
        f"one of {', '.join(packings)}, lococo:FOLDER (of `sakiyomi train lococo`) and minference, joined "
        "as h2o+quant-4, or offload:FOLDER"
    )


def _part(spec: str, match: re.Match[str], form: CacheForm) -> CachePart:
    name, file = match["name"], match["file"] or ""
    if file and not form.file:
        raise InputError(f"cache={spec!r}: {name} takes no file; leave {file!r} out")
    if form.made_by and not file:
        raise InputError(f"cache={spec!r}; expected {name}:FOLDER with what `sakiyomi {form.made_by}` made")
    options: list[tuple[str, Any]] = []
    for entry in filter(None, (match["options"] or "").split(",")):
        key, _, text = entry.partition("=")
        if entry == PAPER and form.published:
            options.append((PAPER, None))
            continue
        if key not in form.options:
            known = ", ".join([*form.options, *([PAPER] if form.published else [])])
            raise InputError(f"cache={spec!r}: {name} has no option {key!r}; it has {known or 'none'}")
        try:
            options.append((key, form.options[key].read(text)))
        except ValueError:
            raise InputError(f"cache={spec!r}: {key}={text!r}; expected {form.options[key].expected}") from None
    return CachePart(form.kind, name, file, tuple(options))


def check_cache(cache: str, kv_budget: int | str | None = None, kv_memory: int | str | None = None) -> None:
    """Refuse an invalid spec, a missing folder, and a budget that does not fit the spec.

    Raises:
        InputError, LoadError: see there.
    """
    parts = parse_cache(cache)
    for part in parts:
        if CACHE_FORMS[part.name].made_by and not folder_of(part.file).is_dir():
            raise LoadError(f"cache={cache!r}: there is no folder {part.file!r}; check the path")
    budget_of(cache, parts, kv_budget, kv_memory)


def budget_of(
    cache: str, parts: Sequence[CachePart], kv_budget: int | str | None, kv_memory: int | str | None
) -> int | str | None:
    """The budget, from ``kv_budget`` or ``kv_memory``; None for caches without one.

    Raises:
        InputError: both are given, the value is invalid, the cache keeps everything, or it needs a budget and has none.
    """
    budget = kv_budget
    if kv_memory is not None:
        if kv_budget is not None:
            raise InputError(f"kv_memory={kv_memory!r} and kv_budget={kv_budget!r} say the same; give one of them")
        parse_bytes(str(kv_memory), "kv_memory")
        budget = f"{kv_memory}b" if str(kv_memory).isdigit() else kv_memory
    evicts = any(part.kind in ("policy", "merger") for part in parts)
    if budget is not None and not evicts:
        raise InputError(
            f"kv_budget={budget!r} with cache={cache!r}, which keeps everything; name a policy, or leave it out"
        )
    if budget is None and evicts:
        raise InputError(f"cache={cache!r} without a budget; give kv_budget, pairs of a head, or kv_memory as '2GiB'")
    if budget is not None:
        read_budget(budget)
    return budget


def read_budget(budget: int | str) -> tuple[int, bool]:
    """A budget as a number, and whether its unit is bytes (else pairs of a head).

    Raises:
        InputError: it is neither a number of pairs nor a size such as "2GiB".
    """
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget, False
    if not isinstance(budget, str):
        raise InputError(f"kv_budget={budget!r}; expected a number of pairs of a head, or bytes as '2GiB'")
    return parse_bytes(budget, "kv_budget"), any(map(str.isalpha, budget))


def without_place(spec: str) -> str:
    """A spec without ``offload``, which changes where pairs lie and not what they are."""
    kept = [part for part in _BREAK.split(spec) if not part.partition(":")[0].startswith("offload")]
    return "+".join(kept) or "full"
