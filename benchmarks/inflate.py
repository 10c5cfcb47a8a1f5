"""A larger model that computes exactly what a trained small one does: real acceptance at the cost of a real size.

    python benchmarks/inflate.py large-tales --params 134M
    python benchmarks/inflate.py large-tales --params 134M --heads medusa:tales-medusa

The residual stream becomes ``factor`` copies of the small one, so that its mean square, and with it every norm, stays
as it was, in any dtype. The gains of the norms are zero for all copies but the first: the columns that read the others
are random and see zeros. New heads and new MLP units have random weights inside and zeros where they would write; so
have new layers. What is random stays below what is real, in weights and in activations: rounding a row to 8 bits rounds
its real part as in the small model.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from inflate_heads import Wider, read_wider
from inflate_seq import EncoderDecoder, is_encoder_decoder
from inflating import NEW_TOKENS, Inflatable, fresh_folder
from sakiyomi.cli.common import JsonOption
from sakiyomi.cli.output import progress, say
from sakiyomi.core.embedded import DEFAULT
from sakiyomi.core.errors import InputError, SakiyomiError, UnsupportedError
from sakiyomi.core.memory import available_bytes, readable, require_bytes
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.prompts import STORIES
from sakiyomi.evaluation.bench.config import Note
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.model_executor.loading import load_model
from scripts import command, run

__all__ = ["InflateConfig", "Llama", "app", "inflate", "parse_count"]

TEXT_TOKENS = 256
TOLERANCE = 1e-3
"""Largest difference of a logit in float32; sums in another order make about 1e-5."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


@dataclass(frozen=True)
class InflateConfig:
    """A model to be made larger without a change of what it computes.

    Attributes:
        out: folder of the new model; it must not exist, or be empty.
        params: about so many parameters: 134M, 500M, 1.5B.
        target: the model to start from: a Llama (embedded name, folder or hub id), or the folder of a Pegasus or
            Whisper. Its vocabulary stays as it is.
        heads: Medusa heads, EAGLE head, block drafter and MTP layer of a Llama, which become as wide:
            OUT_FOLDER/medusa, eagle, block, mtp. A folder, or one of each kind: medusa:tales-medusa+eagle:tales-eagle.
    """

    out: str = field(metadata={"argument": "OUT_FOLDER"})
    params: str
    target: str = DEFAULT
    heads: str | None = None


