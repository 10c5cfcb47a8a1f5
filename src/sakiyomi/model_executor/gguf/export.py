"""Writes models as GGUF files, by the tables with which such files are read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.core.files import whole_file
from sakiyomi.core.gguf import GgufFile, read_gguf
from sakiyomi.core.progress import progress
from sakiyomi.model_executor.gguf.architectures import ARCHITECTURES, Architecture
from sakiyomi.model_executor.gguf.changes import SAME
from sakiyomi.model_executor.gguf.config import ROPE_TENSORS, build_config
from sakiyomi.model_executor.gguf.quantize import K_FORMATS, quantize_k
from sakiyomi.model_executor.gguf.special import of_full_layers, width_of
from sakiyomi.model_executor.gguf.tokenizer import build_tokenizer, pre_tokenizer_names

TYPES = {kind: (kind, kind) for kind in ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_0", "Q5_1", "Q4_0", "Q4_1")} | {
    "Q5_K_M": ("Q5_K", "Q6_K"),
    "Q4_K_M": ("Q4_K", "Q6_K"),
}
"""Types in which matrices are written: most, and those that bear rounding worst; vectors stay in F32."""
_OTHERS = {"mistral": "llama", "mixtral": "llama", "olmo3": "olmo2", "deepseek_v3": "deepseek2"}
_NOT_HELD = {
    "architectures", "attention_dropout", "bos_token_id", "dtype", "embd_pdrop", "eos_token_id", "hidden_dropout",
    "initializer_range", "max_position_embeddings", "model_type", "output_router_logits", "pad_token_id",
    "resid_pdrop", "rope_parameters", "router_aux_loss_coef", "sakiyomi_inflated", "transformers_version",
    "use_cache", "_name_or_path", "attn_pdrop", "original_max_position_embeddings", "pretraining_tp",
    "block_auto_adjust_ff_dim", "intermediate_size", "multi_query", "num_ln_in_parallel_attn", "no_rope_layers",
}  # fmt: skip
"""Settings that change no logits, sizes that tensors prove, and positions, which have a check of their own."""
_NEXT = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # of rows that are no multiple of 256
_SMALL = ("ssm_conv1d", "shortconv.conv", "ffn_gate_inp", "conv_base", "conf_proj")
_WORST = ("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps")
_SAMPLES = (
    "The fox went 12345 miles, didn't it?  Yes!\n\n\tif x == 1:\r\n        return ½",
    "昔々、あるところに Việt Nam Ελλάδα ñandú 🙂🙂 a1b2c3 don'T WE'LL naïve",
)


def check_type(kind: str) -> str:
    """The name of a type, which may be given in small letters.

    Raises:
        InputError: it is none of ``TYPES``.
    """
    if kind.upper() not in TYPES:
        raise InputError(f"the type is {kind!r}; expected {', '.join(TYPES)}")
    return kind.upper()


def write_gguf(path: Path, model: Any, tokenizer: Any, kind: str) -> None:
    """Write a model and its tokenizer.

    Args:
        path: of the file to be; it is there whole, or not at all.
        model: a loaded transformers model.
        tokenizer: its tokenizer.
        kind: one of ``TYPES``.

    Raises:
        InputError: another type.
        UnsupportedError: an architecture, positions or a tokenizer that such files cannot hold, or that is not known.
        LoadError: the file cannot be written.
    """
    kind, config = check_type(kind), model.config
    name, architecture = _architecture(config)
    metadata = settings(config, name, architecture) | vocabulary(tokenizer, int(config.vocab_size))
    layers = int(config.num_hidden_layers)

    def check(fresh: Path) -> None:
        _check_settings(config, build_config(read_gguf(fresh, vocabulary=False)))

    write_file(path, name, metadata, _tensors(model, architecture), kind, layers, check)


def write_file(
    path: Path,
    name: str,
    metadata: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    kind: str,
    layers: int,
    check: Callable[[Path], object] = lambda fresh: None,
) -> None:
    """Write metadata and tensors.

    Args:
        path: of the file to be; it is there whole, or not at all.
        name: of its architecture.
        metadata: by their full names.
        tensors: by their names in the file, float32 or int64.
        kind: one of ``TYPES``.
        layers: of the model.
        check: of the written file, before it takes its name.

    Raises:
        LoadError: it cannot be written.
    """
    import gguf

    with whole_file(path, "choose another place") as fresh, progress(f"writing {path.name}") as shown:
        writer = gguf.GGUFWriter(fresh, name)
        try:
            for key, value in metadata.items():
                _add(writer, key, value)
            for number, (part, tensor) in enumerate(tensors, 1):
                shown.update(f"writing {path.name}: tensor {number}, {part}")
                form = _form(tensor, part, kind, layers)
                writer.add_tensor(part, _rounded(tensor, form), raw_dtype=form)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
        check(fresh)


def _check_settings(config: Any, read: Any) -> None:
    """Compare a model's configuration with the one that its file gives.

    Raises:
        UnsupportedError: such files do not hold a setting that changes what the model computes.
    """
    own, found = config.to_dict(), read.to_dict()
    lost = [name for name in own.keys() & found.keys() - _NOT_HELD if not _alike(own[name], found[name])]
    if lost:
        shown = ", ".join(f"{name}={own[name]!r}" for name in sorted(lost))
        raise UnsupportedError(f"GGUF files of {config.model_type} do not hold this model's settings: {shown}")


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other) or one is None or not (one or other)  # None: what follows from other settings


def _architecture(config: Any) -> tuple[str, Architecture]:
    kind = config.model_type
    found = {each.model_type: name for name, each in reversed(ARCHITECTURES.items())} | _OTHERS
    if kind not in found:
        raise UnsupportedError(
            f"a model of the type {kind!r} is not written as GGUF; expected {', '.join(sorted(found))}; llama.cpp's "
            "own convert_hf_to_gguf.py knows more"
        )
    return found[kind], ARCHITECTURES[found[kind]]


def _form(tensor: Tensor, part: str, kind: str, layers: int) -> Any:
    """The type of a tensor: F32 of vectors and biases.

    Of a matrix the one asked for, or the next finer one of which its rows are whole blocks.

    In the mixtures the head, and in the layers that need it most values and what an MLP gives, are the finer type.
    """
    import gguf

    types = gguf.GGMLQuantizationType
    if not tensor.is_floating_point():
        return types.I64
    if tensor.ndim < 2 or part.endswith(".bias") or any(small in part for small in _SMALL):
        return types.F32
    most, fine = TYPES[kind]
    layer = int(part.split(".")[1]) if part.startswith("blk.") else -1
    needs = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    finer = part == "output.weight" or (layer >= 0 and needs and any(f".{each}." in part for each in _WORST))
    name = fine if finer else most
    for other in (name, _NEXT.get(name, "F16"), "F16"):
        if not tensor.shape[-1] % gguf.GGML_QUANT_SIZES[types[other]][0]:
            return types[other]
    raise AssertionError("F16 has blocks of one number")


def _rounded(tensor: Tensor, form: Any) -> Any:
    import gguf

    if form.name == "I64":
        return tensor.numpy()
    return quantize_k(form.name, tensor) if form.name in K_FORMATS else gguf.quantize(tensor.numpy(), form)


# ---------------------------------------------------------------- metadata


def settings(config: Any, name: str, architecture: Architecture) -> dict[str, Any]:
    """Metadata of a configuration, by their full names.

    Args:
        config: of a model, or of the decoder layers of a head.
        name: of the architecture in the file.
        architecture: whose tables say what is written.

    Raises:
        UnsupportedError: rotary positions that such files do not have.
    """
    found = {key: _dig(config, name) for key, name in architecture.keys.items()}
    found = {key: value for key, value in found.items() if isinstance(value, int | float)}
    if "head_dim" in architecture.keys.values():
        found.setdefault("attention.key_length", width_of(config))
        found["attention.value_length"] = width_of(config)
    found |= _positions(config) | dict(architecture.tell(config))
    return {f"{name}.{key}": value for key, value in found.items()}


def _dig(config: Any, name: str) -> Any:
    first, *rest = name.split(".")
    value = config.to_dict().get(first)
    value = getattr(config, first, None) if value is None else value
    for part in rest:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _positions(config: Any) -> dict[str, Any]:
    """Metadata of scaled rotary positions; those that are divisors are tensors.

    Raises:
        UnsupportedError: a kind that such files do not have.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in ("default", "llama3"):
        return {}
    found = {"rope.scaling.type": kind}
    if kind in ("linear", "yarn"):
        found["rope.scaling.factor"] = rope["factor"]
    if kind in ("yarn", "longrope"):
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if kind == "yarn" and rope.get(name) is not None:
            found[f"rope.scaling.{key}"] = rope[name]
    if kind == "yarn" and rope.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"] / 10
    if kind == "longrope":
        factor = rope.get("factor") or config.max_position_embeddings / rope["original_max_position_embeddings"]
        own = rope["original_max_position_embeddings"]
        scale = math.sqrt(1 + math.log(factor) / math.log(own)) if factor > 1 else 1.0
        found["rope.scaling.attn_factor"] = rope.get("attention_factor") or scale
    if kind not in ("linear", "yarn", "longrope"):
        raise UnsupportedError(f"rotary positions of the kind {kind!r} are not written as GGUF")
    return found


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


