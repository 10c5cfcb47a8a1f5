"""Weights in 8 or 4 bits: which layers tolerate it, and what the rounding changed.

A weight channel, or 32 neighbours of it in 4 bits, and a row are each divided by a scale of their own. One number that
is far larger than the others then takes their precision: layers with such outliers keep their weights (Dettmers et al.,
arXiv 2208.07339, saw them in large models). Which ones do is measured on a text, layer by layer, before anything is
rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.build import native
from sakiyomi.kernels.experts import chosen_rows, is_experts
from sakiyomi.kernels.native import DTYPES, PIECE, can_pack, to_halves
from sakiyomi.kernels.pack import is_linear, present, weight_of

EVERY = 4  # of so many rows of the text one is looked at, layer by layer


@dataclass(frozen=True, slots=True)
class Quantization:
    """A way of rounding a model's linear layers.

    Attributes:
        bits: of a weight.
        most: relative error of a layer's output, above which 8 bits take the place of 4, and above which a layer of 8
            bits keeps its weights. Rounding alone makes about 0.01 in 8 bits and 0.08 in 4.
        round: a weight (out, in) as it is after rounding.
    """

    bits: int
    most: float
    round: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What the rounding changed, on ``tokens`` tokens.

    Attributes:
        kind: as in ``LLM(quantize=...)``.
        layers: linear layers that are rounded.
        kept: names of those that kept their weights, because a few of their inputs or weights outgrow the others; on
            a GPU the head's.
        agreement: share of positions with the same most probable token.
        divergence: mean KL divergence of the rounded model's next-token distribution from the model's own, in nats.
        tokens: of the text.
    """

    kind: str
    layers: int
    kept: tuple[str, ...]
    agreement: float
    divergence: float
    tokens: int

    def __str__(self) -> str:
        kept = f", {len(self.kept)} kept as they were ({', '.join(self.kept[:3])}{', ...' * (len(self.kept) > 3)})"
        return (
            f"{self.kind}: {self.layers} layers{kept if self.kept else ''}; on {self.tokens} tokens the most probable "
            f"token is the same {self.agreement:.1%} of the time, mean KL divergence {self.divergence:.4f} nats"
        )


def _to_bytes(values: Tensor) -> Tensor:
    """Each row to 8 bits and back."""
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return (values / scale).round() * scale


def _to_halves(weight: Tensor) -> Tensor:
    """Each 32 neighbours to 4 bits and back."""
    numbers, scales = to_halves(weight)
    groups = numbers.float().sub_(8).unflatten(1, (scales.shape[1], -1))
    back: Tensor = (groups * scales.float()[..., None]).flatten(1)
    return back


QUANTIZATIONS = {"int8": Quantization(8, 0.05, _to_bytes), "int4": Quantization(4, 0.2, _to_halves)}


def check_quantization(what: str, dtype: torch.dtype) -> None:
    """Refuse rounded weights where nothing can compute with them.

    Args:
        what: wants it, the subject of the message.
        dtype: of the rows.

    Raises:
        UnsupportedError: another dtype, or no kernels.
    """
    if dtype not in DTYPES:
        raise UnsupportedError(
            f"{what} needs rows in float32 or bfloat16, and the model is in {dtype}; use it with dtype='bfloat16'"
        )
    if native() is None:
        raise UnsupportedError(
            f"{what} needs the compiled CPU kernels, which are not available here (sakiyomi info says what is "
            "missing); use the model without quantize"
        )


