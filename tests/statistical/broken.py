"""Rules that look right and are not: each must be rejected by the test that the real rules pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import DRAFT_KINDS, Draft, Draw, TokenTree, Verdict
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.rows import draw, top_tokens
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers import Rows, Verifier
from sakiyomi.sampling.verifiers.base import Rule, ended
from sakiyomi.sampling.verifiers.block import BlockVerifier
from sakiyomi.sampling.verifiers.greedy import follow
from sakiyomi.sampling.verifiers.native import Case, verify_all
from sakiyomi.sampling.verifiers.ratio import RatioVerifier, residual
from sakiyomi.sampling.verifiers.traversal import TraversalVerifier
from statistical.harness import Propose, Table, as_probs


class _Broken:
    name = "broken"
    rule: Rule = "ratio"
    lossless = False
    takes = DRAFT_KINDS


class AlwaysAccept(_Broken):
    """Keeps the first child of every place."""

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        path: list[int] = []
        while children := draft.tree.children(path[-1] if path else -1):
            path.append(children[0])
        return ended(draft, path, draw(rows.row(path[-1] + 1 if path else 0), noise.uniform()))


class ResampleFromTarget(_Broken):
    """Accepts rightly, but draws the recovered token from p and not from the residual."""

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        verdict = RatioVerifier().verify(draft, rows, noise)
        if verdict.kind != "recovered":
            return verdict
        row = rows.row(verdict.path[-1] + 1 if verdict.path else 0)
        return ended(draft, verdict.path, draw(row, noise.uniform()))


class Compiled(_Broken):
    """A rule as the kernels have it, on logits whose softmax are the rows: a right one, unless asked wrongly.

    Args:
        verifier: the rule.
        fault: "rows": those of the nodes are in the order of the last one first; "uniforms": every round has the same.
    """

    def __init__(self, verifier: Verifier, fault: str = "") -> None:
        self._verifier, self._fault = verifier, fault

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        logits, before = rows.raw.log(), noise.counter
        if self._fault == "rows":
            logits = torch.cat([logits[:1], logits[1:].flip(0)])
        sampler = Sampler(SamplingParams(temperature=1.0), logits.shape[1])
        case = Case(draft, 0, rows.position, self._verifier, sampler, noise, [])
        (verdict,) = verify_all([case], logits)
        assert verdict is not None
        if self._fault == "uniforms":
            noise.counter = before
        return verdict


class _OneUniform(RequestNoise):
    __slots__ = ("_value",)

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self._value = value

    def uniform(self) -> float:
        return self._value


class SharedUniform(_Broken):
    """One uniform a round, for every acceptance and for the token after it."""

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        return RatioVerifier().verify(draft, rows, _OneUniform(noise.uniform()))


class BonusFromDraft(_Broken):
    """Takes the bonus token from the draft model, which has one more row to offer."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        verdict = RatioVerifier().verify(draft, rows, noise)
        if verdict.kind != "bonus":
            return verdict
        last = draft.tree.tokens[verdict.path[-1]]
        return ended(draft, verdict.path, draw(self._table[last], noise.uniform()))


class BonusFromWrongRow(_Broken):
    """Takes the bonus token from the row before the last: one too early."""

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        verdict = RatioVerifier().verify(draft, rows, noise)
        if verdict.kind != "bonus":
            return verdict
        return ended(draft, verdict.path, draw(rows.row(verdict.path[-1]), noise.uniform()))


class SiblingsWithoutResidual(_Broken):
    """Judges every sibling against the target's whole row, as if none had been refused before it."""

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        assert draft.probs is not None
        path: list[int] = []
        place = -1
        while True:
            target = rows.row(place + 1)
            left = target
            for drawn in draft.draws_at(place):
                token = draft.tree.tokens[drawn.node]
                row = draft.probs[drawn.row].numpy()
                if noise.uniform() * row[token] < target[token]:
                    place = drawn.node
                    break
                left = residual(left, row, token)
            else:
                return ended(draft, path, draw(left, noise.uniform()))
            path.append(place)


class NodesJudgedOnce(_Broken):
    """Merged drafts: takes nodes for draws, so that a token which two drafters drew is tried once."""

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        first = {drawn.node: drawn for drawn in reversed(draft.draws)}
        once = tuple(drawn for drawn in draft.draws if first[drawn.node] is drawn)
        return RatioVerifier().verify(Draft(draft.tree, draft.kind, once, draft.probs), rows, noise)


