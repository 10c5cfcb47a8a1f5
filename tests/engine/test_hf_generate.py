"""``model.generate(..., custom_generate=sakiyomi.custom_generate)``: what transformers gives, whoever reads ahead."""

from __future__ import annotations

import functools
import gc
import subprocess
import threading
import weakref
from collections.abc import Callable, Generator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

import sakiyomi
from architectures import CONFIGS, VOCAB, make, model_of, prompt
from sakiyomi.core.errors import InputError, SakiyomiError, UnsupportedError
from sakiyomi.core.hf_names import CACHE
from sakiyomi.engine.engine import Engine
from sakiyomi.engine.hf_generate.generate import CustomGenerate, _receive_all_arguments
from sakiyomi.model_executor.model_state import ModelState
from seq2seq_toys import FOUR, sources
from seq2seq_toys import build as build_seq2seq
from seq2seq_toys import model_of as seq2seq_of
from statistical.harness import LEVEL, p_value
from toys import tiny_llama, tiny_tokenizer
from warm import warm

OURS = sakiyomi.custom_generate.using(compile=False)
NEW = 24
PAD = 1


@pytest.fixture(autouse=True)
def _quiet() -> Generator[None, None, None]:
    """Transformers warns of settings that do not go together; its words are not what is tested."""
    before = hf.logging.get_verbosity()
    hf.logging.set_verbosity_error()
    yield
    hf.logging.set_verbosity(before)


@cache
def assistant() -> Any:
    return make(CONFIGS["llama"](), seed=5)


def batch(*lengths: int) -> dict[str, Tensor]:
    """Prompts of these lengths, padded on the left."""
    longest = max(lengths)
    rows = [[PAD] * (longest - n) + prompt(n, seed=n) for n in lengths]
    mask = [[0] * (longest - n) + [1] * n for n in lengths]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def both(model: Any, inputs: dict[str, Tensor], draft: Any = None, **options: Any) -> tuple[Any, Any]:
    """What transformers gives, and what it gives with our loop."""
    values: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD} | options
    theirs = model.generate(**inputs, **values)
    return theirs, model.generate(**inputs, **values, custom_generate=OURS, assistant_model=draft)


def same(model: Any, inputs: dict[str, Tensor], draft: Any = None, **options: Any) -> Tensor:
    theirs, ours = both(model, inputs, draft, **options)
    assert theirs.tolist() == ours.tolist()
    return ours  # type: ignore[no-any-return]


# ------------------------------------------------------------ what is changed in transformers


