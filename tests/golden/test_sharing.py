"""Requests that run at once and begin alike: what one has read the others copy, and every text is that of a request
that reads its prompt itself.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sakiyomi.model_executor.build
import seq2seq_toys
from architectures import VOCAB, model_of, prompt, rounds_decoding_otherwise
from sakiyomi import LLM, MemoryLimitError, SamplingParams
from sakiyomi.cache.eviction import EvictingCache
from sakiyomi.cache.prefix import alike
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.engine.request import Request, RetainedSlot
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.runner import ModelRunner
from toys import character_tokenizer

CHUNK = 16
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
BEGINNING = prompt(100, 1)
PROMPTS = [
    [*BEGINNING, *prompt(29, 2)],
    [*BEGINNING, *prompt(3, 3)],
    [*BEGINNING, *prompt(29, 2)],
    [*BEGINNING[:64], *prompt(20, 4)],
    prompt(40, 5),
    BEGINNING,
]
CACHES: dict[str, dict[str, Any]] = {
    "full": {},
    "h2o": {"cache": "h2o[local=4]", "kv_budget": 40},
    "h2o, packed": {"cache": "h2o[local=4]+quant-4[residual=8]", "kv_budget": 44},
    "both ends": {"cache": "snapkv[window=4,local=4,ends=0.8]", "kv_budget": 40},
    "the prompt alone": {"cache": "pyramidkv[window=4,local=0,pyramid=4,where=prompt]", "kv_budget": 40},
    "sirllm": {"cache": "sirllm[local=4]", "kv_budget": 40},
    "moved": {"cache": "streaming[local=4,positions=reassigned]", "kv_budget": 40},
    "infllm": {"cache": "infllm[block=4,sinks=4,local=4]", "kv_budget": 40},
}
"""Those that differ in what is copied; all are tried in ``test_exact_everywhere.py``."""
HOW = {"max_new_tokens": 24, "ignore_eos": True, "logprobs": 3, "gamma": 3}
GREEDY, SEEDED = SamplingParams(**HOW), SamplingParams(**HOW, temperature=0.9, top_p=0.95, seed=1)


def make(kind: str, draft: Any = "none", model: Any = None, **options: Any) -> LLM:
    model = model_of("llama") if model is None else model
    return LLM((model, TOKENIZER), draft, compile=False, **({"chunk_size": CHUNK} | CACHES[kind] | options))


def near(slots: int = 8) -> ModelDrafter:
    """A draft that is right half of the time."""
    model = copy.deepcopy(model_of("llama"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.05)
    return ModelDrafter(build_runner(model, compile=False, max_slots=slots), VOCAB)


def run(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, **options: Any) -> list[Request]:
    """All at once; the last one comes two rounds later."""
    *first, last = prompts
    requests = [llm.engine.submit(tokens, params, key=(i,), **options) for i, tokens in enumerate(first)]
    llm.engine.step()
    llm.engine.step()
    requests.append(llm.engine.submit(last, params, key=(len(first),), **options))
    finish(llm)
    return requests


def finish(llm: LLM) -> None:
    while llm.engine.busy:
        llm.engine.step()


def alone(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[Request]:
    found = []
    for i, tokens in enumerate(prompts):
        found.append(llm.engine.submit(tokens, params, key=(i,), shares=False))
        finish(llm)
    return found


@cache
def shared(kind: str, exact: bool = True) -> LLM:
    """Four places and a draft; of the numbers in bfloat16 every bit counts."""
    model = copy.deepcopy(model_of("llama")).to(torch.bfloat16 if exact else torch.float32)
    return make(kind, near(4), exact=exact, max_batch=4, model=model)


def counted(model: ModelRunner) -> list[int]:
    """Rows of each pass over prompts, as they come."""
    rows: list[int] = []
    score = model.score

    def heard(segments: Any, **options: Any) -> Any:
        if any(segment.prompt for segment in segments):
            rows.append(sum(len(segment.tokens) for segment in segments))
        return score(segments, **options)

    model.score = heard  # type: ignore[method-assign]
    return rows


BITS = st.integers(0, 1)


@settings(derandomize=True, deadline=None)
@given(st.lists(BITS, max_size=150), st.lists(BITS, max_size=70), st.lists(BITS, max_size=70))
def test_what_two_texts_have_in_common(same: list[int], one: list[int], other: list[int]) -> None:
    texts = [*same, *one], [*same, *other]
    pairs = zip(*texts, strict=False)
    assert alike(*texts) == sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


# ---------------------------------------------------------------- texts


@pytest.mark.thorough
@pytest.mark.parametrize("kind", CACHES)
def test_every_cache_is_bit_equal(kind: str) -> None:
    """With ``exact``: tokens and log probabilities are those of a request alone; greedy, and seeded with a draft."""
    llm = shared(kind)
    requests = run(llm, PROMPTS, SEEDED)
    for request, wanted in zip(requests, alone(llm, PROMPTS, SEEDED), strict=True):
        assert request.output == wanted.output
        assert [e.top_logprobs for e in request.trace] == [e.top_logprobs for e in wanted.trace]
    reused = [request.stats.reused for request in requests]
    assert reused[0] == reused[4] == 0 and reused[2] == (112 if kind == "both ends" else 128)
    # Of 64 tokens in common the next one is another, and how likely it was the policy has been told.
    assert reused[3] == (48 if kind == "sirllm" else 64)
    assert llm.target.cache.free == 4


@pytest.mark.thorough
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_every_token_is_used_again(params: SamplingParams) -> None:
    """In float32, with a draft and without; a place in the middle of a chunk is as good as another."""
    wanted = [request.output for request in alone(make("full"), PROMPTS, params)]
    for draft in ("none", near()):
        llm = make("full", draft, chunk_size=256)
        requests = run(llm, PROMPTS, params)
        assert [request.output for request in requests] == wanted
        assert [request.stats.reused for request in requests] == [0, 100, 128, 64, 0, 99]
    assert sum(request.stats.accepted for request in requests) > 20


@pytest.mark.thorough
@pytest.mark.parametrize("broken", ["what the policy knows", "rows of decoding passes"])
def test_what_must_not_be_shared(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above see it, with ``exact``."""
    kind = "h2o" if broken == "what the policy knows" else "full"
    llm = shared(kind)
    if kind == "full":
        rounds_decoding_otherwise(llm)

    def same() -> bool:
        first = llm.engine.submit(PROMPTS[0], GREEDY)
        while kind == "full" and len(first.output) < 20:
            llm.engine.step()
        tokens = [*first.tokens, *prompt(9, 7)]
        second = llm.engine.submit(tokens, GREEDY)
        finish(llm)
        assert second.stats.reused
        (wanted,) = alone(llm, [tokens], GREEDY)
        return [e.top_logprobs for e in second.trace] == [e.top_logprobs for e in wanted.trace]

    assert same()
    if kind == "h2o":
        fork = EvictingCache.fork

        def forgetting(self: EvictingCache, slot: int, *where: int) -> None:
            fork(self, slot, *where)
            for heads in self._slots[slot].scores:
                heads[:] = [torch.zeros_like(scores) for scores in heads]

        monkeypatch.setattr(EvictingCache, "fork", forgetting)
    else:
        monkeypatch.setattr(llm.engine._slots, "_exact", False)
    assert not same()


