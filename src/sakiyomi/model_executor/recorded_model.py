"""A model that runs from a recording of its passes: its weights and a program, without its transformers class.

Recordings are read by `loading/recording.py` and written by `loading/recorder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._fuser import optimized_execution

from sakiyomi.kernels.native import PackedLayer
from sakiyomi.model_executor.program import Program
from sakiyomi.sampling.suppressed import SuppressedTokens, forbidding


class PlainConfig(SimpleNamespace):
    """The configuration of a text model, without its transformers class."""

    def get_text_config(self, **_: Any) -> PlainConfig:
        """Itself."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """The settings as a dict, as in transformers."""
        return dict(vars(self))


class RecordedModel(nn.Module):
    """Stands in for a transformers model: modules with its names that hold its weights. None of them is called.

    Of an encoder-decoder model it stands in for the decoder.

    Args:
        about: the metadata of a recording, see `loading/recorder.py`.
        graph: TorchScript, from token ids and positions (1, N), the rows to keep (K) and the weights to logits (1, K,
            V), what the head reads, (1, K, hidden), and the outputs of layers, (1, N, hidden) each; of a decoder
            behind an encoder, of each layer's projection to queries for cross-attention.
        weights: the tensors that the graph reads, by name, in its order.
        layers: the packed linear layers, by name.
        whole: loads the transformers model with these packed layers in it.

    Attributes:
        program: runs passes.
        outputs: stand for the modules whose outputs passes can give: their forward hooks are called.

    Raises:
        UnsupportedError: see ``Program``.
    """

    device = torch.device("cpu")  # whose kernels are recorded

    def __init__(
        self,
        about: Mapping[str, Any],
        graph: Any,
        weights: Mapping[str, Tensor],
        layers: Mapping[str, PackedLayer],
        whole: Callable[[RecordedModel], Any],
    ) -> None:
        super().__init__()
        self.config = PlainConfig(**(about.get("decoder") or about["config"]))
        self.generation_config = PlainConfig(**about["generation_config"])
        self.dtype: torch.dtype = getattr(torch, about["dtype"])
        self.layers, self.whole = dict(layers), whole
        for name, tensor in weights.items():
            parent, _, own = name.rpartition(".")
            if parent in about["embeddings"]:  # a pass reads only a few of its rows
                self._put(parent, nn.Embedding.from_pretrained(tensor))
            else:
                self._container(parent).register_parameter(own, nn.Parameter(tensor, requires_grad=False))
        for name, layer in layers.items():
            self._put(name, layer)
        self._head, self._embedding = layers[about["head"]], str(about["embedding"])
        self.outputs = nn.ModuleList(nn.Module() for _ in range(about["outputs"]))
        self._captured: list[nn.Module] = []
        widths = self._head.out_features, *[self._head.in_features] * (1 + len(self.outputs))
        rows = [(width, self.dtype) for width in widths]
        self._program = partial(Program, graph, list(weights.values()), rows)
        self.program = self._program((0, 1))

    def _container(self, name: str) -> nn.Module:
        found: nn.Module = self
        for part in name.split(".") if name else ():
            if part not in found._modules:
                found.add_module(part, nn.Module())
            found = found._modules[part]  # type: ignore[assignment]
        return found

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, own = name.rpartition(".")
        self._container(parent).add_module(own, module)

    def capture(self, layers: Sequence[int]) -> None:
        """Have passes also give the outputs of these layers, in this order."""
        captured = [self.outputs[layer] for layer in layers]
        if captured == self._captured:  # a program takes a while to make
            return
        self._captured = captured
        self.program = self._program((0, 1, *(2 + layer for layer in layers)))

    def get_input_embeddings(self) -> nn.Module | None:
        """The embedding of tokens; None: the recording does not hold it as numbers of the model's dtype."""
        return dict(self.named_modules()).get(self._embedding) if self._embedding else None

    def get_output_embeddings(self) -> nn.Module:
        """The head over the vocabulary."""
        return self._head

    def set_attn_implementation(self, name: str) -> None:
        """Does nothing: the operator is part of the program."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: None = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
    ) -> SimpleNamespace:
        """Token ids and positions (1, N) to an object with logits, (1, N, V), or of the rows to keep, (1, K, V).

        No hooks of modules are called, except the forward pre-hooks of the head, with its input, and the forward hooks
        of layers whose outputs are captured.
        """
        keep = logits_to_keep if isinstance(logits_to_keep, Tensor) else None
        logits, (read, *outputs) = self.program(input_ids, position_ids, keep)
        for hook in self._head._forward_pre_hooks.values():
            hook(self._head, (read,))
        for layer, output in zip(self._captured, outputs, strict=True):
            for after in layer._forward_hooks.values():
                after(layer, (), output)
        return SimpleNamespace(logits=logits)


class RecordedEncoder(nn.Module):
    """The encoder of a speech model, whose input has one shape.

    Args:
        about: metadata of the encoder, see `loading/recorder.py`.
        script: TorchScript, from features (1, mels, frames) and weights to the last layer, (1, places, width).
        weights: the tensors that the script reads, in its order.
        layers: the packed linear layers.

    Attributes:
        about: as given.
    """

    def __init__(
        self, about: Mapping[str, Any], script: Any, weights: Collection[Tensor], layers: Collection[PackedLayer]
    ) -> None:
        super().__init__()
        self.about = about
        self.weights = nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in weights)
        self.layers = nn.ModuleList(layers)
        self._run = script.forward

    def forward(self, input_features: Tensor) -> SimpleNamespace:
        """Features to an object with last_hidden_state; packed layers need a pass that was begun without rows."""
        with optimized_execution(False):  # or it would join operators, which rounds differently
            return SimpleNamespace(last_hidden_state=self._run(input_features, *self.weights))


class RecordedEncoderDecoder(nn.Module):
    """Stands in for a transformers model with an encoder.

    Args:
        about: the metadata of a recording.
        decoder, encoder: its parts.
    """

    device = torch.device("cpu")

    def __init__(self, about: Mapping[str, Any], decoder: RecordedModel, encoder: RecordedEncoder) -> None:
        super().__init__()
        self.decoder, self.encoder = decoder, encoder
        self.config, self.dtype = PlainConfig(**about["config"]), decoder.dtype
        self.generation_config = decoder.generation_config

    def get_output_embeddings(self) -> nn.Module:
        """The head over the vocabulary."""
        return self.decoder.get_output_embeddings()

    def _get_logits_processor(self, settings: Any, begin: int, _: Tensor | None) -> list[SuppressedTokens]:
        """As transformers' method, for settings of which it makes no others."""
        return forbidding(settings, begin)
