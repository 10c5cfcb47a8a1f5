"""Block drafters for the tests: random ones in the files of three tools, and what they guess, computed plainly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from eagle_toys import EPS, mlp, norm, offsets, rotated
from sakiyomi.core.trained import write_trained
from sakiyomi.drafters.block_heads.formats import BlockFile, BlockOptions

HEADS, OWN = 4, 8  # of this width each
RANK = 5


def new_block(
    model: Any,
    *,
    depth: int = 2,
    size: int = 6,
    tokens: Sequence[int] | None = None,
    seed: int = 5,
    sharp: float = 1.0,
    trusts_tokens: bool = True,
    **options: Any,
) -> BlockFile:
    """A drafter with random weights for a target.

    Args:
        model: the target.
        depth, size: layers, and rows of a block.
        tokens: that it knows; None: all, by the target's own head.
        seed: of the weights.
        sharp: scale of the weights of its own head.
        trusts_tokens: the confidence head reads the token before.
        options: see ``BlockOptions``.
    """
    config = model.config
    width, vocab = config.hidden_size, config.vocab_size
    fixed = {"layers": (1, 3, 5, 6), "mask": vocab - 1, "size": size}
    named = BlockOptions(**(fixed | options))
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    def near_one(size: int) -> Tensor:
        return 1 + drawn(size)

    tensors = {"fc.weight": drawn(width, len(named.layers) * width), "norm.weight": near_one(width)}
    tensors["hidden_norm.weight"] = near_one(width)
    for i in range(depth):
        sizes = {"q": (HEADS * OWN, width), "k": (2 * OWN, width), "v": (2 * OWN, width), "o": (width, HEADS * OWN)}
        tensors |= {f"layers.{i}.self_attn.{name}_proj.weight": drawn(*shape) for name, shape in sizes.items()}
        sizes = {"gate": (2 * width, width), "up": (2 * width, width), "down": (width, 2 * width)}
        tensors |= {f"layers.{i}.mlp.{name}_proj.weight": drawn(*shape) for name, shape in sizes.items()}
        tensors |= {f"layers.{i}.{name}_layernorm.weight": near_one(width) for name in ("input", "post_attention")}
        tensors |= {f"layers.{i}.self_attn.{name}_norm.weight": near_one(OWN) for name in "qk"}
    if tokens is not None:
        tensors["lm_head.weight"] = drawn(len(tokens), width, scale=sharp)
    if named.markov:
        tensors["markov_head.markov_w1.weight"] = drawn(vocab, RANK, scale=1.0)
        tensors["markov_head.markov_w2.weight"] = drawn(vocab if tokens is None else len(tokens), RANK, scale=sharp)
    mixes = {"gated": ("gate_proj", RANK, width + RANK), "rnn": ("joint_proj", 3 * RANK, width + 2 * RANK)}
    if named.markov in mixes:
        name, out, inner = mixes[named.markov]
        tensors |= {f"markov_head.{name}.weight": drawn(out, inner), f"markov_head.{name}.bias": drawn(out)}
    if named.confident:
        inner = width + (RANK if named.markov and trusts_tokens else 0)
        tensors |= {"confidence_head.proj.weight": drawn(1, inner), "confidence_head.proj.bias": drawn(1)}
    if named.kernel:
        count, groups = 2 * named.kernel, width // named.group
        for i, part in ((i, part) for i in range(depth) for part in ("attention", "mlp")):
            tensors[f"layers.{i}.{part}_conv.base_kernel"] = drawn(2, named.kernel, width, scale=1.0)
            tensors[f"layers.{i}.{part}_conv.kernel_projection.weight"] = drawn(count * groups, width)
        prefix = "candidate_selector."
        tensors |= {
            f"{prefix}{name}_codebook": drawn(vocab, RANK, scale=sharp) for name in ("predecessor", "successor")
        }
        tensors[f"{prefix}hidden_projection.weight"] = drawn(RANK, width)
    inner_config = {
        "model_type": "qwen3", "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth,
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": OWN, "vocab_size": vocab,
        "rms_norm_eps": EPS, "max_position_embeddings": 64, "rope_theta": 10000.0, "attention_bias": False,
    }  # fmt: skip
    return BlockFile(inner_config, named, tensors, None if tokens is None else torch.tensor(tokens), "toy")


def _corrections(options: BlockOptions) -> dict[str, Any]:
    return {
        "markov_rank": RANK if options.markov else 0, "markov_head_type": options.markov or "vanilla",
        "enable_confidence_head": options.confident,
    }  # fmt: skip


def dflash_folder(folder: Path, file: BlockFile) -> Path:
    """The drafter as the method's authors have it; the causal one as JetSpec has it."""
    options = file.options
    nested = {"mask_token_id": options.mask, "target_layer_ids": list(options.layers)}
    if options.causal:
        nested["causal_head"] = True
    if options.logit_scale != 1.0:
        nested |= {"output_multiplier": options.logit_scale, "final_logit_softcapping": options.softcap}
    config = {**file.config, "architectures": ["DFlashDraftModel"], "block_size": options.size, "is_causal": False}
    return _plain(folder, file, {**config, "num_target_layers": 8, "dflash_config": nested})


