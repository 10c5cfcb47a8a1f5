"""The engine's life around the passes: coming and going, streams, stops, figures, traces, interruptions.

What a pass computes is tested elsewhere; here it is who gets it, when, and what is said about it.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

import sakiyomi.model_executor.build
from architectures import VOCAB, greedy, logits_after, model_of, prompt, references
from drafters import Branching, Noisy, Scripted, texts_of
from sakiyomi import LLM, Generation, InputError, MemoryLimitError, SamplingParams, Step, UnsupportedError
from sakiyomi.cache.slots import FIRST_ROOM
from sakiyomi.core.tree import Draft
from sakiyomi.drafters import Context
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.engine.request import Request
from sakiyomi.model_executor.build import build_runner
from toys import character_tokenizer, save_model, tiny_llama, tiny_tokenizer

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
PROMPTS = [prompt(11, 1), prompt(3, 2), prompt(19, 3)]
NEW = 20


def wanted() -> list[list[int]]:
    return references("llama", PROMPTS, NEW)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True, "gamma": 3} | values))


def llm_with(draft: Any = "none", **options: Any) -> LLM:
    return LLM((model_of("llama"), TOKENIZER), draft, compile=False, **options)


def scripted(skill: Any = "sometimes", kind: type[Scripted] = Scripted) -> Scripted:
    return kind(texts_of(PROMPTS, wanted()), skill, VOCAB)


def run(llm: LLM, requests: Sequence[int]) -> dict[int, list[Step]]:
    """Step until nothing is left; the steps of each request."""
    found: dict[int, list[Step]] = {request: [] for request in requests}
    while llm.engine.busy:
        for step in llm.engine.step():
            found[step.request].append(step)
    return found


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


# ---------------------------------------------------------------- coming and going


def test_requests_join_and_leave_between_rounds() -> None:
    """Whoever comes late gets the same text as who comes first, and disturbs nobody."""
    llm = llm_with(scripted())
    first = llm.engine.add(PROMPTS[0], params())
    found: dict[int, list[Step]] = {first: []}
    for number in range(4):
        for step in llm.engine.step():
            found[step.request].append(step)
        if number == 1:
            found[llm.engine.add(PROMPTS[1], params())] = []
        if number == 3:
            found[llm.engine.add(PROMPTS[2], params())] = []
    while llm.engine.busy:
        for step in llm.engine.step():
            found[step.request].append(step)
    assert [tokens_of(steps) for steps in found.values()] == wanted()
    for steps in found.values():
        assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + ["length"]
        assert [step.stats is None for step in steps] == [True] * (len(steps) - 1) + [False]


def test_every_step_gives_every_running_request_something() -> None:
    """No request starves while others draft or read prompts."""
    llm = llm_with(scripted())
    for tokens in PROMPTS:
        llm.engine.add(tokens, params())
    llm.engine.step()
    for _ in range(3):
        steps = llm.engine.step()
        assert len(steps) == 3
        assert len({step.request for step in steps}) == 3
        assert all(step.token_ids for step in steps)


def test_a_removed_request_frees_its_place_at_once() -> None:
    """In the middle of its text, while waiting, and twice; the others' texts stay what they are."""
    llm = llm_with(scripted(), max_batch=2)
    requests = [llm.engine.add(tokens, params()) for tokens in PROMPTS]
    kept: list[Step] = []
    for _ in range(3):
        kept += [step for step in llm.engine.step() if step.request == requests[1]]
    assert llm.engine.find(requests[2]).slot is None, "two places, three requests"  # type: ignore[union-attr]
    assert llm.engine.remove(requests[0]) is not None
    assert llm.engine.remove(requests[0]) is None
    assert llm.engine.remove(12345) is None
    assert llm.engine.find(requests[0]) is None
    steps = llm.engine.step()
    assert {step.request for step in steps} == {requests[1], requests[2]}, "the place was not free"
    kept += [step for step in steps if step.request == requests[1]]
    llm.engine.remove(requests[2])
    while llm.engine.busy:
        kept += llm.engine.step()
    assert tokens_of(kept) == wanted()[1]
    assert sorted(llm.target.cache._free) == [0, 1]