class BlockWithTokenResidual(_Broken):
    """Judges the block, but draws the recovered token from max(p - q, 0) as the ratio rule does."""

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        verdict = BlockVerifier().verify(draft, rows, noise)
        if verdict.kind != "recovered":
            return verdict
        assert draft.probs is not None
        place = len(verdict.path)
        left = residual(rows.row(place), draft.probs[place].numpy(), draft.tree.tokens[place])
        return ended(draft, verdict.path, draw(left, noise.uniform()))


class BlockByLastToken(_Broken):
    """Looks for the longest beginning from the end, but judges each by the ratio of its last token alone."""

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        assert draft.probs is not None
        for kept in range(len(draft), 0, -1):
            row, token = rows.row(kept - 1), draft.tree.tokens[kept - 1]
            if noise.uniform() * float(draft.probs[kept - 1, token]) < row[token]:
                return ended(draft, range(kept), draw(rows.row(kept), noise.uniform()))
        left = residual(rows.row(0), draft.probs[0].numpy(), draft.tree.tokens[0])
        return ended(draft, (), draw(left, noise.uniform()))


class TraversalWithoutUpdate(_Broken, TraversalVerifier):
    """Goes on after a refusal with the target's row and the level as they were."""

    @staticmethod
    def _refuse(draft: Draft, place: Any) -> None:
        pass


class TraversalWithOldLevel(_Broken, TraversalVerifier):
    """Takes the residual after a refusal, but leaves the level."""

    @staticmethod
    def _refuse(draft: Draft, place: Any) -> None:
        level = place.level
        TraversalVerifier._refuse(draft, place)
        place.level = level


class CoupledWithWrongKey(_Broken):
    """Keys the noise by the round's first position, for all of its tokens."""

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        return follow(draft, lambda row, depth: noise.top(rows.position, rows.row(row))[0])


class CoupledByRow(_Broken):
    """Keys the noise by the row, and not by the depth: in a tree, siblings stand at one position."""

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        return follow(draft, lambda row, depth: noise.top(rows.position + row, rows.row(row))[0])


def prune_after_drawing(table: Table, drawn: int, kept: int) -> Propose:
    """A drafter that draws siblings and then keeps the most probable of them: what stays is no draw from its row."""

    def propose(token: int, position: int, noise: RequestNoise) -> Draft:
        stream = noise.fork("draft")
        tokens = [draw(table[token], stream.uniform()) for _ in range(drawn)]
        tokens = sorted(tokens, key=lambda sibling: -table[token][sibling])[:kept]
        tree = TokenTree(tuple(tokens), (-1,) * kept)
        return Draft(tree, "iid", tuple(Draw(node, "draft", 0) for node in range(kept)), as_probs(table, [token]))

    return propose


def top_tokens_called_drawn(table: Table, count: int) -> Propose:
    """A drafter that takes the most probable tokens and says that it drew them."""

    def propose(token: int, position: int, noise: RequestNoise) -> Draft:
        tokens = tuple(top_tokens(table[token], count))
        draws = tuple(Draw(node, "draft", 0) for node in range(count))
        return Draft(TokenTree(tokens, (-1,) * count), "without_replacement", draws, as_probs(table, [token]))

    return propose


def mislabelled(propose: Propose) -> Propose:
    """A drafter that draws siblings without replacement and calls them independent."""

    def relabelled(token: int, position: int, noise: RequestNoise) -> Draft:
        draft = propose(token, position, noise)
        return Draft(draft.tree, "iid", draft.draws, draft.probs)

    return relabelled


def sharpened(propose: Propose) -> Propose:
    """A drafter that reports a sharper distribution than it drew from, as one with another temperature would."""

    def changed(token: int, position: int, noise: RequestNoise) -> Draft:
        draft = propose(token, position, noise)
        assert draft.probs is not None
        probs = np.sqrt(draft.probs.numpy())
        return Draft(
            draft.tree, draft.kind, draft.draws, as_probs(probs / probs.sum(1, keepdims=True), list(range(len(probs))))
        )

    return changed