def test_transformers_is_changed_when_custom_generate_is_asked_for_and_not_at_import() -> None:
    code = """
import transformers, sakiyomi.engine.hf_generate.generate as ours
method = transformers.GenerationMixin._extract_generation_mode_kwargs
assert not hasattr(method, "__wrapped__"), "changed at import"
import sakiyomi
assert callable(sakiyomi.custom_generate)
assert transformers.GenerationMixin._extract_generation_mode_kwargs.__wrapped__ is method
sakiyomi.custom_generate.using(gamma=3)
assert transformers.GenerationMixin._extract_generation_mode_kwargs.__wrapped__ is method, "wrapped twice"
"""
    done = subprocess.run([*warm(), "-c", code], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr


def test_a_version_of_transformers_without_the_method_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else assistant_model= is lost without a word, and the text comes at the speed of plain decoding."""
    monkeypatch.delattr(hf.GenerationMixin, "_extract_generation_mode_kwargs")
    _receive_all_arguments.cache_clear()
    loop = sakiyomi.custom_generate.using(gamma=3).using(gamma=4)
    assert isinstance(loop, CustomGenerate)
    (record,) = caplog.records
    for part in ("has no GenerationMixin._extract_generation_mode_kwargs", "assistant_model", "functools.partial"):
        assert part in record.getMessage()


# ------------------------------------------------------------ greedy, by architecture


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "opt", "gpt2", "gpt_neox", "falcon", "qwen3"])
def test_greedy_batch(name: str) -> None:
    """Padding on the left, rows that end at different lengths, a draft that is mostly wrong."""
    plain = same(model_of(name), batch(9, 4, 13), assistant())
    end = int(plain[1, 13 + 8])
    ended = same(model_of(name), batch(9, 4, 13), assistant(), eos_token_id=[end])
    assert (ended == PAD)[:, 13:].any()


def test_a_draft_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[None] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: (rounds.append(None), step(engine))[1])
    model, values = tiny_llama(), {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 40, "eos_token_id": None}
    expected = model.generate(**values)
    found = model.generate(**values, custom_generate=OURS.using(gamma=4), assistant_model=tiny_llama())
    assert found.tolist() == expected.tolist()
    assert len(rounds) < 15  # the draft was used


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 4}, {"assistant_early_exit": 1}], ids=str)
def test_other_drafts(options: dict[str, Any]) -> None:
    model = tiny_llama()
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 5, 6, 7, 5]])}
    expected = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    assert model.generate(**inputs, max_new_tokens=30, custom_generate=OURS, **options).tolist() == expected.tolist()
    found = model.generate(**inputs, max_new_tokens=30, custom_generate=OURS.using(draft="suffix"))
    assert found.tolist() == expected.tolist()


def test_a_draft_of_another_tokenizer() -> None:
    ours, theirs = tiny_tokenizer(), tiny_tokenizer(290)
    model, draft = tiny_llama(len(ours)), tiny_llama(len(theirs), seed=3)
    inputs = {"input_ids": ours("Once upon a time", return_tensors="pt").input_ids}
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    found = model.generate(
        **inputs,
        max_new_tokens=20,
        custom_generate=OURS,
        assistant_model=draft,
        tokenizer=ours,
        assistant_tokenizer=theirs,
    )
    assert found.tolist() == expected.tolist()


def test_a_partial_hides_the_draft() -> None:
    """From transformers, which refuses several samples with one."""
    model = tiny_llama()
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**inputs)
    with_draft = functools.partial(OURS, assistant_model=tiny_llama(seed=1))
    assert model.generate(**inputs, custom_generate=with_draft).tolist() == expected.tolist()
    samples = inputs | {"do_sample": True, "num_return_sequences": 3, "eos_token_id": None}
    torch.manual_seed(0)
    found = model.generate(**samples, custom_generate=with_draft)
    assert found.shape == (3, 11)
    assert len({tuple(row) for row in found.tolist()}) > 1


# ------------------------------------------------------------ criteria, streamers, processors


class StopAfterSum(hf.StoppingCriteria):
    """Looks at every prefix, and writes down what it saw."""

    def __init__(self, limit: int = 700) -> None:
        self.limit, self.seen = limit, []  # type: ignore[var-annotated]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.seen.append(input_ids.tolist())
        return (input_ids.sum(1) > self.limit) & (input_ids[:, -1] % 2 == 0)


@pytest.mark.parametrize("eos", [None, 3])
@pytest.mark.parametrize("lengths", [(7,), (7, 3)])
def test_own_criteria_see_what_they_would_see(lengths: tuple[int, ...], eos: int | None) -> None:
    """Called after every token with all rows; rows that are over are padded, or written on without an end token."""
    seen = []
    for custom, draft in ((None, None), (OURS, assistant())):
        criterion = StopAfterSum()
        more = {} if custom is None else {"custom_generate": custom, "assistant_model": draft}
        model_of("llama").generate(
            **batch(*lengths),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=PAD,
            eos_token_id=eos,
            stopping_criteria=hf.StoppingCriteriaList([criterion]),
            **more,
        )
        seen.append(criterion.seen)
    assert seen[0] == seen[1]
    assert len(seen[0]) < NEW


def test_stop_strings() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(len(tokenizer))
    inputs = {"input_ids": tokenizer("Once upon", return_tensors="pt").input_ids}
    plain = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    text = tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :])
    same(model, inputs, tiny_llama(len(tokenizer), seed=2), stop_strings=[text[6:9]], tokenizer=tokenizer)


def test_max_time_ends_it() -> None:
    out = tiny_llama().generate(
        input_ids=torch.tensor([[5, 6]]), max_new_tokens=400, max_time=0.0, eos_token_id=None, custom_generate=OURS
    )
    assert out.shape[1] < 10


class Told(hf.generation.streamers.BaseStreamer):  # type: ignore[name-defined]
    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


@pytest.mark.parametrize("lengths", [(7,), (7, 3)])
def test_streamers_get_every_step(lengths: tuple[int, ...]) -> None:
    theirs, ours = Told(), Told()
    model, values = model_of("llama"), {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
    model.generate(**batch(*lengths), **values, streamer=theirs)
    model.generate(**batch(*lengths), **values, streamer=ours, custom_generate=OURS, assistant_model=assistant())
    assert theirs.values == ours.values


def test_text_streamers(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    model, draft = tiny_llama(len(tokenizer)), tiny_llama(len(tokenizer), seed=2)
    values = {"input_ids": tokenizer("Once upon", return_tensors="pt").input_ids, "max_new_tokens": 20}
    values |= {"do_sample": False, "custom_generate": OURS, "assistant_model": draft}
    streamer = hf.TextIteratorStreamer(tokenizer, timeout=60)
    thread = threading.Thread(target=model.generate, kwargs=values | {"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    out = model.generate(**values, streamer=hf.TextStreamer(tokenizer, skip_prompt=True))
    assert text == tokenizer.decode(out[0])
    assert capsys.readouterr().out.strip() == tokenizer.decode(out[0, values["input_ids"].shape[1] :]).strip()


class OddPlaces(hf.LogitsProcessor):
    """Looks at the length, padding included, and at its row."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row in range(len(scores)):
            scores[row, (input_ids.shape[1] + row) % 3 :: 3] -= 5.0
        return scores


def allowed(row: int, ids: Tensor) -> list[int]:
    return [token for token in range(3, VOCAB) if (token + row + len(ids)) % 4]


PROCESSORS: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "lengths": {"min_new_tokens": 9, "eos_token_id": list(range(40)), "begin_suppress_tokens": [*range(60)]},
    "forced": {"forced_eos_token_id": 7, "suppress_tokens": [*range(8, 30)], "eos_token_id": 7},
    "words": {"bad_words_ids": [[t] for t in range(3, 50)], "sequence_bias": {(60,): 4.0, (70, 61): 9.0}},
    "decay": {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": 11},
    "own": {"logits_processor": hf.LogitsProcessorList([OddPlaces()])},
    "allowed": {"prefix_allowed_tokens_fn": allowed},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS)
def test_processors(options: dict[str, Any]) -> None:
    same(model_of("llama"), batch(9, 4), assistant(), **options)
    same(model_of("llama"), batch(9), assistant(), **options)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 1}], ids=str)
