"""What a frozen target gives: hidden states, outputs of its layers, and likeliest tokens as labels of a draft."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.model_executor.structural_copy import layer_list

logger = logging.getLogger("sakiyomi")


class HiddenStates:
    """Hidden states of rows that may come again, kept on disk.

    Args:
        backbone: the target.
        folder: holds the file of kept states, which is deleted when the process ends.
        limit_bytes: of that file; 0: no file. If the disk is full earlier, the file keeps what fits.

    Attributes:
        computed, found: rows so far, by the target and on disk.
    """

    def __init__(self, backbone: Backbone, folder: Path, limit_bytes: int = 0) -> None:
        self._backbone, self._limit = backbone, limit_bytes
        # The system deletes it with the process, however that ends.
        self._file = tempfile.TemporaryFile(dir=folder) if limit_bytes else None  # noqa: SIM115
        self._places: dict[bytes, int] = {}
        self.computed = self.found = 0

    def __call__(self, ids: Tensor) -> Tensor:
        """(B, T) ids to (B, T, hidden), on the device of the ids."""
        if self._file is None:
            return self._compute(ids)
        keys = row_keys(ids)
        missing = [index for index, key in enumerate(keys) if key not in self._places]
        fresh = dict(zip(missing, self._compute(ids[missing]), strict=True)) if missing else {}
        self.found += len(ids) - len(missing)
        for index, row in fresh.items():
            self._keep(keys[index], row)
        dtype = fresh[missing[0]].dtype if missing else self._backbone.weight.dtype
        return torch.stack([fresh[i] if i in fresh else self._read(key, ids, dtype) for i, key in enumerate(keys)])

    def close(self) -> None:
        """Give the disk space back."""
        if self._file is not None:
            self._file.close()
        self._file, self._places = None, {}

    def _compute(self, ids: Tensor) -> Tensor:
        self.computed += len(ids)
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
            return torch.cat([self._backbone(rows) for rows in chunks(ids)])[: len(ids)]

    def _keep(self, key: bytes, row: Tensor) -> None:
        size = row.numel() * 2
        if self._file is None or key in self._places or (len(self._places) + 1) * size > self._limit:
            return
        content = row.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
        place = len(self._places) * size
        try:
            written = os.pwrite(self._file.fileno(), content, place)
        except OSError as error:
            logger.warning("hidden states are kept no further (%s); the others are computed each time", error.strerror)
            self._limit = 0
            return
        if written == size:
            self._places[key] = place

    def _read(self, key: bytes, ids: Tensor, dtype: torch.dtype) -> Tensor:
        assert self._file is not None
        width = int(self._backbone.weight.shape[1])
        content = bytearray(os.pread(self._file.fileno(), ids.shape[1] * width * 2, self._places[key]))
        row = torch.frombuffer(content, dtype=torch.int16).view(torch.bfloat16).view(ids.shape[1], width)
        return row.to(ids.device, dtype)


# ---------------------------------------------------------------- outputs of layers


class TargetStates:
    """Outputs of a target's layers for whole texts, computed when needed and not kept.

    Args:
        target: a frozen causal LM.
        layers: whose outputs are wanted; none: what the head reads stands in their place.
    """

    def __init__(self, target: Any, layers: Sequence[int]) -> None:
        self.backbone = Backbone(target)
        list_of = target.get_submodule(
            layer_list(target, int(target.config.get_text_config().num_hidden_layers), "training heads")
        )
        self._modules = [list_of[layer] for layer in layers]

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) ids to the outputs of the layers side by side, (B, T, layers * H), and what the head reads."""
        found: dict[int, Tensor] = {}

        def gave(place: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                found[place] = output[0] if isinstance(output, tuple) else output

            return hook

        hooks = [module.register_forward_hook(gave(place)) for place, module in enumerate(self._modules)]
        try:
            with torch.autocast(ids.device.type, enabled=False):
                last = self.backbone(ids)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([found[place] for place in range(len(self._modules))] or [last], -1), last

    @torch.no_grad()
    def probs(self, last: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """The target's distributions over some of its tokens, None: all, and where the likeliest is one of them.

        Args:
            last: (n, H), what its head reads.
            tokens: that the others' mass is spread over.

        Returns:
            (n, tokens) and (n,) bool.
        """
        with torch.autocast(last.device.type, enabled=False):
            logits = self.backbone.head(last)
        if tokens is None:
            return torch.softmax(logits.float(), -1), torch.ones(len(last), dtype=torch.bool)
        known = torch.isin(logits.argmax(-1), tokens)
        return torch.softmax(logits[:, tokens].float(), -1), known


@torch.no_grad()
def begin_as(made: Any, target: Any, tokens: Tensor | None = None) -> Any:
    """Give a new head the target's embedding, head over the vocabulary and, where it has one like its own, last norm.

    Args:
        made: the head as a causal LM, changed in place.
        target: a causal LM.
        tokens: that the head knows; None: all.
    """
    made.float()
    # The target's own, in its dtype.
    made.model.embed_tokens = nn.Embedding.from_pretrained(target.get_input_embeddings().weight.detach())
    out = target.get_output_embeddings().weight.float()
    made.lm_head.weight.copy_(out if tokens is None else out[tokens])
    with suppress(AttributeError, RuntimeError):  # of other names, or another kind
        made.model.norm.weight.copy_(target.base_model.norm.weight)
    return made


def layer_config(target: Any, *, kv_heads: int = 0, intermediate: int = 0) -> dict[str, Any]:
    """The configuration of a decoder layer as wide as a target's, in the form of Llama's.

    Args:
        target: a causal LM.
        kv_heads, intermediate: in the place of the target's own; 0: these.
    """
    config = target.config.get_text_config()
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    theta = rope.pop("rope_theta", 10000.0)
    scaled = rope if rope.get("rope_type", "default") != "default" else None
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": intermediate or int(getattr(config, "intermediate_size", None) or 4 * width),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or width // heads),
        "hidden_act": "silu",
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", None) or 1e-6),
        "rope_theta": float(theta),
        "rope_scaling": scaled,
        "max_position_embeddings": int(getattr(config, "max_position_embeddings", None) or 2048),
        "tie_word_embeddings": False,
        "vocab_size": int(target.get_output_embeddings().weight.shape[0]),
    }


# ---------------------------------------------------------------- labels of a draft


# Rows of one pass of the target: always one shape, because a compiled model compiles anew for each other shape.
CHUNK_ROWS = 4


def vocabulary(model: PreTrainedModel) -> int:
    """Rows of the output embedding: the width of the logits, which may pass the tokenizer's last id."""
    head: Any = model
    return int(head.get_output_embeddings().weight.shape[0])


def row_keys(ids: Tensor) -> list[bytes]:
    """A short name of each row of (B, T) ids."""
    return [hashlib.blake2b(row.cpu().numpy().tobytes(), digest_size=16).digest() for row in ids]


def chunks(ids: Tensor) -> Sequence[Tensor]:
    """Rows of (B, T) ids in passes of one shape; the last is filled up with zeros."""
    filled = torch.cat([ids, ids.new_zeros(-len(ids) % CHUNK_ROWS, ids.shape[1])])
    return list(torch.split(filled, CHUNK_ROWS))


class SoftLabels:
    """Labels of rows of token ids, from a frozen target.

    Args:
        target: a causal LM; evaluated without gradients.
        top: tokens kept a position (K).
        limit_bytes: memory for rows that may come again; rows past it are computed each time.
        share: of the time since the first call that making labels may take; 1: all rows have some.

    Attributes:
        seconds: that this took.
    """

    def __init__(self, target: PreTrainedModel, top: int, limit_bytes: int, share: float = 1.0) -> None:
        self._target, self._limit, self._share = target, limit_bytes, share
        self.seconds, self._began = 0.0, 0.0
        self.top = min(top, vocabulary(target))
        self._kept: dict[bytes, tuple[Tensor, Tensor]] = {}
        self._bytes = 0

    def __call__(self, ids: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of (B, T) ids: token ids (B, T, K) int64, likeliest first, and probabilities (B, T, K) float32.

        Rows for which there is no time have the text itself as labels: its next tokens (``following``, (B, T)), each
        with probability 1.
        """
        self._began = self._began or time.monotonic()
        keys = row_keys(ids)
        missing = [index for index, key in enumerate(keys) if key not in self._kept]
        fresh: dict[bytes, tuple[Tensor, Tensor]] = {}
        for some in (missing[start : start + CHUNK_ROWS] for start in range(0, len(missing), CHUNK_ROWS)):
            if self.seconds > self._share * (time.monotonic() - self._began):
                break
            began = time.monotonic()
            tokens, probs = self._compute(ids[some])
            for row, index in enumerate(some):
                fresh[keys[index]] = self._keep(keys[index], tokens[row], probs[row])
            self.seconds += time.monotonic() - began
        found = [
            fresh.get(key) or self._kept.get(key) or self._text(row) for key, row in zip(keys, following, strict=True)
        ]
        tokens = torch.stack([pair[0] for pair in found]).to(ids.device, torch.int64)
        return tokens, torch.stack([pair[1] for pair in found]).to(ids.device, torch.float32)

    def _text(self, following: Tensor) -> tuple[Tensor, Tensor]:
        """The text's own next tokens as labels; the others have probability 0, whichever they are."""
        tokens = following.to(torch.int32)[:, None].repeat(1, self.top)
        probs = torch.zeros(tokens.shape, dtype=torch.float16)
        probs[:, 0] = 1
        return tokens, probs

    def _compute(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        tokens, probs = [], []
        for rows in chunks(ids):
            with torch.no_grad():
                logits = self._target(input_ids=rows, use_cache=False).logits.float()
                top = logits.topk(self.top, dim=-1)
                # 6 bytes a label instead of 12; half precision moves a probability by 0.05 % at most.
                tokens.append(top.indices.to(torch.int32).cpu())
                probs.append((top.values - logits.logsumexp(dim=-1, keepdim=True)).exp().to(torch.float16).cpu())
        return torch.cat(tokens)[: len(ids)], torch.cat(probs)[: len(ids)]

    def _keep(self, key: bytes, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        size = tokens.numel() * tokens.element_size() + probs.numel() * probs.element_size()
        if self._bytes + size <= self._limit:
            # clone: a view would hold the whole batch in memory
            self._kept[key] = (tokens.clone(), probs.clone())
            self._bytes += size
        return tokens, probs
