"""Seconds and word errors of several engines on the same recordings with the same Whisper model.

    python benchmarks/speech_peers.py clips --target whisper-tiny --ct2 whisper-ct2 --peers OTHER/bin/python

Each engine runs in a process of its own, one after the other, `--laps` times in turn; OTHER has faster-whisper,
pywhispercpp and jiwer. faster-whisper needs the model in CTranslate2's form (`--ct2`), whisper.cpp a file that is
written here from the folder. Texts are greedy, with timestamps, each sound for itself. Word errors are counted against
what transformers writes in float32. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RATE = 16000
REFERENCE = "transformers float32"
Transcribe = Callable[[Any], str]


def sound(path: Path) -> Any:
    """Samples of a clip of `speech.py`, (n,) float32."""
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 2**15


# ---------------------------------------------------------------- engines


def ours(given: argparse.Namespace, dtype: str, quantize: str | None, draft: str) -> Transcribe:
    from sakiyomi import LLM, Audio, TranscriptionParams

    llm = LLM(given.target, draft, dtype=dtype, quantize=quantize)
    params = TranscriptionParams(temperatures=(0.0,), condition_on_previous=False, language=given.language)
    return lambda samples: llm.transcribe(Audio(samples, RATE), params).text


def theirs(given: argparse.Namespace, dtype: str, assistant: str | None = None) -> Transcribe:
    import torch
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    def load(name: str) -> Any:
        return WhisperForConditionalGeneration.from_pretrained(name, dtype=getattr(torch, dtype)).eval()

    model, processor = load(given.target), WhisperProcessor.from_pretrained(given.target)
    more: dict[str, Any] = {"assistant_model": load(assistant)} if assistant else {}
    if model.generation_config.is_multilingual:
        more |= {"language": given.language, "task": "transcribe"}

    def transcribe(samples: Any) -> str:
        fits = len(samples) <= 30 * RATE
        how = {} if fits else {"truncation": False, "padding": "longest", "return_attention_mask": True}
        inputs = processor(samples, sampling_rate=RATE, return_tensors="pt", **how)
        inputs["input_features"] = inputs["input_features"].to(model.dtype)
        tokens = model.generate(**inputs, **more, return_timestamps=True, do_sample=False, num_beams=1)
        return str(processor.batch_decode(tokens, skip_special_tokens=True)[0])

    return transcribe


def faster_whisper(given: argparse.Namespace, kind: str) -> Transcribe:
    from faster_whisper import WhisperModel

    model = WhisperModel(given.ct2, device="cpu", compute_type=kind, cpu_threads=given.threads)
    how: dict[str, Any] = {"beam_size": 1, "temperature": 0.0, "condition_on_previous_text": False}

    def transcribe(samples: Any) -> str:
        segments, _ = model.transcribe(samples, language=given.language, **how)
        return "".join(segment.text for segment in segments)

    return transcribe


def whisper_cpp(given: argparse.Namespace) -> Transcribe:
    from pywhispercpp.model import Model

    how: dict[str, Any] = {"n_threads": given.threads, "print_progress": False, "print_realtime": False}
    how |= {"temperature_inc": 0.0, "no_context": True, "single_segment": False, "greedy": {"best_of": 1}}
    model = Model(str(given.ggml), language=given.language, **how)
    return lambda samples: "".join(segment.text for segment in model.transcribe(samples))


ENGINES: dict[str, Callable[[argparse.Namespace], Transcribe]] = {
    REFERENCE: lambda given: theirs(given, "float32"),
    "transformers bfloat16": lambda given: theirs(given, "bfloat16"),
    "transformers assisted, float32": lambda given: theirs(given, "float32", given.draft.partition(":")[2]),
    "sakiyomi float32": lambda given: ours(given, "float32", None, "none"),
    "sakiyomi bfloat16": lambda given: ours(given, "bfloat16", None, "none"),
    "sakiyomi int8": lambda given: ours(given, "bfloat16", "int8", "none"),
    "sakiyomi auto, int8": lambda given: ours(given, "bfloat16", "int8", "auto"),
    "sakiyomi draft, float32": lambda given: ours(given, "float32", None, given.draft),
    "sakiyomi draft, bfloat16": lambda given: ours(given, "bfloat16", None, given.draft),
    "sakiyomi draft, int8": lambda given: ours(given, "bfloat16", "int8", given.draft),
    "faster-whisper int8": lambda given: faster_whisper(given, "int8"),
    "faster-whisper float32": lambda given: faster_whisper(given, "float32"),
    "whisper.cpp float16": whisper_cpp,
}


# ---------------------------------------------------------------- whisper.cpp's file


def write_ggml(folder: str, path: Path) -> None:
    """Write a Whisper folder as a file of whisper.cpp, in float16."""
    from transformers import WhisperForConditionalGeneration, WhisperProcessor
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    from sakiyomi.model_executor.loading.ggml_whisper import openai_name

    model, processor = WhisperForConditionalGeneration.from_pretrained(folder), WhisperProcessor.from_pretrained(folder)
    config, filters = model.config, np.asarray(processor.feature_extractor.mel_filters, np.float32).T
    letters = {sign: value for value, sign in bytes_to_unicode().items()}
    special = set(processor.tokenizer.all_special_tokens) - {"<|endoftext|>"}
    words = sorted((i, word) for word, i in processor.tokenizer.get_vocab().items() if word not in special)
    with path.open("wb") as file:
        width, heads = config.d_model, (config.encoder_attention_heads, config.decoder_attention_heads)
        sizes = (config.vocab_size, config.max_source_positions, width, heads[0], config.encoder_layers,
                 config.max_target_positions, width, heads[1], config.decoder_layers, config.num_mel_bins)  # fmt: skip
        file.write(struct.pack("12i", 0x67676D6C, *sizes, 1))
        file.write(struct.pack("2i", *filters.shape) + np.ascontiguousarray(filters).tobytes())
        words = [(i, word) for i, word in words if not word.startswith("<|") or word == "<|endoftext|>"]
        file.write(struct.pack("i", len(words)))
        for _, word in words:
            text = bytes(letters[sign] for sign in word) if all(sign in letters for sign in word) else word.encode()
            file.write(struct.pack("i", len(text)) + text)
        for name, tensor in model.model.state_dict().items():
            data = tensor.float().numpy()
            if name in ("encoder.conv1.bias", "encoder.conv2.bias"):
                data = data[:, None]
            wide = data.ndim < 2 or data.shape[-1] == 1 or "positions" in name
            name = openai_name(name)
            data = data if wide else data.astype(np.float16)
            file.write(struct.pack(f"3i{data.ndim}i", data.ndim, len(name), not wide, *reversed(data.shape)))
            file.write(name.encode() + data.tobytes())


# ---------------------------------------------------------------- processes


def run_one(given: argparse.Namespace) -> None:
    """In the process of one engine: load, warm up, transcribe all clips, print seconds and texts."""
    began = time.perf_counter()
    transcribe = ENGINES[given.engine](given)
    clips = [(path.name, sound(path)) for path in given.paths]
    transcribe(clips[0][1])
    ready = time.perf_counter() - began
    seconds, texts = {}, {}
    for name, samples in clips:
        began = time.perf_counter()
        texts[name] = transcribe(samples)
        seconds[name] = time.perf_counter() - began
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = int(status.partition("VmHWM:")[2].split()[0]) // 1024
    print(json.dumps({"seconds": seconds, "texts": texts, "ready": ready, "peak_mb": peak}))


def ask(given: argparse.Namespace, engine: str) -> dict[str, Any]:
    """The result of an engine in a fresh process."""
    python = given.peers if engine.startswith(("faster", "whisper.cpp")) else sys.executable
    command = [python, "-W", "ignore", __file__, *map(str, given.paths), "--engine", engine, "--target", given.target,
               "--draft", given.draft, "--ct2", given.ct2, "--ggml", str(given.ggml), "--language", given.language,
               "--threads", str(given.threads)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        raise SystemExit(f"{engine}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


WORDS = """
import json, re, sys
import jiwer
right, found = json.load(sys.stdin)
plain = lambda text: " ".join(re.findall(r"[\\w']+", text.lower())) or "-"
print(jiwer.wer([plain(right[name]) for name in right], [plain(found[name]) for name in right]))
"""


def word_errors(given: argparse.Namespace, right: dict[str, str], found: dict[str, str]) -> float:
    """Share of wrong words, by jiwer in the peers' environment."""
    done = subprocess.run(
        [given.peers, "-c", WORDS], input=json.dumps([right, found]), capture_output=True, encoding="utf-8", check=True
    )
    return float(done.stdout)