def test_scores_and_logits(options: dict[str, Any]) -> None:
    """top_k=1 leaves one choice, so that sampled texts can be compared."""
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    theirs, ours = both(model_of("llama"), batch(9, 4), assistant(), **wanted, **options)
    assert type(theirs) is type(ours)
    assert theirs.sequences.tolist() == ours.sequences.tolist()
    for name in ("scores", "logits"):
        a, b = torch.stack(theirs[name]), torch.stack(ours[name])
        assert torch.equal(a.isinf(), b.isinf())
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)
    assert getattr(ours, CACHE) is None
    assert both(model_of("llama"), batch(9), return_dict_in_generate=True)[1].scores is None


# ------------------------------------------------------------ sampling

SMALL, LENGTH, SAMPLES = 5, 3, 1200
WARPS: dict[str, dict[str, Any]] = {
    "all": {"temperature": 1.4, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
    "theirs": {"top_k": 0, "typical_p": 0.8, "repetition_penalty": 1.5, "renormalize_logits": True},
}


@pytest.mark.thorough
@pytest.mark.parametrize("options", WARPS.values(), ids=WARPS)
def test_distribution(options: dict[str, Any]) -> None:
    """Joint distribution of three tokens, by transformers' own processors; a false alarm once in a million seeds."""
    model, draft = (
        tiny_llama(SMALL, layers=1, dim=16, seed=seed, initializer_range=0.5, eos_token_id=None) for seed in (0, 1)
    )
    ids = torch.tensor([[3, 1, 4]])
    texts: dict[tuple[int, ...], int] = {}
    torch.manual_seed(7)
    ours = functools.partial(OURS.using(gamma=2), assistant_model=draft)
    values: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": True, "pad_token_id": 0} | options
    found = model.generate(input_ids=ids, num_return_sequences=SAMPLES, custom_generate=ours, **values)
    for row in found[:, 3:].tolist():
        texts[tuple(row)] = texts.get(tuple(row), 0) + 1
    expected, seen = np.zeros(SMALL**LENGTH), np.zeros(SMALL**LENGTH, dtype=np.int64)
    every = torch.cartesian_prod(*[torch.arange(SMALL)] * LENGTH)
    whole = torch.cat([ids.expand(len(every), -1), every], 1)
    chances = torch.ones(len(every), dtype=torch.float64)
    config = hf.GenerationConfig(**values)
    processors = model._get_logits_processor(config, 3, logits_processor=hf.LogitsProcessorList())
    with torch.no_grad():
        logits = model(input_ids=whole).logits
    for place in range(3, 3 + LENGTH):
        probs = processors(whole[:, :place], logits[:, place - 1].float()).softmax(-1)
        chances *= probs.gather(1, whole[:, place : place + 1])[:, 0].double()
    for i, text in enumerate(every.tolist()):
        expected[i], seen[i] = float(chances[i]), texts.get(tuple(text), 0)
    p, distance = p_value(seen, expected / expected.sum())
    print(f"p = {p:.3g}, TV = {distance:.4f}")
    assert p > LEVEL


def test_manual_seed_gives_the_same_text() -> None:
    texts = []
    for draft, seed in ((None, 5), (assistant(), 5), (assistant(), 6)):
        torch.manual_seed(seed)
        values: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "pad_token_id": PAD}
        texts += [
            model_of("llama").generate(**batch(9, 4), **values, custom_generate=OURS, assistant_model=draft).tolist()
            for _ in range(2)
        ]
    assert texts[:2] == texts[2:4]  # whatever drafts
    assert texts[0] != texts[1]
    assert texts[2] != texts[4]


