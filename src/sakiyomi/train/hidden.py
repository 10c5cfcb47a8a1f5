"""What a frozen target gives: hidden states, outputs of its layers, and likeliest tokens as labels of a draft."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.model_executor.structural_copy import layer_list
from sakiyomi.train.kept_rows import KeptRows, chunks, row_keys


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
        self._backbone = backbone
        self._kept = KeptRows(folder, limit_bytes, torch.bfloat16)
        self.close = self._kept.close
        self.computed = self.found = 0

    def __call__(self, ids: Tensor) -> Tensor:
        """(B, T) ids to (B, T, hidden), on the device of the ids."""
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
            (found,), computed = self._kept.get(ids, self._compute, CHUNK_ROWS)
        self.computed += computed
        self.found += len(ids) - computed
        return found.to(self._backbone.weight.dtype)

    def _compute(self, rows: Tensor) -> Sequence[Tensor]:
        return [self._backbone(rows)]


# ---------------------------------------------------------------- outputs of layers


LABEL_ROWS = 256  # positions whose logits over the whole vocabulary are held at a time


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
    def likeliest(self, last: Tensor, tokens: Tensor | None, top: int) -> tuple[Tensor, Tensor, Tensor]:
        """The target's likeliest tokens among some, None: all, and whether the likeliest of all is one of them.

        Args:
            last: (n, H), what its head reads.
            tokens: that the others' mass is spread over.
            top: how many (K).

        Returns:
            (n, K) int32 places among the tokens, likeliest first, (n, K) float16 probabilities that sum to 1, and (n,)
            bool.
        """
        found = []
        for some in last.split(LABEL_ROWS):
            logits = self.backbone.head(some)
            own = logits if tokens is None else logits[:, tokens]
            values, places = own.topk(min(top, own.shape[1]), dim=1)
            known = values[:, 0] >= logits.amax(1)
            found.append((places.int(), torch.softmax(values.float(), 1).half(), known))
        places, probs, known = (torch.cat(parts) for parts in zip(*found, strict=True))
        return places, probs, known


@dataclass(frozen=True)
class Lesson:
    """What a target gives for some rows of text.

    Attributes:
        joined: (B, T, joined) outputs of its layers side by side.
        places: (B, T, K) its likeliest tokens after each, as places among the tokens that a head proposes.
        probs: (B, T, K) their probabilities, which sum to 1.
        counts: (B, T) whether the likeliest token of all is one of these.
    """

    joined: Tensor
    places: Tensor
    probs: Tensor
    counts: Tensor

    def part(self, some: slice) -> Lesson:
        """Some of the rows."""
        return Lesson(self.joined[some], self.places[some], self.probs[some], self.counts[some])


class Lessons:
    """Lessons of rows that may come again: a later epoch needs no pass of the target.

    Args:
        states: of the target.
        tokens: that a head proposes; None: all.
        top: labels of a position (K).
        kept: where lessons are kept.
    """

    def __init__(self, states: TargetStates, tokens: Tensor | None, top: int, kept: KeptRows) -> None:
        self._states, self._tokens, self._top, self._kept = states, tokens, top, kept

    def __call__(self, ids: Tensor) -> Lesson:
        """Of (B, T) token ids."""
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
            parts, _ = self._kept.get(ids, self._compute, min(CHUNK_ROWS, len(ids)))
        joined, places, probs, counts = parts
        return Lesson(joined, places.long(), probs.float(), counts)

    def _compute(self, rows: Tensor) -> Sequence[Tensor]:
        joined, last = self._states(rows)
        labels = self._states.likeliest(last.flatten(0, 1), self._tokens, self._top)
        return [joined, *(part.unflatten(0, rows.shape) for part in labels)]

    def close(self) -> None:
        """Give the disk space back."""
        self._kept.close()


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
        for rows in chunks(ids, CHUNK_ROWS):
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
