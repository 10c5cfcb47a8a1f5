"""What a user gives to encoder-decoder models: texts, sounds, settings of the model, and everything that is wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, WhisperFeatureExtractor
from typer.testing import CliRunner

import sakiyomi.model_executor.runner
from sakiyomi import LLM, Audio, InputError, SamplingParams, UnsupportedError
from sakiyomi.cli import app
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.model_executor.build import build_runner
from seq2seq_toys import ALL, FOUR, FRAMES, MELS, NEW, TOKENIZER, VOCAB, build, model_of, reference, sources
from toys import save_model, tiny_llama

RATE, HOP = 16000, 160


def llm_of(model: Any, draft: Any = "none", **options: Any) -> LLM:
    return LLM((model, TOKENIZER), draft, compile=False, strict=True, **options)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW} | values))


def extractor() -> WhisperFeatureExtractor:
    """Of sounds of one second."""
    return WhisperFeatureExtractor(feature_size=MELS, sampling_rate=RATE, hop_length=HOP, chunk_length=1, n_fft=400)


def tone(hertz: float = 440.0, seconds: float = 0.6, rate: int = RATE) -> Audio:
    times = np.arange(int(seconds * rate)) / rate
    return Audio((0.5 * np.sin(2 * np.pi * hertz * times)).astype(np.float32), rate)


# ---------------------------------------------------------------- settings of the model

SETTINGS: dict[str, dict[str, Any]] = {
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "penalties": {"repetition_penalty": 1.7, "encoder_repetition_penalty": 1.5},
    "from_the_source": {"encoder_no_repeat_ngram_size": 1},
    "begin_and_end": {"forced_bos_token_id": 9, "forced_eos_token_id": 1},
    "length": {"min_length": 12},
    "new_tokens": {"min_new_tokens": 12, "exponential_decay_length_penalty": (6, 1.4)},
    "suppressed": {"suppress_tokens": [*range(20, 30)], "begin_suppress_tokens": [*range(30, 50)]},
    "words": {"bad_words_ids": [[5], [8, 9]], "sequence_bias": [[[11], 4.0]]},
    "valid": {"remove_invalid_values": True},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_settings_of_the_model_are_followed_as_transformers_does(name: str, setting: str) -> None:
    model = copy.deepcopy(model_of(name))
    if setting in ("begin_and_end", "length", "new_tokens"):  # an end that would come early
        model.generation_config.eos_token_id = reference(model, sources(name)[0])[5]
    before = [reference(model, source, ended=True) for source in sources(name)]
    for key, value in SETTINGS[setting].items():
        setattr(model.generation_config, key, value)
    expected = [reference(model, source, ended=True) for source in sources(name)]
    assert setting in ("valid", "from_the_source") or expected != before, "the setting changes nothing here"
    plain = llm_of(model).generate(sources(name), params())
    assert [out.token_ids for out in plain] == expected
    ahead = llm_of(model, "suffix+early-exit:1").generate(sources(name), params(gamma=3))
    assert [out.token_ids for out in ahead] == expected


def test_the_users_processors_come_behind_those_of_the_model() -> None:
    model = copy.deepcopy(model_of("bart"))
    model.generation_config.suppress_tokens = [7]
    seen: list[float] = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(float(scores[0, 7]))
        return scores

    llm_of(model).generate(sources("bart"), params(logits_processors=[look]))
    assert seen
    assert set(seen) == {-torch.inf}


# ---------------------------------------------------------------- whisper


def whisper(**settings: Any) -> Any:
    model = copy.deepcopy(model_of("whisper"))
    for key, value in settings.items():
        setattr(model.generation_config, key, value)
    return model


LANGUAGES = {"lang_to_id": {"<|en|>": 40, "<|fr|>": 41, "<|ja|>": 42}, "is_multilingual": True}
TASKS = {"task_to_id": {"transcribe": 50, "translate": 51}}
SILENT = {"no_timestamps_token_id": 55}
PROMPTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bare": ({}, {}),
    "silent": (SILENT, {}),
    "heard": (LANGUAGES | SILENT, {}),
    "heard with tasks": (LANGUAGES | TASKS | SILENT, {}),
    "told": (LANGUAGES | TASKS | SILENT, {"language": "fr"}),
    "told by name": (LANGUAGES | TASKS | SILENT, {"language": "Japanese", "task": "translate"}),
    "task only": (LANGUAGES | TASKS | SILENT, {"task": "translate"}),
    "set": (LANGUAGES | TASKS | SILENT | {"language": "<|en|>", "task": "transcribe"}, {}),
    "forced": ({"forced_decoder_ids": [[1, 41], [2, 50]]}, {}),
    "forced and heard": (LANGUAGES | TASKS | SILENT | {"forced_decoder_ids": [[1, None], [2, 50]]}, {}),
    "suppressed": (SILENT | {"suppress_tokens": [*range(10, 25)], "begin_suppress_tokens": [*range(25, 40), 1]}, {}),
}


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")  # of transformers' generate on old settings
@pytest.mark.parametrize("prompt", PROMPTS)
def test_whisper_writes_what_its_own_generate_writes(prompt: str) -> None:
    """Which begins with start, language, task and "no times", and takes them and the end token away."""
    settings, told = PROMPTS[prompt]
    model = whisper(**settings)
    features = extractor()
    sounds = [tone(300.0 * i, 0.2 * i) for i in (1, 2, 3)]
    expected = []
    for sound in sounds:
        made = features(sound.samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
        expected.append(model.generate(made, max_new_tokens=NEW, **told)[0].tolist())
    model.tokenizer, processor = TOKENIZER, _Processor(TOKENIZER, features)
    llm = LLM((model, processor), "early-exit:1", compile=False, strict=True)
    told_sounds = [Audio(sound.samples, RATE, **told) for sound in sounds]
    done = llm.generate(told_sounds, params(gamma=2))
    for out, text in zip(done, expected, strict=True):
        assert _without_end(out.token_ids) == _without_end(text)
    assert len({tuple(out.token_ids) for out in done}) > 1


def _without_end(tokens: list[int]) -> list[int]:
    """Whisper's generate takes the end token away, and what it takes for padding (0) before it."""
    return tokens if not tokens or tokens[-1] > 1 else _without_end(tokens[:-1])