@pytest.mark.thorough
def test_a_conversation_lends_what_others_would_have() -> None:
    """Its first prompt ended where for others it goes on, and the policy has kept that end: it goes on before it."""
    llm = shared("both ends")
    place = RetainedSlot()
    llm.engine.submit(BEGINNING[:96], replace(GREEDY, max_new_tokens=4), place=place)
    finish(llm)
    second, other = llm.engine.submit(PROMPTS[0], GREEDY, place=place), llm.engine.submit(PROMPTS[0], GREEDY)
    finish(llm)
    llm.engine.release(place)
    assert second.stats.reused < 96
    assert second.output == other.output == alone(llm, PROMPTS[:1], GREEDY)[0].output


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt2", "falcon"])
def test_other_attention(name: str) -> None:
    """Sliding windows, soft caps, learnt positions, attention that stays the model's own."""
    own, llm = (LLM((model_of(name), TOKENIZER), "none", compile=False) for _ in range(2))
    requests = run(llm, PROMPTS, GREEDY)
    assert [request.output for request in requests] == [request.output for request in alone(own, PROMPTS, GREEDY)]
    assert sum(request.stats.reused for request in requests) > 300


@pytest.mark.thorough
@pytest.mark.parametrize("draft", ["self-evicted:64", "early-exit:1", "suffix"])
def test_drafts_that_look_into_the_cache(draft: str) -> None:
    wanted = [request.output for request in alone(make("full"), PROMPTS, GREEDY)]
    requests = run(make("full", draft), PROMPTS, GREEDY)
    assert [request.output for request in requests] == wanted
    assert requests[2].stats.reused == 128


@pytest.mark.thorough
def test_samples_of_one_prompt() -> None:
    """The library's own: a prompt is read once, whatever is asked of it, also where nothing more is written."""
    for new in (1, 24):
        params = SamplingParams(max_new_tokens=new, ignore_eos=True, temperature=1.0, seed=3, n=8)
        llm = make("full", chunk_size=64)
        rows = counted(llm.target)
        samples = llm.generate([PROMPTS[0]], params)[0]
        assert rows == [64, 64, 8] and [out.stats.reused for out in samples] == [0] + 7 * [128]
        keyed = [(i, out.token_ids) for i, out in enumerate(samples)]
        for i, tokens in keyed:
            request = llm.engine.submit(PROMPTS[0], params, key=(0, i), shares=False)
            finish(llm)
            assert request.output == tokens


