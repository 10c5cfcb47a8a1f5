"""What a model's layers store, learnt from a small pass; and what its own forward gives, for the proof at load."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sakiyomi.cache.layout import LayerShape
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.hf_names import cache_of
from sakiyomi.kernels.pack import Watch
from sakiyomi.model_executor.attention import op
from sakiyomi.model_executor.structural_copy import changed_settings
from sakiyomi.model_executor.widened import widened

__all__ = ["FAULTS", "PROOF", "Expectation", "Probed", "expect", "probe", "proof_text"]

PROOF = 9  # tokens of the proof at load
SHORT = 4  # positions of windows and chunks in the proof, so that it reaches beyond them
REACHES = ("sliding_window", "attention_chunk_size")
"""Names of windows and chunks in configurations."""

FAULTS = AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError
"""What a forward raises that is not given what it wants."""


class Expectation(NamedTuple):
    """What the proof at load compares with.

    Attributes:
        logits: (PROOF, V) of the model's own forward, without any cache, with windows of ``SHORT`` positions; where
            ``layers`` are named what the head would read, (PROOF, hidden).
        reaches: by the number of each layer that called attention how far it saw.
        layers: those that were run, one of every kind; None: all.
    """

    logits: Tensor
    reaches: dict[int, int]
    layers: list[int] | None = None


class Probed(NamedTuple):
    """What a small pass tells of a model.

    Attributes:
        shapes: of the cache, by layer.
        siblings: groups of linear layers that read the same input.
        read: ids of linear layers whose weights others read.
        own_attention: the class keeps its own attention.
    """

    shapes: list[LayerShape]
    siblings: list[list[nn.Module]]
    read: set[int]
    own_attention: bool


def probe(model: Any, vocab_size: int, layers: int | None, device: torch.device) -> Probed:
    """Run a model on two tokens; its attention is left switched.

    Args:
        model: our structural copy.
        vocab_size: of the model.
        layers: attention layers; None: other layers, whose states are served, are among them.
        device: of the model.

    Raises:
        UnsupportedError: it does not run on a cache of ours.
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
        if shapes is not None:
            return Probed(shapes, watch.siblings(), watch.read, False)
        if layers is None:
            raise UnsupportedError(
                f"{type(model).__name__} has recurrent layers beside attention of its own, which cannot be switched to "
                "ours; use transformers for this model"
            )
        return Probed(_own_shapes(model, ids, layers), watch.siblings(), watch.read, True)


def proof_text(config: Any, vocab_size: int) -> list[int]:
    """Tokens on which a model's path is compared with its own forward; the last two stand beside the text."""
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(0, vocab_size, (4 * PROOF,), generator=generator).tolist()
    pad = getattr(config, "pad_token_id", None)  # which some classes give no position
    return [token for token in ids if token != pad][: PROOF + 2]


@torch.no_grad()
def expect(model: Any, vocab_size: int, device: torch.device, *, stateful: bool) -> Expectation | None:
    """What a model's own forward gives on the text of the proof; None: it does not run on it.

    Args:
        model: our structural copy; its attention is left switched.
        vocab_size, device: of the model.
        stateful: layers without attention are among its layers; those with attention are numbered without them.

    Raises:
        UnsupportedError: its attention asks for what is not known here.
    """
    config = model.config.get_text_config()
    text = torch.tensor([proof_text(config, vocab_size)[:PROOF]], device=device)
    found: list[Tensor] = []

    def forward() -> None:
        with widened(device):
            found.append(model(input_ids=text, use_cache=False).logits[0].float())

    try:
        with changed_settings(model, _shortened):
            try:
                op.switch_to_probe(model)
            except ValueError:  # the class has only its own attention
                forward()
                return Expectation(found[0], {})
            callers, shapes = op.note_calls(model, forward)
    except FAULTS:
        return None  # what is wrong with it, the probe says
    numbers = range(len(callers)) if stateful else [int(module.layer_idx) for module in callers]
    return Expectation(found[0], {i: shape.reach for i, shape in zip(numbers, shapes, strict=True)})


def _shortened(name: str, value: Any) -> Any:
    """A setting of the proof's: windows and chunks have ``SHORT`` positions."""
    return SHORT if name in REACHES and type(value) is int and value > SHORT else value


def _own_shapes(model: Any, ids: Tensor, layers: int) -> list[LayerShape]:
    """Layer shapes of a model that keeps its own attention."""
    name, config = type(model).__name__, model.config.get_text_config()
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedError(f"{name} derives positions from the column of the cache; such models are not supported")
    if "local" in (getattr(config, "attention_layers", None) or ()) or getattr(config, "sliding_window", None):
        raise UnsupportedError(
            f"{name} cuts its sliding window by the column of the cache; such models are not supported"
        )
    model.set_attn_implementation("eager")
    done = model(input_ids=ids, use_cache=True)
    stored = getattr(cache_of(done), "layers", [])
    if len(stored) != layers or any(getattr(layer, "keys", None) is None for layer in stored):
        raise UnsupportedError(
            f"{name} keeps something else than keys and values of {layers} layers; such models are not supported"
        )
    return [
        LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.device)
        for layer in stored
    ]
