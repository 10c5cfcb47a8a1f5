"""Rounds that the compiled kernels run or verify give the text, the figures and the traces of Python's."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from random_models import Numbers, random_llama
from sakiyomi import LLM, SamplingParams
from sakiyomi.core.tree import Draft, TokenTree
from sakiyomi.drafters.base import Context, HiddenStates, Ranked
from sakiyomi.drafters.draft_length import FixedSize, Size, Throughput
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.native_trees import NativeTrees
from sakiyomi.drafters.recycle import RecycleDrafter
from sakiyomi.drafters.tree_reader import TreeReader
from sakiyomi.drafters.trees import Choices
from sakiyomi.engine import engine as engine_module
from sakiyomi.engine.native_commits import CommittedRounds
from sakiyomi.engine.native_rounds import NativeRounds
from sakiyomi.engine.pace import Pace
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.kernels.build import native
from sakiyomi.model_executor import kernel_rounds
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.kernel_rounds import KernelRounds
from sakiyomi.model_executor.program import Program
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.verifiers.native import Case, verify_all
from watched_rounds import rounds_of

pytestmark = pytest.mark.skipif(native() is None, reason="the kernels are not available")

VOCAB = 300
PROMPTS = [[5, 6, 7], list(range(20, 29)), [9] * 5]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy tree": {"tree": "best-first", "nodes": 7},
    "coupled": {"temperature": 0.9, "acceptance": "coupled", "top_p": 0.9},
    "coupled tree": {"temperature": 0.9, "tree": "best-first", "nodes": 7},
    "ratio": {"temperature": 0.8, "acceptance": "ratio"},
    "ratio tree": {"temperature": 0.8, "acceptance": "ratio", "tree": "static", "nodes": 6, "top_k": 40},
    "block": {"temperature": 0.8, "acceptance": "block", "min_p": 0.01},
}


@cache
def engine() -> LLM:
    target = random_llama(64, 2, 4, 128, VOCAB, torch.float32)
    draft = build_runner(random_llama(64, 1, 4, 128, VOCAB, torch.float32), max_slots=len(PROMPTS))
    llm = LLM((target, Numbers()), draft=ModelDrafter(draft, VOCAB), max_batch=len(PROMPTS))
    llm.generate(PROMPTS, SamplingParams(max_new_tokens=12, gamma=4))
    llm.wait()
    untaught(llm)
    return llm


@cache
def untaught(llm: LLM) -> Any:
    """What its draft knew of its chances when this was asked for first."""
    return copy.deepcopy(llm.engine.drafter.reader.confidence)  # type: ignore[union-attr]


@pytest.fixture
def by_python() -> Iterator[None]:
    """Python runs the passes of rounds, as it does those of models that have no program."""
    rounds = engine().engine._native._rounds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_rounds, "_program", lambda *_: 0)
        rounds._made_for = []
        yield
    rounds._made_for = []


def texts(
    params: SamplingParams | list[SamplingParams], prompts: int = len(PROMPTS), llm: LLM | None = None
) -> list[dict[str, Any]]:
    llm = llm or engine()
    reader = llm.engine.drafter.reader  # type: ignore[union-attr]
    reader.confidence = copy.deepcopy(untaught(llm))  # what other tests have taught it would change the trees
    if isinstance(params, list):
        inner = llm.engine
        done = inner.complete(inner.submit(*each) for each in zip(PROMPTS, params, strict=False))
    else:
        done = llm.generate(PROMPTS[:prompts], params)
    found = [out.to_dict() for out in done]
    for each in found:
        each["stats"] = {name: value for name, value in each["stats"].items() if "second" not in name}
    return found


@pytest.mark.few(5)
@pytest.mark.parametrize("case", CASES)
def test_rounds_are_those_of_python(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[bool] = []

    def counted(cases: Sequence[Case], logits: Any) -> Any:
        verdicts = verify_all(cases, logits)
        judged.extend(verdict is not None for verdict in verdicts)
        return verdicts

    options = {"gamma": 4} | CASES[case]
    params = SamplingParams(max_new_tokens=25, ignore_eos=True, seed=3, logprobs=2, **options)
    monkeypatch.setattr(engine_module, "verify_all", counted)
    found = texts(params)
    assert len(judged) >= 25
    assert all(judged)
    monkeypatch.setattr(engine_module, "verify_all", lambda cases, logits: [None] * len(cases))
    assert texts(params) == found


CHOICES = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 0, 0)]
WHOLE = CASES | {
    "temperature": {"temperature": 0.8},
    "point masses": {"temperature": 0.8, "acceptance": "ratio", "tree": "best-first", "nodes": 6, "top_k": 40},
    "heuristic tree": {"temperature": 1.5, "tree": "best-first", "gamma": 1, "nodes": "heuristic"},
    "wide": {"tree": "best-first", "nodes": 10, "gamma": 3},
    "greedy static": {"tree": "static", "nodes": 8, "gamma": 3},
    "coupled choices": {"tree": CHOICES, "gamma": "auto", "temperature": 0.9},
    "ratio choices": {"tree": CHOICES, "gamma": "auto", "temperature": 1.3, "acceptance": "ratio"},
    "ratio, few tokens": {"tree": "static", "nodes": 9, "temperature": 0.9, "acceptance": "ratio", "top_k": 2},
    "block, few tokens": {"temperature": 0.9, "acceptance": "block", "top_k": 3},
    "dynamic": {"tree": "dynamic", "nodes": 9},
    "point masses by level": {"tree": "dynamic", "nodes": 9, "temperature": 0.8, "acceptance": "ratio"},
    "ddtree": {"tree": "ddtree", "nodes": 9},
    "coupled ddtree": {"tree": "ddtree", "nodes": 9, "temperature": 0.9},
    "greedy auto": {"gamma": "auto", "tree": "chain"},
    "tree auto": {"gamma": "auto", "tree": "auto"},
    "coupled tree auto": {"gamma": "auto", "tree": "auto", "temperature": 0.9},
}


class Watched:
    """Counts the rounds of ``NativeRounds``.

    Args:
        monkeypatch: puts it in place.
        able: whether the kernels may run rounds.
        part: "run": those whose drafts grow there; "score": those whose drafts are given.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, able: bool = True, part: str = "run") -> None:
        self.native = self.python = 0
        inner = getattr(NativeRounds, part)

        def run(rounds: NativeRounds, *round: Any) -> Any:
            steps = inner(rounds, *round) if able else None
            self.native += rounds_of(steps, round[0]) if steps is not None else 0
            self.python += steps is None
            return steps

        monkeypatch.setattr(NativeRounds, part, run)


