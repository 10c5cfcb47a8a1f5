"""A small pass that finds what a model's layers store; and the logits of its own forward, for the proof at load."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sakiyomi.cache.layout import LayerShape
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.pack import Watch
from sakiyomi.model_executor.attention import op
from sakiyomi.model_executor.structural_copy import changed_settings
from sakiyomi.model_executor.widened import widened

PROOF = 9  # tokens of the proof at load
SHORT = 4  # positions of windows and chunks in the proof, so that its text is longer than they are
WINDOWS = ("sliding_window", "attention_chunk_size")
"""Names of windows and chunks in configurations."""

FAULTS = AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError
"""Errors of a forward that lacks something it needs."""


class FixedAttentionError(UnsupportedError):
    """A class keeps its own attention: each text can only go through its own forward by itself."""


class Expectation(NamedTuple):
    """The results that the proof at load expects.

    Attributes:
        logits: (PROOF, V) of the model's own forward, without any cache, with windows of ``SHORT`` positions; where
            ``layers`` are given, the input of the head, (PROOF, hidden).
        windows: of each layer that called attention, by its number, see ``LayerShape.reach``.
        layers: the layers that were run, one of every kind; None: all.
    """

    logits: Tensor
    windows: dict[int, int]
    layers: list[int] | None = None


class Probed(NamedTuple):
    """The findings of a small pass over a model.

    Attributes:
        shapes: of the cache, by layer.
        siblings: groups of linear layers that read the same input.
        read: ids of linear layers whose weights others read.
    """

    shapes: list[LayerShape]
    siblings: list[list[nn.Module]]
    read: set[int]


def probe(model: Any, vocab_size: int, layers: int | None, device: torch.device) -> Probed:
    """Run a model on two tokens; its attention is left switched.

    Args:
        model: our structural copy.
        vocab_size: of the model.
        layers: number of attention layers; None: the model has other layers too, whose states we keep.
        device: of the model.

    Raises:
        FixedAttentionError: it does not call transformers' attention interface.
        UnsupportedError: it does not run on our cache for another reason.
    """
    ids = torch.tensor([[1, 2]], device=device) % vocab_size
    positions = torch.tensor([[0, 1]], device=device)

    def forward() -> None:
        model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False)

    with torch.no_grad():
        try:
            with Watch(model) as watch:
                shapes = op.layer_shapes(model, forward, layers)
        except FAULTS as error:
            raise UnsupportedError(
                f"{type(model).__name__} asks for more than keys, values and positions: it runs on no cache of ours"
            ) from error
    if shapes is None:
        raise FixedAttentionError(f"{type(model).__name__} keeps its own attention, which cannot be switched to ours")
    return Probed(shapes, watch.siblings(), watch.read)


def proof_text(config: Any, vocab_size: int) -> list[int]:
    """Tokens on which our path is compared with the model's own forward; the last two are rejected nodes of a tree."""
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(0, vocab_size, (4 * PROOF,), generator=generator).tolist()
    pad = getattr(config, "pad_token_id", None)  # some classes give it no position
    return [token for token in ids if token != pad][: PROOF + 2]


@torch.no_grad()
def expect(model: Any, vocab_size: int, device: torch.device, *, stateful: bool) -> Expectation | None:
    """The results of a model's own forward on the text of the proof; None: it does not run on the text.

    Args:
        model: our structural copy; its attention is left switched.
        vocab_size, device: of the model.
        stateful: it has layers without attention; those with attention are numbered without them.

    Raises:
        UnsupportedError: its attention has arguments that are not supported.
    """
    config = model.config.get_text_config()
    text = torch.tensor([proof_text(config, vocab_size)[:PROOF]], device=device)
    found: list[Tensor] = []

    def forward() -> None:
        with widened(device):
            found.append(model(input_ids=text, use_cache=False).logits[0].float())

    try:
        with changed_settings(model, _shortened):
            callers, shapes = op.note_calls(model, forward)
    except FAULTS:
        return None  # the probe reports the reason
    numbers = range(len(callers)) if stateful else [int(module.layer_idx) for module in callers]
    return Expectation(found[0], {i: shape.reach for i, shape in zip(numbers, shapes, strict=True)})


def _shortened(name: str, value: Any) -> Any:
    """A setting for the proof, where windows and chunks have ``SHORT`` positions."""
    return SHORT if name in WINDOWS and type(value) is int and value > SHORT else value
