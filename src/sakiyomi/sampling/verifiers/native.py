"""Verdicts by the compiled kernels: the drafts of all requests of a round in one call, from rows of logits.

`kernels/verify.h` does what the rules here do, with the same numbers and uniforms, so that every token is the same.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.tree import Draft, Verdict, VerdictKind
from sakiyomi.kernels.build import loaded
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers.base import Verifier
from sakiyomi.sampling.verifiers.block import BlockVerifier
from sakiyomi.sampling.verifiers.coupled import CoupledVerifier
from sakiyomi.sampling.verifiers.greedy import GreedyVerifier
from sakiyomi.sampling.verifiers.ratio import RatioVerifier

__all__ = ["Case", "verify_all"]

_CASE = struct.Struct("=9q3d2Q")  # Case in verify.h
_RULES: dict[type[Verifier], int] = {GreedyVerifier: 0, CoupledVerifier: 1, RatioVerifier: 2, BlockVerifier: 3}
_KINDS: tuple[VerdictKind, ...] = ("plain", "recovered", "bonus")
_HEAD = 6  # numbers before those of a path
_HALF = {torch.float32: 0, torch.bfloat16: 1}  # logits that the kernels read


@dataclass(slots=True)
class Case:
    """A draft and how it is judged.

    Attributes:
        draft: n nodes; empty: the target's own token is wanted.
        row: of the logits, that behind the last committed token; row + i + 1 follows node i.
        position: absolute position of the token that ``row`` predicts.
        verifier, sampler, noise: of the request.
    """

    draft: Draft
    row: int
    position: int
    verifier: Verifier
    sampler: Sampler
    noise: RequestNoise


def verify_all(cases: Sequence[Case], logits: Tensor) -> list[Verdict | None]:
    """What ``Verifier.verify`` gives for each case, with the chances of its tokens.

    Args:
        cases: of one pass.
        logits: (..., rows, V) of any float type, on any device.

    Returns:
        None where the kernels cannot judge a case (a rule or options that only Python knows, a row that holds no
        numbers): nothing was drawn for it then.
    """
    verdicts: list[Verdict | None] = [None] * len(cases)
    kernels = loaded()
    if kernels is None or logits.dtype not in _HALF or not (logits.is_cpu and logits.is_contiguous()):
        return verdicts
    width = logits.shape[-1]
    able = [i for i, case in enumerate(cases) if _fits(case, width)]
    numbers: list[int] = []
    packed = b"".join([_pack(cases[i], numbers) for i in able])
    # A node has a token and a parent among the numbers, so that no verdict has more.
    ints = (ctypes.c_int64 * (_HEAD * len(able) + len(numbers)))()
    doubles = (ctypes.c_double * (len(able) + len(numbers)))()
    own = struct.pack(f"={len(numbers)}q", *numbers)
    kernels.sk_verify(len(able), packed, own, logits.data_ptr(), _HALF[logits.dtype], width, ints, doubles)
    whole, chances, at, done = ints[:], doubles[:], 0, 0
    for i in able:
        decided, token, ending, stream, accepted, refused = whole[at : at + _HEAD]
        middle = at + _HEAD + accepted
        path, at = tuple(whole[at + _HEAD : middle]), middle + refused
        if decided:
            cases[i].noise.counter = stream % 2**64
            seen = tuple(chances[done : done + accepted + 1])
            done += accepted + 1
            verdicts[i] = Verdict(path, token, _KINDS[ending], tuple(whole[middle:at]), seen)
    return verdicts


def _fits(case: Case, width: int) -> bool:
    rule, probs, sampler = _RULES.get(type(case.verifier)), case.draft.probs, case.sampler
    if rule is None or sampler.edits or (rule and sampler.greedy):
        return False
    return probs is None or (
        probs.dtype is torch.float32 and probs.is_cpu and probs.is_contiguous() and probs.shape[1] == width
    )


def _pack(case: Case, numbers: list[int]) -> bytes:
    """A case as the kernels take it; numbers of its own are added to those of the others."""
    draft, noise, params = case.draft, case.noise, case.sampler.params
    tree, rule, first = draft.tree, _RULES[type(case.verifier)], len(numbers)
    numbers += tree.tokens
    numbers += tree.parents
    draws: Any = draft.draws if rule > 1 else ()  # the others look at tokens alone
    numbers += chain.from_iterable((draw.node, -1 if draw.row is None else draw.row) for draw in draws)
    probs = draft.probs.data_ptr() if draft.probs is not None and rule > 1 else 0
    return _CASE.pack(
        *(case.row, rule, case.position, len(tree.tokens), len(draws), draft.kind == "without_replacement"),
        *(first, probs, params.top_k, params.temperature, params.top_p, params.min_p, noise.state, noise.counter),
    )
