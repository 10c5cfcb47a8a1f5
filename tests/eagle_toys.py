"""EAGLE heads for the tests: random ones in the files of two tools, and what they guess, computed plainly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from sakiyomi.core.trained import write_trained
from sakiyomi.drafters.block_heads.formats import BlockFile
from sakiyomi.drafters.eagle_heads.formats import EagleFile, usual_layers
from sakiyomi.drafters.eagle_heads.module import EagleOptions

EPS = 1e-6


def new_head(
    model: Any,
    *,
    tokens: Sequence[int] | None = None,
    kind: str = "llama",
    depth: int = 1,
    seed: int = 5,
    sharp: float = 1.0,
    **options: Any,
) -> EagleFile:
    """A head with random weights for a target; ``sharp``: the scale of those over its vocabulary."""
    config = model.config
    width, vocab = config.hidden_size, config.vocab_size
    heads, own = 4, 8  # of this width each
    named = EagleOptions(**{"layers": usual_layers(config.num_hidden_layers), "target_size": width} | options)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    tensors = {"fc.weight": drawn(width, 3 * width), "norm.weight": 1 + drawn(width, scale=0.1)}
    tensors["lm_head.weight"] = drawn(vocab if tokens is None else len(tokens), width, scale=sharp)
    if named.first:
        tensors = {"fc.weight": drawn(width, 2 * width), "fc.bias": drawn(width)}
    for i in range(depth):
        read = 2 * width if i == 0 and not named.first else width
        sizes = {"q": (heads * own, read), "k": (2 * own, read), "v": (2 * own, read), "o": (width, heads * own)}
        tensors |= {f"layers.{i}.self_attn.{name}_proj.weight": drawn(*shape) for name, shape in sizes.items()}
        mlp = {"gate": (2 * width, width), "up": (2 * width, width), "down": (width, 2 * width)}
        tensors |= {f"layers.{i}.mlp.{name}_proj.weight": drawn(*shape) for name, shape in mlp.items()}
        norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if i == 0 else [])]
        norms = norms[1:2] if named.first and i == 0 else norms[:2] if named.first else norms
        tensors |= {f"layers.{i}.{name}.weight": 1 + drawn(width, scale=0.3) for name in norms}
        if kind == "qwen3":
            tensors |= {f"layers.{i}.self_attn.{name}_norm.weight": 1 + drawn(own, scale=0.3) for name in "qk"}
    if named.norm_before_fc:
        tensors["input_norm.weight"] = 1 + drawn(3 * width, scale=0.3)
    if named.fc_norm:
        tensors |= {f"fc_norm.{i}.weight": 1 + drawn(width, scale=0.3) for i in range(3)}
    inner = {
        "model_type": kind, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth,
        "num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": own, "vocab_size": vocab,
        "rms_norm_eps": EPS, "max_position_embeddings": 64, "rope_theta": 10000.0,
    }  # fmt: skip
    if named.mask is not None:
        tensors["mask_hidden"] = drawn(1, 1, 3 * width, scale=1.0)
    return EagleFile(inner, named, tensors, None if tokens is None else torch.tensor(tokens), "toy")


def speculators_folder(folder: Path, head: EagleFile) -> Path:
    """The head as speculators has it, with digests."""
    options = head.options
    config = {
        "architectures": ["Eagle3Speculator"], "mask_token_id": options.mask,
        "speculators_model_type": "eagle3" if options.mask is None else "peagle", "speculators_version": "0.3.0",
        "transformer_layer_config": head.config, "draft_vocab_size": len(head.tensors["lm_head.weight"]),
        "target_hidden_size": options.target_size, "norm_before_residual": options.norm_before_residual,
        "norm_before_fc": options.norm_before_fc, "fc_norm": options.fc_norm, "norm_output": options.norm_output,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in options.layers],
    }  # fmt: skip
    write_trained(folder, "model.safetensors", {**head.tensors, **offsets(head)}, config, "toy head")
    return folder


def original_folder(folder: Path, head: EagleFile) -> Path:
    """The head as the method's authors have it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name.replace("layers.0.", "midlayer."): tensor.clone() for name, tensor in head.tensors.items()}
    config = {**head.config, "architectures": ["LlamaForCausalLMEagle3"]}
    if head.options.mask is not None:
        config |= {"parallel_drafting": True, "mask_token_id": head.options.mask}
    if head.tokens is not None:
        tensors |= offsets(head)
        config["draft_vocab_size"] = len(head.tokens)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def first_folder(folder: Path, head: EagleFile) -> Path:
    """A head of EAGLE-1 and 2 as the method's authors have it: an ordinary model's configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(head.tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({**head.config, "architectures": ["LlamaForCausalLM"]}), encoding="utf-8"
    )
    return folder


def offsets(head: EagleFile | BlockFile) -> dict[str, Tensor]:
    """Offsets of the head's tokens in the target's vocabulary, and which of that it has."""
    vocab = head.config["vocab_size"]
    tokens = torch.arange(vocab) if head.tokens is None else head.tokens
    known = torch.zeros(vocab, dtype=torch.bool).index_fill(0, tokens, True)
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": known}


# ---------------------------------------------------------------- the same, plainly


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of (heads, rows, width)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def _attention(x: Tensor, part: dict[str, Tensor], width: int) -> Tensor:
    def heads(name: str) -> Tensor:
        found = (x @ part[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, width)
        if f"self_attn.{name}_norm.weight" in part:
            found = norm(found, part[f"self_attn.{name}_norm.weight"])
        return found.transpose(0, 1)

    q, k, v = heads("q"), heads("k"), heads("v")
    k, v = (each.repeat_interleave(len(q) // len(k), 0) for each in (k, v))
    mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    return mixed.transpose(0, 1).flatten(1) @ part["self_attn.o_proj.weight"].T


def mlp(x: Tensor, part: dict[str, Tensor]) -> Tensor:
    x = F.silu(x @ part["mlp.gate_proj.weight"].T) * (x @ part["mlp.up_proj.weight"].T)
    return x @ part["mlp.down_proj.weight"].T


def rows(head: EagleFile, embedding: Tensor, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
    """Logits over the head's own tokens and fed-back features, (rows, ...), of tokens and features given together."""
    x, options = embedding[torch.tensor(tokens)], head.options
    for i in range(int(head.config["num_hidden_layers"])):
        part = {n.removeprefix(f"layers.{i}."): t for n, t in head.tensors.items() if n.startswith(f"layers.{i}.")}
        if i == 0:
            normed = norm(features, part["hidden_norm.weight"])
            read = torch.cat([norm(x, part["input_layernorm.weight"]), normed], -1)
            x = normed if options.norm_before_residual else features
        else:
            read = norm(x, part["input_layernorm.weight"])
        x = x + _attention(read, part, int(head.config["head_dim"]))
        x = x + mlp(norm(x, part["post_attention_layernorm.weight"]), part)
    last = norm(x, head.tensors["norm.weight"])
    return last @ head.tensors["lm_head.weight"].T, last if options.norm_output else x