@pytest.mark.parametrize("case", WHOLE)
def test_whole_rounds_are_those_of_python(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, traces to the last bit, counts, and what a stop within an accepted run leaves; passes as programs."""
    equal_to_python(case, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Program, "__call__", lambda *_: pytest.fail("a pass of a round came to Python"))
        texts(SamplingParams(max_new_tokens=4, gamma=2))


@pytest.mark.parametrize("case", ["greedy", "tree auto", "temperature"])
def test_whole_rounds_around_passes_of_python(case: str, monkeypatch: pytest.MonkeyPatch, by_python: None) -> None:
    equal_to_python(case, monkeypatch)


def equal_to_python(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "BRIEF", 1000.0)
    options = {"gamma": 4} | WHOLE[case]
    params = SamplingParams(max_new_tokens=25, ignore_eos=True, seed=3, **options)
    with monkeypatch.context() as patch:
        watched = Watched(patch, able=False)
        expected = texts(params)
        assert watched.python
        stop = expected[0]["token_ids"][13]
        stopped = texts(replace(params, stop_token_ids=(stop,)))
    with monkeypatch.context() as patch:
        watched = Watched(patch)
        if options["gamma"] == "auto" and options["tree"] != CHOICES:  # clocks decide what is drafted, but no text
            assert [each["token_ids"] for each in texts(params)] == [each["token_ids"] for each in expected]
        else:
            assert texts(params) == expected
            assert texts(replace(params, stop_token_ids=(stop,))) == stopped
        assert watched.native > 10 and not watched.python


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("tree", ["best-first", "static", "dynamic", "ddtree"])
def test_weighed_trees_are_those_of_python(tree: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where clocks always say the same, levels and nodes are weighed alike, for several requests together."""
    monkeypatch.setattr(ModelRunner, "pass_seconds", lambda model, rows: 1e-4 + 2e-5 * model.padded(rows))
    # By what a request had so far, so that those of a round have different ones.
    monkeypatch.setattr(Throughput, "expected", lambda gain, costs: (900.0 + 400.0 * (gain._tokens % 4)) / count**0.5)
    monkeypatch.setattr(TreeReader, "took", lambda *_: None)
    weighed = SamplingParams(max_new_tokens=40, ignore_eos=True, gamma=6, tree=tree, nodes="auto")
    # One that is not weighed; at its end it drafts nothing, and the others are weighed beside it.
    params = [weighed, replace(weighed, nodes=7, max_new_tokens=30), weighed][:count]
    with monkeypatch.context() as patch:
        Watched(patch, able=False)
        patch.setattr(NativeTrees, "grow", lambda *_: None)
        expected = texts(params, count)
    watched = Watched(monkeypatch)
    assert texts(params, count) == expected
    assert watched.native and not watched.python
    stats = expected[0]["stats"]
    assert 1 < stats["drafted"] / stats["rounds"] < 30


def test_given_trees_are_cut_to_what_others_can_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike in Python and in the kernels: a place had as many candidates as the list said, however few were wanted."""
    monkeypatch.setattr(FixedSize, "next", lambda policy, costs: Size(2, 3))
    params = SamplingParams(
        max_new_tokens=25, ignore_eos=True, temperature=0.9, acceptance="ratio", tree=[1, 200], seed=3
    )
    found = []
    for able in (False, True):
        with monkeypatch.context() as patch:
            watched = Watched(patch, able)
            requests = [engine().engine.submit(PROMPTS[0], params, bounded=True)]
            (out,) = engine().engine.complete(requests)
            found.append((out.token_ids, out.stats.drafted, out.stats.rounds))
            assert bool(watched.native) == able
    assert found[0] == found[1]
    assert found[0][1] <= 3 * found[0][2]


def test_a_round_that_learns_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above compare depends on what rounds have taught the draft."""
    params = SamplingParams(max_new_tokens=25, ignore_eos=True, gamma=4, tree="best-first", nodes=7)
    expected = texts(params)
    inner = CommittedRounds._commit

    def unlearned(rounds: CommittedRounds, request: Any, found: Any, *how: Any, **named: Any) -> Any:
        return inner(rounds, request, found._replace(places=[(0, ())]), *how, **named)

    monkeypatch.setattr(CommittedRounds, "_commit", unlearned)
    assert texts(params) != expected


def test_another_shape_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree that lacks a node: the text is the same, what is said of its rounds is not."""
    params = SamplingParams(max_new_tokens=25, ignore_eos=True, tree=CHOICES)
    expected = texts(params)
    fewer = Choices(CHOICES[:-1]).shape(4, len(CHOICES))
    monkeypatch.setattr(Choices, "shape", lambda *given: fewer)
    found = texts(params)
    assert [each["token_ids"] for each in found] == [each["token_ids"] for each in expected]
    assert found != expected


class Given(ModelDrafter):
    """Drafts that the kernels are given; notes the hidden states that it gets."""

    hidden_states = HiddenStates((0, HEAD))

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.told: list[dict[int, torch.Tensor]] = []

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        self.told += [dict(context.states) for context in contexts]
        return super().propose(contexts, gammas)


@cache
def given() -> LLM:
    target = random_llama(64, 2, 4, 128, VOCAB, torch.float32)
    draft = build_runner(random_llama(64, 1, 4, 128, VOCAB, torch.float32), max_slots=len(PROMPTS))
    llm = LLM((target, Numbers()), draft=Given(draft, VOCAB), max_batch=len(PROMPTS))
    llm.generate(PROMPTS, SamplingParams(max_new_tokens=12, gamma=4))
    llm.wait()
    return llm


@pytest.mark.few(8)
@pytest.mark.parametrize("passes", ["kernels", "python"])
@pytest.mark.parametrize("case", [case for case in WHOLE if "auto" not in case and "heuristic" not in case])
def test_given_drafts_are_judged_as_by_python(case: str, passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, traces and figures; and the hidden states of the target's passes that the drafter gets."""
    params = SamplingParams(max_new_tokens=25, ignore_eos=True, seed=3, **({"gamma": 4} | WHOLE[case]))
    loop = given().engine
    drafter = loop.drafter
    assert isinstance(drafter, Given)
    found = []
    for able in (False, True):
        with monkeypatch.context() as patch:
            if passes == "python":
                patch.setattr(kernel_rounds, "_program", lambda *_: 0)
            loop._native._rounds._made_for = []
            watched = Watched(patch, able, "score")
            drafter.told.clear()
            found.append((texts(params, llm=given()), list(drafter.told)))
        assert bool(watched.native) == able
    assert not watched.python
    (expected, wanted), (written, told) = found
    assert written == expected
    assert len(told) == len(wanted) > 10
    for one, other in zip(told, wanted, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(state, other[layer]) for layer, state in one.items())


class Told(RecycleDrafter):
    """Notes what it is told of the rows of rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Ranked] = []

    def rank(self, context: Context, tree: TokenTree, rows: Sequence[Ranked]) -> None:
        self.told += rows
        super().rank(context, tree, rows)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "acceptance": "ratio"}])
def test_ranks_of_rounds_in_the_kernels_are_those_of_python(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Told()
    llm = LLM((random_llama(64, 2, 4, 128, VOCAB, torch.float32), Numbers()), drafter, max_batch=len(PROMPTS))
    wanted = SamplingParams(max_new_tokens=25, ignore_eos=True, seed=3, gamma=3, nodes=6, **params)
    llm.generate(PROMPTS, wanted)
    llm.wait()
    found = []
    for able in (False, True):
        with monkeypatch.context() as patch:
            watched = Watched(patch, able, "score")
            drafter.forget()
            drafter.told.clear()
            done = llm.generate(PROMPTS, wanted)
        assert bool(watched.native) == able
        found.append(([out.token_ids for out in done], Counter(tuple(tokens) for tokens, _ in drafter.told)))
    (texts_of_python, told), (texts_of_kernels, some) = found
    assert texts_of_python == texts_of_kernels and some <= told
    assert 75 < told.total() <= some.total() + len(PROMPTS), "but for a row at the end of each text"


def test_hidden_states_are_those_of_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of another thread may follow at once: it runs by the same program, and overwrites its hidden states."""
    params = SamplingParams(max_new_tokens=25, ignore_eos=True, gamma=4)
    loop = given().engine
    drafter, inner = loop.drafter, KernelRounds.committed
    assert isinstance(drafter, Given)

    def later(rounds: KernelRounds, *counts: int) -> Any:
        for size in loop.target.sizes:
            loop.target.run(BatchPlan([]), size)
        return inner(rounds, *counts)

    found = []
    for committed in (inner, later):
        monkeypatch.setattr(KernelRounds, "committed", committed)
        drafter.told.clear()
        texts(params, llm=given())
        found.append(list(drafter.told))
    assert len(found[0]) > 10
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(state, other[layer]) for layer, state in one.items())


