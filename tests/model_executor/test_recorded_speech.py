"""Recorded speech models: the numbers and transcripts of the models themselves, without their classes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sakiyomi import LLM, TranscriptionParams
from sakiyomi.cache.cross_attention import Source
from sakiyomi.cache.policies.retaining.formats import fingerprint
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.encoder_decoder.decoder import Decoder
from sakiyomi.model_executor.loading import recorder, recording
from sakiyomi.model_executor.loading.recorded_extractor import RecordedExtractor, recorded_extractor
from sakiyomi.model_executor.recorded_model import RecordedEncoder, RecordedModel
from sakiyomi.model_executor.runner import ModelRunner
from seq2seq_toys import FRAMES, MELS, build
from speech_toys import BEFORE, END, PROCESSOR, START, WINDOW, noise, save_speech, toy, wav
from toys import character_tokenizer, save_model
from warm import warm

pytestmark = pytest.mark.skipif(native() is None, reason="recordings are of the compiled kernels")
SOUNDS = [noise(0.7 * WINDOW), noise(1.4 * WINDOW, 1)]
WAYS = [
    TranscriptionParams(timestamps="none", language="en"),
    TranscriptionParams(timestamps="segment"),
    TranscriptionParams(timestamps="word", language="fr", task="translate"),
    TranscriptionParams(timestamps="word", prompt="あいう"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No recordings but a test's own."""
    monkeypatch.setattr(recording, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.delenv("SAKIYOMI_RECORD")


def transcripts(llm: LLM, *temperatures: float) -> list[Any]:
    """By all of `WAYS`, without further tries."""
    found = [llm.transcribe(SOUNDS, replace(params, temperatures=(0.0,))) for params in WAYS]
    return found + [llm.transcribe(SOUNDS, replace(WAYS[0], temperatures=(each,), seed=3)) for each in temperatures]


def numbers(runner: ModelRunner) -> list[torch.Tensor]:
    """What encoder and cross-attention make of a sound, and logits of a beginning, of a tree behind it and a batch."""
    found, encoder, rows = [], runner.weights.encoder, [START, *range(4, 36)]
    assert encoder is not None
    features = torch.randn(1, MELS, FRAMES, generator=torch.Generator().manual_seed(1))
    sources = [Source({"input_features": loudness * features}, FRAMES // 2) for loudness in (1.0, 0.1)]
    for source in sources:
        runner.begin(BatchPlan([]), 0)
        found += [encoder.read(source), *(part for pair in encoder.pairs(encoder.read(source)) for part in pair)]
    with runner.cache.lent(60) as first, runner.cache.lent(60) as second:
        runner.make_room(first, 60, sources[0])
        runner.make_room(second, 60, sources[1])
        found.append(runner.score([SequenceRows(first, 0, rows, prompt=True)], last=True).logits.clone())
        found.append(runner.score([SequenceRows(first, 33, rows[:5], (-1, 0, 0, 1, 2))]).logits.clone())
        both = [SequenceRows(first, 33, rows[:3]), SequenceRows(second, 0, rows[:6])]
        found.append(runner.score(both).logits.clone())
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_and_transcripts_are_equal_to_the_last_bit(dtype: str, tmp_path: Path) -> None:
    """Times of words, detected languages and prompts among them; and those of the modules that somebody asks for."""
    folder = save_speech(tmp_path / "model")
    own = LLM(folder, "none", dtype=dtype)
    texts = transcripts(own, 0.8)
    assert own.record() and not isinstance(own.target.module, RecordedModel)
    again = LLM(folder, "none", dtype=dtype)
    assert isinstance(again.target.module, RecordedModel)
    assert own.engine.stop_ids == again.engine.stop_ids and own.max_context == again.max_context
    assert own.target.weights.small_head == again.target.weights.small_head
    assert fingerprint(own.target.module, None) == fingerprint(again.target.module, None)
    assert own.target.weights.bytes == again.target.weights.bytes
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(numbers(own.target), numbers(again.target), strict=True))
        assert transcripts(again, 0.8) == texts
    assert isinstance(again.target.module, RecordedModel) and isinstance(again.processor, RecordedExtractor)
    assert any(segment.words for transcript in texts[2] for segment in transcript.segments)
    again.target.unfold()
    assert isinstance(again.target.module, Decoder)
    assert transcripts(again, 0.8) == texts


def test_features_may_be_given(tmp_path: Path) -> None:
    folder = save_speech(tmp_path / "model")
    own = LLM(folder, "none")
    assert own.record()
    again = LLM(folder, "none")
    made = [
        torch.as_tensor(llm.processor(SOUNDS[0].samples, sampling_rate=16000)["input_features"]) for llm in (own, again)
    ]
    assert torch.equal(*made)
    assert own.generate(made[0]).token_ids == again.generate(made[0]).token_ids


def test_a_draft_that_is_recorded_borrows_the_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_speech(tmp_path / "model")
    draft = f"model:{save_speech(tmp_path / 'draft')}"
    own = LLM(folder, draft)
    texts = transcripts(own)
    assert own.record()
    again, read = LLM(folder, draft), []
    forward = RecordedEncoder.forward
    monkeypatch.setattr(RecordedEncoder, "forward", lambda self, **given: read.append(self) or forward(self, **given))
    assert transcripts(again) == texts and len(set(map(id, read))) == 1
    assert again.draft is not None and isinstance(again.draft.model.module, RecordedModel)


@pytest.mark.thorough
def test_neither_transformers_nor_torchs_compiler_is_imported(tmp_path: Path) -> None:
    (tmp_path / "sound.wav").write_bytes(wav(SOUNDS[1]))
    script = """
import sys
from pathlib import Path
from sakiyomi import LLM, TranscriptionParams
from sakiyomi.model_executor.loading import recording
recording.cache_folder = lambda: Path(sys.argv[1]) / "cache"
llm = LLM(sys.argv[1] + "/model", "none")
params = TranscriptionParams(timestamps="segment", temperatures=(0.0,))
print(llm.transcribe(sys.argv[1] + "/sound.wav", params).segments)
llm.record()
print([name for name in ("transformers", "torch._dynamo") if name in sys.modules], file=sys.stderr)
"""
    save_speech(tmp_path / "model")
    command = ["-W", "ignore", "-c", script, str(tmp_path)]
    runs = [
        subprocess.run([*start, *command], capture_output=True, encoding="utf-8", check=True)
        for start in (warm(), (sys.executable,))  # the one that records imports everything anyway
    ]
    assert runs[0].stdout == runs[1].stdout and runs[0].stdout.strip() not in ("", "()")
    assert runs[1].stderr.strip().endswith("[]")


def _changed(name: str, **settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        known = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(known | settings), encoding="utf-8")

    return change


def _other_weights(folder: Path) -> None:
    model = toy()
    torch.nn.init.normal_(model.model.encoder.conv1.weight)
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    "change",
    [
        _other_weights,
        _changed("generation_config.json", suppress_tokens=[4, BEFORE]),
        _changed("preprocessor_config.json", padding_value=0.5),
    ],
)
def test_a_recording_of_something_else_is_not_used(change: Callable[[Path], None], tmp_path: Path) -> None:
    folder = save_speech(tmp_path / "model")
    assert LLM(folder, "none").record()
    change(Path(folder))
    fresh = LLM(folder, "none")
    assert not isinstance(fresh.target.module, RecordedModel) and fresh.record()
    assert isinstance(LLM(folder, "none").target.module, RecordedModel)


@pytest.mark.parametrize(
    ("settings", "options", "why"),
    [
        ({"repetition_penalty": 1.2}, {}, "do more than forbid tokens"),
        ({"forced_eos_token_id": END}, {}, "do more than forbid tokens"),
        ({}, {"quantize": "int8"}, "quantized in every start"),
    ],
)
def test_what_is_not_recorded(
    settings: dict[str, Any], options: dict[str, Any], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_speech(tmp_path / "model")
    _changed("generation_config.json", **settings)(Path(folder))
    caplog.set_level("DEBUG", "sakiyomi")
    assert not LLM(folder, "none", **options).record() and why in caplog.text


def test_encoders_of_text_are_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_model(tmp_path / "model", build("bart", 3), character_tokenizer())
    caplog.set_level("DEBUG", "sakiyomi")
    assert not LLM(folder, "none").record() and "sources of any length" in caplog.text


def test_an_encoder_that_computes_something_else_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = recorder._with_weights

    def wrong(*given: Any) -> list[str]:
        read = made(*given)
        if "model.encoder.conv1.weight" in read:
            first, last = [i for i, name in enumerate(read) if name.endswith("layer_norm.weight")][:2]
            read[first], read[last] = read[last], read[first]
        return read

    folder = save_speech(tmp_path / "model")
    model = toy()
    with torch.no_grad():
        for i, module in enumerate(each for each in model.modules() if isinstance(each, torch.nn.LayerNorm)):
            module.weight += 0.1 * i
    model.save_pretrained(folder)
    monkeypatch.setattr(recorder, "_with_weights", wrong)
    caplog.set_level("DEBUG", "sakiyomi")
    assert not LLM(folder, "none").record() and "encoder gives other numbers" in caplog.text


def test_an_extractor_of_another_kind_is_not_recorded() -> None:
    known, filters = recorded_extractor(PROCESSOR.feature_extractor)
    again = RecordedExtractor(known, filters, lambda: PROCESSOR.feature_extractor)
    assert np.array_equal(again.mel_filters, PROCESSOR.feature_extractor.mel_filters)
    assert again.to_dict() == PROCESSOR.feature_extractor.to_dict()  # of the whole one
    with pytest.raises(recorder.UnsupportedError, match="is not Whisper's"):
        recorded_extractor(again)
