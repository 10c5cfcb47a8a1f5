"""Classes that nothing here can take apart: greedy text equals transformers', in every way in which texts are read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import causal_models
from architectures import ALL, REFUSED, VOCAB, greedy, make, prompt
from drafters import Branching, Scripted, texts_of
from sakiyomi import LLM, SamplingParams, UnsupportedError
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor import own_forward
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.own_forward import OwnForward, TextReader
from toys import character_tokenizer

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
NEW = 16
PROMPTS = [prompt(11, 1), prompt(3, 2), prompt(19, 3)]


def _sparse() -> Any:
    config = causal_models.config("deepseek_v32")
    config.index_topk = 6  # fewer columns than there are
    config.index_n_heads = 32  # with few, many columns have the same score: none; which of them are chosen is chance
    return config


CLASSES: dict[str, tuple[str, Callable[[], Any]]] = {
    "gpt_neo": ("cached", REFUSED["gpt_neo"]),
    "rwkv": ("cached", REFUSED["rwkv"]),
    "minimax": ("steps", REFUSED["minimax"]),
    "deepseek_v32": ("cached", _sparse),
    "openai-gpt": ("whole", lambda: causal_models.config("openai-gpt")),
}
"""By name: the way in which texts are read, and a tiny configuration."""


@cache
def model_of(name: str) -> Any:
    return make(CLASSES[name][1]())


@cache
def wanted(name: str) -> list[list[int]]:
    return [greedy(model_of(name), tokens, NEW) for tokens in PROMPTS]


def llm_of(name: str, kind: Any = None, **options: Any) -> LLM:
    drafter = "none" if kind is None else kind(texts_of(PROMPTS, wanted(name)), "sometimes", VOCAB)
    return LLM((model_of(name), TOKENIZER), drafter, compile=False, **options)


def texts(llm: LLM, chosen: list[int]) -> list[list[int]]:
    values = SamplingParams(max_new_tokens=NEW, ignore_eos=True, gamma=3)
    done = [out.token_ids for out in llm.generate([PROMPTS[i] for i in chosen], values)]
    assert not llm.engine._speculation.broken, "the drafter raised"
    return done


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["chain", "tree", "chunks"])
@pytest.mark.parametrize("name", CLASSES)
def test_greedy_text(name: str, how: str) -> None:
    kind = {"chain": Scripted, "tree": Branching}.get(how)
    llm = llm_of(name, kind, chunk_size=4 if how == "chunks" else 512)
    assert llm.target.module.reader.way == CLASSES[name][0]
    for chosen in ([1], [0, 1, 2]):
        assert texts(llm, chosen) == [wanted(name)[i] for i in chosen]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt_neo", "deepseek_v32"])
def test_what_is_kept_of_a_text_is_not_changed_by_trees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that were rejected stay in a cache that was not copied."""
    llm = llm_of(name, Branching)
    monkeypatch.setattr(own_forward, "copy", type("copy", (), {"deepcopy": staticmethod(lambda read: read)}))
    values = SamplingParams(max_new_tokens=NEW, ignore_eos=True, gamma=3)
    try:
        done = [out.token_ids for out in llm.generate(PROMPTS, values)]
    except (IndexError, RuntimeError, ValueError):
        return
    assert done != wanted(name) or llm.engine._speculation.broken


def test_a_way_that_gives_other_logits_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof finds a cache that forgets, and the next way is tried; where none is left, the model is refused."""
    own = TextReader._forward

    def forgetful(self: TextReader, tokens: list[int], fresh: int, past: dict[str, Any]) -> Any:
        return own(self, tokens[-fresh:] if past else tokens, fresh, {})

    monkeypatch.setattr(TextReader, "_forward", forgetful)
    runner = build_runner(model_of("gpt_neo"), compile=False)
    assert isinstance(runner.module, OwnForward) and runner.module.reader.way == "whole"
    monkeypatch.setattr("sakiyomi.model_executor.own_forward.WAYS", ("cached", "steps"))
    with pytest.raises(UnsupportedError, match="its own forward does not give again"):
        build_runner(model_of("gpt_neo"), compile=False)


def test_a_class_that_asserts_what_it_is_given_runs_by_itself() -> None:
    """Its own forward gets what ``generate`` gives it, here a mask; our cache has none for it."""

    def checked(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        assert given.get("attention_mask") is not None, "a mask is needed"

    model = make(ALL["llama"]())
    model.register_forward_pre_hook(checked, with_kwargs=True)
    assert isinstance(build_runner(model, compile=False).module, OwnForward)


def test_weights_that_a_class_rescales_are_rescaled_once() -> None:
    """The user's model and our copy of it share them: each would halve those of the second layer when it first runs."""
    config = REFUSED["rwkv"]()
    config.rescale_every = 1
    theirs, model = make(config), make(config)
    expected = greedy(theirs, PROMPTS[0], 12)
    llm = LLM((model, TOKENIZER), "none", compile=False)
    values = SamplingParams(max_new_tokens=12, ignore_eos=True)
    assert llm.generate([PROMPTS[0]], values)[0].token_ids == expected
    assert greedy(model, PROMPTS[0], 12) == expected
    for one, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    assert llm.generate([PROMPTS[0]], values)[0].token_ids == expected


def test_conversations_go_on_from_what_was_read() -> None:
    """A second turn, and a fork of the first, are the texts of fresh requests."""
    llm = llm_of("rwkv", Scripted)
    values = SamplingParams(max_new_tokens=6, ignore_eos=True)
    with llm.conversation() as talk:
        first = talk.generate(PROMPTS[0], values).token_ids
        second = [*PROMPTS[0], *first, *PROMPTS[1]]
        more = talk.generate(second, values).token_ids
    assert first == greedy(model_of("rwkv"), PROMPTS[0], 6)
    assert more == greedy(model_of("rwkv"), second, 6)


def test_memory_counts_what_the_class_keeps() -> None:
    runner = build_runner(model_of("gpt_neo"), compile=False)
    with runner.cache.lent(8) as slot:
        before = runner.cache.bytes
        runner.score([SequenceRows(slot, 0, PROMPTS[0], prompt=True)])
        assert runner.cache.bytes - before == 2 * 2 * 32 * len(PROMPTS[0]) * 4  # keys and values of two layers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exact": True}, "keeps its own attention.*leave quantize at None and exact at False"),
        ({"cache": "streaming", "kv_budget": 64}, "keeps its own attention"),
        ({"draft": "early-exit:1"}, "early exit"),
    ],
)
def test_what_asks_for_keys_and_values_is_refused(options: dict[str, Any], words: str) -> None:
    draft = options.pop("draft", "none")
    with pytest.raises(UnsupportedError, match=words):
        LLM((model_of("gpt_neo"), TOKENIZER), draft, compile=False, **options)


def test_hidden_states_come_row_by_row() -> None:
    """What layers give is that of the rows of the pass, in their order."""
    model = make(hf.GPTNeoConfig(**CLASSES["gpt_neo"][1]().to_diff_dict()))
    runner = build_runner(copy.deepcopy(model), compile=False)
    runner.capture([0])
    with runner.cache.lent(8) as slot:
        out = runner.score([SequenceRows(slot, 0, PROMPTS[1], prompt=True)])
    assert sorted(out.features) == [-1, 0]
    assert [len(states) for states in out.features.values()] == [3, 3]
