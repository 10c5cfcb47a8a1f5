"""What a model's layers store, learnt from a small pass; and the proof for models that keep their own attention."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.slots import SlotCache
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.kernels.pack import Watch
from sakiyomi.model_executor.attention import BackendNeeds, op
from sakiyomi.model_executor.attention.hf_cache import HFCacheBackend

__all__ = ["Probed", "expected_logits", "probe", "proof_text"]

PROOF = 11  # tokens of the proof at load


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


def probe(model: Any, vocab_size: int, layers: int | None, dtype: torch.dtype, device: torch.device) -> Probed:
    """Run a model on two tokens; its attention is left switched.

    Args:
        model: our structural copy.
        vocab_size: of the model.
        layers: attention layers; None: other layers, whose states are served, are among them.
        dtype, device: of the model.

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
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedError(
                f"{type(model).__name__} does not run on a cache of ours ({type(error).__name__}: {error}); "
                "use transformers for this model"
            ) from error
        if shapes is not None:
            return Probed(shapes, watch.siblings(), watch.read, False)
        if layers is None:
            raise UnsupportedError(
                f"{type(model).__name__} has recurrent layers beside attention of its own, which cannot be switched to "
                "ours; use transformers for this model"
            )
        return Probed(_own_shapes(model, ids, layers, dtype), watch.siblings(), watch.read, True)


def proof_text(vocab_size: int) -> list[int]:
    """Tokens on which a model's path is compared with its own forward; the last two stand beside the text."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (PROOF + 2,), generator=generator).tolist()


@torch.no_grad()
def expected_logits(model: Any, vocab_size: int, device: torch.device) -> Tensor:
    """Logits (PROOF, V) of a model's own forward on the text of the proof, without any cache."""
    text = torch.tensor([proof_text(vocab_size)[:PROOF]], device=device)
    logits: Tensor = model(input_ids=text, use_cache=False).logits[0].float()
    return logits


def _own_shapes(model: Any, ids: Tensor, layers: int, dtype: torch.dtype) -> list[LayerShape]:
    """Layer shapes of a model that keeps its own attention, and the proof that a cache of ours serves it."""
    name, config = type(model).__name__, model.config.get_text_config()
    if getattr(config, "alibi", False) or "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedError(
            f"{name} derives positions from the column of the cache (ALiBi); such models are not supported"
        )
    if "local" in (getattr(config, "attention_layers", None) or ()) or getattr(config, "sliding_window", None):
        raise UnsupportedError(
            f"{name} cuts its sliding window by the column of the cache; such models are not supported"
        )
    model.set_attn_implementation("eager")
    done = model(input_ids=ids, use_cache=True)
    stored = getattr(getattr(done, "past_key_values", None), "layers", [])
    if len(stored) != layers or any(getattr(layer, "keys", None) is None for layer in stored):
        raise UnsupportedError(
            f"{name} keeps something else than keys and values of {layers} layers; such models are not supported"
        )
    shapes = [
        LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.device)
        for layer in stored
    ]
    trial = SlotCache(shapes, dtype=dtype, max_slots=1)
    trial.reserve(0, 2)
    backend, rows = HFCacheBackend(BackendNeeds(ids.device, own_attention=True), trial), []
    for i in range(2):  # one token after the other through our cache must give what one pass gave
        backend.begin(BatchPlan([SequenceRows(0, i, [int(ids[0, i])])]), 1)
        position = torch.tensor([[i]], device=ids.device)
        rows.append(model(input_ids=ids[:, i : i + 1], position_ids=position, **backend.inputs(1)).logits[0, 0])
    difference = (torch.stack(rows) - done.logits[0].float()).abs().max()
    scale = done.logits.float().abs().max()
    if not bool(difference <= (1e-3 if dtype == torch.float32 else 0.1) * scale):
        raise UnsupportedError(
            f"{name} gives other logits through our cache (difference {float(difference):.2g}); it is not supported"
        )
    return shapes
