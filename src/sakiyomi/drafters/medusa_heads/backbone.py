"""Computes the hidden states that a target's own head over the vocabulary reads; the model is not changed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.drafters.medusa_heads.heads import MedusaHeads

PADDING = 1024


class _Reached(Exception):
    """Ends a pass at the head."""


class Backbone:
    """A causal LM of any class without its head over the vocabulary.

    It returns the head's own input, which includes all norms and projections before the head.

    Args:
        model: a transformers causal LM.

    Attributes:
        head: its head over the vocabulary.
        weight: of that, (vocab, hidden).

    Raises:
        UnsupportedError: it has none.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.head: nn.Module = model.get_output_embeddings()
        weight = getattr(self.head, "weight", None)
        if not isinstance(weight, Tensor):
            raise UnsupportedError(
                f"{type(model).__name__} has no head over the vocabulary; heads cannot read beside it"
            )
        self.weight: Tensor = weight

    def __call__(self, ids: Tensor, **more: Any) -> Tensor:
        """Hidden states of (B, T) token ids, (B, T, hidden); the head itself is not computed.

        Args:
            ids: of the tokens.
            more: further arguments of the model.
        """
        taken: list[Tensor] = []

        def stop(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            taken.append(inputs[0])
            raise _Reached

        with self.head.register_forward_pre_hook(stop), suppress(_Reached):
            self.model(input_ids=ids, use_cache=False, **more)
        return taken[0]


def check_heads(heads: MedusaHeads, hidden_size: int, vocab_size: int, name: str) -> None:
    """Refuse heads of another model.

    Raises:
        UnsupportedError: their sizes differ from the target's.
    """
    shape = heads.shape
    some = heads.token_map is not None
    guessed = int(heads.token_map.max()) + 1 if heads.token_map is not None else shape.vocab_size or 0
    # Vocabularies that differ by more than padding are not the same.
    strange = guessed > vocab_size or (not some and guessed + PADDING < vocab_size)
    strange = strange or (heads.token_map is not None and int(heads.token_map.min()) < 0)
    if shape.hidden_size != hidden_size or (shape.own and strange):
        raise UnsupportedError(
            f"the heads in {name} read {shape.hidden_size} values"
            + (f" and guess {shape.vocab_size} tokens" if shape.own else "")
            + f"; the target has hidden states of {hidden_size} and {vocab_size} tokens: they belong to another model"
        )
