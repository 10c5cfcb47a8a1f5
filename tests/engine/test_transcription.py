"""Transcription beside transformers' own ``generate``, on a tiny Whisper model with random weights."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperTimeStampLogitsProcessor
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from sakiyomi import LLM, Audio, InputError, LoadError, SamplingParams, TranscriptionParams, UnsupportedError
from sakiyomi.core.transcripts import Segment
from sakiyomi.engine.transcription import Transcriber
from sakiyomi.engine.transcription_rules import TimestampRules
from sakiyomi.engine.transcription_windows import Part, compression_ratio, cut
from sakiyomi.engine.transcription_words import warp, words_of
from seq2seq_toys import model_of
from speech_toys import (
    BEFORE,
    EN,
    END,
    HEADS,
    PROCESSOR,
    RATE,
    SETTINGS,
    SILENT,
    START,
    TEXT,
    TRANSCRIBE,
    VOCAB,
    WINDOW,
    ZERO,
    noise,
    speech_llm,
    toy,
)
from toys import character_tokenizer

BARE = TranscriptionParams(
    temperatures=(0.0,),
    compression_ratio_threshold=None,
    logprob_threshold=None,
    no_speech_threshold=None,
    condition_on_previous=False,
    language="en",
)


def llm_of(draft: Any = "none", **settings: Any) -> LLM:
    return speech_llm(draft, settings)


def reference(sound: Audio, params: TranscriptionParams, **given: Any) -> list[tuple[float, float, str]]:
    """Start, end and text of the segments that transformers makes."""
    long = sound.seconds > WINDOW
    padding = {"truncation": False, "padding": "longest"} if long else {}
    extractor, tokenizer = PROCESSOR.feature_extractor, PROCESSOR.tokenizer
    features = extractor(sound.samples, sampling_rate=RATE, return_tensors="pt", **padding)["input_features"]
    times = long or params.timestamps != "none"
    if params.prompt is not None:
        ids = tokenizer(f" {params.prompt}", add_special_tokens=False)["input_ids"]
        given["prompt_ids"] = torch.tensor([BEFORE, *ids])
    if long:
        given["condition_on_prev_tokens"] = params.condition_on_previous
    found = toy().generate(
        features,
        return_timestamps=times,
        return_segments=True,
        language=params.language,
        task=params.task,
        temperature=0.0,
        **given,
    )
    return [
        (float(each["start"]), float(each["end"]), text)
        for each in found["segments"][0]
        if (text := tokenizer.decode([token for token in each["tokens"].tolist() if token < ZERO and token < END]))
    ]


def spoken(segments: Any) -> list[tuple[float, float, str]]:
    return [(each.start, each.end, each.text) for each in segments]


CASES: dict[str, TranscriptionParams] = {
    "plain": dataclasses.replace(BARE, timestamps="none"),
    "times": BARE,
    "detected": dataclasses.replace(BARE, language=None),
    "translated": dataclasses.replace(BARE, task="translate", language="french"),
    "prompt": dataclasses.replace(BARE, prompt="".join(map(chr, range(0x3045, 0x3050)))),
    "conditioned": dataclasses.replace(BARE, condition_on_previous=True),
}


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")  # of transformers' generate
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("draft", ["none", "suffix+early-exit:1"])
def test_segments_are_those_of_transformers(case: str, draft: str) -> None:
    params, llm = CASES[case], llm_of(draft)
    for seed, seconds in enumerate((WINDOW, 2.5)):
        sound = noise(seconds, seed)
        expected = reference(sound, params)
        found = llm.transcribe(sound, params)
        assert spoken(found.segments) == [
            (pytest.approx(min(start, seconds)), pytest.approx(min(end, seconds)), text)
            for start, end, text in expected
        ]
        assert found.seconds == seconds
    assert len(expected) > 1
    if draft != "none":
        assert llm.engine.drafter is not None


@pytest.mark.parametrize("first", [None, 8])
def test_rules_are_those_of_transformers(first: int | None) -> None:
    settings = copy.deepcopy(toy(max_initial_timestamp_index=first).generation_config)
    begin, generator = 3, torch.Generator().manual_seed(0)
    theirs, ours = WhisperTimeStampLogitsProcessor(settings, begin), TimestampRules(begin, SILENT, END, first)
    times = torch.arange(ZERO, VOCAB)
    chosen = 0
    for _ in range(300):
        count = int(torch.randint(0, 7, (1,), generator=generator))
        written = torch.randint(0, TEXT, (count,), generator=generator)
        marks = torch.rand(count, generator=generator) < 0.5
        steps = times[torch.randint(0, len(times), (count,), generator=generator)].sort()[0]
        history = torch.cat([torch.tensor([START, EN, TRANSCRIBE]), torch.where(marks, steps, written)])[None]
        scores = 2 * torch.randn(1, VOCAB, generator=generator)
        expected = theirs(history, scores)
        row = scores[0].clone()
        ours.change(history[0, :4].tolist(), history[0, 4:].tolist(), row.numpy())
        assert torch.equal(row, expected[0])
        chosen += bool(expected[0, :ZERO].isinf().all())
    assert 50 < chosen < 250, "both kinds of tokens are preferred"


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("tokens", "parts", "step"),
    [
        ([3, 4], [Part(0, 50, (3, 4), 0)], 100),
        ([ZERO, 3, 4], [Part(0, 50, (ZERO, 3, 4), 0)], 100),
        ([ZERO, 3, ZERO + 20], [Part(0, 20, (ZERO, 3, ZERO + 20), 0)], 100),
        (
            [ZERO, 3, ZERO + 9, ZERO + 10, 4, ZERO + 20],
            [Part(0, 9, (ZERO, 3, ZERO + 9), 0), Part(10, 20, (ZERO + 10, 4, ZERO + 20), 3)],
            100,
        ),
        ([ZERO, 3, ZERO + 9, ZERO + 10, 4], [Part(0, 9, (ZERO, 3, ZERO + 9), 0)], 18),
        ([ZERO, 3, ZERO + 9, ZERO + 9], [Part(0, 9, (ZERO, 3, ZERO + 9), 0)], 18),
        ([], [Part(0, 50, (), 0)], 100),
    ],
)
def test_a_text_is_cut_where_timestamps_meet(tokens: list[int], parts: list[Part], step: int) -> None:
    assert cut(tokens, ZERO, 100) == (parts, step)


def test_several_sounds_share_passes() -> None:
    llm, sounds = llm_of("suffix"), [noise(seconds, 7) for seconds in (2.5, 0.4, 1.7)]
    together = llm.transcribe(sounds, BARE)
    assert [spoken(found.segments) for found in together] == [
        spoken(llm.transcribe(sound, BARE).segments) for sound in sounds
    ]
    assert len({found.text for found in together}) == 3
    assert max(end for _, end, _ in spoken(together[1].segments)) <= 0.4


def test_segments_come_one_by_one() -> None:
    llm = llm_of()
    sound = noise(2.5)
    coming = Transcriber(llm).segments(sound, BARE)
    first = next(coming)
    assert isinstance(first, Segment)
    assert llm.engine.requests == 1
    assert (first, *coming) == llm.transcribe(sound, BARE).segments


def test_a_segment_says_where_its_window_begins() -> None:
    begun, before, seeks = Transcriber(llm_of()).begin(noise(2.5), BARE), 0.0, []
    for _, found in begun.tries():
        assert all(segment.seek == round(100 * before) <= round(100 * segment.start) for segment in found)
        seeks += [segment.seek for segment in found]
        before = begun.position
    assert before == 2.5 and len(set(seeks)) > 2 and len(seeks) > len(set(seeks))


# ---------------------------------------------------------------- words


@pytest.mark.filterwarnings("ignore")  # of transformers' generate
@pytest.mark.parametrize("draft", ["none", "suffix+early-exit:1"])
def test_words_begin_where_transformers_says(draft: str) -> None:
    """Of a toy that writes no spaces, so that each segment is a word, or one for each character."""
    params, sound = dataclasses.replace(BARE, timestamps="word"), noise(2.5)
    model = toy(alignment_heads=HEADS)
    extractor = PROCESSOR.feature_extractor
    made = extractor(
        sound.samples, sampling_rate=RATE, return_tensors="pt", truncation=False, return_attention_mask=True
    )
    expected = model.generate(
        made["input_features"],
        attention_mask=made["attention_mask"],
        return_timestamps=True,
        return_token_timestamps=True,
        return_segments=True,
        language="en",
        task="transcribe",
        temperature=0.0,
    )["segments"][0]
    llm = llm_of(draft, alignment_heads=HEADS)
    found = llm.transcribe(sound, params).segments
    assert spoken(found) == spoken(llm.transcribe(sound, BARE).segments)
    compared = 0
    for segment, other in zip(found, [e for e in expected if (e["tokens"] < END).any()], strict=True):
        assert "".join(word.text for word in segment.words) == segment.text
        starts = [
            float(at) for token, at in zip(other["tokens"], other["token_timestamps"], strict=True) if token < END
        ]
        assert segment.words[0].start == pytest.approx(starts[0])
        assert [word.start for word in segment.words] == sorted(word.start for word in segment.words)
        assert all(0 < word.probability < 1 for word in segment.words)
        compared += 1
    assert compared > 3


def test_words_of_a_text() -> None:
    tokenizer = character_tokenizer("abc .,")
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})  # texts have the tokens below it
    tokens = tokenizer("ab cab.", add_special_tokens=False)["input_ids"]
    starts, chances = [0.1 * i for i in range(7)], [1.0, 0.5, 0.2, 0.4, 0.6, 0.8, 0.5]
    words = words_of(tokens, starts, 2.0, chances, tokenizer, "english")
    assert [word.text for word in words] == ["ab", " cab."]
    assert [(word.start, word.end) for word in words] == [(0.0, starts[2]), (starts[2], 2.0)]
    assert [word.probability for word in words] == [pytest.approx(0.75), pytest.approx(0.5)]
    characters = words_of(tokens, starts, 2.0, chances, tokenizer, "japanese")
    assert [word.text for word in characters] == ["a", "b", " c", "a", "b."]
    assert words_of([], [], 2.0, [], tokenizer, "english") == ()


@pytest.mark.parametrize(("rows", "columns"), [(1, 6), (5, 5), (7, 3), (12, 90)])
def test_the_cheapest_way_is_that_of_transformers(rows: int, columns: int) -> None:
    costs = np.random.default_rng(rows).normal(size=(rows, columns))
    costs[:, ::2] = costs[:, ::2].round()  # equal ones, too
    text, time = _dynamic_time_warping(costs)
    entered = np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)
    assert warp(costs) == time[entered].tolist()


# ---------------------------------------------------------------- further tries, silence


def test_a_poor_text_is_tried_again_at_the_next_temperature() -> None:
    llm, sound = llm_of(), noise(WINDOW)
    params = dataclasses.replace(BARE, temperatures=(0.0, 0.5, 1.0), seed=3, logprob_threshold=0.0)
    found = llm.transcribe(sound, params)
    assert llm.engine.requests == 3, "no text is certain, so that the last try is taken"
    assert {segment.temperature for segment in found.segments} == {1.0}
    assert found == llm.transcribe(sound, params), "a seed fixes all tries"
    greedy = llm.transcribe(sound, BARE)
    assert greedy.segments != found.segments
    again = dataclasses.replace(params, temperatures=(0.0, 0.0))
    assert llm.transcribe(sound, again).segments == greedy.segments, "a try begins as the one before it"
    kept = dataclasses.replace(params, logprob_threshold=greedy.segments[0].average_logprob - 0.01)
    assert llm.transcribe(sound, kept).segments == greedy.segments
    ratio = greedy.segments[0].compression_ratio
    repeats = dataclasses.replace(params, logprob_threshold=None, compression_ratio_threshold=ratio - 0.01)
    assert llm.transcribe(sound, repeats).segments[0].temperature > 0


def test_a_mean_log_probability_is_that_of_the_models_logits() -> None:
    """Without the tokens that are forbidden, the end token included."""
    sound, params = noise(WINDOW), dataclasses.replace(BARE, timestamps="none")
    segment = llm_of(begin_suppress_tokens=None).transcribe(sound, params).segments[0]
    features = PROCESSOR.feature_extractor(sound.samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
    model, opening = toy(begin_suppress_tokens=None), [START, EN, TRANSCRIBE, SILENT]
    tokens = model.generate(features, language="en", task="transcribe", temperature=0.0)[0].tolist()
    tokens = tokens[len(opening) :] if tokens[: len(opening)] == opening else tokens
    with torch.no_grad():
        logits = model(input_features=features, decoder_input_ids=torch.tensor([opening + tokens])).logits[0]
    logits[:, SETTINGS["suppress_tokens"]] = -torch.inf
    ended = [*tokens, END] if len(tokens) < 100 - len(opening) and tokens[-1] != END else tokens
    scores = logits.log_softmax(-1)[len(opening) - 1 :][: len(ended)].gather(1, torch.tensor(ended)[:, None])
    assert segment.average_logprob == pytest.approx(float(scores.mean()), abs=1e-4)


def test_silent_windows_are_skipped() -> None:
    llm, sound = llm_of(), noise(2.5)
    spoken_in = llm.transcribe(sound, BARE)
    chance = min(segment.no_speech_probability for segment in spoken_in.segments)
    assert 0 < chance < 1
    silent = dataclasses.replace(BARE, temperatures=(0.0, 1.0), logprob_threshold=0.0, no_speech_threshold=0.0)
    assert llm.transcribe(sound, silent).segments == ()
    certain = dataclasses.replace(silent, logprob_threshold=-1000.0)
    assert llm.transcribe(sound, certain).segments == spoken_in.segments
    assert compression_ratio("la " * 100) > 2.4 > compression_ratio("A text that says what it says once.")


# ---------------------------------------------------------------- languages, errors


def test_the_language_is_said() -> None:
    llm = llm_of()
    assert llm.transcribe(noise(0.5), dataclasses.replace(BARE, language="French")).language == "fr"
    detected = llm.transcribe(noise(0.5), dataclasses.replace(BARE, language=None)).language
    assert detected in ("en", "fr")
    other = Audio(noise(0.5).samples, RATE, language="fr", task="translate")
    found = llm.transcribe(other, dataclasses.replace(BARE, language=None))
    assert (found.language, found.task) == ("fr", "translate")


def test_models_of_one_language() -> None:
    llm = llm_of(is_multilingual=False, lang_to_id=None, task_to_id=None)
    english = [llm.transcribe(noise(0.5), dataclasses.replace(BARE, language=name)) for name in (None, "en", "English")]
    assert [found.language for found in english] == [None] * 3
    assert len({found.text for found in english}) == 1
    others: list[dict[str, Any]] = [{"language": "fr"}, {"task": "translate"}]
    for wrong in others:
        with pytest.raises(InputError, match="one language"):
            llm.transcribe(noise(0.5), dataclasses.replace(BARE, **wrong))


@pytest.mark.filterwarnings("ignore")  # of transformers' generate
def test_a_model_that_lists_languages_and_takes_none() -> None:
    """It detects one, as transformers does, and is told none."""
    sound, llm = noise(WINDOW), llm_of(is_multilingual=False)
    features = PROCESSOR.feature_extractor(sound.samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
    expected = toy(is_multilingual=False).generate(features, temperature=0.0)[0].tolist()
    ours = llm.generate(sound, SamplingParams(max_new_tokens=90)).token_ids
    assert ours[:-1] == expected and ours[-1] == END
    plain = dataclasses.replace(BARE, timestamps="none")
    found = [llm.transcribe(sound, dataclasses.replace(plain, language=name)) for name in (None, "en")]
    assert found[0] == found[1] and found[0].language in ("en", "fr")
    said = [token for segment in found[0].segments for token in segment.tokens]
    assert said == [token for token in ours if token < END]
    with pytest.raises(InputError, match="one language"):
        llm.transcribe(sound, dataclasses.replace(plain, language="fr"))


def test_what_cannot_be_transcribed() -> None:
    llm = llm_of()
    with pytest.raises(InputError, match=r"expected a sakiyomi\.Audio"):
        llm.transcribe([3])  # type: ignore[list-item]
    with pytest.raises(LoadError, match="no file"):
        llm.transcribe("missing.wav")
    with pytest.raises(InputError, match="klingon"):
        llm.transcribe(noise(0.5), TranscriptionParams(language="klingon"))
    with pytest.raises(InputError, match=r"special token .*endoftext"):
        llm.transcribe(noise(0.5), TranscriptionParams(prompt="<|endoftext|>"))
    with pytest.raises(UnsupportedError, match="reads text"):
        LLM((model_of("bart"), PROCESSOR.tokenizer), "none", compile=False).transcribe(noise(0.5))
    with pytest.raises(UnsupportedError, match="preprocessor_config"):
        LLM((toy(), PROCESSOR.tokenizer), "none", compile=False).transcribe(noise(0.5))
    with pytest.raises(UnsupportedError, match="alignment_heads"):
        llm.transcribe(noise(0.5), TranscriptionParams(timestamps="word"))
    with pytest.raises(UnsupportedError, match="no_timestamps_token_id"):
        llm_of(no_timestamps_token_id=None).transcribe(noise(0.5))