def deepspec_folder(folder: Path, file: BlockFile) -> Path:
    """The drafter as DeepSpec has it."""
    options = file.options
    config = {
        **file.config, "architectures": ["Qwen3DSparkModel"], "block_size": options.size, **_corrections(options),
        "mask_token_id": options.mask, "target_layer_ids": list(options.layers), "num_anchors": 512,
    }  # fmt: skip
    return _plain(folder, file, config)


def _plain(folder: Path, file: BlockFile, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone() for name, tensor in file.tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def speculators_folder(folder: Path, file: BlockFile) -> Path:
    """The drafter as speculators has it, with digests."""
    options = file.options
    kind = "dspark" if options.markov or options.confident else "dflash2" if options.kernel else "dflash"
    second = {"conv_kernel_size": options.kernel, "conv_group_size": options.group, "selector_top_k": options.selected}
    config = {
        "speculators_model_type": kind, "speculators_version": "0.9.0", "transformer_layer_config": file.config,
        "draft_vocab_size": file.config["vocab_size"] if file.tokens is None else len(file.tokens),
        "block_size": options.size, "mask_token_id": options.mask,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in options.layers],
        "sample_from_anchor": options.anchored, **_corrections(options), **(second if options.kernel else {}),
    }  # fmt: skip
    vocabulary = {} if file.tokens is None else offsets(file)
    write_trained(folder, "model.safetensors", {**file.tensors, **vocabulary}, config, "toy drafter")
    return folder


# ---------------------------------------------------------------- the same, plainly


def convolved(rows: Tensor, base: Tensor, added: Tensor) -> Tensor:
    """Row by row: a sum over the rows before it and itself, weighted number by number."""
    taps, group = len(base), rows.shape[1] // added.shape[2]
    found = torch.zeros_like(rows)
    for i in range(len(rows)):
        for tap in range(min(taps, i + 1)):
            found[i] += rows[i - tap] * (base[tap] + added[i, tap].repeat_interleave(group))
    return found


def _block(file: BlockFile, context: Tensor, x: Tensor, *, mixed: bool) -> Tensor:
    """What the head reads of every row of a block (rows, hidden) behind a text (tokens, hidden)."""
    rows, before = len(x), len(context)
    seen = torch.ones(rows, before + rows, dtype=torch.bool)
    if file.options.causal:
        seen = seen.tril(before)
    for i in range(int(file.config["num_hidden_layers"])):
        part = {n.removeprefix(f"layers.{i}."): t for n, t in file.tensors.items() if n.startswith(f"layers.{i}.")}
        read = norm(x, part["input_layernorm.weight"])
        text = norm(context, part["input_layernorm.weight"]) if mixed else context
        base, added = {}, {}
        for name, rows_in in (("attention", read),) if file.options.kernel else ():
            base[name] = part[f"{name}_conv.base_kernel"]
            added[name] = (rows_in @ part[f"{name}_conv.kernel_projection.weight"].T).view(
                rows, 2, file.options.kernel, -1
            )
            read = convolved(rows_in, base[name][0], added[name][:, 0])
        both = torch.cat([text, read])

        def heads(name: str, of: Tensor, part: dict[str, Tensor] = part) -> Tensor:
            found = (of @ part[f"self_attn.{name}_proj.weight"].T).view(len(of), -1, OWN)
            if name in "qk":
                found = norm(found, part[f"self_attn.{name}_norm.weight"])
            return found.transpose(0, 1)

        q = torch.cat([torch.zeros(HEADS, before, OWN), heads("q", read)], 1)  # at their positions
        k, v = (heads(name, both).repeat_interleave(HEADS // 2, 0) for name in "kv")
        out = F.scaled_dot_product_attention(rotated(q)[:, before:], rotated(k), v, attn_mask=seen)
        out = out.transpose(0, 1).flatten(1) @ part["self_attn.o_proj.weight"].T
        x = x + (convolved(out, base["attention"][1], added["attention"][:, 1]) if base else out)
        read = norm(x, part["post_attention_layernorm.weight"])
        if not base:
            x = x + mlp(read, part)
            continue
        kernel = part["mlp_conv.base_kernel"]
        more = (read @ part["mlp_conv.kernel_projection.weight"].T).view(rows, 2, file.options.kernel, -1)
        x = x + convolved(mlp(convolved(read, kernel[0], more[:, 0]), part), kernel[1], more[:, 1])
    return norm(x, file.tensors["norm.weight"])


@torch.no_grad()
def guessed(
    model: Any,
    file: BlockFile,
    tokens: Sequence[int],
    count: int,
    *,
    off: int = 0,
    turned: bool = False,
    ahead: int = 0,
    mixed: bool = False,
    **other: Any,
) -> list[int]:
    """The chain that a drafter guesses behind a text.

    Args:
        model: the target.
        file: the drafter.
        tokens: of the text; the target has read all but the last.
        count: tokens to guess.
        off, turned: what is misread easily: layers one off, their order;
        ahead: which row guesses the first token;
        mixed: the text passes the layers' norms, too;
        other: other options than the file's.
    """
    options = replace(file.options, **other)
    file = replace(file, options=options)
    states = model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    parts = [states[layer + 1 + off][0, :-1] for layer in (reversed(options.layers) if turned else options.layers)]
    context = norm(torch.cat(parts, -1) @ file.tensors["fc.weight"].T, file.tensors["hidden_norm.weight"])
    embedding = model.get_input_embeddings().weight
    rows = [tokens[-1], *[options.mask] * (options.size - 1)]
    hidden = _block(file, context, embedding[torch.tensor(rows)], mixed=mixed)
    head = file.tensors.get("lm_head.weight", model.get_output_embeddings().weight)
    logits = hidden @ head.T * options.logit_scale
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    first = (0 if options.anchored else 1) + ahead
    found, state = [int(tokens[-1])], torch.zeros(RANK)
    for h, row in zip(hidden[first : first + count], logits[first : first + count], strict=True):
        bias = 0.0
        if options.markov:
            mixed_in = before = file.tensors["markov_head.markov_w1.weight"][found[-1]]
            if options.markov == "gated":
                gate = F.linear(torch.cat([h, before]), *_linear(file, "gate_proj"))
                mixed_in = torch.sigmoid(gate) * before
            if options.markov == "rnn":
                parts3 = F.linear(torch.cat([state, before, h]), *_linear(file, "joint_proj")).chunk(3)
                gate = torch.sigmoid(parts3[0])
                state, mixed_in = gate * state + (1 - gate) * torch.tanh(parts3[1]), torch.tanh(parts3[2])
            bias = file.tensors["markov_head.markov_w2.weight"] @ mixed_in
        if options.selected:
            prefix = "candidate_selector."
            here = file.tensors[f"{prefix}predecessor_codebook"][found[-1]]
            here = here * (file.tensors[f"{prefix}hidden_projection.weight"] @ h)
            some = row.topk(options.selected).indices
            bias = torch.full_like(row, -torch.inf)
            bias[some] = file.tensors[f"{prefix}successor_codebook"][some] @ here
        best = int((row + bias).argmax())
        found.append(best if file.tokens is None else int(file.tokens[best]))
    return found[1:]


def _linear(file: BlockFile, name: str) -> tuple[Tensor, Tensor]:
    return file.tensors[f"markov_head.{name}.weight"], file.tensors[f"markov_head.{name}.bias"]