class _Processor:
    """What is used of transformers' processors: a tokenizer and a feature extractor in one."""

    def __init__(self, tokenizer: Any, feature_extractor: Any) -> None:
        self.tokenizer, self.feature_extractor = tokenizer, feature_extractor
        self.decode = tokenizer.decode


def test_a_language_is_heard_while_every_place_is_taken() -> None:
    model = whisper(**LANGUAGES)
    llm = LLM((model, _Processor(TOKENIZER, extractor())), "none", compile=False, max_batch=1)
    first = llm.engine.submit(tone(300.0), params(ignore_eos=True))
    llm.engine.step()
    assert llm.target.cache.free == 0
    second = llm.engine.submit(tone(900.0), params(ignore_eos=True))
    together = [out.token_ids for out in llm.engine.complete([first, second])]
    alone = [llm.generate(tone(hertz), params(ignore_eos=True)).token_ids for hertz in (300.0, 900.0)]
    assert together == alone


# ---------------------------------------------------------------- folders, texts, command line


@cache
def folder_of(name: str, root: Path, **changed: Any) -> Path:
    folder = root / name
    save_model(folder, build(name, **changed), TOKENIZER)
    if name == "whisper":
        extractor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FOUR)
def test_a_folder_is_loaded_with_a_folder_as_its_draft(name: str, root: Path) -> None:
    folder = folder_of(name, root)
    llm = LLM(folder, f"model:{folder}", compile=False, strict=True)
    if name == "whisper":
        given: Any = [tone(300.0), tone(500.0, 0.3)]
    else:
        given = [TOKENIZER.decode(source) for source in sources(name)]
    done = llm.generate(given, params(gamma=2, ignore_eos=True))
    model = (AutoModelForSpeechSeq2Seq if name == "whisper" else AutoModelForSeq2SeqLM).from_pretrained(folder)
    for out, prompt in zip(done, given, strict=True):
        source = prompt
        if name == "whisper":
            source = extractor()(prompt.samples, sampling_rate=RATE, return_tensors="pt")["input_features"][0]
        else:
            source = TOKENIZER(prompt)["input_ids"]
            assert out.prompt_tokens == len(source)
        assert out.token_ids == reference(model, source)
        assert out.text == TOKENIZER.decode(out.token_ids, skip_special_tokens=True)
        assert out.stats.acceptance_rate == 1.0
    assert llm.generate(given[0], params(ignore_eos=True)).token_ids == done[0].token_ids