# ---------------------------------------------------------------- tensors


def _tensors(model: Any, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Names and float32 values of all tensors of a model's file."""
    tied = {"lm_head.weight", *(getattr(model, "_tied_weights_keys", None) or ())}
    left = tied if model.config.tie_word_embeddings else ()
    held = {name: tensor for name, tensor in model.state_dict().items() if name not in left}
    yield from named_tensors(held, model.config, architecture)


def named_tensors(
    tensors: Mapping[str, Tensor], config: Any, architecture: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Tensors as a file has them.

    Args:
        tensors: by their names in the model.
        config: of the model.
        architecture: whose tables say what they are called in the file.

    Yields:
        Names and float32 values.

    Raises:
        UnsupportedError: a tensor that such files do not have.
    """
    parts = {**architecture.parts, **architecture.renamed(config)}
    back = {own: part for part, own in parts.items()}
    if (divisors := _divisors(config)) is not None:
        yield from divisors
    for name, tensor in tensors.items():
        prefix, own = _layer(name, architecture.layers)
        values = tensor.detach().cpu().float()
        joins = [join for each, join in architecture.joins.items() if each == own and own not in back]
        if joins:
            names, change = joins[0]
            given = change.to_file(values, config)
            yield from ((prefix + part, each.contiguous()) for part, each in zip(names, given, strict=True))
            continue
        leaf, _, suffix = own.rpartition(".")
        part = back.get(own) or (f"{back[leaf]}.{suffix}" if leaf in back else None)
        if part is None:
            raise UnsupportedError(f"the tensor {name!r} has no place in a GGUF file of {config.model_type}")
        change = architecture.changes.get(part, architecture.changes.get(part.rpartition(".")[0], SAME))
        (found,) = change.to_file(values, config)
        yield prefix + part, found.contiguous()


def _layer(name: str, layers: str) -> tuple[str, str]:
    """The prefix of a tensor's layer in the file, and its name behind that of the layer in the model."""
    if not name.startswith(f"{layers}."):
        return "", name
    number, _, own = name.removeprefix(f"{layers}.").partition(".")
    return f"blk.{number}.", own


def _divisors(config: Any) -> list[tuple[str, Tensor]] | None:
    """Tensors that divide rotary frequencies: those of Llama 3, of long texts, of Gemma 4's wide heads."""
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", {})
    if full.get("rope_type") == "proportional":
        count = of_full_layers(config.to_dict(), "head_dim") // 2
        turned = int(count * full.get("partial_rotary_factor", 1.0))
        return [(ROPE_TENSORS[0], torch.tensor([1.0] * turned + [1e30] * (count - turned)))]
    kind = rope.get("rope_type", "default")
    if kind == "longrope":
        short, long = rope["short_factor"], rope["long_factor"]
        if short == long and rope.get("factor") == 1.0:
            return [(ROPE_TENSORS[0], torch.tensor(short))]
        return [(ROPE_TENSORS[1], torch.tensor(short)), (ROPE_TENSORS[2], torch.tensor(long))]
    if kind == "llama3":
        return [(ROPE_TENSORS[0], _llama3(rope, width_of(config)))]
    return None


def _llama3(rope: Mapping[str, Any], width: int) -> Tensor:
    """Llama 3.1's divisors: slow frequencies by the factor, fast ones not, a mixture between."""
    frequencies = rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = length * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    divisors: Tensor = 1 / ((1 - share) / factor + share)
    return divisors


# ---------------------------------------------------------------- the tokenizer


def vocabulary(tokenizer: Any, size: int) -> dict[str, Any]:
    """Metadata of a tokenizer. Rows of the model behind the tokenizer's last token are unused tokens.

    Raises:
        UnsupportedError: one that such files cannot hold; it is read back and compared before it is written.
    """
    import gguf

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model, kinds = state["model"], gguf.TokenType
    if model["type"] != "BPE":
        raise UnsupportedError(
            f"a tokenizer of the kind {model['type']} is not written as GGUF; it has to be a BPE; llama.cpp's own "
            "convert_hf_to_gguf.py knows others"
        )
    pieces = {number: piece for piece, number in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_ids)
    added = {each["id"]: each["special"] for each in state["added_tokens"]}
    plain = set(model["vocab"].values())

    def kind(number: int) -> int:
        if number not in pieces:
            return int(kinds.UNUSED)
        if number in special or added.get(number):
            return int(kinds.CONTROL)
        if pieces[number].startswith("<0x") and model.get("byte_fallback") and len(pieces[number]) == 6:
            return int(kinds.BYTE)
        return int(kinds.USER_DEFINED if number in added and number not in plain else kinds.NORMAL)

    found: dict[str, Any] = {
        "tokens": [pieces.get(number, f"<unused {number}>") for number in range(size)],
        "token_type": [kind(number) for number in range(size)],
    }
    for name in ("bos", "eos", "pad", "unk"):
        if (number := getattr(tokenizer, f"{name}_token_id", None)) is not None:
            found[{"pad": "padding", "unk": "unknown"}.get(name, name) + "_token_id"] = number
    probe = tokenizer("a")["input_ids"]
    found["add_bos_token"] = tokenizer.bos_token_id is not None and probe[:1] == [tokenizer.bos_token_id]
    found["add_eos_token"] = tokenizer.eos_token_id is not None and probe[-1:] == [tokenizer.eos_token_id]
    template = getattr(tokenizer, "chat_template", None)
    extra = {"tokenizer.chat_template": template} if isinstance(template, str) else {}
    for more in _merging(model, found["tokens"]):
        made = {f"tokenizer.ggml.{key}": value for key, value in (found | more).items()} | extra
        if _same(tokenizer, made):
            return made
    raise UnsupportedError(
        "the tokenizer is not written as GGUF: none of the ways in which such files cut texts gives its tokens; "
        "llama.cpp's own convert_hf_to_gguf.py knows others"
    )


def _merging(model: Mapping[str, Any], tokens: list[str]) -> Iterator[dict[str, Any]]:
    """What files may say of a BPE's merges."""
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    if not model.get("byte_fallback"):
        yield from ({"model": "gpt2", "pre": name, "merges": merges} for name in pre_tokenizer_names())
        return
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model["merges"]):
        left, right = pair if isinstance(pair, list) else pair.split(" ", 1)
        ranks.setdefault(left + right, rank)
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    for prefix in (True, False):
        yield {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefix}
    yield {"model": "gemma4", "merges": merges}


def _same(tokenizer: Any, metadata: Mapping[str, Any]) -> bool:
    """Whether a file with these metadata gives the tokenizer's tokens and texts."""
    made = build_tokenizer(GgufFile((Path("it"),), dict(metadata), {})).backend
    special = [token for token in (tokenizer.bos_token, tokenizer.eos_token) if token]
    for text in (*_SAMPLES, *(f"a{token} b" for token in special), ""):
        for add in (True, False):
            ids = list(tokenizer(text, add_special_tokens=add)["input_ids"])
            if made.encode(text, add_special_tokens=add).ids != ids:
                return False
            if made.decode(ids, skip_special_tokens=False) != tokenizer.decode(ids):
                return False
    return True