@pytest.mark.thorough
def test_drafters_hear_of_every_end(tmp_path: Path) -> None:
    """Finished, removed while running, removed while waiting, left stream: a drafter that did not hear would hold its
    place for ever, and the ninth request would find none.
    """
    drafter = scripted()
    llm = llm_with(drafter, max_batch=2)
    requests = [llm.engine.add(tokens, params()) for tokens in PROMPTS]
    llm.engine.step()
    for request in requests[1:]:
        llm.engine.remove(request)
    run(llm, requests[:1])
    assert sorted(drafter.ended) == requests
    folder = save_model(tmp_path, model_of("llama"), TOKENIZER)
    own = llm_with(f"model:{folder}", max_batch=2)
    for number in range(7):
        stream = own.stream(PROMPTS[number % 3], params())
        next(stream), next(stream), next(stream)
        stream.close()
    assert [out.token_ids for out in own.generate(PROMPTS, params())] == wanted()
    assert sorted(own.draft.model.cache._free) == [0, 1]  # type: ignore[union-attr]


def test_more_requests_than_places_wait_in_order() -> None:
    llm = llm_with(scripted(), max_batch=2)
    prompts = [PROMPTS[i % 3] for i in range(7)]
    requests = [llm.engine.add(tokens, params(max_new_tokens=5)) for tokens in prompts]
    most, begun = 0, []
    while llm.engine.busy:
        for step in llm.engine.step():
            begun += [step.request] if step.request not in begun else []
        most = max(most, 2 - len(llm.target.cache._free))
    assert most == 2
    assert begun == requests
    done = llm.generate(prompts, params())
    assert [out.token_ids for out in done] == [wanted()[i % 3] for i in range(7)]


@pytest.mark.parametrize("max_batch", [1, 3, 5])
def test_places_need_not_be_powers_of_two(max_batch: int) -> None:
    """Storage grows by doubling, up to a number of places that may be odd."""
    llm = llm_with(scripted("always", Branching), max_batch=max_batch)
    assert [out.token_ids for out in llm.generate(PROMPTS * 3, params())] == wanted() * 3


# ---------------------------------------------------------------- prompts


@pytest.mark.few(2)
@pytest.mark.parametrize("chunk", [1, 2, 7, 64, None])
def test_prompts_in_chunks_give_the_same_text(chunk: int | None) -> None:
    """Whatever the size of the chunks, alone and beside others."""
    long = [prompt(70, 1), prompt(5, 2), prompt(33, 3)]
    llm = llm_with("none", chunk_size=chunk)
    done = llm.generate(long, params())
    assert [out.token_ids for out in done] == references("llama", long, NEW)


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    """Its chunks come between the rounds: those who write get tokens in every step meanwhile."""
    llm = llm_with("none", chunk_size=8)
    first = llm.engine.add(PROMPTS[0], params(max_new_tokens=40))
    for _ in range(2):
        llm.engine.step()
    assert llm.engine.find(first).prefilled  # type: ignore[union-attr]
    late = llm.engine.add(prompt(80, 9), params(max_new_tokens=3))
    waited = 0
    while True:
        steps = {step.request: step for step in llm.engine.step()}
        assert first in steps
        if late in steps:
            break
        waited += 1
    assert waited == 9, "80 tokens by 8 are ten chunks, the last of which gives a token"
    run(llm, [first, late])


def test_storage_grows_in_the_middle_of_texts(tmp_path: Path) -> None:
    """Beyond the first room, twice, while requests hold keys there, in the target's cache and in the draft's."""
    model = tiny_llama(vocab=VOCAB, max_position_embeddings=1024)
    folder = save_model(tmp_path, model, TOKENIZER)
    prompts = [prompt(FIRST_ROOM - 20, 1), prompt(5, 2)]
    plain = [greedy(model, tokens, 60) for tokens in prompts]
    for draft in ("none", Branching(texts_of(prompts, plain), "sometimes", VOCAB), f"model:{folder}"):
        llm = LLM((model, TOKENIZER), draft, compile=False)
        assert llm.target.cache.bytes == 0
        done = llm.generate(prompts, params(max_new_tokens=60))
        assert [out.token_ids for out in done] == plain
        assert llm.target.cache.room == 2 * FIRST_ROOM


