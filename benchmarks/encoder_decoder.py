"""What a pass of an encoder-decoder target costs: its decoder here and in transformers, by rows; and its encoder.

Random models of real sizes, so that no text means anything: only the time of a pass does. Interleaved in one process,
medians; the first lap is warm-up. With `--clock cpu` and one thread the processor's own seconds are counted, which
other work on the machine changes less. The last line is one JSON object.

python benchmarks/encoder_decoder.py [bart-base|t5-base|whisper-small|marian-base] [--dtype bfloat16] [--laps 15]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from sakiyomi.cache.cross_attention import Source
from sakiyomi.core.hf_names import CACHE
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.runner import ModelRunner

_BART = {"d_model": 768, "encoder_attention_heads": 12, "decoder_attention_heads": 12}
_BART |= {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart-base": ("BartConfig", "BartForConditionalGeneration", _BART | {"encoder_layers": 6, "decoder_layers": 6}),
    "marian-base": ("MarianConfig", "MarianMTModel", {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6}),
    "t5-base": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12},
    ),
    "whisper-small": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        _BART | {"encoder_layers": 12, "decoder_layers": 12},
    ),
}
PLACES, HELD, ROWS = 256, 64, (1, 4, 8, 16)


def main() -> None:
    """Measure one shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", default="bart-base", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--laps", type=int, default=15)
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"))
    options = parser.parse_args()
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    config, name, values = SHAPES[options.shape]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**values)).eval()
    model = model.to(getattr(torch, options.dtype))
    if hasattr(model.config, "num_mel_bins"):
        places = model.config.max_source_positions
        inputs = {"input_features": torch.randn(1, model.config.num_mel_bins, 2 * places).to(model.dtype)}
    else:
        places = PLACES
        inputs = {"input_ids": torch.randint(10, 1000, (1, places))}
    source = Source(inputs, places)
    with torch.no_grad():
        found = measure(model, source, options.laps, clock)
    shown = {
        "shape": options.shape,
        "dtype": options.dtype,
        "places": places,
        "held": HELD,
        "clock": options.clock,
        "milliseconds": found,
    }
    for what, times in found.items():
        print(f"{what:28}", times)
    print(json.dumps(shown | {"milliseconds": found, "threads": torch.get_num_threads(), "torch": torch.__version__}))


def measure(model: Any, source: Source, laps: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of a pass by who makes it and by rows."""
    graphs, eager = build_runner(model, compile="auto"), build_runner(model, compile=False)
    slots = {}
    ids = torch.randint(10, 1000, (HELD + max(ROWS),)).tolist()
    for packed in (graphs, eager):
        slot = slots[packed] = packed.cache.take()
        packed.make_room(slot, HELD + max(ROWS), source)
        packed.score([SequenceRows(slot, 0, ids[:HELD], prompt=True)], last=True)
    theirs = model.get_encoder()(**source.inputs).last_hidden_state
    own = EncoderDecoderCache(DynamicCache(), DynamicCache())
    known = BaseModelOutput(last_hidden_state=theirs)
    model(encoder_outputs=known, decoder_input_ids=torch.tensor([ids[:HELD]]), **{CACHE: own}, use_cache=True)

    def their_pass(rows: int) -> None:
        given = torch.tensor([ids[HELD : HELD + rows]])
        model(encoder_outputs=known, decoder_input_ids=given, **{CACHE: own}, use_cache=True)
        own.self_attention_cache.crop(-rows)

    def ours(packed: ModelRunner) -> Callable[[int], object]:
        return lambda rows: packed.score([SequenceRows(slots[packed], HELD, ids[HELD : HELD + rows])]).logits

    ways = {"ours, graphs": ours(graphs), "ours, eager": ours(eager), "transformers": their_pass}
    times: dict[str, dict[int, list[float]]] = {way: {rows: [] for rows in ROWS} for way in ways}
    encoding: list[float] = []
    for lap in range(laps + 1):
        for rows in ROWS:
            for way, run in ways.items():
                began = clock()
                run(rows)
                if lap:
                    times[way][rows].append(1000 * (clock() - began))
        if lap < 4:
            began = clock()
            graphs.make_room(slots[graphs], HELD, Source(source.inputs, source.length))
            encoding.append(1000 * (clock() - began))
    found: dict[str, Any] = {
        way: {rows: round(statistics.median(values), 2) for rows, values in by_rows.items()}
        for way, by_rows in times.items()
    }
    return found | {"encoder and cross keys": round(statistics.median(encoding[1:]), 1)}


if __name__ == "__main__":
    main()
