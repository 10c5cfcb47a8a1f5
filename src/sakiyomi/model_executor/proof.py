"""Proof at load: on our path a model gives the logits that its own forward gives on the whole text without a cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.attention import op
from sakiyomi.model_executor.early_exit import FirstLayers
from sakiyomi.model_executor.probe import FAULTS, proof_text
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.structural_copy import settings_of
from sakiyomi.model_executor.weights import quantizes

FIRST = 5  # tokens read as a prompt
TREE = (-1, 0, 0, 2, 2)  # the text continues along its rows 0, 2 and 4
PATH = (0, 2, 4)
BOUND = 1e-3  # of the largest logit
ROUNDED = 0.1  # the same for bfloat16, float16, and weights or rows that are quantized


def prove(runner: ModelRunner) -> None:
    """Take the text through prompt, a token tree, a commit and a single row, beside another request.

    Windows are as short as in the run of the model's own forward, so that the text is longer than they are. Of a large
    model one layer of every kind is run. Does nothing for a model whose own logits were not taken (see
    ``ModelWeights.expect``).

    Raises:
        LoadError: the model's own logits are no numbers.
        UnsupportedError: the logits differ by more than rounding.
    """
    weights = runner.weights
    expected, weights.expected = weights.expected, None
    if expected is None:
        return
    if not bool(expected.logits.isfinite().all()):
        raise LoadError(_no_numbers(weights.module))
    windows = [expected.windows.get(i, shape.reach) for i, shape in enumerate(weights.shapes)]
    op.set_windows(runner.module, windows)
    try:
        if expected.layers is None:
            with runner.eagerly():
                _compare(runner, expected.logits)
        else:
            with settings_of(runner.module, expected.layers, int(runner.config.num_hidden_layers)):
                some = FirstLayers(runner, len(expected.layers), records=False, chosen=expected.layers)
                _compare(some, expected.logits)
    except FAULTS as error:
        raise UnsupportedError(
            f"{type(runner.module).__name__} does not run on our cache; use transformers for this model"
        ) from error
    finally:
        weights.set_windows()
        runner.cache.shed()
        runner.clock.clear()  # of eager passes, some of them with fewer layers


def _no_numbers(module: nn.Module) -> str:
    """What is wrong with a model whose own logits are NaN or infinite."""
    bad = [name for name, tensor in module.named_parameters() if not bool(tensor.isfinite().all())]
    if bad:
        reason = f"{len(bad)} of its weights have values that are NaN or infinite ({', '.join(bad[:3])})"
    else:
        reason = "values or scales of its weights are damaged, or its configuration is"
    name = type(module).__name__
    return f"the logits of {name} are no numbers, whatever computes them: {reason}; get its files again"


def _compare(runner: ModelRunner, expected: Tensor) -> None:
    text = proof_text(runner.config, runner.vocab_size)
    cache, found = runner.cache, {}
    with cache.lent(len(text) + len(TREE)) as slot:
        beside = cache.take() if cache.free else None
        segments = [SequenceRows(slot, 0, text[:FIRST], prompt=True)]
        if beside is not None:
            cache.reserve(beside, FIRST)
            segments.insert(0, SequenceRows(beside, 0, text[3:5], prompt=True))
        found[FIRST - 1] = runner.score(segments, last=True).logits[-1]
        at = FIRST
        nodes = [text[at], text[-1], text[at + 1], text[-2], text[at + 2]]
        segments = [SequenceRows(slot, at, nodes, TREE)]
        if beside is not None:
            segments.insert(0, SequenceRows(beside, 2, text[5:6]))
        rows = runner.score(segments).logits[-len(TREE) :]
        found |= {at + depth: rows[node] for depth, node in enumerate(PATH)}
        cache.commit(slot, at, PATH)
        at += len(PATH)
        found[at] = runner.score([SequenceRows(slot, at, text[at : at + 1])]).logits[0]
        if beside is not None:
            cache.release(beside)
    scale = expected.abs().max()
    errors = torch.stack([(row.float() - expected[at]).abs().max() for at, row in found.items()]) / scale
    # With rounding a token may choose another expert, so the median counts instead of the maximum.
    exact = runner.dtype == torch.float32 and not quantizes(runner.weights)
    worst = float(errors.max() if exact else errors.median())
    bound = BOUND if exact else ROUNDED
    if not worst <= bound:
        raise UnsupportedError(
            f"{type(runner.module).__name__} gives other logits through our cache than by itself (they differ by "
            f"{worst:.2g} of the largest, at most {bound:.2g} is rounding): its layers keep something that is not "
            "served, or it counts positions by a cache; use transformers' generate()"
        )
