"""The decoder of an encoder-decoder model as a causal model on packed rows, and its encoder beside it.

Made from a structural copy of the user's model. transformers' own decoder runs, with three kinds of modules replaced:
cross-attention (ours reads the cache of the source), the embedding of positions (ours takes each row's position), and
self-attention of families that derive a bias from columns (ours has a table of biases by distance).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.cache.cross_attention import Source
from sakiyomi.cache.layout import LayerShape
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.kernels.pack import pack_linears, present
from sakiyomi.model_executor.attention.op import CROSS, SOURCE, register_source
from sakiyomi.model_executor.encoder_decoder.families import Family, family_of
from sakiyomi.model_executor.encoder_decoder.judged import Judged
from sakiyomi.model_executor.recorded_model import PlainConfig, RecordedEncoderDecoder
from sakiyomi.model_executor.widened import widened


class _Attention(nn.Module):
    """The projections of one of transformers' attention modules.

    Args:
        module: the attention module.
        layer: its index.
        family: of the model.
    """

    def __init__(self, module: nn.Module, layer: int, family: Family) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (getattr(module, name) for name in family.parts)
        self.heads, self.results = int(getattr(module, family.heads)), family.results
        self.scaling = float(module.scaling)  # type: ignore[arg-type]
        self.layer_idx = layer
        self.attention = "eager"

    def _split(self, x: Tensor) -> Tensor:
        """(B, T, heads * dim) as (B, heads, T, dim)."""
        parts: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return parts

    def _close(self, out: Tensor) -> tuple[Tensor | None, ...]:
        return (self.out(out.flatten(2)), None, None)[: self.results]


class _SelfAttention(_Attention):
    """Self-attention without its own bias: the attention operator adds the bias by distance."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor | None, ...]:
        from transformers import AttentionInterface

        q, k, v = (self._split(part(hidden_states)) for part in (self.q, self.k, self.v))
        attend = AttentionInterface()[self.attention]
        return self._close(attend(self, q, k, v, None, scaling=self.scaling)[0])


class CrossAttention(_Attention):
    """Cross-attention over the cached source of each row's request."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor | None, ...]:
        """Rows (1, rows, width), and what else transformers gives such a module; the result of the attention."""
        q = self._split(self.q(hidden_states))
        return self._close(CROSS[self.attention](q, self.layer_idx, self.scaling))

    def queries(self, projected: Tensor) -> Tensor:
        """Queries (heads, rows, dim), with the scale of scores, of what `q` makes of rows, (1, rows, width)."""
        return self._split(projected)[0] * self.scaling

    def read(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (heads, places, dim) of the encoder's output, (1, places, width)."""
        return self._split(self.k(hidden_states))[0], self._split(self.v(hidden_states))[0]


class _NoPositions(nn.Module):
    """Replaces the embedding of positions, which are added before."""

    zero: Tensor

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("zero", torch.zeros(1, dtype=dtype, device=device), persistent=False)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.zero