@pytest.mark.parametrize(("make", "rule"), [(engine, "ratio"), (given, "coupled")])  # given drafts are drawn again
@pytest.mark.parametrize("name", ["committed", "_count"])
def test_an_interrupted_round_is_run_again(
    make: Callable[[], LLM], rule: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when the kernels have committed a round, and no request has it yet."""
    params = SamplingParams(max_new_tokens=25, ignore_eos=True, seed=3, gamma=4, temperature=0.8, acceptance=rule)
    loop, inner = make().engine, getattr(KernelRounds, name)
    expected = [make().generate([prompt], params)[0].token_ids for prompt in PROMPTS]
    calls = 0

    def interrupted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (2, 3, 5):
            raise KeyboardInterrupt
        return inner(*given)

    requests = [loop.submit(prompt, params) for prompt in PROMPTS]
    monkeypatch.setattr(KernelRounds, name, interrupted)
    while not all(request.over for request in requests):
        with suppress(KeyboardInterrupt):
            loop.step()
    assert calls > 5
    assert [request.output for request in requests] == expected


def test_plain_rounds_are_those_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_llama(64, 2, 4, 128, VOCAB, torch.float32)
    llm = LLM((target, Numbers()), draft="none", max_batch=len(PROMPTS))
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, seed=3, temperature=0.9)
    llm.generate(PROMPTS, params)
    llm.wait()
    with monkeypatch.context() as patch:
        Watched(patch, able=False)
        expected = [out.trace for out in llm.generate(PROMPTS, params)]
    watched = Watched(monkeypatch)
    assert [out.trace for out in llm.generate(PROMPTS, params)] == expected
    assert watched.native and not watched.python


def test_passes_of_a_full_batch_are_as_small_as_their_rows() -> None:
    """No slot is free to compare row counts in: it is done behind a text, which stays what it is. They were passed
    over, and rounds that drafted little took as long as those that drafted much.
    """
    target = random_llama(64, 2, 4, 128, VOCAB, torch.float32)
    draft = build_runner(random_llama(64, 1, 4, 128, VOCAB, torch.float32), max_slots=2)
    llm = LLM((target, Numbers()), draft=ModelDrafter(draft, VOCAB), max_batch=2)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, gamma=4)
    found = [out.token_ids for out in llm.generate(PROMPTS[:2], params)]
    assert found == [out.token_ids for out in engine().generate(PROMPTS[:2], params)]
    for model, rows in ((llm.engine.target, 10), (draft, 2)):
        assert model.recorder is not None
        assert {size for size in model.sizes if size <= rows} <= set(model.recorder.ready)


def test_rounds_that_make_passes_are_not_taken_for_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared first takes many times as long: drafting looked like a loss, and rested."""
    target = random_llama(64, 2, 4, 128, VOCAB, torch.float32)
    draft = build_runner(random_llama(64, 1, 4, 128, VOCAB, torch.float32), max_slots=2)
    llm = LLM((target, Numbers()), draft=ModelDrafter(draft, VOCAB), max_batch=2)
    inner, compared, told = ModelRunner.run, 0, []

    def slow(model: ModelRunner, *given: Any, **options: Any) -> Any:
        nonlocal compared
        found, before = inner(model, *given, **options), compared
        compared += model.recorder is not None and model.recorder.fresh
        time.sleep(0.2 * (compared - before))
        return found

    add = Pace.add_drafted

    def tell(pace: Pace, tokens: float, seconds: float) -> None:
        told.append(seconds)
        add(pace, tokens, seconds)

    monkeypatch.setattr(ModelRunner, "run", slow)
    monkeypatch.setattr(Pace, "add_drafted", tell)
    llm.generate(PROMPTS[:2], SamplingParams(max_new_tokens=40, gamma=4, ignore_eos=True))
    assert compared > 3 and len(told) > 5
    assert max(told) < 0.2
    assert llm.engine.target.clock.made + draft.clock.made == compared


def test_rounds_change_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that wants log probabilities has Python run everybody's rounds as long as it is there."""
    asks = [
        SamplingParams(max_new_tokens=40, ignore_eos=True, seed=3, gamma=3, temperature=0.9, acceptance=rule)
        for rule in ("ratio", "coupled")
    ]
    asks.append(replace(asks[1], max_new_tokens=12, logprobs=1, seed=4))
    with monkeypatch.context() as patch:
        Watched(patch, able=False)
        expected = [engine().generate([PROMPTS[i]], ask)[0].token_ids for i, ask in enumerate(asks)]
    watched = Watched(monkeypatch)
    loop = engine().engine
    requests = [loop.submit(PROMPTS[i], ask) for i, ask in enumerate(asks[:2])]
    for _ in range(4):
        loop.step()
    assert watched.native and not watched.python
    requests.append(loop.submit(PROMPTS[2], asks[2]))
    while not all(request.over for request in requests):
        loop.step()
    for request in requests:
        loop.remove(request.id)
    assert [request.output for request in requests] == expected
    assert watched.python and watched.native > 6


def test_a_round_that_fails_is_run_again_by_python(monkeypatch: pytest.MonkeyPatch, by_python: None) -> None:
    """Nothing was committed: the text is the same, whichever pass of a round has failed."""
    params = SamplingParams(max_new_tokens=25, ignore_eos=True, seed=3, gamma=3, temperature=0.8, acceptance="ratio")
    expected = engine().generate([PROMPTS[0]], params)[0].token_ids
    kernels = native()
    assert kernels is not None
    inner, calls = kernels.sk_pass, 0

    def failing(*given: Any) -> int:
        nonlocal calls
        calls += 1
        if not calls % 11:
            raise RuntimeError("no memory")
        return int(inner(*given)) if calls % 7 else -1

    monkeypatch.setattr(kernels, "sk_pass", failing)
    watched = Watched(monkeypatch)
    assert engine().generate([PROMPTS[0]], params)[0].token_ids == expected
    assert watched.native and watched.python


def test_a_row_without_numbers_is_pythons_matter(monkeypatch: pytest.MonkeyPatch, by_python: None) -> None:
    """The kernels commit nothing of a round with one, of no request; Python then finds whose it is."""
    loop = engine().engine
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, gamma=2)
    expected = engine().generate(PROMPTS[:2], params)
    requests = [loop.submit(prompt, params) for prompt in PROMPTS[:2]]
    for _ in range(3):
        loop.step()
    passes, spoilt = loop._native._rounds._passes, set()

    def spoil(code: int, replay: Any) -> Any:
        def run(ids: Any, positions: Any) -> Any:
            logits, states = replay(ids, positions)
            if code % 2:
                spoilt.add(code)
                logits = logits.clone()
                logits[0, 0] = float("nan")
            return logits, states

        return run

    for code, (replay, *inputs) in list(passes.items()):
        passes[code] = (spoil(code, replay), *inputs)
    watched = Watched(monkeypatch)
    while not all(request.over for request in requests):
        loop.step()
    for request in requests:
        loop.remove(request.id)
    assert spoilt and watched.python and not watched.native
    assert [request.output for request in requests] == [out.token_ids for out in expected]
