"""The life of a conversation's place in the caches: kept, taken away, given back, whatever ends a request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from torch import Tensor

import sakiyomi.model_executor.build
import sakiyomi.model_executor.runner
from architectures import VOCAB, greedy, model_of, prompt
from drafters import Branching, Scripted, texts_of
from sakiyomi import LLM, InputError, MemoryLimitError, RemovedError, SamplingParams
from sakiyomi.core.tree import Draft
from sakiyomi.drafters import Context
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.model_executor.attention.cpu import CpuBackend
from toys import character_tokenizer, tiny_llama

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
NEW = 12
FIRST = prompt(11, 1)


@cache
def reply(tokens: tuple[int, ...]) -> list[int]:
    return greedy(model_of("llama"), list(tokens), NEW)


def second() -> list[int]:
    return FIRST + reply(tuple(FIRST)) + prompt(4, 2)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True, "gamma": 3} | values))


def llm_with(draft: Any = "none", **options: Any) -> LLM:
    return LLM((model_of("llama"), TOKENIZER), draft, compile=False, **options)


def scripted(kind: type[Scripted] = Scripted) -> Scripted:
    prompts = [FIRST, second()]
    return kind(texts_of(prompts, [reply(tuple(tokens)) for tokens in prompts]), "sometimes", VOCAB)


@pytest.mark.parametrize("what", ["inherit", "end"])
def test_a_drafter_that_fails_between_requests_costs_no_place(what: str, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Scripted):
        pass

    def fail(self: Failing, *contexts: Context) -> None:
        raise RuntimeError("the drafter's own mistake")

    setattr(Failing, what, fail)
    llm = llm_with(scripted(Failing), max_batch=1)
    with llm.conversation() as conversation:
        for tokens in (FIRST, second(), FIRST):
            assert conversation.generate(tokens, params()).token_ids == reply(tuple(tokens))
    assert llm.target.cache.free == 1
    assert f"failed in {what}: RuntimeError: the drafter's own mistake" in caplog.text


def test_other_requests_take_the_place_of_the_longest_idle() -> None:
    """Two places, three conversations and a request: nobody waits for ever, and all texts are what they were."""
    llm = llm_with(max_batch=2)
    conversations = [llm.conversation() for _ in range(3)]
    for conversation in conversations:
        assert conversation.generate(FIRST, params()).token_ids == reply(tuple(FIRST))
    assert llm.target.cache.free == 0
    assert conversations[2].generate(second(), params()).stats.reused == 22
    out = conversations[0].generate(second(), params())
    assert (out.stats.reused, out.token_ids) == (0, reply(tuple(second())))
    assert [out.token_ids for out in llm.generate([FIRST] * 5, params())] == [reply(tuple(FIRST))] * 5
    for conversation in conversations:
        conversation.close()
        conversation.close()
    assert sorted(llm.target.cache._free) == [0, 1]


def test_requests_beside_a_conversation() -> None:
    """Its request shares the passes of others, and leaves theirs as they are."""
    llm = llm_with(scripted(), max_batch=3)
    others = [llm.engine.add(FIRST, params()) for _ in range(5)]
    with llm.conversation() as conversation:
        assert conversation.generate(FIRST, params()).token_ids == reply(tuple(FIRST))
        steps = list(conversation.stream(second(), params()))
    assert [token for step in steps for token in step.token_ids] == reply(tuple(second()))
    while llm.engine.busy:
        llm.engine.step()
    assert llm.target.cache.free == 3
    assert all(llm.engine.find(other) is None for other in others)


def test_kept_places_make_way_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the storage for one place more is not to be had, those that nobody uses are given up first."""
    llm = LLM((tiny_llama(vocab=VOCAB, max_position_embeddings=1024), TOKENIZER), "none", compile=False)
    idle, conversation = llm.conversation(), llm.conversation()
    wanted = idle.generate(FIRST, params()).token_ids
    monkeypatch.setattr(sakiyomi.model_executor.build, "available_bytes", lambda device: 0)
    assert conversation.generate(FIRST, params()).token_ids == wanted
    assert llm.target.cache.slots == 1
    with pytest.raises(MemoryLimitError):
        conversation.generate(FIRST, params(max_new_tokens=500))
    assert conversation.generate(FIRST + wanted, params()).stats.reused > 0, "what is refused changes nothing"
    assert idle.generate(FIRST, params()).stats.reused == 0


@pytest.mark.parametrize("kind", [Scripted, Branching])
def test_a_stream_that_is_left_keeps_what_it_wrote(kind: type[Scripted]) -> None:
    llm = llm_with(scripted(kind))
    with llm.conversation() as conversation:
        stream = conversation.stream(FIRST, params())
        said = [token for _ in range(3) for token in next(stream).token_ids]
        stream.close()
        assert not llm.engine.busy
        tokens = FIRST + said + prompt(4, 2)
        out = conversation.generate(tokens, params())
        assert out.stats.reused == len(FIRST) + len(said) - 1
        assert out.token_ids == reply(tuple(tokens))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Scripted, Branching])
def test_a_stop_inside_a_draft(kind: type[Scripted]) -> None:
    """More of the draft was verified than the text took: only the text is held."""
    written = reply(tuple(FIRST))
    for end in range(1, NEW):
        llm = llm_with(scripted(kind))
        with llm.conversation() as conversation:
            out = conversation.generate(FIRST, params(stop_token_ids=[written[end]]))
            tokens = FIRST + out.token_ids + prompt(4, end)
            out = conversation.generate(tokens, params())
            assert out.token_ids == reply(tuple(tokens))
            assert out.stats.reused >= len(tokens) - 5


def test_one_request_at_a_time() -> None:
    llm = llm_with()
    conversation = llm.conversation()
    stream = conversation.stream(FIRST, params())
    next(stream)
    with pytest.raises(InputError, match="under way"):
        conversation.generate(FIRST, params())
    with pytest.raises(InputError, match="n=2"):
        conversation.generate(FIRST, params(n=2))
    with pytest.raises(InputError, match="empty"):
        conversation.generate([], params())
    rest = [token for step in stream for token in step.token_ids]
    assert rest == reply(tuple(FIRST))[1:]
    assert conversation.generate(second(), params()).stats.reused > 0


def test_closing_ends_a_stream() -> None:
    """Its place is free at once, whoever holds the stream."""
    llm = llm_with()
    conversation = llm.conversation()
    stream = conversation.stream(FIRST, params())
    next(stream)
    conversation.close()
    assert not llm.engine.busy
    with pytest.raises(RemovedError):
        list(stream)
    assert llm.target.cache.free == llm.target.cache.max_slots
    assert conversation.generate(second(), params()).token_ids == reply(tuple(second()))


def test_an_error_gives_the_place_back() -> None:
    def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
        raise ValueError("the user's own mistake")

    llm = llm_with()
    conversation = llm.conversation()
    conversation.generate(FIRST, params())
    with pytest.raises(ValueError, match="own mistake"):
        conversation.generate(second(), params(logits_processors=[broken]))
    assert llm.target.cache.free == llm.target.cache.max_slots
    out = conversation.generate(second(), params())
    assert (out.stats.reused, out.token_ids) == (0, reply(tuple(second())))


@pytest.mark.parametrize("place", ["draft", "score", "keep"])
def test_an_interruption_anywhere(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while drafting, inside a pass, or between cache and tokens: the next reply is what it should be."""
    llm = llm_with(scripted(Branching))
    owner, name = {
        "draft": (llm.draft, "propose"),
        "score": (llm.target, "score"),
        "keep": (llm.target.cache, "commit"),
    }[place]
    work, calls = getattr(owner, name), [0]

    def interrupted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        done = work(*args, **options)
        if calls[0] == 3:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(owner, name, interrupted)
    conversation = llm.conversation()
    with pytest.raises(KeyboardInterrupt):
        list(conversation.stream(FIRST, params()))
    assert not llm.engine.busy
    for tokens in (FIRST, second()):
        assert conversation.generate(tokens, params()).token_ids == reply(tuple(tokens))
    conversation.close()
    assert llm.target.cache.free == llm.target.cache.max_slots


def test_kernels_that_are_ready_between_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What plain torch wrote into the cache on a machine's first use is read by the compiled kernels from then on."""
    if PackedWeights.create() is None:
        pytest.skip("the C++ kernels cannot be compiled here")
    for place in ("session", "build"):
        monkeypatch.setattr(f"sakiyomi.model_executor.{place}.native_at_hand", lambda: False)
    llm = LLM((model_of("llama"), TOKENIZER), "none")
    with llm.conversation() as conversation:
        conversation.generate(FIRST, params())
        assert not isinstance(llm.target.backend, CpuBackend)
        monkeypatch.setattr("sakiyomi.model_executor.session.native_at_hand", lambda: True)
        out = conversation.generate(second(), params())
        assert isinstance(llm.target.backend, CpuBackend)
        assert (out.stats.reused, out.token_ids) == (22, reply(tuple(second())))


def test_drafters_hear_of_every_request() -> None:
    """Of each end once, and before that of the next request, to which memory may be handed over."""

    class Heir(Scripted):
        def __init__(self) -> None:
            super().__init__(scripted().texts, "sometimes", VOCAB)
            self.heard: list[tuple[int, ...]] = []

        def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
            for context in contexts:
                context.memory["known"] = context.memory.get("known", 0) + 1
            return super().propose(contexts, gammas)

        def inherit(self, context: Context, earlier: Context) -> None:
            self.heard.append((context.id, earlier.id))
            context.memory["known"] = earlier.memory.pop("known")

    drafter = Heir()
    llm = llm_with(drafter)
    with llm.conversation() as conversation:
        conversation.generate(FIRST, params())
        assert (drafter.heard, drafter.ended) == ([], [])
        conversation.generate(second(), params())
        assert (drafter.heard, drafter.ended) == ([(1, 0)], [0])
    assert drafter.ended == [0, 1]
    without = scripted()
    with llm_with(without).conversation() as conversation:
        conversation.generate(FIRST, params())
        conversation.generate(second(), params())
    assert without.ended == [0, 1]