def test_features_and_sounds_give_the_same_text(root: Path) -> None:
    llm = LLM(folder_of("whisper", root), "none", compile=False)
    sound = tone(700.0)
    features = extractor()(sound.samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
    texts = [llm.generate(given, params()).token_ids for given in (sound, features[0], features)]
    assert texts[0] == texts[1] == texts[2]
    assert llm.generate([sound, features[0]], params())[1].token_ids == texts[0]


@pytest.mark.thorough
def test_generate_on_the_command_line(root: Path) -> None:
    options = ["--max-new-tokens", "8", "--compile", "false"]
    target, text = str(folder_of("marian", root)), TOKENIZER.decode(sources("marian")[0])
    result = CliRunner().invoke(app, ["generate", text, "--target", target, "--draft", f"model:{target}", *options])
    assert result.exit_code == 0, result.output
    expected = LLM(target, "none", compile=False).generate(text, SamplingParams(max_new_tokens=8))
    assert result.stdout.strip() == expected.text.strip()


# ---------------------------------------------------------------- what is looked up


@pytest.mark.thorough
def test_drafts_are_looked_up_in_the_source_only_where_it_has_the_decoders_tokens() -> None:
    """A model that copies: prompt lookup finds the text in the source, from the second token on."""
    for name, config, shared in (
        ("bart", {}, True),
        ("marian", {}, True),
        ("marian", {"share_encoder_decoder_embeddings": False}, False),
        ("marian", {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 50}, False),
    ):
        llm = llm_of(build(name, **config), "prompt-lookup")
        tokens = sources(name)[1]
        source = llm.engine._requests.process(tokens, params()).source
        assert source is not None
        assert list(source.tokens) == (tokens if shared else []), config
        texts = llm.generate([tokens], params(ignore_eos=True))[0].token_ids
        assert texts == reference(build(name, **config), tokens)


def test_what_stands_in_the_source_is_proposed() -> None:
    from sakiyomi.cache.cross_attention import Source
    from sakiyomi.drafters import Context
    from sakiyomi.drafters.lookup import PromptLookup
    from sakiyomi.drafters.suffix import SuffixDrafter
    from sakiyomi.sampling.rng import RequestNoise

    source = Source({}, 6, (5, 6, 7, 8, 9, 10))
    for drafter in (PromptLookup(), SuffixDrafter()):
        context = Context(0, [2, 6, 7], params(), "greedy", RequestNoise(0, 0), frozenset(), nodes=3, source=source)
        (draft,) = drafter.propose([context], [3])
        assert draft.tree.tokens == (8, 9, 10)


# ---------------------------------------------------------------- what is wrong


def refuse(call: Callable[[], object], kind: type[Exception], *words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_sources_that_cannot_be_read_are_refused(root: Path) -> None:
    bart = llm_of(model_of("bart"))
    refuse(lambda: bart.generate([[5] * 129], params()), InputError, "129 tokens", "128 at most")
    refuse(lambda: bart.generate([[VOCAB]], params()), InputError, str(VOCAB))
    refuse(lambda: bart.generate("", params()), InputError, "empty")
    refuse(lambda: bart.generate([[]], params()), InputError, "empty")
    refuse(lambda: bart.generate(tone(), params()), InputError, "reads text", "whisper")
    refuse(lambda: bart.generate(torch.zeros(MELS, FRAMES), params()), InputError, "reads text")
    hearing = LLM(folder_of("whisper", root), "none", compile=False)
    refuse(lambda: hearing.generate("あい", params()), InputError, "is a speech model", "Audio")
    refuse(lambda: hearing.generate(tone(seconds=1.5), params()), InputError, "1.5 s", "1 s", "split")
    refuse(lambda: hearing.generate(torch.zeros(MELS, 7), params()), InputError, "(1, 16, 7)", "(16, 100)")
    refuse(lambda: hearing.generate(Audio(tone().samples, RATE, "en"), params()), InputError, "language", "'en'")
    told = LLM((whisper(**LANGUAGES, **TASKS), _Processor(TOKENIZER, extractor())), "none", compile=False)
    refuse(lambda: told.generate(Audio(tone().samples, RATE, "Klingon"), params()), InputError, "Klingon", "fr")
    refuse(lambda: told.generate(Audio(tone().samples, RATE, "en", "sing"), params()), InputError, "sing", "translate")
    deaf = llm_of(model_of("whisper"))
    refuse(lambda: deaf.generate(tone(), params()), UnsupportedError, "feature extractor")
    for llm in (bart, hearing, told, deaf):
        assert not llm.engine.busy
        assert llm.target.cache.free == 8
    llama = LLM((tiny_llama(VOCAB), TOKENIZER), "none", compile=False)
    refuse(lambda: llama.generate(tone(), params()), InputError, "Audio", "text")


def test_t5_reads_sources_of_any_length() -> None:
    long = sources("t5", (300,))[0]
    assert llm_of(model_of("t5"), "suffix").generate([long], params(ignore_eos=True))[0].token_ids == reference(
        model_of("t5"), long
    )


def test_drafts_of_another_kind_are_refused_before_weights_are_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bart, whispering = folder_of("bart", root), folder_of("whisper", root)
    llama = save_model(tmp_path / "llama", tiny_llama(VOCAB), TOKENIZER)
    mels = save_model(tmp_path / "mels", build("whisper", num_mel_bins=8), TOKENIZER)
    for folder in (llama, mels, folder_of("t5", root), folder_of("marian", root)):
        for file in folder.glob("*.safetensors"):  # what cannot be read would be told otherwise
            file.write_bytes(b"no weights")

    def load(target: Path, draft: Path) -> Callable[[], object]:
        return lambda: LLM(target, f"model:{draft}", compile=False)

    refuse(load(bart, llama), UnsupportedError, "target has an encoder", "draft has none", "prompt-lookup")
    refuse(load(bart, root / "marian"), UnsupportedError, "family marian", "bart")
    refuse(load(bart, root / "t5"), UnsupportedError, "family t5", "bart")
    refuse(load(whispering, mels), UnsupportedError, "num_mel_bins 8", "16")
    refuse(
        lambda: LLM((tiny_llama(VOCAB), TOKENIZER), f"model:{bart}", compile=False),
        UnsupportedError,
        "draft has an encoder",
        "target has none",
    )


def test_a_draft_of_another_vocabulary_is_refused(root: Path, tmp_path: Path) -> None:
    from toys import character_tokenizer

    other = tmp_path / "other"
    save_model(other, build("bart"), character_tokenizer("".join(map(chr, range(0x30A1, 0x30A1 + VOCAB - 2)))))
    refuse(lambda: LLM(folder_of("bart", root), f"model:{other}", compile=False), UnsupportedError, "tokenizers differ")


def test_unknown_families_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "prophetnet", "is_encoder_decoder": True}), encoding="utf-8"
    )
    refuse(lambda: LLM(tmp_path, "none"), UnsupportedError, "prophetnet", "whisper")