class Decoder(nn.Module):
    """A causal model on packed rows: token ids and positions in, logits out.

    Args:
        model: a structural copy of the user's model without its encoder; changed in place.
        family: of the model.
        device: the device that computes.

    Attributes:
        distances: (heads, n) float32, added to a score by the distance of the key (n - 1 and more: the last entry);
            None: nothing is added.
    """

    def __init__(self, model: Any, family: Family, device: torch.device) -> None:
        super().__init__()
        config, decoder = model.config, model.get_decoder()
        self.inner, self._given = model, {"": "", "inner.": ""}
        path = next(name for name, module in model.named_modules() if module is decoder)
        self.config = PlainConfig(
            model_type=config.model_type,
            vocab_size=int(getattr(config, family.vocabulary, None) or config.vocab_size),
            num_hidden_layers=int(getattr(config, family.count)),
            max_position_embeddings=int(getattr(config, family.limit)) if family.limit else 0,
        )
        layers = getattr(decoder, family.layers)
        self.register_buffer("distances", None, persistent=False)
        if family.own is not None:
            self.distances = _by_distance(layers[0].get_submodule(family.own))
            _replace(layers, family.own, _SelfAttention, family)
        _replace(layers, family.cross, CrossAttention, family)
        for at in [f"{path}.{family.layers}.{layer}.{family.cross}." for layer in range(len(layers))]:
            parts = zip(["q", "k", "v", "out"], family.parts, strict=True)
            self._given |= {f"inner.{at}{own}": f"{at}{given}" for own, given in parts}
        self.embed, self.positions, self.scale = decoder.embed_tokens, None, 1.0
        if family.positions is not None:
            self.positions = getattr(decoder, family.positions)
            self._given["positions"] = f"{path}.{family.positions}"
            setattr(decoder, family.positions, _NoPositions(self.positions.weight.dtype, device))
        if family.scales:  # else it would scale the positions too
            self.scale, decoder.embed_scale = float(decoder.embed_scale), 1.0

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: None = None, use_cache: bool = False
    ) -> Any:
        """Token ids and positions (1, N) to an object with logits (1, N, V)."""
        from transformers.modeling_outputs import BaseModelOutput

        embeds = self.embed(input_ids)
        if self.scale != 1.0:
            embeds = embeds * self.scale
        if self.positions is not None:
            embeds = embeds + self.positions(input_ids, position_ids=position_ids[0])
        # Our cross-attention ignores the encoder's output; without one the decoder would skip it.
        return self.inner(
            encoder_outputs=BaseModelOutput(last_hidden_state=embeds[:, :1]),
            decoder_inputs_embeds=embeds,
            use_cache=use_cache,
        )

    def given_name(self, name: str) -> str:
        """The name of a module or a weight in the user's model."""
        own = max(filter(name.startswith, self._given), key=len)
        return self._given[own] + name.removeprefix(own)

    def set_attn_implementation(self, name: str) -> None:
        """Switch to one of the attention operators, see ``kernels.attention``."""
        self.inner.set_attn_implementation(name)
        for module in self.modules():
            if isinstance(module, _Attention):
                module.attention = name

    def get_output_embeddings(self) -> Any:
        """The head over the vocabulary."""
        return self.inner.get_output_embeddings()


