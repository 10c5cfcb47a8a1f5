"""Makes the parts that ``cache=`` names: policy, merger, quantization, sparse prompts, and where pairs are stored.

``core/cache_specs.py`` reads the syntax.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
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
from sakiyomi.cache.policies.minference import MInference
from sakiyomi.cache.policies.sirllm import SirLLM
from sakiyomi.cache.policies.snapkv import PyramidKV, SnapKV
from sakiyomi.cache.policies.sparse import Sparse
from sakiyomi.cache.policies.streaming import Recency, Streaming
from sakiyomi.cache.policies.tova import TOVA
from sakiyomi.cache.quantized import Packing
from sakiyomi.cache.quantized_levels import LeveledPacking
from sakiyomi.core.cache_specs import PAPER, CachePart, parse_cache

POLICY_CLASSES = (
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
POLICIES: dict[str, Callable[..., Policy]] = {policy.name: policy for policy in POLICY_CLASSES}
"""Eviction policies, by the name in ``cache=``."""
SPARSE: dict[str, Callable[..., Sparse]] = {MInference.name: MInference}
"""Sparse attention of prompts, likewise."""
_OTHERS = {"lococo": LoCoCo, "quant": Packing, "kvquant": LeveledPacking, "offload": MappedFiles}
_MAKERS = ChainMap[str, Any](POLICIES, SPARSE, _OTHERS)


class CacheSpec(NamedTuple):
    """The parts of a spec; None: the cache keeps all pairs in memory, unquantized, and prompts attend to all."""

    policy: Policy | None = None
    packing: Packing | None = None
    sparse: Sparse | None = None
    offloaded: MappedFiles | None = None


def read_cache(spec: str) -> CacheSpec:
    """What a cache spec says, see ``parse_cache``.

    Raises:
        InputError: it is none.
    """
    found = {part.kind: _made(part) for part in parse_cache(spec)}
    merger = found.pop("merger", None)
    if merger is not None:
        found.setdefault("policy", H2O()).merger = merger
    return CacheSpec(**found)


def _made(part: CachePart) -> Any:
    name, _, bits = part.name.rpartition("-") if part.kind == "packing" else (part.name, "", "")
    make = _MAKERS[name]
    options: dict[str, Any] = {"file": part.file} if part.file else {}
    for key, value in part.options:
        options |= make.published if key == PAPER else {key: value}
    return make(bits=int(bits), **options) if bits else make(**options)
