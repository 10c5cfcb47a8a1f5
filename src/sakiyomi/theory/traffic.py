"""Bytes and operations of passes: what a draft saves of the traffic between memory and processor."""

from __future__ import annotations

from dataclasses import dataclass

from sakiyomi.theory.checks import cost, count, positive


@dataclass(frozen=True)
class Traffic:
    """Bytes that are read for one token of the text.

    Attributes:
        weights, kv: of the target, by its passes.
        draft_weights, draft_kv: of the draft, by its own.
    """

    weights: float
    kv: float
    draft_weights: float = 0.0
    draft_kv: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the four."""
        return self.weights + self.kv + self.draft_weights + self.draft_kv


def memory_ratio(tokens: float) -> float:
    """How much less often the target's weights and KV cache are read per token: 1 / tokens per pass.

    Section 3.4: a pass reads them once, however many tokens come of it.

    Args:
        tokens: per target pass, at least 1.
    """
    return 1.0 / positive("tokens", tokens, "tokens per target pass")


def traffic(
    tokens: float,
    steps: float,
    *,
    weights: float,
    kv: float = 0.0,
    draft_weights: float = 0.0,
    draft_kv: float = 0.0,
    batch: int = 1,
) -> Traffic:
    """Bytes read per token, by the target's pass and the draft's steps of a round. Section 3.4.

    Weights are read once a pass for all requests of a batch, keys and values by each request its own.

    Args:
        tokens: expected per round and request; 1 of plain generation.
        steps: draft steps of the round; 0 of plain generation.
        weights, draft_weights: bytes of the weights of one pass.
        kv, draft_kv: bytes of the keys and values of one request.
        batch: requests that share the passes.
    """
    per = 1.0 / (positive("tokens", tokens, "tokens per target pass") * count("batch", batch, 1))
    steps = cost("steps", steps)
    return Traffic(
        per * positive("weights", weights, "bytes"),
        per * batch * cost("kv", kv),
        per * steps * cost("draft_weights", draft_weights),
        per * batch * steps * cost("draft_kv", draft_kv),
    )


def kv_bytes(layers: int, kv_heads: int, head_dim: int, number_bytes: float = 2.0) -> float:
    """Bytes of the keys and values of one token: 2 x layers x KV heads x head size x bytes of a number.

    Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245, section 2) shares KV heads among query heads.
    """
    shape = count("layers", layers, 1) * count("kv_heads", kv_heads, 1) * count("head_dim", head_dim, 1)
    return 2.0 * shape * positive("number_bytes", number_bytes, "bytes")


def pass_seconds(rows: int, *, read: float, operations: float, bandwidth: float, rate: float | None = None) -> float:
    """Time of a pass bound by memory or arithmetic: the larger of read / bandwidth and rows x operations / rate.

    The roofline of Williams et al. 2009 (doi 10.1145/1498765.1498785). v(T) is its ratio to one row's: flat while
    memory bounds, then growing with T.

    Args:
        rows: tokens of the pass.
        read: bytes that it reads, weights and keys and values.
        operations: of one row; two for each weight.
        bandwidth: bytes a second.
        rate: operations a second; None: memory alone bounds.
    """
    bound = positive("read", read, "bytes") / positive("bandwidth", bandwidth, "bytes a second")
    work = count("rows", rows, 1) * cost("operations", operations)
    return bound if rate is None else max(bound, work / positive("rate", rate, "operations a second"))
