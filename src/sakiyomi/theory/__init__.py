"""Closed forms of speculative decoding, in plain floats: what a draft is worth before anything is run.

alpha is the expected acceptance rate, gamma the draft tokens per round, c the time of a draft step in target steps,
c_hat its operations in those of the target. Source, if not said otherwise: Leviathan et al. 2023 (arXiv 2211.17192),
section 3.
"""

from sakiyomi.theory.alphas import (
    acceptance,
    alpha_of,
    guess_acceptance,
    matching_acceptance,
    mean_acceptance,
    positional_acceptance,
    synchronous_alpha,
    total_variation,
)
from sakiyomi.theory.chains import (
    expected_chain_tokens,
    expected_tokens,
    marginal_gamma,
    operations_ratio,
    optimal_gamma,
    round_speedup,
    speedup,
)
from sakiyomi.theory.traffic import Traffic, kv_bytes, memory_ratio, pass_seconds, traffic
from sakiyomi.theory.trees import best_tree, expected_tree_tokens, optimal_tree

__all__ = [
    "Traffic",
    "acceptance",
    "alpha_of",
    "best_tree",
    "expected_chain_tokens",
    "expected_tokens",
    "expected_tree_tokens",
    "guess_acceptance",
    "kv_bytes",
    "marginal_gamma",
    "matching_acceptance",
    "mean_acceptance",
    "memory_ratio",
    "operations_ratio",
    "optimal_gamma",
    "optimal_tree",
    "pass_seconds",
    "positional_acceptance",
    "round_speedup",
    "speedup",
    "synchronous_alpha",
    "total_variation",
    "traffic",
]
