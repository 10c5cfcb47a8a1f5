"""Verifies the drafts of all requests of a round in one call of the compiled kernels, from rows of logits.

`kernels/verify.h` applies the rules of this folder with the same numbers and uniforms, so every token is the same.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from sakiyomi.core.tree import Draft, Verdict, VerdictKind
from sakiyomi.kernels.build import loaded
from sakiyomi.kernels.native import HALF
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers.base import Verifier
from sakiyomi.sampling.verifiers.block import BlockVerifier
from sakiyomi.sampling.verifiers.coupled import CoupledVerifier
from sakiyomi.sampling.verifiers.greedy import GreedyVerifier
from sakiyomi.sampling.verifiers.ratio import RatioVerifier

_CASE = struct.Struct("=9q3d2Qq")  # Case in verify.h
_NUMBERS: dict[type[Verifier], int] = {GreedyVerifier: 0, CoupledVerifier: 1, RatioVerifier: 2, BlockVerifier: 3}
KINDS: tuple[VerdictKind, ...] = ("plain", "recovered", "bonus")
_HEAD = 6  # numbers before those of a path


@dataclass(slots=True)
class Case:
    """A draft and how it is judged.

    Attributes:
        draft: n nodes; empty: the target's own token is wanted.
        row: of the logits, that behind the last committed token; row + i + 1 follows node i.
        position: absolute position of the token that ``row`` predicts.
        verifier, sampler, noise, tokens: of the request; the latter are all that are committed, which processors read.
    """

    draft: Draft
    row: int
    position: int
    verifier: Verifier
    sampler: Sampler
    noise: RequestNoise
    tokens: Sequence[int]


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
    if kernels is None or logits.dtype not in HALF or not (logits.is_cpu and logits.is_contiguous()):
        return verdicts
    width = logits.shape[-1]
    numbers: list[int] = []
    asked = [pack_case(case, width, numbers) for case in cases]
    able = [i for i, packed in enumerate(asked) if packed]
    if not able:
        return verdicts
    # A node has a token and a parent among the numbers, so that no verdict has more.
    most = _HEAD * len(able) + len(numbers)
    ints, doubles = np.empty(most, np.int64), np.empty(most, np.float64)
    given = len(able), b"".join(asked), struct.pack(f"={len(numbers)}q", *numbers), logits.data_ptr()
    kernels.sk_verify(*given, HALF[logits.dtype], width, ints.ctypes.data, doubles.ctypes.data)
    for i in able:
        if cases[i].sampler.edits:
            cases[i].sampler.native_edits.raise_interrupt()
    whole, chances, at, done = ints.tolist(), doubles.tolist(), 0, 0
    for i in able:
        decided, token, ending, stream, accepted, refused = whole[at : at + _HEAD]
        middle = at + _HEAD + accepted
        path, at = tuple(whole[at + _HEAD : middle]), middle + refused
        if decided:
            cases[i].noise.counter = stream % 2**64
            seen = tuple(chances[done : done + accepted + 1])
            done += accepted + 1
            verdicts[i] = Verdict(path, token, KINDS[ending], tuple(whole[middle:at]), seen)
    return verdicts


def pack_case(case: Case, width: int, numbers: list[int]) -> bytes:
    """A case as the kernels take it, nothing if they do not; numbers of its own are added to those of the others."""
    draft, noise, sampler = case.draft, case.noise, case.sampler
    rule, tree, rows, params = _NUMBERS.get(type(case.verifier)), draft.tree, draft.probs, sampler.params
    if rule is None or (rule and sampler.greedy) or (sampler.edits and sampler.vocab_size != width):
        return b""
    edits = 0
    if sampler.edits:
        sampler.native_edits.follow(case.tokens)
        edits = sampler.native_edits.address
    first, probs, draws = len(numbers), 0, draft.draws
    if rows is not None:
        if not (rows.dtype is torch.float32 and rows.is_cpu and rows.is_contiguous() and rows.shape[1] == width):
            return b""
        probs = rows.data_ptr()
    numbers += tree.tokens
    numbers += tree.parents
    if rule > 1:
        numbers += chain.from_iterable([(draw.node, -1 if draw.row is None else draw.row) for draw in draws])
    else:  # which looks at tokens alone
        probs, draws = 0, ()
    drawn = len(tree.tokens), len(draws), draft.kind == "without_replacement", first, probs
    warps = params.top_k, params.temperature, params.top_p, params.min_p
    return _CASE.pack(case.row, rule, case.position, *drawn, *warps, noise.state, noise.counter, edits)
