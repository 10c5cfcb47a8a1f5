"""Drafts with the target's own layer for predicting further tokens (MTP), token by token as an EAGLE head does.

DeepSeek-V3: arXiv 2412.19437, section 2.2. The hidden state that it reads is what the target's head reads; for drafted
tokens it is what the layer itself gave behind its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.drafters.eagle import EagleDrafter, EagleHead
from sakiyomi.drafters.eagle_heads.module import EagleOptions
from sakiyomi.drafters.mtp_layer import FusedEmbedding, make_mtp, norm_of, read_mtp
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.loading.model import Loaded
from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["MtpDrafter"]


class MtpHead(EagleHead):
    """The layer beside its target.

    Args:
        target: whose layer it is.
        model: the layer, packed.
        norm: the weight of the target's last norm.
        blank: the first row of a text has no embedding.
    """

    def __init__(self, target: ModelRunner, model: ModelRunner, norm: Tensor, *, blank: bool) -> None:
        self.model, self._target, self._blank = model, target, blank
        last = int(target.config.num_hidden_layers) - 1
        self.options = EagleOptions(layers=(last,), target_size=int(target.config.hidden_size), norm_output=True)
        embedding: FusedEmbedding = model.module.model.embed_tokens
        self._given, self._kept = embedding.given, embedding.kept
        self._norm_of_target = norm_of(model.module, norm)

    def project(self, states: Mapping[int, Tensor]) -> Tensor:
        """What the target's layers gave, as its head reads it: (rows, hidden)."""
        with torch.no_grad():
            features: Tensor = self._norm_of_target(states[self.options.layers[0]])
            return features

    def _pass(self, segments: Sequence[SequenceRows], inputs: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        target = self._target
        with self.model.lock:
            self._given[: len(inputs)] = inputs
            if self._blank:
                self._kept[: len(inputs)] = torch.tensor(
                    [[float(bool(part.length or row))] for part in segments for row in range(len(part.tokens))]
                )
            states = self.model.score(segments, last=last).features[HEAD]
        with torch.no_grad(), target.lock:
            target.begin(BatchPlan([]), len(states))
            return target.head(states), states


class MtpDrafter(EagleDrafter):
    """Drafts a tree or a chain with the target's own MTP layer, for all requests at once, one pass a level."""

    name = "mtp"

    @classmethod
    def of(cls, loaded: Loaded, target: ModelRunner, pack: Callable[[Loaded], ModelRunner]) -> MtpDrafter:
        """The layer in a target's own folder.

        Args:
            loaded: the target, as it was read.
            target: the same as it runs.
            pack: makes a model ready to run beside the target.

        Raises:
            InputError: the target was not read from a folder.
            LoadError, UnsupportedError: it has no such layer, or it cannot be read.
        """
        if loaded.folder is None or not loaded.folder.is_dir():
            raise InputError(
                f"draft mtp reads a layer in the target's own files, and {loaded.name} is no folder in Hugging Face "
                "format; pass the folder as target, or choose another draft"
            )
        layers = int(target.config.num_hidden_layers)
        form, tensors = read_mtp(loaded.folder, layers)
        target.capture([layers - 1])
        module = make_mtp(form, tensors, target.module, str(loaded.folder))
        inner = getattr(target.module.model, "language_model", target.module.model)
        model = pack(Loaded(module, None, f"{loaded.name} (mtp)", loaded.folder, owned=True))
        return cls(MtpHead(target, model, inner.norm.weight.detach(), blank=form.blank), target.vocab_size)