# ------------------------------------------------------------ encoder-decoder


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FOUR)
def test_encoder_decoder(name: str) -> None:
    model, draft = seq2seq_of(name), build_seq2seq(name, seed=3, layers=1)
    values: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    given = sources(name)
    if name == "whisper":
        inputs: dict[str, Any] = {"inputs": torch.stack(given)}
    else:
        longest = max(map(len, given))
        inputs = {
            "inputs": torch.tensor([row + [0] * (longest - len(row)) for row in given]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in given]),
        }
    plain = hf.GenerationMixin.generate
    expected = plain(model, **inputs, **values)
    found = plain(model, **inputs, **values, custom_generate=OURS, assistant_model=draft)
    assert found.tolist() == expected.tolist()
    full = plain(model, **inputs, **values, custom_generate=OURS, return_dict_in_generate=True, output_logits=True)
    assert isinstance(full, hf.generation.utils.GenerateEncoderDecoderOutput)
    assert full.sequences.tolist() == expected.tolist()


def test_whispers_own_generate() -> None:
    """It calls ``generate`` many times, and is given an assistant where transformers alone takes one sound."""
    model, sounds = seq2seq_of("whisper"), torch.stack(sources("whisper")[:2])
    expected = model.generate(sounds, max_new_tokens=8)
    draft = build_seq2seq("whisper", seed=3, layers=1)
    found = model.generate(sounds, max_new_tokens=8, custom_generate=OURS, assistant_model=draft)
    assert found.tolist() == expected.tolist()


# ------------------------------------------------------------ what cannot be honoured

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams=2"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
    "constraints": ({"force_words_ids": [[5]], "num_beams": 2}, "constraints"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "static": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale"),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight=0.5"),
    "in step": ({"synced_gpus": True}, "synced_gpus=True"),
    "positions": ({"position_ids": torch.tensor([[0, 1, 2, 4]])}, "position_ids"),
}