class Encoder:
    """Reads a source before the first token is written: makes keys and values for every cross-attention.

    Args:
        module: the encoder of a structural copy of the user's model; `pack` changes it.
        path: of the module in the user's model.
        crosses: the decoder's cross-attentions.
        family: of the model.
        limit: most places of a source; None: no limit.
        device: the device that computes.
        fingerprint: equal for encoders with the same weights; None: it is computed.

    Attributes:
        module, path, crosses, limit: as given.
        fingerprint: of its weights.
        shapes: shapes of the keys and values that cross-attention reads, by layer.
        judged: measurements of the whole model, if it is to be quantized; None: there are none.
        lender: of a draft: the target's encoder, if it is the same, so that it runs once for both; None: another one.
    """

    judged: Judged | None = None
    lender: Encoder | None = None

    def __init__(
        self,
        module: Any,
        path: str,
        crosses: list[CrossAttention],
        family: Family,
        limit: int | None,
        device: torch.device,
        fingerprint: str | None = None,
    ) -> None:
        self.module, self.path, self.crosses, self._family, self.limit = module, path, crosses, family, limit
        self.dtype, self.device = next(module.parameters()).dtype, device
        self.fingerprint = fingerprint or _fingerprint(module)
        self.shapes = [
            LayerShape(c.heads, c.k.out_features // c.heads, c.v.out_features // c.heads, device) for c in crosses
        ]

    @property
    def projections(self) -> list[nn.Module]:
        """The projections of a source to keys and values, packed or not."""
        return [module for cross in self.crosses for module in (cross.k, cross.v)]

    def pack(self, table: PackedWeights, bits: Mapping[int, int] | None, *, free: bool) -> None:
        """Have the kernels compute its linear layers and, without a bias of its own, its attention.

        Args:
            table, bits, free: see ``pack_linears``.
        """
        pack_linears(self.module, table, free=free, bits=bits)
        if self._family.own is None:
            register_source()
            self.module.set_attn_implementation(SOURCE)

    def borrow(self, target: Encoder) -> None:
        """Use what the target's encoder makes of a source, if the two have the same weights."""
        if self.fingerprint == target.fingerprint:
            self.lender = target

    def read(self, source: Source) -> Tensor:
        """The encoder's last layer, (1, places, width). Packed layers need a pass that was begun without rows."""
        for each in (self, self.lender):
            if (known := source.encoded.get(id(each))) is not None:
                return known.to(self.device, self.dtype)
        inputs = {name: given.to(self.device) for name, given in source.inputs.items()}
        inputs = {name: given.to(self.dtype) if given.is_floating_point() else given for name, given in inputs.items()}
        with widened(self.device):
            hidden: Tensor = self.module(**inputs).last_hidden_state
        source.encoded[id(self)] = hidden
        return hidden

    def noise(self, places: int) -> list[tuple[Tensor, Tensor]]:
        """Random keys and values, for self-tests."""
        generator = torch.Generator().manual_seed(0)

        def rows(shape: LayerShape, dim: int) -> Tensor:
            return torch.randn(shape.heads, places, dim, generator=generator)

        return [(rows(shape, shape.key_dim), rows(shape, shape.value_dim)) for shape in self.shapes]

    def pairs(self, hidden: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (heads, places, dim) of every layer."""
        with widened(self.device):
            return [cross.read(hidden) for cross in self.crosses]


def split(model: Any, device: torch.device) -> tuple[Any, Encoder]:
    """Take a model apart.

    Args:
        model: a structural copy of the user's model, changed in place, or a recorded one.
        device: the device that computes, which may not be that of the weights.

    Returns:
        A `Decoder`, or the `RecordedModel` of one, and the encoder.

    Raises:
        UnsupportedError: its family is not supported.
    """
    if isinstance(model, RecordedEncoderDecoder):
        return model.decoder, _recorded_encoder(model)
    config, family = model.config, family_of(model.config)
    encoder = model.get_encoder()
    name = next(name for name, module in model.named_modules() if module is encoder)
    model.set_submodule(name, nn.Identity())
    own = copy.copy(config)  # the attention of the decoder is switched by its configuration
    for module in encoder.modules():
        if getattr(module, "config", None) is config:
            module.config = own
    decoder = Decoder(model, family, device).eval()
    crosses = [module for module in decoder.modules() if isinstance(module, CrossAttention)]
    return decoder, Encoder(encoder, name, crosses, family, family.source_positions(config), device)


def _recorded_encoder(model: RecordedEncoderDecoder) -> Encoder:
    """The encoder of a recorded model, with cross-attentions of the decoder's layers."""
    about, family, crosses = model.encoder.about, family_of(model.config), []
    for index, (path, settings) in enumerate(about["crosses"].items()):
        attention = model.decoder.get_submodule(path)
        vars(attention).update(settings)
        crosses.append(CrossAttention(attention, index, family))
    limit = family.source_positions(model.config)
    return Encoder(model.encoder, about["path"], crosses, family, limit, model.device, about["fingerprint"])


def _fingerprint(encoder: nn.Module) -> str:
    """Equal for encoders with the same weights, of which a few are read: drafts use it, whose errors change no text."""
    layers = [module for module in encoder.modules() if any(True for _ in module.parameters(recurse=False))]
    found = hashlib.sha256(f"{type(encoder).__name__} {len(layers)}".encode())
    for layer in layers[:: max(1, len(layers) // 3)]:
        with present(layer):
            for weight in layer.parameters(recurse=False):
                some = weight.detach().flatten()[:: max(1, weight.numel() // 64)].to("cpu", torch.bfloat16)
                found.update(f"{tuple(weight.shape)}".encode() + some.view(torch.int16).numpy().tobytes())
    return found.hexdigest()


def _replace(layers: Any, path: str, kind: type[_Attention], family: Family) -> None:
    """Replace one attention module of every layer by ours."""
    for index, layer in enumerate(layers):
        layer.set_submodule(path, kind(layer.get_submodule(path), index, family))


def _by_distance(module: Any) -> Tensor:
    """T5's relative bias, (heads, n) float32 by the distance of a key behind its query."""
    far, table = int(module.relative_attention_max_distance), module.relative_attention_bias
    with present(table):
        weight: Tensor = table.weight.detach().float()
    bucket = module._relative_position_bucket(
        -torch.arange(far + 1, device=weight.device),
        bidirectional=False,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=far,
    )
    return weight[bucket].T.contiguous()
