"""Targets with a layer for predicting further tokens in their files, and what it guesses, computed plainly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from architectures import ALL, HYBRIDS, VOCAB, make
from sakiyomi.drafters.mtp_layer import FORMS
from toys import save_model

_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
TARGETS: dict[str, tuple[str, Callable[..., Any]]] = {
    "qwen3_5": ("Qwen3-Next", HYBRIDS["qwen3_5"]),
    "qwen3_next": ("Qwen3-Next", HYBRIDS["qwen3_next"]),
    "deepseek_v3": ("DeepSeek-V3", ALL["deepseek_v3"]),
    "glm4_moe": (
        "DeepSeek-V3",
        lambda: hf.Glm4MoeConfig(
            **_SIZES, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1,
            topk_group=1, n_shared_experts=1,
        ),
    ),
    "mimo": ("MiMo", lambda **more: hf.Qwen2Config(**(_SIZES | more))),  # its class is Qwen2's with these tensors
}  # fmt: skip


@dataclass
class MtpToy:
    """A target and its layer.

    Attributes:
        model: the target.
        form: name of the tensors' form.
        inner: the layer as a model of the same class.
        norms: of embedding and hidden state.
        project: (hidden, 2 hidden).
    """

    model: Any
    form: str
    inner: Any
    norms: tuple[Any, Any]
    project: Tensor


def new_toy(name: str, **sizes: Any) -> MtpToy:
    """A target with random weights, and a random layer."""
    form, config = TARGETS[name]
    return with_layer(make(config(**sizes)), form)


def with_layer(model: Any, form: str) -> MtpToy:
    """A target, whose last norm is changed, and a random layer in this form."""
    one = copy.deepcopy(model.config)
    one.num_hidden_layers = 1
    if getattr(one, "layer_types", None):
        one.layer_types = ["full_attention"]
    if hasattr(one, "first_k_dense_replace"):
        one.first_k_dense_replace = 0
    inner = make(one, seed=4)
    generator = torch.Generator().manual_seed(6)
    width = one.hidden_size
    norms = copy.deepcopy(inner.model.norm), copy.deepcopy(inner.model.norm)
    for norm in (*norms, model.model.norm, inner.model.norm):
        norm.weight.data = norm.weight.data + 0.5 * torch.randn(width, generator=generator)
    return MtpToy(model, form, inner, norms, 0.3 * torch.randn(width, 2 * width, generator=generator))


def target_folder(folder: Path, toy: MtpToy, tokenizer: Any) -> Path:
    """The target in Hugging Face format, the layer's tensors among its own."""
    form, layers = FORMS[toy.form], toy.model.config.num_hidden_layers
    save_model(folder / "inner", toy.inner, None)
    inner = load_file(folder / "inner" / "model.safetensors")
    own = {form.layer + n.removeprefix("model.layers.0."): t for n, t in inner.items() if n.startswith("model.layers.")}
    own[f"{form.norm}.weight"] = inner["model.norm.weight"]
    own |= {f"{form.embedding}.weight": toy.norms[0].weight.data, f"{form.hidden}.weight": toy.norms[1].weight.data}
    own[f"{form.project}.weight"] = toy.project
    if toy.form == "DeepSeek-V3":  # which stores once more what it shares with the target
        own["embed_tokens.weight"] = toy.model.model.embed_tokens.weight.data
        own["shared_head.head.weight"] = toy.model.lm_head.weight.data
    save_model(folder, toy.model, tokenizer)
    place = folder / "model.safetensors"
    prefix = form.prefix.format(layers=layers)
    tensors = load_file(place) | {prefix + name: tensor for name, tensor in own.items()}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, place, {"format": "pt"})
    return folder


@torch.no_grad()
def guessed(
    toy: MtpToy,
    tokens: Sequence[int],
    count: int,
    *,
    turned: bool = False,
    raw: bool = False,
    shift: int = 1,
    blank: bool | None = None,
) -> list[int]:
    """The chain that a layer guesses behind a text, everything computed anew for every token.

    Args:
        toy: target and layer.
        tokens: of the text; the target has read all but the last.
        count: tokens to guess.
        turned, raw, shift, blank: what is misread easily: the order in which both are joined, the hidden state before
            the target's last norm, which token's it is, whether the first row has an embedding.
    """
    form, model, known = FORMS[toy.form], toy.model, list(tokens)
    taken: list[Tensor] = []
    with model.model.norm.register_forward_pre_hook(lambda module, inputs: taken.append(inputs[0])):
        after = model(input_ids=torch.tensor([known]), output_hidden_states=True).hidden_states[-1][0]
    states = taken[0][0] if raw else after
    features = states[:-1] if shift else states[1:]
    found: list[int] = []
    for _ in range(count):
        embedded = model.model.embed_tokens(torch.tensor(known[1:]))
        if form.blank if blank is None else blank:
            embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        both = [toy.norms[0](embedded), toy.norms[1](features)]
        fused = torch.cat(both[::-1] if form.hidden_first != turned else both, -1) @ toy.project.T
        out = toy.inner.model(inputs_embeds=fused[None]).last_hidden_state[0]
        found.append(int(model.lm_head(out[-1]).argmax()))
        known.append(found[-1])
        features = torch.cat([features, out[-1:]])
    return found
