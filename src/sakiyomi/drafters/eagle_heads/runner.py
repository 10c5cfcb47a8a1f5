"""Runs EAGLE heads beside a packed target: features from its hidden states, and logits from features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.drafters.beside import Beside, target_logits
from sakiyomi.drafters.eagle_heads.formats import EagleFile
from sakiyomi.drafters.eagle_heads.module import BESIDE, EagleOptions
from sakiyomi.drafters.head_model import HEAD_WEIGHT, ROWS, FusedEmbedding, last_norm, over_vocabulary
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.kernels.pack import linear_beside
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.kernel_rounds import Around, FedRows, HeardStates, MaskRows
from sakiyomi.model_executor.row_layers import RowLayers
from sakiyomi.model_executor.runner import ModelRunner


class FeatureHead(ABC):
    """A head whose rows read a feature each, beside a packed target.

    Args:
        options: of the head.
        model: the head, packed.
        given: where its layers read the features of a pass, (ROWS, hidden).
        target: whose hidden states it reads.

    Attributes:
        around: how the kernels run its passes by themselves; nothing is fed: they cannot.
    """

    blank = False  # the first row of a text has no embedding

    def __init__(self, options: EagleOptions, model: ModelRunner, given: Tensor, target: ModelRunner) -> None:
        self.options, self.model, self._given, self.target = options, model, given, target
        width = options.target_size
        features = RowLayers(target, width * len(options.layers), lambda rows, *_: self._made(rows))
        self.around = Around(heard=HeardStates(options.layers, width, features=features))

    def project(self, states: Mapping[int, Tensor]) -> Tensor:
        """Hidden states of the target by layer, (rows, target hidden) each, to features, (rows, hidden)."""
        both = torch.cat([states[layer] for layer in self.options.layers], -1).to(self.target.dtype)
        with torch.no_grad(), self.target.lock:
            self.target.begin(BatchPlan([]), len(both))  # other models may have had a pass meanwhile
            return self._made(both)

    def _made(self, both: Tensor) -> Tensor:
        return self._features(both)

    @abstractmethod
    def _features(self, both: Tensor) -> Tensor:
        """Hidden states of the target's layers side by side, (rows, layers x target hidden), to features."""

    def read(self, segments: Sequence[SequenceRows], inputs: Tensor, *, last: bool = False) -> tuple[Tensor, Tensor]:
        """Logits over the target's vocabulary and features of these rows, which read these features.

        One pass, or more where a pass has no place for so many features.
        """
        if len(inputs) > self._most and len(segments) > 1:
            half = len(segments) // 2
            rows = sum(len(segment.tokens) for segment in segments[:half])
            one = self.read(segments[:half], inputs[:rows], last=last)
            other = self.read(segments[half:], inputs[rows:], last=last)
            return torch.cat([one[0], other[0]]), torch.cat([one[1], other[1]])
        return self._pass(segments, inputs, last)

    @property
    def _most(self) -> int:
        """Rows of a pass; an exact model would itself make several of more."""
        return min(ROWS, self.model.sizes[-1]) if self.model.exact else ROWS

    @abstractmethod
    def _pass(self, segments: Sequence[SequenceRows], inputs: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """``read`` in one pass."""


class EagleHead(Beside, FeatureHead):
    """A head of EAGLE-3, with a projection of features and a head over the vocabulary of its own.

    Args:
        file: of the head.
        target: whose hidden states it reads.
        model: the head, packed.
    """

    def __init__(self, file: EagleFile, target: ModelRunner, model: ModelRunner) -> None:
        layers = model.module.model.layers
        Beside.__init__(self, target)
        FeatureHead.__init__(self, file.options, model, layers[0].given, target)
        self._tokens = file.tokens
        beside = ((name, tensor) for name, tensor in file.tensors.items() if name.startswith(BESIDE))
        self._tensors = {name: tensor.to(target.device) for name, tensor in beside}
        self._out = HEAD if file.options.norm_output else len(layers) - 1
        model.capture([self._out])
        tokens = file.tokens if file.tokens is None else file.tokens.to("cpu", torch.int64).contiguous()
        if model.device.type == "cpu":
            known = len(file.tensors[HEAD_WEIGHT])
            fed = FedRows(self._given.shape[1], self._given, self._out, known, tokens)
            mask = file.options.mask
            masks = None if mask is None else MaskRows(mask, self.mask_feature)
            self.around = self.around._replace(fed=fed, masks=masks)
        self._mask_feature: Tensor | None = None
        self._prepare()

    def _pack(self, tables: PackedWeights | None) -> None:
        self._fc = linear_beside(tables, self._tensors["fc.weight"].to(self._host.weights.dtype))

    def _made(self, both: Tensor) -> Tensor:
        self._prepare()
        return self._features(both)

    def _features(self, both: Tensor) -> Tensor:
        if self.options.fc_norm:
            parts = both.split(self.options.target_size, -1)
            both = torch.cat([self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], -1)
        if self.options.norm_before_fc:
            both = self._norm(both, "input_norm.weight")
        features: Tensor = self._fc(both)
        return features

    def mask_feature(self) -> Tensor:
        """Feature of a mask, (1, hidden)."""
        if self._mask_feature is None:
            learnt = self._tensors["mask_hidden"].view(1, -1).split(self.options.target_size, -1)
            self._mask_feature = self.project(dict(zip(self.options.layers, learnt, strict=True)))
        return self._mask_feature

    def _norm(self, states: Tensor, name: str) -> Tensor:
        """RMSNorm with this weight."""
        weight = self._tensors[name].float()
        return F.rms_norm(states.float(), weight.shape, weight, self.model.config.rms_norm_eps).to(states.dtype)

    def _pass(self, segments: Sequence[SequenceRows], inputs: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        with self.model.lock:
            self._given[: len(inputs)] = inputs
            found = self.model.score(segments, last=last)
        return over_vocabulary(found.logits, self._tokens, self._host.vocab_size), found.features[self._out]


class SharedHead(FeatureHead):
    """A head that reads what the target's own head reads, and whose logits come from that: EAGLE-1 and 2, MTP layers.

    Args:
        target: whose hidden states it reads.
        model: the head, packed; its embedding is a ``FusedEmbedding``, and its output what the target's head reads.
        blank: the first row of a text has no embedding.
    """

    def __init__(self, target: ModelRunner, model: ModelRunner, *, blank: bool = False) -> None:
        embedding: FusedEmbedding = model.module.model.embed_tokens
        last, width = int(target.config.num_hidden_layers) - 1, int(target.config.hidden_size)
        options = EagleOptions(layers=(last,), target_size=width, norm_output=True)
        self.blank, self._kept = blank, embedding.kept
        self._last_norm = last_norm(target.module)
        super().__init__(options, model, embedding.given, target)
        if model.device.type == "cpu":
            said = RowLayers(target, width, lambda rows, *_: target.head(rows))
            self.around = self.around._replace(fed=FedRows(width, self._given, HEAD, target.vocab_size, None, said))

    def _features(self, both: Tensor) -> Tensor:
        """What the target's layers gave, as its head reads it: (rows, hidden)."""
        features: Tensor = self._last_norm(both)
        return features

    def _pass(self, segments: Sequence[SequenceRows], inputs: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        begins = [not (part.length or row) for part in segments for row in range(len(part.tokens))]
        with self.model.lock:
            self._given[: len(inputs)] = inputs
            try:
                if self.blank and any(begins):
                    self._kept[: len(inputs)][begins] = 0
                states = self.model.score(segments, last=last).features[HEAD]
            finally:
                if self.blank:
                    self._kept.fill_(1)
        return target_logits(self.target, states), states