class Llama(Inflatable):
    """A Llama without biases."""

    stacks: ClassVar[dict[str, str]] = {"model.layers": "num_hidden_layers"}
    shown: ClassVar[dict[str, str]] = {
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
    }
    mlp = ("intermediate_size",)
    wide = tuple(shown.values())
    softened = (("self_attn.v_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj"))

    @classmethod
    def load(cls, name: str) -> Llama:
        """Any model that the engine loads; its weights are rounded to bfloat16.

        Raises:
            UnsupportedError: it is no plain Llama.
            LoadError: it cannot be read.
        """
        loaded = load_model(name, dtype="bfloat16", device="cpu")
        model, config = loaded.model, loaded.model.config
        if type(model).__name__ != "LlamaForCausalLM" or config.attention_bias or config.mlp_bias:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be inflated; it has to be a LlamaForCausalLM without biases (as tales "
                "is)"
            )
        most = min(TEXT_TOKENS, config.max_position_embeddings)
        text = torch.tensor([loaded.tokenizer("\n".join(STORIES)).input_ids[:most]])
        return cls(loaded.name, model, loaded.tokenizer, {"input_ids": text})

    def unit(self, shape: Any) -> int:
        """See ``Inflatable``: rows of gate and up, a column of down."""
        return int(3 * shape.hidden_size)

    def through(self, layer: Any, made: dict[str, Tensor], reader: str, rows: Tensor) -> Tensor:
        """See ``Inflatable``; units are multiplied by their gates."""
        found = super().through(layer, made, reader, rows)
        if reader == "mlp.up_proj":
            gates: Tensor = layer.mlp.act_fn(super().through(layer, made, "mlp.gate_proj", rows))
            found = found * gates
        return found

    def written(self, model: Any) -> list[int]:
        """See ``Inflatable``: behind the beginning of the text."""
        text = self.batch["input_ids"][0].tolist()
        prompt = text[: max(1, min(len(text) // 4, len(text) - NEW_TOKENS))]
        return Transformers(model).generate(prompt, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))


def inflate(config: InflateConfig, note: Note) -> dict[str, Any]:
    """Write a model of about ``config.params`` parameters that computes the function of ``config.target``.

    The weights are bfloat16 (a target of another dtype is rounded first). Needs main memory of four bytes a parameter
    of both: the model is built in two, and checked in float32 from the files.

    Returns:
        What was written, as JSON values: folder, sizes, seconds, and what the check found.

    Raises:
        InputError: the size is no number, or less than the target's; the folder holds something.
        UnsupportedError: the target is no plain Llama, Pegasus or Whisper.
        MemoryLimitError: too little memory; before anything is allocated.
        LoadError: the target cannot be read, or the folder cannot be written. Nothing stays behind.
        SakiyomiError: the result is not the same function.
    """
    began = time.perf_counter()
    wanted, out = parse_count(config.params), Path(config.out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty folder; name a new one")
    encodes = is_encoder_decoder(config.target)
    if encodes and config.heads is not None:
        raise InputError(f"heads is {config.heads!r}; heads are those of a Llama, and the target has an encoder")
    small: Inflatable = EncoderDecoder.load(config.target) if encodes else Llama.load(config.target)
    heads = [] if config.heads is None else list(read_wider(config.heads, small.model.config))
    shape, parameters = small.wider(wanted)
    shape.sakiyomi_inflated = {"from": small.name, "params": parameters}
    largest = available_bytes() // 4 - small.parameters
    require_bytes(
        4 * (small.parameters + parameters),
        f"a model of {config.params} parameters",
        remedy=f"the largest that can be made has {largest / 1e6:.0f}M parameters",
    )
    with fresh_folder(out, 2 * parameters) as folder:
        note(f"building {parameters / 1e6:.0f}M parameters")
        small.write(shape, folder)
        note("checking the files")
        difference, equal, tokens, loudness = small.compare(folder)
        if difference > TOLERANCE or not equal:
            raise SakiyomiError(
                f"the inflated model is not the same function: logits differ by up to {difference:.2g} in float32, "
                f"greedy tokens are {'equal' if equal else 'not equal'}; nothing was written"
            )
        for kind, write in heads:
            note(f"widening {kind}")
            write(Wider(small.model.config, shape, out), folder / kind)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    layers = [getattr(shape, name) for name in small.stacks.values()]
    return {
        "folder": str(out),
        "from": config.target,
        "parameters": parameters,
        "bytes": size,
        "seconds": time.perf_counter() - began,
        "layers": " + ".join(map(str, layers)) if encodes else layers[0],
        **{key: getattr(shape, name) for key, name in small.shown.items()},
        "largest_logit_difference": difference,
        "equal_greedy_tokens": tokens,
        "random_to_real_activations": loudness,
    }


def parse_count(text: str) -> int:
    """A number of parameters: "134M", "1.5B", "500000".

    Raises:
        InputError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if not match or not float(match[1]):
        raise InputError(f"params is {text!r}; expected a number of parameters such as 134M, 500M or 1.5B")
    return int(float(match[1]) * _UNITS[match[2]])


def _command(config: InflateConfig, output: JsonOption) -> None:
    """Write a larger model that computes what a small one does.

    Real acceptance at a real size: new layers, heads and units are random inside and add nothing. The new model is
    compared with the small one before it is written.

    Example: python benchmarks/inflate.py large-tales --params 134M
    """
    with progress("loading") as status:
        found = inflate(config, status.update)
    say(
        f"{found['folder']}: the function of {found['from']} at {found['parameters'] / 1e6:.0f}M parameters, "
        f"{readable(found['bytes'])}, made in {found['seconds']:.0f} s",
        f"  {found['layers']} layers, hidden size {found['hidden_size']}, {found['heads']} heads, {found['kv_heads']} "
        f"key heads, {found['intermediate_size']} MLP units",
        f"  checked in float32: logits differ by {found['largest_logit_difference']:.2g} at most, "
        f"{found['equal_greedy_tokens']} of {found['equal_greedy_tokens']} greedy tokens are equal; random activations "
        f"reach {found['random_to_real_activations']:.2f} of the real ones",
    )
    output.emit(found)


app = command(_command)

if __name__ == "__main__":
    run(app)