# ---------------------------------------------------------------- text


class Forced(LogitsProcessor):
    """The model says what it is told: the text is known, and everything else is as always."""

    def __init__(self, text: Sequence[int], start: int) -> None:
        self.text, self.start = list(text), start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self.start
        token = self.text[place] if place < len(self.text) else 0
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token]), 0.0)


JAPANESE = "むかし、おじいさん😀と👨‍👩‍👧が🇯🇵に住んでいました。 The end, says she.\n"
BYTES = tiny_tokenizer()


@pytest.fixture(scope="module")
def byte_model() -> Any:
    return tiny_llama(vocab=len(BYTES))


def forced(model: Any, text: str, skill: Any, kind: type[Scripted] = Scripted) -> tuple[LLM, list[int], SamplingParams]:
    """An LLM that writes this text after a prompt, with a drafter that knows it."""
    ids = BYTES(text)["input_ids"]
    start = BYTES("one day")["input_ids"]
    draft = "none" if skill == "none" else kind({tuple(start): ids}, skill, len(BYTES))
    values = SamplingParams(max_new_tokens=len(ids), gamma=4, logits_processors=[Forced(ids, len(start))])
    return LLM((model, BYTES), draft, compile=False), start, values


@pytest.mark.parametrize(("skill", "kind"), [("none", Scripted), ("always", Scripted), ("sometimes", Branching)])
def test_a_stream_never_gives_half_a_character(byte_model: Any, skill: str, kind: type[Scripted]) -> None:
    """Characters are several tokens here, and a round's border may lie inside one."""
    llm, start, values = forced(byte_model, JAPANESE, skill, kind)
    steps = list(llm.stream(start, values))
    assert "".join(step.text for step in steps) == JAPANESE
    assert not any("\N{REPLACEMENT CHARACTER}" in step.text for step in steps)
    (out,) = llm.generate([start], values)
    assert out.text == JAPANESE
    assert tokens_of(steps) == out.token_ids
    assert len(steps) > 5, "the text came in pieces"
    assert skill != "none" or any(not step.text for step in steps), "a piece of a character was held back"


@pytest.mark.few(2)
@pytest.mark.parametrize("skill", ["none", "always", "sometimes"])
def test_joined_stream_is_the_text_of_any_rubbish(byte_model: Any, skill: str) -> None:
    """A random model writes bytes that are no characters: joined steps and text agree all the same."""
    llm = LLM((byte_model, BYTES), "none", compile=False)
    values = SamplingParams(max_new_tokens=60, temperature=2.0, seed=3, ignore_eos=True, gamma=4)
    (out,) = llm.generate([[1, 2, 3]], values)
    drafted = LLM((byte_model, BYTES), Scripted({(1, 2, 3): out.token_ids}, skill, len(BYTES)), compile=False)  # type: ignore[arg-type]
    for target in (llm, drafted) if skill != "none" else (llm,):
        steps = list(target.stream([1, 2, 3], values))
        assert "".join(step.text for step in steps) == out.text
        assert tokens_of(steps) == out.token_ids
        assert out.text == BYTES.decode(out.token_ids, skip_special_tokens=True)


@pytest.mark.few(4)
@pytest.mark.parametrize("skill", ["none", "always", "sometimes"])
@pytest.mark.parametrize(
    ("stop", "left"),
    [
        ("住ん", "むかし、おじいさん😀と👨‍👩‍👧が🇯🇵に"),
        (("nowhere", "The end"), "むかし、おじいさん😀と👨‍👩‍👧が🇯🇵に住んでいました。 "),
        (("。", "end"), "むかし、おじいさん😀と👨‍👩‍👧が🇯🇵に住んでいました"),
        ("む", ""),
        ("says she.\n", "むかし、おじいさん😀と👨‍👩‍👧が🇯🇵に住んでいました。 The end, "),
    ],
)
def test_stop_strings(byte_model: Any, skill: str, stop: Any, left: str) -> None:
    """The text is cut before the string, the tokens end with the one that completes it, wherever in a round that is;
    a stream never gives the beginning of a string that then comes whole.
    """
    llm, start, values = forced(byte_model, JAPANESE, skill)
    values = dataclasses.replace(values, stop=stop)
    (out,) = llm.generate([start], values)
    assert (out.text, out.finish_reason) == (left, "stop")
    strings = (stop,) if isinstance(stop, str) else stop
    whole = BYTES.decode(out.token_ids)
    assert any(string in whole for string in strings)
    assert not any(string in BYTES.decode(out.token_ids[:-1]) for string in strings)
    steps = list(llm.stream(start, values))
    assert "".join(step.text for step in steps) == left
    assert tokens_of(steps) == out.token_ids
    assert out.stats.tokens == len(out.token_ids) == len(out.trace)