@pytest.mark.thorough
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("name", [name for name in ALL if name != "marian"])
def test_weights_on_disk(name: str, drafted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of encoder and decoder: texts are those of the model in memory, and nothing stays there."""
    monkeypatch.setattr("sakiyomi.model_executor.loading.stream.SMALL", 0)
    model, given = model_of(name), sources(name)
    wanted = [reference(model, source) for source in given]
    draft = ModelDrafter(build_runner(model, compile=False), VOCAB) if drafted else "none"
    llm = LLM(folder_of(name, tmp_path), draft, offload="disk", compile=False)
    target = llm.target.weights
    assert target.encoder is not None
    assert target.stream is not None
    parts = [*target.module.parameters(), *target.encoder.module.parameters()]
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, gamma=3, tree="static", nodes=5)
    for _ in range(2):  # the second time tensors are read ahead in the order of the first
        done = llm.generate(given, params)
        assert [out.token_ids for out in done] == wanted
        assert all((out.stats.accepted > 0) == drafted for out in done)
        assert all(part.is_meta for part in parts), "something stayed in memory"
    names = {name.partition(".")[0] for name in target.stream.extents}
    assert names == {"0", "1"}, "encoder and decoder share a stream"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_a_loaded_model_whose_weights_are_on_disk(name: str, tmp_path: Path) -> None:
    folder, given = folder_of(name, tmp_path), sources(name)
    model = type(model_of(name)).from_pretrained(folder, device_map={"": "disk"})
    llm = LLM((model, TOKENIZER), "none", compile=False)
    done = llm.generate(given, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    assert [out.token_ids for out in done] == [reference(model_of(name), source) for source in given]


def test_positions_that_are_in_no_file_are_refused(root: Path) -> None:
    refuse(lambda: LLM(folder_of("marian", root), "none", offload="disk"), UnsupportedError, "offload", "positions")


def test_a_source_for_which_there_is_no_memory_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(model_of("bart"), max_batch=4)
    assert llm.target.sources is not None
    monkeypatch.setattr(llm.target.sources.sizing, "available", lambda: 0)
    first = llm.engine.submit(sources("bart")[0], params())
    llm.engine.step()
    assert isinstance(first.error, sakiyomi.MemoryLimitError)
    monkeypatch.undo()
    assert llm.generate([sources("bart")[1]], params(ignore_eos=True))[0].token_ids == reference(
        model_of("bart"), sources("bart")[1]
    )


def test_a_source_too_long_for_the_draft_goes_undrafted() -> None:
    small = build("bart", seed=3, max_position_embeddings=40)
    llm = llm_of(model_of("bart"), ModelDrafter(build_runner(small, compile=False), VOCAB))
    long, short = sources("bart", (60, 30))
    done = llm.generate([long, short], params(gamma=2, ignore_eos=True))
    assert [out.token_ids for out in done] == [reference(model_of("bart"), source) for source in (long, short)]
    assert [out.stats.drafted > 0 for out in done] == [False, True]