# ---------------------------------------------------------------- who waits for whom


def test_short_prompts_wait_for_nobody() -> None:
    llm = make("full", chunk_size=512)
    rows = counted(llm.target)
    run(llm, [PROMPTS[0][:60], PROMPTS[0][:50], PROMPTS[4]], GREEDY)
    assert rows[0] == 110


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["full", "h2o"])
def test_a_source_that_goes(kind: str) -> None:
    """The others go on from what it has read, and the next one of them is waited for."""
    llm = make(kind)
    requests = [llm.engine.submit(tokens, GREEDY, key=(i,)) for i, tokens in enumerate(PROMPTS[:4])]
    llm.engine.step()
    llm.engine.step()
    assert [request.cached for request in requests] == [32, 0, 0, 0]
    llm.engine.remove(requests[0].id)
    assert [request.cached for request in requests[1:]] == [32] * 3
    finish(llm)
    own = alone(make(kind), PROMPTS[:4], GREEDY)
    assert [request.output for request in requests[1:]] == [request.output for request in own[1:]]
    assert llm.target.cache.free == 8


def test_a_source_that_fails() -> None:
    """By its own processor, at its first token: each of the others is read, or fails, as it would alone."""

    def broken(ids: Tensor, scores: Tensor) -> Tensor:
        raise ValueError("the user's own mistake")

    llm = make("full", chunk_size=256)
    bad = SamplingParams(**HOW, logits_processors=[broken])
    requests = [
        llm.engine.submit(tokens, bad if i in (0, 2) else GREEDY, key=(i,)) for i, tokens in enumerate(PROMPTS[:4])
    ]
    finish(llm)
    own = alone(make("full"), PROMPTS[:4], GREEDY)
    assert [request.error is None for request in requests] == [False, True, False, True]
    assert [requests[i].output for i in (1, 3)] == [own[i].output for i in (1, 3)]
    assert requests[3].stats.reused == 64


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["full", "h2o"])
def test_an_interrupted_copy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of it: that request ends, the others go on."""
    llm = make(kind)
    fork = llm.target.cache.fork

    def interrupted(*args: Any) -> None:
        fork(*args)
        monkeypatch.setattr(llm.target.cache, "fork", fork)
        raise KeyboardInterrupt

    requests = [llm.engine.submit(tokens, GREEDY, key=(i,)) for i, tokens in enumerate(PROMPTS[:3])]
    monkeypatch.setattr(llm.target.cache, "fork", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish(llm)
    finish(llm)
    own = alone(make(kind), PROMPTS[:3], GREEDY)
    assert [request.error is None for request in requests] == [True, False, True]
    assert [requests[i].output for i in (0, 2)] == [own[i].output for i in (0, 2)]


def test_without_memory_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none for another slot: it ends as any request does, and the first one goes on."""
    llm = make("full")
    requests = [llm.engine.submit(PROMPTS[0], GREEDY) for _ in range(2)]
    llm.engine.step()
    monkeypatch.setattr(sakiyomi.model_executor.build, "available_bytes", lambda device: 0)
    finish(llm)
    monkeypatch.undo()
    (wanted,) = alone(make("full"), PROMPTS[:1], GREEDY)
    assert requests[0].output == wanted.output
    assert isinstance(requests[1].error, MemoryLimitError)


def test_an_encoder_says_another_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders' prompts are alike, and what was read of them is not."""

    def texts(llm: LLM, together: bool) -> list[list[int]]:
        requests = []
        for i, source in enumerate(seq2seq_toys.sources("bart")):
            asked = llm.engine._requests.process(source, GREEDY)
            asked = replace(asked, tokens=[*asked.tokens, *[3 + token % 50 for token in prompt(80, 1)]])
            requests.append(llm.engine.submit(asked, key=(i,)))
            if not together:
                finish(llm)
        finish(llm)
        return [request.output for request in requests]

    llm = LLM((seq2seq_toys.model_of("bart"), seq2seq_toys.TOKENIZER), "none", compile=False)
    assert texts(llm, True) == (wanted := texts(llm, False))
    monkeypatch.setattr(llm.engine._slots, "_akin", lambda request, other: request is not other)
    assert texts(llm, True) != wanted


# ---------------------------------------------------------------- the draft's own cache


def test_the_draft_copies_too() -> None:
    drafter = near()
    llm = make("full", drafter)
    rows = counted(drafter.model)
    run(llm, [PROMPTS[0], *PROMPTS[:3]], GREEDY)
    assert 100 < sum(rows) < 140
    assert drafter.model.cache.free == 8 and not drafter._seats


