"""Runs a block drafter beside a packed target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from sakiyomi.drafters.beside import Beside, projection_bits, target_logits
from sakiyomi.drafters.block_heads.correction import Corrections, Selector
from sakiyomi.drafters.block_heads.formats import BlockFile
from sakiyomi.drafters.head_model import over_vocabulary
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.kernels.norms import serve_norms
from sakiyomi.kernels.pack import linear_beside
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.kernel_rounds import Around, FedRows, HeardStates, MaskRows
from sakiyomi.model_executor.row_layers import RowLayers
from sakiyomi.model_executor.runner import ModelRunner


class Written(NamedTuple):
    """Committed tokens of a text, whose keys and values are to be written.

    Attributes:
        slot: of the text.
        column: of the first of them.
        states: of the target's layers side by side, (tokens, layers x hidden).
    """

    slot: int
    column: int
    states: Tensor

    @property
    def columns(self) -> slice:
        """Of all of them."""
        return slice(self.column, self.column + len(self.states))


class BlockRunner(Beside):
    """Writes keys and values of the text, and guesses blocks of tokens.

    Args:
        file: of the drafter.
        target: whose hidden states it reads.
        model: its layers, packed.

    Attributes:
        options, model: as given.
        corrections: of guesses by the tokens before them; None: there are none.
        around: how the kernels run its passes by themselves; nothing is fed: they cannot.

    Raises:
        LoadError: tensors are missing, or have other shapes.
    """

    def __init__(self, file: BlockFile, target: ModelRunner, model: ModelRunner) -> None:
        super().__init__(model)
        self.options, self.model = file.options, model
        self._target, self._tokens = target, file.tokens
        attention = [f"layers.{layer}.self_attn." for layer in range(len(model.cache.shapes))]

        def own(name: str) -> Tensor:
            return file.tensors[name].to(model.device, model.dtype)

        self._fc, eps = own("fc.weight"), float(model.config.rms_norm_eps)
        # A drafter has its key norms side by side: rows are scaled to 1 first, then by the layer's weights.
        self._norms = nn.ModuleList([_norm_of(own("hidden_norm.weight"), eps)])
        both = [f"{name}{part}" for name in attention for part in ("k_proj", "v_proj")]
        self._pairs = torch.cat([own(f"{name}.weight") for name in both])
        biased = f"{both[0]}.bias" in file.tensors
        self._bias = torch.cat([own(f"{name}.bias") for name in both]) if biased else None
        self._key_norms = torch.stack([own(f"{name}k_norm.weight") for name in attention])
        self._norms.append(_norm_of(torch.ones_like(self._key_norms[0]), eps))
        self._angles: tuple[Tensor, Tensor] | None = None  # by position
        self._own_head = "lm_head.weight" in file.tensors
        self._known = len(file.tensors["lm_head.weight"]) if self._own_head else target.vocab_size  # tokens
        self.corrections: Corrections | Selector | None = None
        if self.options.markov or self.options.confident:
            self.corrections = Corrections(file, self._known, model.device, model.dtype)
        elif self.options.selected:
            self.corrections = Selector(file, model.device, model.dtype)
        for layer in model.module.model.layers if self.options.kernel else ():
            layer.live.fill_(True)
        self._prepare()
        self.around = self._around()

    def _around(self) -> Around:
        options, model, target, corrections = self.options, self.model, self._target, self.corrections
        by_rows = isinstance(corrections, Corrections) and corrections.by_rows
        finished = self._own_head and (options.logit_scale != 1 or options.softcap)
        if (corrections is not None and not by_rows) or finished or model.device.type != "cpu":
            return Around()
        width, states = self._fc.shape[0], len(options.layers)
        each = self._fc.shape[1] // states
        tokens = None if self._tokens is None else self._tokens.to("cpu", torch.int64).contiguous()

        def said(rows: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
            return self._finished(target.head(rows))

        def pairs(rows: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
            self._prepare()
            cos, sin = (part[0, :, None, None] for part in self.model.module.model.rotary_emb(rows, positions))
            return torch.cat([part.flatten(2) for part in self._pairs_of(rows, cos, sin)], -1).flatten(1)

        def bias(rows: Tensor, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            self._prepare()
            assert isinstance(corrections, Corrections)
            return corrections.biased(rows, ids[0])

        rated = isinstance(corrections, Corrections) and options.confident
        masks = MaskRows(
            options.mask,
            block=True,
            rows=0 if options.causal and not options.kernel else options.size,
            first=0 if options.anchored else 1,
            sees_all=not options.causal,
            pairs=RowLayers(model, each * states, pairs),
            bias=None if corrections is None else RowLayers(model, width, bias),
            rated=rated,
        )
        fed = FedRows(
            width, None, HEAD, self._known, tokens, None if self._own_head else RowLayers(target, width, said)
        )
        return Around(fed, masks, HeardStates(options.layers, each))

    def _pack(self, tables: PackedWeights | None) -> None:
        if tables is not None:
            serve_norms(self._norms)
        bits = projection_bits(self._target)
        self._project = linear_beside(tables, self._fc, None, bits)
        self._to_pairs = linear_beside(tables, self._pairs, self._bias, bits)
        if isinstance(self.corrections, Corrections):
            self.corrections.pack(tables, bits)

    @property
    def target_dtype(self) -> torch.dtype:
        """Of the hidden states that it reads."""
        return self._target.dtype

    # ------------------------------------------------------------ the text

    def write(self, parts: Sequence[Written]) -> None:
        """Write keys and values of committed tokens, of all these texts in one product.

        Args:
            parts: whose slots have room for them.
        """
        model = self.model
        both, counts = _joined([part.states for part in parts]), [len(part.states) for part in parts]
        count = len(both)
        with self._timed(), self._running(count):
            both = both.to(model.dtype)
            keys, values = self._pairs_of(both, *self._turns(parts, both))
            fresh: list[Tensor] = []
            places: list[Tensor] = []
            for store, made in ((model.cache.keys, keys), (model.cache.values, values)):
                for part, own in zip(parts, made.split(counts), strict=True):
                    fresh += own.permute(1, 2, 0, 3).unbind()
                    places += [store[layer][part.slot, :, part.columns] for layer in range(made.shape[1])]
            torch._foreach_copy_(places, fresh)

    def _pairs_of(self, both: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (tokens, layers, heads, dim) from states of the target's layers side by side.

        Args:
            both: (tokens, layers x hidden).
            cos, sin: of the tokens' positions, (tokens, 1, 1, key_dim).
        """
        shape = self.model.cache.shapes[0]
        features = self._norms[0](self._project(both))
        pairs = self._to_pairs(features).view(-1, len(self._key_norms), 2, shape.heads, shape.key_dim)
        keys = self._norms[1](pairs[:, :, 0]) * self._key_norms[:, None]
        low, high = keys.chunk(2, -1)
        return keys * cos + torch.cat([-high, low], -1) * sin, pairs[:, :, 1]

    def _turns(self, parts: Sequence[Written], like: Tensor) -> list[Tensor]:
        """Cosines and sines of the positions of these parts, (tokens, 1, 1, key_dim)."""
        length = max([part.columns.stop for part in parts])
        if self._angles is None or len(self._angles[0]) < length:
            positions = torch.arange(2 * length, device=like.device)[None]
            cos, sin = (part[0, :, None, None] for part in self.model.module.model.rotary_emb(like, positions))
            self._angles = cos, sin
        return [_joined([table[part.columns] for part in parts]) for table in self._angles]

    # ------------------------------------------------------------ blocks

    @torch.no_grad()
    def guess(self, texts: Sequence[tuple[int, int, int]], count: int) -> tuple[Tensor, Tensor]:
        """Guess the next tokens of several texts in one pass.

        Args:
            texts: slot, columns of the text, and last committed token of each; slots have room for a block.
            count: tokens wanted of each.

        Returns:
            Logits of the tokens that it knows, (texts, count, V), and what they come from, (texts, count, hidden).
        """
        with self._timed():
            self.passes += 1
            return self._guess(texts, count)

    def _guess(self, texts: Sequence[tuple[int, int, int]], count: int) -> tuple[Tensor, Tensor]:
        options = self.options
        first = 0 if options.anchored else 1
        rows = first + count if options.causal and not options.kernel else options.size
        masks = [options.mask] * (rows - 1)
        segments = [
            SequenceRows(slot, length, [token, *masks], block=not options.causal) for slot, length, token in texts
        ]
        found = self.model.score(segments)
        hidden = found.features[HEAD].view(len(texts), rows, -1)[:, first : first + count]
        if self._own_head:
            logits = found.logits.to(hidden.device).view(len(texts), rows, -1)[:, first : first + count]
        else:
            logits = target_logits(self._target, hidden.flatten(0, 1)).view(len(texts), count, -1)
        return self._finished(logits), hidden

    def _finished(self, logits: Tensor) -> Tensor:
        """Logits as the head's options scale and bound them."""
        options = self.options
        if options.logit_scale != 1:
            logits = logits * options.logit_scale
        if options.softcap:
            logits = torch.tanh(logits / options.softcap) * options.softcap
        return logits

    @contextmanager
    def correcting(self, rows: int) -> Iterator[None]:
        """Context in which ``corrections`` of so many slots are computed."""
        with self._timed(), self._running(rows):
            yield

    def over_target(self, logits: Tensor) -> Tensor:
        """Logits of the tokens that it knows as those of the target's vocabulary."""
        return over_vocabulary(logits, self._tokens, self._target.vocab_size)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of several tensors as one."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _norm_of(weight: Tensor, eps: float) -> nn.Module:
    norm = Qwen3RMSNorm(len(weight), eps)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm
