"""A larger model that computes exactly what a trained small one does: real acceptance at the cost of a real size.

The residual stream becomes ``factor`` copies of the small one, so that its mean square, and with it every norm, stays
as it was, in any dtype. The gains of the norms are zero for all copies but the first: the columns that read the others
are random and see zeros. New heads and new MLP units have random weights inside and zeros where they would write; so
have new layers. What is random stays below what is real, in weights and in activations: whoever rounds a row to 8 bits
rounds its real part as in the small model.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError, SakiyomiError, UnsupportedError
from sakiyomi.core.memory import available_bytes, require_bytes
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.prompts import STORIES
from sakiyomi.drafters.medusa_heads.backbone import check_heads
from sakiyomi.drafters.medusa_heads.formats import read_heads, write_heads
from sakiyomi.drafters.medusa_heads.heads import MedusaHeads
from sakiyomi.evaluation.bench.config import InflateConfig, Note
from sakiyomi.evaluation.bench.inflate_seq import Inflatable, is_encoder_decoder
from sakiyomi.evaluation.bench.inflating import (
    ASPECT,
    LOUDNESS,
    NEW_TOKENS,
    Random,
    fresh_folder,
    gain,
    hooked,
    save_model,
    writer,
)
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.model_executor.loading import load_model

__all__ = ["inflate", "inflated", "parse_count", "wider"]

TEXT_TOKENS = 256
TOLERANCE = 1e-3
"""Largest difference of a logit in float32; sums in another order make about 1e-5."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def inflate(config: InflateConfig, note: Note) -> dict[str, Any]:
    """Write a model of about ``config.params`` parameters that computes the function of ``config.target``.

    The weights are bfloat16 (a target of another dtype is rounded first). Needs main memory of four bytes a parameter
    of both: the model is built in two, and checked in float32 from the files.

    Returns:
        What was written, as JSON values: folder, sizes, seconds, and what the check found.

    Raises:
        InputError: the size is no number, or less than the target's; the folder holds something.
        UnsupportedError: the target is no plain Llama.
        MemoryLimitError: too little memory; before anything is allocated.
        LoadError: the target cannot be read, or the folder cannot be written. Nothing stays behind.
        SakiyomiError: the result is not the same function.
    """
    began = time.perf_counter()
    wanted, out = parse_count(config.params), Path(config.out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty folder; name a new one")
    if is_encoder_decoder(config.target):
        if config.heads is not None:
            raise InputError(f"heads is {config.heads!r}; heads are those of a Llama, and the target has an encoder")
        return _encoder_decoder(config, wanted, out, note, began)
    loaded = load_model(config.target, dtype="bfloat16", device="cpu")
    _check_kind(loaded.model)
    heads = None if config.heads is None else _heads(config.heads, loaded.model.config)
    shape = wider(loaded.model.config, wanted)
    parameters = _count(shape)
    shape.sakiyomi_inflated = {"from": loaded.name, "params": parameters}
    _require_memory(config, _count(loaded.model.config), parameters)
    text = _text(loaded.tokenizer, loaded.model.config)
    with fresh_folder(out, 2 * parameters) as folder:
        note(f"building {parameters / 1e6:.0f}M parameters")
        state = _weights(loaded.model.float(), shape, text)
        save_model(type(loaded.model), state, shape, loaded.model.generation_config, folder)
        loaded.tokenizer.save_pretrained(folder)
        note("checking the files")
        found = _check(loaded.model, folder, text)
        if heads is not None:
            write_heads(wider_heads(heads, shape.hidden_size), folder / "medusa", base=out)
        size = _size(folder)
    return (
        _written(config, parameters, size, began)
        | {
            "layers": shape.num_hidden_layers,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "heads": shape.num_attention_heads,
            "kv_heads": shape.num_key_value_heads,
        }
        | found
    )


def _encoder_decoder(config: InflateConfig, wanted: int, out: Path, note: Note, began: float) -> dict[str, Any]:
    small = Inflatable.load(config.target)
    shape, parameters = small.wider(wanted)
    shape.sakiyomi_inflated = {"from": config.target, "params": parameters}
    _require_memory(config, small.parameters, parameters)
    with fresh_folder(out, 2 * parameters) as folder:
        note(f"building {parameters / 1e6:.0f}M parameters")
        small.write(shape, folder)
        note("checking the files")
        difference, equal, count, loudness = small.compare(folder)
        found = _judged(difference, equal, count) | {"random_to_real_activations": loudness}
        size = _size(folder)
    return (
        _written(config, parameters, size, began)
        | {
            "layers": f"{shape.encoder_layers} + {shape.decoder_layers}",
            "hidden_size": shape.d_model,
            "intermediate_size": shape.decoder_ffn_dim,
            "heads": shape.decoder_attention_heads,
            "kv_heads": shape.decoder_attention_heads,
        }
        | found
    )


def _require_memory(config: InflateConfig, small: int, parameters: int) -> None:
    largest = available_bytes() // 4 - small
    require_bytes(
        4 * (small + parameters),
        f"a model of {config.params} parameters",
        remedy=f"the largest that can be made has {largest / 1e6:.0f}M parameters",
    )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _written(config: InflateConfig, parameters: int, size: int, began: float) -> dict[str, Any]:
    return {
        "folder": str(Path(config.out).expanduser()),
        "from": config.target,
        "parameters": parameters,
        "bytes": size,
        "seconds": time.perf_counter() - began,
    }


def inflated(*configs: Any) -> str | None:
    """What a report has to say of these models' configurations; None if all are as they were trained."""
    notes = [note for config in configs if (note := getattr(config, "sakiyomi_inflated", None))]
    return ", ".join(f"{note['from']} at {note['params'] / 1e6:.0f}M parameters" for note in notes) or None


def parse_count(text: str) -> int:
    """A number of parameters: "134M", "1.5B", "500000".

    Raises:
        InputError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if not match or not float(match[1]):
        raise InputError(f"params is {text!r}; expected a number of parameters such as 134M, 500M or 1.5B")
    return int(float(match[1]) * _UNITS[match[2]])


def _heads(name: str, config: Any) -> MedusaHeads:
    heads = read_heads(folder_of(name)).heads
    check_heads(heads, config.hidden_size, config.vocab_size, name)
    return heads


@torch.no_grad()
def wider_heads(heads: MedusaHeads, width: int) -> MedusaHeads:
    """Heads that guess the same behind a wider target.

    Its head over the vocabulary reads the old hidden state in the first columns, and zeros in the others: what stands
    beside the old weights there is random. The new rows of a block write nothing: the target's head would read it.
    """
    shape, old = replace(heads.shape, hidden_size=width), heads.shape.hidden_size
    made = MedusaHeads(shape, heads.weights.dtype)
    generator = torch.Generator().manual_seed(width)
    scale = heads.weights.float().std()
    beside = torch.randn(shape.layers, shape.heads, old, width - old, generator=generator) * scale
    made.weights[:, :, :old, :old] = heads.weights
    made.weights[:, :, :old, old:] = beside.to(heads.weights.dtype)
    if made.biases is not None and heads.biases is not None:
        made.biases[..., :old] = heads.biases
    if made.own is not None and heads.own is not None:
        made.own[..., :old] = heads.own
        made.own[..., old:] = (
            torch.randn(*made.own.shape[:2], width - old, generator=generator) * heads.own.float().std()
        )
    made.token_map = heads.token_map
    return made


# ---------------------------------------------------------------- the shape


def wider(small: Any, params: int) -> Any:
    """Configuration of about so many parameters into which the function of ``small`` fits.

    Hidden size, heads and key heads grow by one whole factor, so that the old heads keep their key heads.

    Raises:
        InputError: the small model has more parameters.
    """
    own = _count(small)
    if params < own:
        raise InputError(f"params is {params:,} and the model has {own:,} already; ask for at least as many")
    shapes: list[Any] = []
    for factor in itertools.count(1):
        shape = copy.deepcopy(small)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
            setattr(shape, name, factor * getattr(small, name))
        # Left to itself it would follow from the hidden size of another configuration.
        shape.head_dim = _head_dim(small)
        rest = params - _outside_layers(shape)
        shape.num_hidden_layers = round(rest / _in_layer(shape))
        if shape.num_hidden_layers < small.num_hidden_layers:
            break
        # The MLP takes what rounding to whole layers has left over, in multiples that kernels like.
        missing = rest / shape.num_hidden_layers - _in_layer(shape)
        units = shape.intermediate_size + missing / (3 * shape.hidden_size)
        shape.intermediate_size = max(small.intermediate_size, 64 * round(units / 64))
        shapes.append(shape)
    return min(shapes, key=lambda shape: abs(math.log(shape.hidden_size / shape.num_hidden_layers / ASPECT)))


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _outside_layers(config: Any) -> int:
    tables = 1 if config.tie_word_embeddings else 2
    return int((tables * config.vocab_size + 1) * config.hidden_size)


def _in_layer(config: Any) -> int:
    rows = 2 * _head_dim(config) * (config.num_attention_heads + config.num_key_value_heads)
    return int(config.hidden_size * (rows + 3 * config.intermediate_size + 2))


def _count(config: Any) -> int:
    return _outside_layers(config) + int(config.num_hidden_layers) * _in_layer(config)


def _check_kind(model: Any) -> None:
    config = model.config
    if type(model).__name__ != "LlamaForCausalLM" or config.attention_bias or config.mlp_bias:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be inflated; it has to be a LlamaForCausalLM without biases (as tales is)"
        )


# ---------------------------------------------------------------- the weights


@torch.no_grad()
def _weights(small: Any, shape: Any, text: Tensor) -> dict[str, Tensor]:
    """State of the large model in bfloat16; ``small`` is in float32, ``text`` is (1, T) token ids."""
    layers = small.model.layers
    factor = shape.hidden_size // small.config.hidden_size
    random = Random(shape.hidden_size)
    inputs = _inputs(small, text)
    # Old layers are spread over the new depth, the last one on top.
    places = {(i + 1) * shape.num_hidden_layers // len(layers) - 1: i for i in range(len(layers))}
    state = {
        "model.embed_tokens.weight": small.model.embed_tokens.weight.repeat(1, factor),
        "model.norm.weight": gain(small.model.norm.weight, factor),
    }
    if not shape.tie_word_embeddings:
        state["lm_head.weight"] = random.readers(small.lm_head.weight, shape.vocab_size)
    old = 0
    for place in range(shape.num_hidden_layers):
        old = places.get(place, old)
        made = _layer(layers[old], shape, factor, random, inputs[old] if place in places else None)
        state |= {f"model.layers.{place}.{name}": tensor.bfloat16() for name, tensor in made.items()}
    return {name: tensor.bfloat16().contiguous() for name, tensor in state.items()}


def _layer(layer: Any, shape: Any, factor: int, random: Random, inputs: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Tensors of one layer by name: an old one with new heads and units, or without ``inputs`` a new one.

    ``inputs`` holds what the old layer's matrices read on a text, (T, width) each, by their names.
    """
    attention, mlp = layer.self_attn, layer.mlp
    heads = _head_dim(shape) * shape.num_attention_heads
    key_heads = _head_dim(shape) * shape.num_key_value_heads
    rows = {"q_proj": heads, "k_proj": key_heads, "v_proj": key_heads}
    units = {"gate_proj": shape.intermediate_size, "up_proj": shape.intermediate_size}
    real = inputs is not None
    made = {name: random.readers(getattr(attention, name).weight, count, real) for name, count in rows.items()}
    made |= {name: random.readers(getattr(mlp, name).weight, count, real) for name, count in units.items()}
    if inputs is not None:
        _soften(made, mlp.act_fn, inputs)
    found = {f"{'self_attn' if name in rows else 'mlp'}.{name}.weight": tensor for name, tensor in made.items()}
    found["self_attn.o_proj.weight"] = writer(attention.o_proj.weight, heads, factor, real)
    found["mlp.down_proj.weight"] = writer(mlp.down_proj.weight, shape.intermediate_size, factor, real)
    for name in ("input_layernorm", "post_attention_layernorm"):
        found[f"{name}.weight"] = gain(getattr(layer, name).weight, factor)
    return found


def _soften(made: dict[str, Tensor], activation: Any, inputs: dict[str, Tensor]) -> None:
    """Scale new rows of v_proj and up_proj, in place, so that what comes of them stays below what is real.

    Both act linearly. What attention makes of values is a mean of them, so that no value is exceeded.
    """
    old_values, old_units = inputs["o_proj"].shape[1], inputs["down_proj"].shape[1]
    ratio = made["q_proj"].shape[0] // made["v_proj"].shape[0]
    values = made["v_proj"][old_values // ratio :]
    if len(values):
        loudest = _through(inputs["v_proj"], values).abs().max()
        values *= (LOUDNESS * inputs["o_proj"].abs().amax(1).min() / loudest).clamp_max(1).bfloat16()
    gates, ups = made["gate_proj"][old_units:], made["up_proj"][old_units:]
    if len(ups):
        units = activation(_through(inputs["up_proj"], gates)) * _through(inputs["up_proj"], ups)
        loudest = (units.abs().amax(1) / inputs["down_proj"].abs().amax(1)).max()
        ups *= (LOUDNESS / loudest).clamp_max(1).bfloat16()


def _through(rows: Tensor, weight: Tensor) -> Tensor:
    """What rows (T, d) of the small model's width become by a reader of the large one."""
    return rows @ weight[:, : rows.shape[1]].float().T


@torch.no_grad()
def _inputs(model: Any, text: Tensor) -> list[dict[str, Tensor]]:
    """What the matrices of each layer read on a text, (T, width), by their names."""
    wanted = {
        (place, name): getattr(part, name)
        for place, layer in enumerate(model.model.layers)
        for part in (layer.self_attn, layer.mlp)
        for name in ("v_proj", "o_proj", "up_proj", "down_proj")
        if hasattr(part, name)
    }
    with hooked(wanted) as rows:
        model(input_ids=text, use_cache=False)
    found: list[dict[str, Tensor]] = [{} for _ in model.model.layers]
    for (place, name), read in rows.items():
        found[place][name] = read
    return found


# ---------------------------------------------------------------- files and check


def _text(tokenizer: Any, config: Any) -> Tensor:
    """(1, T) tokens of stories, of which the first are the prompt of the check."""
    most = min(TEXT_TOKENS, config.max_position_embeddings)
    return torch.tensor([tokenizer("\n".join(STORIES)).input_ids[:most]])


def _check(small: Any, folder: Path, text: Tensor) -> dict[str, Any]:
    """Compare both models in float32: logits of a text, greedy tokens, and how loud random activations are.

    Raises:
        SakiyomiError: they are not the same function.
    """
    large = load_model(str(folder), dtype="float32", device="cpu").model
    with torch.no_grad():
        logits = [model(input_ids=text, use_cache=False).logits for model in (small, large)]
    difference = float((logits[0] - logits[1]).abs().max())
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    prompt = text[0, : max(1, min(text.shape[1] // 4, text.shape[1] - NEW_TOKENS))].tolist()
    expected, got = (Transformers(model).generate(prompt, params) for model in (small, large))
    loudness = _loudness(_inputs(small, text), _inputs(large, text))
    return _judged(difference, expected == got, len(got)) | {"random_to_real_activations": loudness}


def _judged(difference: float, equal: bool, tokens: int) -> dict[str, Any]:
    if difference > TOLERANCE or not equal:
        raise SakiyomiError(
            f"the inflated model is not the same function: logits differ by up to {difference:.2g} in float32, greedy "
            f"tokens are {'equal' if equal else 'not equal'}; nothing was written"
        )
    return {"largest_logit_difference": difference, "equal_greedy_tokens": tokens}


def _loudness(small: Sequence[dict[str, Tensor]], large: Sequence[dict[str, Tensor]]) -> float:
    """The largest random activation of a row, as a share of the largest real one, where matrices write."""
    worst = 0.0
    for old in range(len(small)):
        place = large[(old + 1) * len(large) // len(small) - 1]
        for name in ("o_proj", "down_proj"):
            real = small[old][name].shape[1]
            if real < place[name].shape[1]:
                rows = place[name].abs()
                worst = max(worst, float((rows[:, real:].amax(1) / rows[:, :real].amax(1)).max()))
    return worst