def test_a_stop_string_in_the_prompt_does_not_count(byte_model: Any) -> None:
    llm, start, values = forced(byte_model, "a b c", "always")
    (out,) = llm.generate([start], dataclasses.replace(values, stop=("one", "day")))
    assert (out.text, out.finish_reason) == ("a b c", "length")


def test_a_text_that_may_begin_a_stop_string_is_given_at_the_end(byte_model: Any) -> None:
    """Held back while it may go on; when nothing more comes it belongs to the text."""
    llm, start, values = forced(byte_model, "the en", "none")
    values = dataclasses.replace(values, stop="en route")
    assert "".join(step.text for step in llm.stream(start, values)) == "the en"
    assert llm.generate([start], values)[0].text == "the en"


def test_one_prompt_as_text_gives_one_generation(byte_model: Any) -> None:
    """A ``str`` gives a Generation, a list gives a list in order, n samples give lists."""
    llm = LLM((byte_model, BYTES), "none", compile=False)
    values = SamplingParams(max_new_tokens=4)
    one = llm.generate("one day", values)
    assert isinstance(one, Generation)
    assert one.prompt_tokens == len(BYTES("one day")["input_ids"])
    assert [out.token_ids for out in llm.generate(["one day"], values)] == [one.token_ids]
    assert llm.generate([], values) == []
    several = llm.generate("one day", SamplingParams(max_new_tokens=4, n=3, temperature=2.0, seed=1))
    assert [type(out) for out in several] == [Generation] * 3
    assert len({tuple(out.token_ids) for out in several}) == 3
    nested = llm.generate(["one day", "the fox"], SamplingParams(max_new_tokens=4, n=2))
    assert [[out.token_ids for out in pair] for pair in nested] == [
        [llm.generate(text, values).token_ids] * 2 for text in ("one day", "the fox")
    ]


# ---------------------------------------------------------------- figures


class Clock:
    """Seconds inside a module's forward, measured from outside."""

    def __init__(self, module: Any) -> None:
        self.total, self.calls, self._inner = 0.0, 0, module.forward
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._inner(*args, **kwargs)
        finally:
            self.total += time.perf_counter() - began
            self.calls += 1


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Forwards of some milliseconds, beside which a clock's own time is nothing."""
    target = tiny_llama(vocab=VOCAB, layers=6, dim=512, max_position_embeddings=512)
    folder = save_model(tmp_path_factory.mktemp("draft"), tiny_llama(vocab=VOCAB, layers=3, dim=512), TOKENIZER)
    return LLM((target, TOKENIZER), f"model:{folder}", compile=False)


@pytest.mark.thorough
@pytest.mark.alone
@pytest.mark.parametrize(("length", "gamma"), [(20, 3), (200, 3), (20, "auto")])
def test_the_four_clocks(heavy: LLM, length: int, gamma: int | str) -> None:
    """They sum to the wall clock, and each is what a watch around the models' forwards shows: within 1 % of the whole
    and .1 ms a forward.
    A short prompt and one that the draft reads in a pass of its own.
    """
    heavy.generate([prompt(length)], params(max_new_tokens=4, gamma=gamma))
    for _ in range(5):
        try:
            compare_clocks(heavy, length, gamma)
            return
        except AssertionError:
            continue  # the machine did something else between two clocks: that does not happen every time
    compare_clocks(heavy, length, gamma)


