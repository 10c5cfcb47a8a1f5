"""The audit's test of frequencies: right rules pass it, broken ones do not, on a pair of models and the real loop.

Odds of a false alarm: 1e-6 an audit, see ``test_false_alarms`` for what the tails really are.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import sakiyomi.params
from sakiyomi.audit import AuditConfig, audit
from sakiyomi.drafters import Context
from sakiyomi.frequencies import RANKS, Frequencies, chance_to_see
from sakiyomi.tree import Draft
from sakiyomi.verifiers import VERIFIERS
from statistical import broken
from toys import tiny_llama, tiny_tokenizer

PROMPTS = ["Once upon a time", "The fox", "a", "There was"]
SAMPLES = 2500
CHAIN, TREE = frozenset({"chain"}), frozenset({"without_replacement"})
BROKEN: list[tuple[type[Any], frozenset[str], str]] = [
    (broken.AlwaysAccept, CHAIN, "ratio"),
    (broken.ResampleFromTarget, CHAIN, "ratio"),
    (broken.SharedUniform, CHAIN, "ratio"),
    (broken.BonusFromWrongRow, CHAIN, "ratio"),
    (broken.SiblingsWithoutResidual, TREE, "ratio"),
    (broken.BlockWithTokenResidual, CHAIN, "ratio"),
    (broken.BlockByLastToken, CHAIN, "ratio"),
    (broken.TraversalWithoutUpdate, TREE, "ratio"),
    (broken.TraversalWithOldLevel, TREE, "ratio"),
    (broken.CoupledWithWrongKey, CHAIN, "coupled"),
    (broken.CoupledByRow, TREE, "coupled"),
]


def scaled(**values: Any) -> Any:
    """A toy with a few likely tokens, as a trained model has."""
    model = tiny_llama(eos_token_id=None, **values)
    with torch.no_grad():
        model.lm_head.weight.mul_(12)
    return model


def pair() -> tuple[Any, Any]:
    target, other = scaled(), scaled(seed=1)
    draft = scaled()
    draft.model.layers[1].load_state_dict(other.model.layers[1].state_dict())
    return target, draft