def layer_errors(
    model: nn.Module, inputs: Mapping[str, Tensor], kinds: Collection[str] = ("int8",)
) -> tuple[dict[int, dict[str, float]], Tensor]:
    """Relative error that roundings make in each linear layer's output, by the layer's id, and the logits (T, V).

    A stack of experts counts as one layer, by the id of its weights; those experts are measured that the text chooses.

    Args:
        model: not packed yet, with an attention of transformers' own; its weights may be on disk (see ``present``).
        inputs: of its forward: (1, T) token ids; with an encoder, a source and what the decoder reads.
        kinds: of ``QUANTIZATIONS``.
    """
    errors: dict[int, dict[str, float]] = {}

    def measure(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        with present(layer):
            weight, bias = weight_of(layer), getattr(layer, "bias", None)
            own = output.flatten(0, -2)[::EVERY].float()
            own = own if bias is None else own - bias.float()
            found = errors.setdefault(id(layer), {})
            for kind, (wrong, size) in _errors(weight, inputs[0].flatten(0, -2)[::EVERY], own, kinds).items():
                found[kind] = max((wrong / size) ** 0.5, found.get(kind, 0.0))

    def measure_experts(stack: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor], _: Tensor) -> None:
        rows, chosen = (*inputs, *(named[name] for name in ("hidden_states", "top_k_index") if name in named))[:2]
        sums: dict[tuple[int, str], tuple[float, float]] = {}
        for name, _expert, weight, given in chosen_rows(stack, rows[::EVERY], chosen[::EVERY]):
            for kind, found in _errors(weight, given, (given @ weight.T).float(), kinds).items():
                key = id(getattr(stack, name)), kind
                sums[key] = tuple(map(sum, zip(sums.get(key, (0.0, 0.0)), found, strict=True)))  # type: ignore[assignment]
        for (layer, kind), (wrong, size) in sums.items():
            errors.setdefault(layer, {})[kind] = (wrong / size) ** 0.5

    with ExitStack() as hooks, torch.no_grad():
        for layer in model.modules():
            if is_linear(layer):
                hooks.enter_context(layer.register_forward_hook(measure))
            elif is_experts(layer):
                hooks.enter_context(layer.register_forward_hook(measure_experts, with_kwargs=True))
        logits: Tensor = model(**inputs, use_cache=False).logits[0]
    return errors, logits


def _errors(weight: Tensor, rows: Tensor, own: Tensor, kinds: Collection[str]) -> dict[str, tuple[float, float]]:
    """By rounding: the square of what it changes in the products of rows (n, in) with a weight (out, in), and of those.

    Args:
        weight, rows: multiplied.
        own: their products, (n, out), as they are without rounding.
        kinds: of roundings; those that do not fit the weight are left out.
    """
    found: dict[str, tuple[float, float]] = {}
    rounded, size = _to_bytes(rows.float()), float(own.square().sum().clamp_min(1e-24))
    for kind in kinds:
        if can_pack(weight.shape, weight.dtype, QUANTIZATIONS[kind].bits):
            pieces = zip(weight.split(PIECE), own.split(PIECE, 1), strict=True)
            wrong = sum(
                float((rounded @ QUANTIZATIONS[kind].round(piece.float()).T - right).square().sum())
                for piece, right in pieces
            )
            found[kind] = wrong, size
    return found


def choose_bits(kind: str, errors: dict[int, dict[str, float]], head: nn.Module) -> dict[int, int]:
    """Bits of each measured layer's weights, by its id: 16 where its error is too large.

    With 4 bits the head has 8, since its errors are the logits' own; so has a layer whose error is small enough in 8
    bits and not in 4.
    """
    bits: dict[int, int] = {}
    for layer, found in errors.items():
        kinds = ("int8",) if kind == "int8" or layer == id(head) else (kind, "int8")
        borne = [QUANTIZATIONS[each].bits for each in kinds if found.get(each, torch.inf) <= QUANTIZATIONS[each].most]
        bits[layer] = borne[0] if borne else 16
    return bits


def compare(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Share of rows, (T, V) each, with the same largest logit; mean KL divergence of ``after`` from ``before``."""
    same, divergence = 0.0, 0.0
    for own, other in zip(before.split(64), after.split(64), strict=True):  # a few rows at a time: V may be large
        same += float((own.argmax(-1) == other.argmax(-1)).sum())
        p, q = own.float().log_softmax(-1), other.float().log_softmax(-1)
        divergence += float((p.exp() * (p - q)).sum())
    return same / len(before), divergence / len(before)