def compare_clocks(heavy: LLM, length: int, gamma: int | str) -> None:
    watches = [Clock(heavy.target.module), Clock(heavy.draft.model.module)]  # type: ignore[union-attr]
    try:
        began = time.perf_counter()
        (out,) = heavy.generate([prompt(length)], params(max_new_tokens=24, gamma=gamma))
        wall = time.perf_counter() - began
    finally:
        for watch, model in zip(watches, (heavy.target.module, heavy.draft.model.module), strict=True):  # type: ignore[union-attr]
            model.forward = watch._inner
    stats = out.stats
    parts = (stats.prefill_seconds, stats.draft_seconds, stats.score_seconds, stats.overhead_seconds)
    drafted = stats.drafted > 0  # "auto" may find that it does not pay
    assert all(part > 0 for part in parts) if drafted else gamma == "auto"
    assert sum(parts) == pytest.approx(stats.seconds, rel=0.01)
    assert stats.seconds == pytest.approx(wall, rel=0.02, abs=2e-3)
    target, draft = watches
    assert gamma == "auto" or target.calls == stats.rounds + 1
    inside = stats.prefill_seconds + stats.draft_seconds + stats.score_seconds
    around = 1e-4 * (target.calls + draft.calls)  # our clocks stand outside the pass, the watches inside
    assert inside == pytest.approx(target.total + draft.total, abs=0.01 * stats.seconds + around)
    assert stats.tokens_per_second == pytest.approx(24 / stats.seconds)


@pytest.mark.thorough
@pytest.mark.alone
def test_the_drafts_prompt_counts_as_prefill(heavy: LLM) -> None:
    """``prefill_seconds`` is inside forwards over the prompt, the target's and the draft's (outputs.Stats): else the
    cost of a draft step would look several times what it is on a long prompt.
    """
    watch = Clock(heavy.draft.model.module)  # type: ignore[union-attr]
    try:
        (out,) = heavy.generate([prompt(400)], params(max_new_tokens=3, gamma=1))
    finally:
        heavy.draft.model.module.forward = watch._inner  # type: ignore[union-attr]
    assert watch.calls >= 2
    # One draft step of one token remains outside; the rest is 400 tokens of prompt.
    assert out.stats.draft_seconds < 0.5 * watch.total


def test_figures_of_a_batch_do_not_count_time_twice(heavy: LLM) -> None:
    """Each request's clocks lie inside its own wall clock, though the passes are shared."""
    for out in heavy.generate([prompt(20, i) for i in range(3)], params(max_new_tokens=8)):
        stats = out.stats
        assert stats.overhead_seconds > 0
        assert stats.prefill_seconds + stats.draft_seconds + stats.score_seconds < stats.seconds


def test_counts_agree_with_the_trace() -> None:
    """Wherever a text ends, accepted tokens are those that the trace calls accepted, and none that nobody got."""
    for skill, kind in (("always", Scripted), ("sometimes", Scripted), ("sometimes", Branching)):
        llm = llm_with(scripted(skill, kind))
        for text, tokens in zip(wanted(), PROMPTS, strict=True):
            for values in (params(gamma=5), params(gamma=5, stop_token_ids=[text[7]])):
                (out,) = llm.generate([tokens], values)
                stats = out.stats
                assert stats.accepted == sum(entry.status == "accepted" for entry in out.trace)
                assert stats.committed == len(out.token_ids) - 1
                assert stats.accepted <= stats.drafted
                assert stats.rounds == 0 or stats.tau == stats.committed / stats.rounds
                judged = stats.accepted + stats.rejected
                assert stats.alpha == (stats.accepted / judged if judged else 0.0)


def test_log_probabilities_are_the_models_own() -> None:
    """The best tokens and their log probabilities at each place, from transformers' own logits on that text."""
    for draft in ("none", scripted("sometimes", Branching)):
        (out,) = llm_with(draft).generate(PROMPTS[:1], params(logprobs=3))
        for i, entry in enumerate(out.trace):
            truth = logits_after(model_of("llama"), PROMPTS[0] + out.token_ids[:i]).log_softmax(-1)
            best = truth.topk(3)
            assert [token for token, _ in entry.top_logprobs] == best.indices.tolist()
            assert [value for _, value in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-3)
            assert entry.target_prob == pytest.approx(float(truth[entry.token_id].exp()), rel=1e-3)