def table(given: argparse.Namespace, engines: Sequence[str]) -> None:
    """Run all engines in turn and print what they took."""
    laps: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    for _ in range(given.laps):
        for engine in engines:
            laps[engine].append(ask(given, engine))
            print(f"{engine}: {sum(laps[engine][-1]['seconds'].values()):.2f} s", file=sys.stderr)
    length = sum(len(sound(path)) / RATE for path in given.paths)
    right, rows = laps[engines[0]][0]["texts"], {}
    print("| engine | s, median | real time | against the first | word errors | MB | ready, s |")
    print("|---|---|---|---|---|---|---|")
    for engine in engines:
        sums = sorted(sum(lap["seconds"].values()) for lap in laps[engine])
        median, last = sums[len(sums) // 2], laps[engine][-1]
        base = sorted(sum(lap["seconds"].values()) for lap in laps[engines[0]])[len(sums) // 2]
        errors = word_errors(given, right, last["texts"])
        rows[engine] = {"seconds": median, "speedup": base / median, "wer": errors, "peak_mb": last["peak_mb"]}
        print(f"| {engine} | {median:.2f} | {length / median:.1f}x | {base / median:.2f}x | {errors:.3f} | "
              f"{last['peak_mb']} | {last['ready']:.1f} |")  # fmt: skip
    print(json.dumps({"seconds_of_sound": length, "engines": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="WAV files of 16 kHz, or a folder of them")
    parser.add_argument("--target", required=True, help="folder of a Whisper model")
    parser.add_argument("--draft", default="", help="draft of it, for the rows that have one")
    parser.add_argument("--ct2", default="", help="the model in CTranslate2's form")
    parser.add_argument("--ggml", type=Path, default=Path("whisper.ggml"), help="where whisper.cpp's file is written")
    parser.add_argument("--peers", default=sys.executable, help="Python with faster-whisper, pywhispercpp and jiwer")
    parser.add_argument("--language", default="en")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), help="which, the first is compared with")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.paths = [clip for path in given.paths for clip in (sorted(path.glob("*.wav")) if path.is_dir() else [path])]
    if given.engine:
        run_one(given)
        return
    engines = [name for name in given.engines if given.draft or not ("draft" in name or "assisted" in name)]
    if "whisper.cpp float16" in engines:
        write_ggml(given.target, given.ggml)
    table(given, engines)


if __name__ == "__main__":
    main()