# ---------------------------------------------------------------- kept places


def served(llm: LLM, tokens: list[int], new: int = 12) -> Request:
    """A request as the server's: what it leaves may be used by all."""
    request = llm.engine.submit(
        tokens, SamplingParams(max_new_tokens=new, ignore_eos=True), place=RetainedSlot(shareable=True)
    )
    finish(llm)
    return request


def test_a_longer_conversation_is_not_lost() -> None:
    """Others copy from its place; its own next turn takes it over; when slots are wanted the oldest goes."""
    llm = make("full", max_batch=3)
    first = served(llm, PROMPTS[0])
    assert served(llm, PROMPTS[1]).stats.reused == 100
    assert llm.target.cache.free == 1
    second = served(llm, first.tokens + prompt(9, 7))
    assert (second.stats.reused, llm.target.cache.free) == (len(first.tokens) - 1, 1)
    assert served(llm, PROMPTS[3]).stats.reused == 64
    assert served(llm, PROMPTS[4]).stats.reused == 0, "the place of the second prompt"
    third = served(llm, second.tokens + prompt(9, 8))
    assert third.stats.reused == len(second.tokens) - 1
    (wanted,) = alone(make("full"), [second.tokens + prompt(9, 8)], GREEDY)
    assert third.output == wanted.output[:12]


@pytest.mark.parametrize("kind", ["full", "h2o"])
def test_a_prompt_that_was_left_is_gone_on_with(kind: str) -> None:
    """A client goes away while its prompt is read, and asks again."""
    llm = make(kind)
    left = llm.engine.submit(PROMPTS[0], GREEDY, place=RetainedSlot(shareable=True))
    llm.engine.step()
    llm.engine.step()
    llm.engine.remove(left.id)
    again = served(llm, PROMPTS[0])
    assert (again.stats.reused, llm.target.cache.free) == (32, 7)
    assert again.output == alone(llm, PROMPTS[:1], GREEDY)[0].output[:12]


def test_the_only_place_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot, or no memory for a second one: the next turn, and any prompt that begins alike, goes on in it."""
    for options in ({"max_batch": 1}, {}):
        llm = make("full", **options)
        first = served(llm, PROMPTS[0])
        if not options:
            monkeypatch.setattr(sakiyomi.model_executor.build, "available_bytes", lambda device: 0)
        assert served(llm, first.tokens + prompt(9, 7)).stats.reused == len(first.tokens) - 1
        assert served(llm, PROMPTS[3]).stats.reused == 64
        assert llm.target.cache.slots == 1


# ---------------------------------------------------------------- whatever comes


JOIN = st.tuples(st.just("join"), st.integers(0, len(PROMPTS) - 1), st.sampled_from([GREEDY, SEEDED]), st.booleans())
OPERATIONS = st.lists(
    st.one_of(JOIN, JOIN, st.tuples(st.just("run"), st.integers(1, 9)), st.tuples(st.just("leave"), st.integers(0, 4))),
    min_size=4,
    max_size=14,
)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "exact"), [("full", False), *((kind, True) for kind in CACHES)])
def test_whoever_comes_and_goes(kind: str, exact: bool) -> None:
    """Joins, rounds and cancellations in any order, places that are kept or not, more requests than slots."""
    llm = shared(kind, exact)
    places: list[RetainedSlot] = []
    reused = 0

    @cache
    def text(which: int, params: SamplingParams) -> list[int]:
        return alone(llm, [PROMPTS[which]], params)[0].output

    def joined(which: int, params: SamplingParams, keeps: bool) -> tuple[Request, int, SamplingParams]:
        places.append(RetainedSlot(shareable=True))
        place = places[-1] if keeps and kind == "full" else None  # others go on from what is dropped by then
        return llm.engine.submit(PROMPTS[which], params, place=place), which, params

    @settings(max_examples=8, derandomize=True, deadline=None)
    @given(OPERATIONS)
    def play(operations: list[tuple[Any, ...]]) -> None:
        nonlocal reused
        asked: list[tuple[Request, int, SamplingParams]] = []
        for what, *values in operations:
            if what == "join":
                asked.append(joined(*values))
            elif what == "run":
                for _ in range(values[0]):
                    llm.engine.step()
            elif asked:
                llm.engine.remove(asked[values[0] % len(asked)][0].id)
        finish(llm)
        for request, which, params in asked:
            reused += request.stats.reused
            assert request.output == text(which, params)[: len(request.output)]
            assert request.error is not None or len(request.output) == 24
        while places:
            llm.engine.release(places.pop())
        assert llm.target.cache.free == 4 and not llm.engine._slots._seated
        assert llm.draft.model.cache.free == 4  # type: ignore[union-attr]

    play()
    assert reused > 300