@pytest.mark.thorough
def test_rounds_traces(tmp_path: Path) -> None:
    """Per round the proposed tree with p and q, the accepted path, the refused token: enough to judge the verifier."""
    drafts: list[Any] = [scripted("sometimes"), scripted("sometimes", Branching), scripted("sometimes", Noisy)]
    for draft in drafts:
        llm = llm_with(draft)
        for values in (params(), params(temperature=1.0, seed=1)):
            (out,) = llm.generate(PROMPTS[:1], values, rounds_trace=True)
            assert out.rounds_trace is not None
            assert [entry.round for entry in out.rounds_trace] == list(range(1, out.stats.rounds + 1))
            for entry in out.rounds_trace:
                before = PROMPTS[0] + [e.token_id for e in out.trace if e.round < entry.round]
                count = len(entry.tokens)
                assert len(entry.parents) == len(entry.target_probs) == len(entry.draft_probs) == count
                committed = [entry.tokens[node] for node in entry.path] + [entry.token]
                got = [e.token_id for e in out.trace if e.round == entry.round]
                assert got == committed[: len(got)]
                for node in range(count):
                    path, place = [], entry.parents[node]
                    while place >= 0:
                        path.insert(0, entry.tokens[place])
                        place = entry.parents[place]
                    p = logits_after(model_of("llama"), before + path).softmax(-1)[entry.tokens[node]]
                    assert entry.target_probs[node] == pytest.approx(float(p), rel=1e-3, abs=1e-6)
                assert (entry.refused is None) == (entry.kind != "recovered")
                if entry.refused is not None:
                    assert entry.refused in entry.tokens
            assert sum(len(entry.tokens) for entry in out.rounds_trace) == out.stats.drafted
    (out,) = llm_with().generate(PROMPTS[:1], params())
    assert out.rounds_trace is None


# ---------------------------------------------------------------- what goes wrong


def test_interruption_leaves_everything_usable() -> None:
    """Ctrl-C in the middle of a round: the next call gives the text that it would have given."""

    class Interrupting(Scripted):
        def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
            if len(self.asked) == 2:
                self.asked.append([])
                raise KeyboardInterrupt
            return super().propose(contexts, gammas)

    llm = llm_with(scripted("sometimes", Interrupting))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, params())
    assert not llm.engine.busy
    assert len(llm.target.cache._free) == llm.target.cache.max_slots
    assert [out.token_ids for out in llm.generate(PROMPTS, params())] == wanted()


def test_a_processor_that_raises_ends_its_call_only() -> None:
    """The error comes through, and the engine is free for the next call."""

    def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > len(PROMPTS[0]) + 3:
            raise ValueError("the user's own mistake")
        return scores

    llm = llm_with(scripted())
    with pytest.raises(ValueError, match="own mistake"):
        llm.generate(PROMPTS, params(logits_processors=[broken]))
    assert not llm.engine.busy
    assert [out.token_ids for out in llm.generate(PROMPTS, params())] == wanted()


def test_too_little_memory_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bytes that are needed and what would fit; then everything goes on as before."""
    llm = llm_with()
    pair = llm.target.cache.pair_bytes
    monkeypatch.setattr(sakiyomi.model_executor.build, "available_bytes", lambda device: 200 * pair)
    with pytest.raises(MemoryLimitError, match="available"):
        llm.generate([prompt(30)], params(max_new_tokens=200))
    assert not llm.engine.busy
    assert llm.target.cache.bytes == 0
    monkeypatch.undo()
    assert [out.token_ids for out in llm.generate(PROMPTS, params())] == wanted()


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "empty"),
        ([""], "empty"),
        ([[1, VOCAB]], str(VOCAB)),
        ([[1, -1]], "-1"),
        ([list(range(3, 100)) * 3], "256"),
        ([1, 2, 3], "list"),
        ([[1, 2], []], "empty"),
        ([["a"]], "list of token ids"),
        ([None], "list of token ids"),
        ([[1.7]], "list of token ids"),
        (5, "expected a text"),
    ],
)
def test_prompts_that_cannot_be_meant(prompts: Any, message: str) -> None:
    """Named, and refused before any work, the good ones in the same list too."""
    llm = llm_with()
    with pytest.raises(InputError, match=message):
        llm.generate(prompts, params())
    assert not llm.engine.busy


@pytest.mark.parametrize(
    "options",
    [
        {"cache": "h2o"},
        {"kv_budget": 100},
        {"kv_memory": "much", "cache": "h2o"},
        {"kv_memory": "1GiB"},
        {"kv_memory": "1GiB", "kv_budget": 100, "cache": "h2o"},
        {"quantize": "int3"},
        {"quantize": True},
        {"compile": "maybe"},
        {"max_batch": 0},
        {"chunk_size": 0},
        {"max_context": 0},
        {"max_context": 10**6},
        {"dtype": "float8"},
        {"device": "tpu"},
        {"draft": "medusa:"},
        {"draft": "model:"},
        {"draft": ""},
        {"draft": 5},
        {"draft": []},
        {"draft": object()},
        {"draft": [5]},
        {"draft": [None]},
        {"compile": 1},
    ],
)
def test_options_that_cannot_be_met(options: dict[str, Any]) -> None:
    """Each gets an error that names the value; none is accepted and ignored."""
    draft = options.pop("draft", "none")
    with pytest.raises((InputError, UnsupportedError)) as caught:
        LLM((model_of("llama"), TOKENIZER), draft, **({"compile": False} | options))
    value = next(iter(options.values()), draft)
    assert (
        str(value) in str(caught.value)
        or type(value).__name__ in str(caught.value)
        or "names no model" in str(caught.value)
    )


def test_a_drafter_that_lacks_something() -> None:
    class Nameless:
        kind = "chain"

        def propose(self, contexts: Any, gammas: Any) -> list[Draft]:
            return []

    with pytest.raises(InputError, match="name"):
        llm_with(Nameless())


@pytest.mark.parametrize("wrong", ["short", "foreign token", "cycle"])
def test_a_drafter_that_breaks_its_word(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong tree is not scored, and the text goes on plainly, with one line in the log."""
    from sakiyomi.core.tree import Draw, TokenTree

    class Wrong(Scripted):
        def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
            if wrong == "short":
                return []
            tree = TokenTree((5, VOCAB), (-1, 0)) if wrong == "foreign token" else TokenTree((5, 6), (1, 0))
            return [Draft(tree, "point_mass", (Draw(0, "wrong"), Draw(1, "wrong")))] * len(contexts)

    llm = llm_with(scripted("always", Wrong))
    assert [out.token_ids for out in llm.generate(PROMPTS, params())] == wanted()
    assert sum("continues without drafts" in record.message for record in caplog.records) == 1


# ---------------------------------------------------------------- several threads