@pytest.mark.parametrize(("options", "words"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_honoured_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        model_of("llama").generate(
            input_ids=torch.tensor([[5, 6, 7, 8]]), max_new_tokens=4, custom_generate=OURS, pad_token_id=PAD, **options
        )
    assert words in str(caught.value)
    assert "; " in str(caught.value)


def test_caches_embeddings_and_padding_are_refused() -> None:
    model = model_of("llama")

    def message(kind: type[SakiyomiError], **inputs: Any) -> str:
        with pytest.raises(kind) as caught:
            model.generate(**inputs, max_new_tokens=4, custom_generate=OURS, pad_token_id=PAD)
        return str(caught.value)

    ids = torch.tensor([[5, 6, 7, 8]])
    assert CACHE in message(UnsupportedError, input_ids=ids, **{CACHE: hf.DynamicCache()})
    embeds = model.get_input_embeddings()(ids).detach()
    assert "inputs_embeds" in message(UnsupportedError, inputs_embeds=embeds)
    assert "left" in message(InputError, input_ids=ids, attention_mask=torch.tensor([[1, 1, 1, 0]]))
    with pytest.raises(InputError, match="gammas"):
        OURS.using(gammas=3)
    with pytest.raises(InputError, match="assistant_model="):
        model.generate(input_ids=ids, max_new_tokens=2, custom_generate=OURS.using(draft="model:tales-draft"))


def test_errors_of_a_processor_come_out() -> None:
    def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    model = tiny_llama()
    with pytest.raises(ZeroDivisionError, match="mine"):
        model.generate(input_ids=torch.tensor([[5]]), custom_generate=OURS, max_new_tokens=3, logits_processor=[broken])
    assert model.generate(input_ids=torch.tensor([[5]]), custom_generate=OURS, max_new_tokens=3).shape[1] > 1


def test_others_loops_are_called_as_before() -> None:
    given: dict[str, Any] = {}

    def loop(model: Any, input_ids: Tensor, logits_processor: Any, mine: int = 0, **others: Any) -> Tensor:
        given.update(others, mine=mine)
        return input_ids

    tiny_llama().generate(
        input_ids=torch.tensor([[5]]), custom_generate=loop, mine=3, max_new_tokens=2, assistant_model=assistant()
    )
    assert given["mine"] == 3


# ------------------------------------------------------------ the model is the user's


def changed_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1.0)


def changed_through_data(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight.data.mul_(-1.0)


def replaced(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().roll(1, 0))


def hooked(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out * -1.0)


@pytest.mark.few(2)
@pytest.mark.parametrize("change", [changed_in_place, changed_through_data, replaced, hooked])
def test_a_changed_model_gives_no_stale_text(change: Callable[[Any], None]) -> None:
    model, inputs = tiny_llama(), {"input_ids": torch.tensor([[5, 6, 7]])}
    before = same(model, inputs)
    change(model)
    assert same(model, inputs).tolist() != before.tolist()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters() -> None:
    """LoRA as it is put in, switched off, and merged."""
    peft = pytest.importorskip("peft")
    model, inputs = tiny_llama(), {"input_ids": torch.tensor([[5, 6, 7]])}
    bare = same(model, inputs).tolist()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_alpha=64)
    adapted = peft.get_peft_model(model, config).eval()
    with_adapter = same(adapted, inputs).tolist()
    assert with_adapter != bare
    with adapted.disable_adapter():
        assert same(adapted, inputs).tolist() == bare
    merged = adapted.merge_and_unload()
    assert same(merged, inputs).tolist() == with_adapter


def test_a_model_that_is_used_is_not_packed_again() -> None:
    model, inputs = tiny_llama(), {"input_ids": torch.tensor([[5, 6, 7]])}
    state = ModelState(model)
    first = same(model, inputs, max_new_tokens=4)
    engines = OURS._engines
    packed = [*engines._packed[model].values()]
    model.train().eval()
    same(model, inputs, tiny_llama(seed=1), max_new_tokens=4)
    same(model, inputs, max_new_tokens=4, prompt_lookup_num_tokens=2)
    assert [*engines._packed[model].values()] == packed  # all drafts share it
    assert state.changed(model) is None
    OURS.forget(model)
    assert model not in engines._packed
    assert same(model, inputs, max_new_tokens=4).tolist() == first.tolist()


@pytest.mark.thorough
def test_what_is_kept_goes_with_the_model() -> None:
    model = tiny_llama()
    same(model, {"input_ids": torch.tensor([[5, 6]])}, tiny_llama(seed=1), max_new_tokens=3)
    (packed,) = map(weakref.ref, OURS._engines._packed[model].values())
    del model
    gc.collect()
    assert packed() is None


def test_threads_share_a_model() -> None:
    model, results = tiny_llama(), {}
    prompts = {seed: torch.tensor([[5 + seed, 6, 7]]) for seed in range(4)}

    def work(seed: int) -> None:
        results[seed] = model.generate(input_ids=prompts[seed], max_new_tokens=20, custom_generate=OURS).tolist()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, ids in prompts.items():
        assert results[seed] == model.generate(input_ids=ids, max_new_tokens=20).tolist()


def test_the_context_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama(max_position_embeddings=16)
    out = model.generate(input_ids=torch.tensor([[5, 6]]), max_new_tokens=40, eos_token_id=None, custom_generate=OURS)
    assert out.shape[1] == 16
    assert "context" in caplog.text