def first_rows(
    head: EagleFile, model: Any, tokens: Sequence[int], features: Tensor, *, turned: bool
) -> tuple[Tensor, Tensor]:
    """The same of a head of EAGLE-1 and 2, over the target's tokens; ``turned``: joined in the other order."""
    both = [model.get_input_embeddings().weight[torch.tensor(tokens)], features]
    x = torch.cat(both[::-1] if turned else both, -1) @ head.tensors["fc.weight"].T + head.tensors["fc.bias"]
    for i in range(int(head.config["num_hidden_layers"])):
        part = {n.removeprefix(f"layers.{i}."): t for n, t in head.tensors.items() if n.startswith(f"layers.{i}.")}
        x = x + _attention(x if i == 0 else norm(x, part["input_layernorm.weight"]), part, int(head.config["head_dim"]))
        x = x + mlp(norm(x, part["post_attention_layernorm.weight"]), part)
    return model.lm_head(x), x


@torch.no_grad()
def guessed(
    model: Any,
    head: EagleFile,
    tokens: Sequence[int],
    count: int,
    *,
    shift: int = 1,
    off: int = 0,
    turned: bool = False,
) -> list[int]:
    """The chain that a head guesses behind a text, everything computed anew for every token.

    Args:
        model: the target.
        head: of it.
        tokens: of the text; the target has read all but the last.
        count: tokens to guess.
        shift, off, turned: what is misread easily: which token's feature a token has, layers one off, their order.
    """
    options, known = head.options, list(tokens)
    states = model(input_ids=torch.tensor([known]), output_hidden_states=True).hidden_states
    parts = [states[layer + 1 + off][0] for layer in (reversed(options.layers) if turned else options.layers)]
    shared = partial(first_rows, head, model, turned=turned) if options.first else None

    def project(parts: Sequence[Tensor]) -> Tensor:
        if options.fc_norm:
            parts = [norm(part, head.tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        both = torch.cat(list(parts), -1)
        if options.norm_before_fc:
            both = norm(both, head.tensors["input_norm.weight"])
        return both @ head.tensors["fc.weight"].T

    all_features = project(parts) if shared is None else parts[0]  # transformers' last ones are behind the last norm
    features = all_features[:-1] if shift else all_features[1:]
    embedding = model.get_input_embeddings().weight
    if options.mask is not None:
        masks = project(head.tensors["mask_hidden"].view(1, -1).split(options.target_size, -1)).expand(count - 1, -1)
        known += [options.mask] * (count - 1)
        chosen = rows(head, embedding, known[1:], torch.cat([features, masks]))[0][-count:].argmax(-1).tolist()
        return chosen if head.tokens is None else [int(head.tokens[token]) for token in chosen]
    found: list[int] = []
    for _ in range(count):
        logits, fed = shared(known[1:], features) if shared else rows(head, embedding, known[1:], features)
        best = int(logits[-1].argmax())
        found.append(best if head.tokens is None else int(head.tokens[best]))
        known.append(found[-1])
        features = torch.cat([features, fed[-1:]])
    return found