def test_calls_from_several_threads() -> None:
    """They share the rounds of one engine, and each gets its own text, as long as it is."""
    llm = llm_with(scripted())
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        count = 1 + 5 * (number % 3)
        if number % 2:
            results[number] = tokens_of(list(llm.stream(PROMPTS[number % 3], params(max_new_tokens=count))))
        else:
            results[number] = llm.generate([PROMPTS[number % 3]], params(max_new_tokens=count))[0].token_ids

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a call never came back"
    assert results == {number: wanted()[number % 3][: 1 + 5 * (number % 3)] for number in range(12)}


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_request_that_is_over_before_its_caller_looks(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may run rounds between the adding of a request and the first look at it: its text, all of it here,
    must not be lost, nor the caller wait for ever.
    """
    llm = llm_with()
    submit, step = llm.engine.submit, llm.engine.step
    idle = [0]

    def and_go(*args: Any, **kwargs: Any) -> Request:
        request = submit(*args, **kwargs)
        step()  # the other thread
        return request

    def at_most_a_few() -> list[Step]:
        idle[0] += not llm.engine.busy
        assert idle[0] < 20, "the caller waits for a request that is over"
        return step()

    monkeypatch.setattr(llm.engine, "submit", and_go)
    monkeypatch.setattr(llm.engine, "step", at_most_a_few)
    values = params(max_new_tokens=1)
    if how == "generate":
        assert [out.token_ids for out in llm.generate(PROMPTS, values)] == [text[:1] for text in wanted()]
    else:
        assert tokens_of(list(llm.stream(PROMPTS[0], values))) == wanted()[0][:1]


# ---------------------------------------------------------------- recorded


@pytest.mark.parametrize(("share", "eager"), [(1.0, 0), (0.0, 3)])
def test_a_short_prompt_takes_a_recorded_pass(monkeypatch: pytest.MonkeyPatch, share: float, eager: int) -> None:
    """Where logits of all its rows cost little: then no pass is eager, and the text is the same."""
    monkeypatch.setattr("sakiyomi.model_executor.build.SIZES", (1, 8, 64))
    monkeypatch.setattr("sakiyomi.model_executor.weights.SMALL_HEAD", share)
    llm = LLM((model_of("llama"), TOKENIZER), "none")
    llm.wait()
    llm.generate(PROMPTS, params())
    plain, calls = llm.target.module.forward, []

    def counted(**given: Any) -> Any:
        calls.append(given)
        return plain(**given)

    monkeypatch.setattr(llm.target.module, "forward", counted)
    assert [llm.generate([tokens], params())[0].token_ids for tokens in PROMPTS] == wanted()
    assert len(calls) == eager


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")
def test_a_model_with_graphs_goes_when_nobody_holds_it() -> None:
    llm = LLM((model_of("llama"), TOKENIZER), "none", compile="auto")
    llm.generate(PROMPTS[:1], params(max_new_tokens=4))
    llm.wait()
    assert llm.compiled()
    held = [weakref.ref(thing) for thing in (llm.target, llm.target.module, llm.target.backend)]
    del llm
    gc.collect()
    assert [thing() for thing in held] == [None] * 3


def test_who_waits_has_every_size_recorded() -> None:
    llm = LLM((model_of("llama"), TOKENIZER), "none", compile="auto", max_batch=32)
    assert not llm.compiled()
    assert llm.wait() and llm.compiled()
    assert all(llm.target.recorded(size) for size in llm.target.sizes)


@pytest.mark.alone
def test_waiting_and_other_requests_prompts_are_not_bookkeeping() -> None:
    """Overhead is what is left of a request's time without forwards: not its place in the queue, nor their prompts."""
    target = tiny_llama(vocab=VOCAB, layers=6, dim=256, max_position_embeddings=512)
    llm = LLM((target, TOKENIZER), "none", compile=False, max_batch=2)
    llm.generate([prompt(60)], params(max_new_tokens=4))
    began = time.perf_counter()
    done = llm.generate([prompt(60, seed) for seed in range(6)], params(max_new_tokens=12))
    wall = time.perf_counter() - began
    for stats in (out.stats for out in done):
        assert stats.overhead_seconds < 0.5 * stats.seconds
    assert sum(out.stats.seconds for out in done) < 2.1 * wall  # two at a time


def test_what_is_no_parameters_or_no_text_is_refused(heavy: LLM) -> None:
    with pytest.raises(InputError, match=r"params is a dict.*expected SamplingParams"):
        heavy.generate("hi", {"max_new_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="params is a dict"):
        heavy.engine.add("hi", {"max_new_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="n=3 samples are 3 requests"):
        heavy.engine.add([1, 2], params(n=3))
    with pytest.raises(InputError, match="is no text"):
        heavy.generate("caf\udce9", params())


def test_a_draft_ends_with_an_end_token() -> None:
    """Whatever gamma says: behind the end of the text there is nothing to guess."""
    model = model_of("llama")
    text = wanted()[0]
    llm = LLM((model, TOKENIZER), ModelDrafter(build_runner(model, compile=False), VOCAB), compile=False)
    end = text[5]
    first = text.index(end)
    values = params(gamma="heuristic", stop_token_ids=[end])
    (out,) = llm.generate(PROMPTS[:1], values, rounds_trace=True)
    assert out.token_ids == text[: first + 1]
    assert out.rounds_trace is not None
    for found in out.rounds_trace:
        assert end not in found.tokens[:-1]
