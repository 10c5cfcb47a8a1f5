"""Encoder-decoder models made larger without a change of what they compute: see `inflate`, whose means these are.

Two families that share names and order: Pegasus and Whisper. Their norms (mean and variance) see the copies of the
residual stream as they saw the one; gain and bias of a norm are zero for all copies but the first. Positions stand in
a table of the checkpoint, which is repeated as the embeddings are. Other families with a norm behind the sum (BART,
Marian) would need their norms moved, and a T5's head is scaled by its width: neither is done here.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.errors import InputError, LoadError, UnsupportedError
from sakiyomi.core.prompts import STORIES
from sakiyomi.evaluation.bench.inflating import ASPECT, LOUDNESS, NEW_TOKENS, Random, gain, hooked, save_model, writer
from sakiyomi.model_executor.loading.families import read_config

__all__ = ["Inflatable", "is_encoder_decoder", "positions"]

FAMILIES = ("PegasusForConditionalGeneration", "WhisperForConditionalGeneration")
PARTS = ("encoder", "decoder")
TEXT_TOKENS = 32
"""Of the answer that both models are compared on."""
QUESTIONS = "held_out.jsonl"
"""File of a folder that some recipes leave beside a model, with what it is to be asked; it goes with the model."""
_LAYER = re.compile(r"(model\.(?:encoder|decoder)\.layers)\.\d+\.(.+)")
_READERS = ("q_proj", "k_proj", "v_proj", "fc1")
_WRITERS = ("out_proj", "fc2")


def is_encoder_decoder(target: str) -> bool:
    """Whether this is the folder of an encoder-decoder model."""
    folder = Path(target).expanduser()
    return (folder / "config.json").is_file() and bool(getattr(read_config(folder), "is_encoder_decoder", False))


@dataclass
class Inflatable:
    """A small model, and what it is compared on.

    Attributes:
        name: as the user gave it.
        model: in bfloat16, or in float32 once it is.
        processor: tokenizer or processor.
        batch: encoder inputs and `decoder_input_ids` of one text.
    """

    name: str
    model: Any
    processor: Any
    batch: dict[str, Tensor]

    @classmethod
    def load(cls, name: str) -> Inflatable:
        """The model of a folder, its weights rounded to bfloat16.

        Raises:
            UnsupportedError: of another family.
            LoadError: it cannot be read.
        """
        import transformers

        folder = Path(name).expanduser()
        kind = (read_config(folder).architectures or ["a model without a class"])[0]
        if kind not in FAMILIES:
            raise UnsupportedError(
                f"{kind} cannot be inflated; it has to be a plain LlamaForCausalLM, or {' or '.join(FAMILIES)}"
            )
        try:
            model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
            whisper = hasattr(model.config, "num_mel_bins")
            auto = transformers.AutoProcessor if whisper else transformers.AutoTokenizer
            processor = auto.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise LoadError(f"cannot load {name!r}: {error}") from error
        model.eval()
        return cls(name, model, processor, _batch(model, processor))

    @property
    def parameters(self) -> int:
        """Of the small model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def wider(self, params: int) -> tuple[Any, int]:
        """Configuration of about so many parameters into which the function fits, and their number.

        Width, heads and MLP grow by one whole factor, the layers of encoder and decoder by another.

        Raises:
            InputError: the small model has more parameters.
        """
        small, kind = self.model.config, type(self.model)
        if params < self.parameters:
            raise InputError(
                f"params is {params:,} and the model has {self.parameters:,} already; ask for at least as many"
            )
        found: list[tuple[Any, int]] = []
        for factor in itertools.count(1):
            shape = copy.deepcopy(small)
            shape.d_model *= factor
            for part, name in itertools.product(PARTS, ("attention_heads", "ffn_dim")):
                setattr(shape, f"{part}_{name}", factor * getattr(small, f"{part}_{name}"))
            size = _Size.of(shape, kind)
            rest = params - size.outside
            times = rest / (size.count(small) - size.outside)
            if times < 1:
                break
            # Rounded down: the MLP takes what is left over, in multiples that kernels like.
            for part in PARTS:
                setattr(shape, f"{part}_layers", int(times * getattr(small, f"{part}_layers")))
            layers = shape.encoder_layers + shape.decoder_layers
            unit = layers * (2 * shape.d_model + 1)
            units = shape.decoder_ffn_dim + 64 * round((params - size.count(shape)) / unit / 64)
            more = max(units, factor * small.decoder_ffn_dim) - shape.decoder_ffn_dim
            parameters = size.count(shape) + more * unit
            shape.encoder_ffn_dim = shape.decoder_ffn_dim = shape.decoder_ffn_dim + more
            shape.num_hidden_layers = shape.encoder_layers
            found.append((shape, parameters))
        return min(found, key=_proportion)

    def write(self, shape: Any, folder: Path) -> None:
        """The large model, with tokenizer or processor and the held-out questions."""
        state = self._weights(shape)
        save_model(type(self.model), state, shape, self.model.generation_config, folder)
        self.processor.save_pretrained(folder)
        questions = Path(self.name).expanduser() / QUESTIONS
        if questions.is_file():
            shutil.copyfile(questions, folder / QUESTIONS)

    def compare(self, folder: Path) -> tuple[float, bool, int, float]:
        """Largest difference of a logit, whether greedy tokens are equal, their number, and how loud random units are.

        All in float32; of the model in this folder and the small one.
        """
        self.model.float()
        large = type(self.model).from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        read = {name: part for name, part in self.batch.items() if name != "decoder_input_ids"}
        tokens = min(NEW_TOKENS, positions(self.model.config) - 1)
        with torch.no_grad():
            logits = [model(**self.batch, use_cache=False).logits for model in (self.model, large)]
            texts = [
                model.generate(**read, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
                for model in (self.model, large)
            ]
        loudness = 0.0
        small_inputs, large_inputs = self._inputs(self.model), self._inputs(large)
        for name, place in self._places(large.config).items():
            for part, rows in small_inputs[name].items():
                real, all_ = rows.shape[1], large_inputs[place][part].abs()
                if part in ("out_proj", "fc2") and real < all_.shape[1]:
                    loudness = max(loudness, float((all_[:, real:].amax(1) / all_[:, :real].amax(1)).max()))
        difference = float((logits[0] - logits[1]).abs().max())
        return difference, torch.equal(*texts), tokens, loudness

    # ------------------------------------------------------------ weights

    def _places(self, shape: Any) -> dict[str, str]:
        """Old layers and their places: spread over the new depth, the last one on top."""
        found = {}
        for part in PARTS:
            old, new = (getattr(config, f"{part}_layers") for config in (self.model.config, shape))
            for i in range(old):
                found[f"model.{part}.layers.{i}"] = f"model.{part}.layers.{(i + 1) * new // old - 1}"
        return found

    @torch.no_grad()
    def _weights(self, shape: Any) -> dict[str, Tensor]:
        small = self.model.float()
        factor = shape.d_model // small.config.d_model
        random = Random(shape.d_model)
        inputs = self._inputs(small)
        state = {
            name: tensor
            for name, tensor in _outside(small.state_dict(), factor).items()
            if _LAYER.fullmatch(name) is None
        }
        places = {place: name for name, place in self._places(shape).items()}
        for part in PARTS:
            old = f"model.{part}.layers.0"
            for i in range(getattr(shape, f"{part}_layers")):
                place = f"model.{part}.layers.{i}"
                old = places.get(place, old)
                real = inputs[old] if place in places else None
                made = _layer(small.get_submodule(old), shape.d_model, shape.decoder_ffn_dim, factor, random, real)
                state |= {f"{place}.{name}": tensor for name, tensor in made.items()}
        return {name: tensor.bfloat16().contiguous() for name, tensor in state.items()}

    @torch.no_grad()
    def _inputs(self, model: Any) -> dict[str, dict[str, Tensor]]:
        """What the matrices of each layer read on the batch, (T, width), by the layers' and their own names."""
        layers = {
            name: module
            for name, module in model.named_modules()
            if re.fullmatch(r"model\.(encoder|decoder)\.layers\.\d+", name)
        }
        wanted = {
            (layer, name): part
            for layer, module in layers.items()
            for name, part in module.named_modules()
            if name.endswith(("v_proj", "out_proj", "fc1", "fc2"))
        }
        with hooked(wanted) as rows:
            model(**self.batch, use_cache=False)
        found: dict[str, dict[str, Tensor]] = {layer: {} for layer in layers}
        for (layer, name), read in rows.items():
            found[layer][name] = read
        return found


def positions(config: Any) -> int:
    """Tokens that the decoder has a place for."""
    return int(getattr(config, "max_target_positions", None) or config.max_position_embeddings)


def _batch(model: Any, processor: Any) -> dict[str, Tensor]:
    """One text to compare on: a story, or for a Whisper a second of noise."""
    config = model.config
    if hasattr(config, "num_mel_bins"):
        tokenizer, rate = processor.tokenizer, processor.feature_extractor.sampling_rate
        sound = torch.randn(rate, generator=torch.Generator()).numpy()
        read = dict(processor.feature_extractor(sound, sampling_rate=rate, return_tensors="pt"))
    else:
        tokenizer = processor
        read = dict(tokenizer([STORIES[1]], return_tensors="pt"))
        read = {name: read[name] for name in ("input_ids", "attention_mask")}
    ids = tokenizer(STORIES[0], add_special_tokens=False)["input_ids"][: min(TEXT_TOKENS, positions(config)) - 1]
    return read | {"decoder_input_ids": torch.tensor([[config.decoder_start_token_id, *ids]])}


def _proportion(found: tuple[Any, int]) -> float:
    """How far the width of a layer, for the depth of a stack, is from what models of real sizes have."""
    shape, _ = found
    depth = (shape.encoder_layers + shape.decoder_layers) / 2
    return abs(math.log(shape.d_model / depth / ASPECT))


@dataclass(frozen=True)
class _Size:
    """Parameters of a shape, by what they belong to."""

    outside: int
    encoder_layer: int
    decoder_layer: int

    @classmethod
    def of(cls, shape: Any, kind: type) -> _Size:
        """Of models of one or two layers; nothing is allocated."""
        counts = []
        for encoder, decoder in ((1, 1), (2, 1), (1, 2)):
            config = copy.deepcopy(shape)
            config.encoder_layers, config.decoder_layers = encoder, decoder
            with torch.device("meta"):
                model: Any = kind(config)
            model.tie_weights()
            counts.append(sum(parameter.numel() for parameter in model.parameters()))
        one, deeper, longer = counts
        return cls(one - (deeper - one) - (longer - one), deeper - one, longer - one)

    def count(self, config: Any) -> int:
        """With as many layers as the configuration says."""
        layers = config.encoder_layers * self.encoder_layer + config.decoder_layers * self.decoder_layer
        return int(self.outside + layers)


def _outside(state: dict[str, Tensor], factor: int) -> dict[str, Tensor]:
    """What is not in a layer: tables repeated, norms of the stacks, and Whisper's convolutions."""
    made = {}
    for name, tensor in state.items():
        if re.search(r"(shared|embed_tokens|embed_positions|lm_head|proj_out)\.weight$", name):
            made[name] = tensor.repeat(1, factor)
        elif re.search(r"layer_norm\.(weight|bias)$", name):
            made[name] = gain(tensor, factor)
        elif re.search(r"conv1\.(weight|bias)$", name) or name.endswith("conv2.bias"):
            made[name] = tensor.repeat(factor, *[1] * (tensor.ndim - 1))
        elif name.endswith("conv2.weight"):
            # It writes the same into every copy and reads the first one alone.
            made[name] = torch.cat((tensor, torch.zeros_like(tensor).repeat(1, factor - 1, 1)), 1).repeat(factor, 1, 1)
        else:
            made[name] = tensor
    return made


def _layer(
    layer: Any, width: int, units: int, factor: int, random: Random, inputs: dict[str, Tensor] | None
) -> dict[str, Tensor]:
    """Tensors of one layer by name: an old one with new heads and units, or without ``inputs`` a new one."""
    real, made = inputs is not None, {}
    for name, tensor in layer.state_dict().items():
        part, kind = name.split(".")[-2:]
        rows = units if part == "fc1" else width
        if part in _READERS and kind == "weight":
            made[name] = random.readers(tensor, rows, real)
        elif part in _READERS:
            made[name] = torch.cat((tensor * real, tensor.new_zeros(rows - len(tensor))))
        elif part in _WRITERS and kind == "weight":
            made[name] = writer(tensor, units if part == "fc2" else width, factor, real)
        elif part in _WRITERS:
            made[name] = tensor.repeat(factor) * real
        else:
            made[name] = gain(tensor, factor)
    if inputs is not None:
        _soften(made, inputs)
    return made


def _soften(made: dict[str, Tensor], inputs: dict[str, Tensor]) -> None:
    """Scale new rows of v_proj and fc1, in place, so that what comes of them stays below what is real.

    Attention gives means of values, and what a unit lets through is no more than what it is given.
    """
    for read, written in (
        ("self_attn.v_proj", "self_attn.out_proj"),
        ("encoder_attn.v_proj", "encoder_attn.out_proj"),
        ("fc1", "fc2"),
    ):
        if read not in inputs:
            continue
        rows, old = inputs[read], inputs[written].shape[1]
        new = made[f"{read}.weight"][old:]
        if len(new):
            loudest = (rows @ new[:, : rows.shape[1]].float().T).abs().max()
            new *= (LOUDNESS * inputs[written].abs().amax(1).min() / loudest).clamp_max(1).bfloat16()
