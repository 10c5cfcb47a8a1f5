"""What goes wrong for one request, in a drafter or on the machine: it ends what it concerns, and nothing else."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import sakiyomi.drafters.model
import sakiyomi.model_executor.build
from architectures import VOCAB, greedy, logits_after, model_of, prompt, references, widen
from drafters import Branching, Scripted, texts_of
from sakiyomi import LLM, DraftError, InputError, MemoryLimitError, RemovedError, SamplingParams, Step, UnsupportedError
from sakiyomi.core.tree import Draft, Draw, TokenTree
from sakiyomi.drafters import Context
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.evaluation.audit.audit import AuditConfig, audit
from sakiyomi.kernels import native
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.model_executor.attention.torch import TorchBackend
from sakiyomi.model_executor.build import build_runner
from toys import character_tokenizer, tiny_llama

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
PROMPTS = [prompt(11, 1), prompt(3, 2), prompt(19, 3)]
NEW = 20


def wanted(name: str = "llama") -> list[list[int]]:
    return references(name, PROMPTS, NEW)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True, "gamma": 3} | values))


def llm_with(draft: Any = "none", name: str = "llama", **options: Any) -> LLM:
    return LLM((model_of(name), TOKENIZER), draft, **({"compile": False} | options))


def scripted(kind: type[Scripted] = Scripted) -> Scripted:
    return kind(texts_of(PROMPTS, wanted()), "sometimes", VOCAB)


def drafted(draft: Any, **options: Any) -> LLM:
    """With a draft model that is another llama of random weights."""
    return llm_with(ModelDrafter(build_runner(draft, compile=False), VOCAB), **options)


def broken_after(count: int) -> Any:
    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > count:
            raise ValueError("the user's own mistake")
        return scores

    return processor


def texts(llm: LLM, **values: Any) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(PROMPTS, params(**values))]


# ---------------------------------------------------------------- one request


def test_a_request_that_fails_says_so_in_its_last_step() -> None:
    """Whoever schedules himself would wait for it for ever."""
    llm = llm_with(scripted())
    bad = llm.engine.add(PROMPTS[0], params(logits_processors=[broken_after(len(PROMPTS[0]) + 3)]))
    good = llm.engine.add(PROMPTS[1], params())
    steps: dict[int, list[Step]] = {bad: [], good: []}
    while llm.engine.busy:
        for step in llm.engine.step():
            steps[step.request].append(step)
    last = steps[bad][-1]
    assert isinstance(last.error, ValueError) and last.finish_reason is None and not last.token_ids
    assert last.to_dict()["error"] == "the user's own mistake"
    assert [t for step in steps[good] for t in step.token_ids] == wanted()[1]


def test_a_processor_that_raises_leaves_the_draft_model_to_others() -> None:
    """It raises in the draft first, which looks further ahead."""
    llm = drafted(model_of("llama"))
    with pytest.raises(ValueError, match="own mistake"):
        llm.generate(PROMPTS, params(logits_processors=[broken_after(len(PROMPTS[0]) + 3)]))
    done = llm.generate(PROMPTS, params())
    assert [out.token_ids for out in done] == wanted()
    assert all(out.stats.accepted for out in done)


def test_a_stream_has_its_last_step_when_it_is_over() -> None:
    """Another thread may look between the two."""

    class Watched(deque[Step]):
        def append(self, step: Step) -> None:
            assert not request.over
            super().append(step)

    llm = llm_with(scripted())
    box = Watched()
    request = llm.engine.submit(PROMPTS[0], params(), outbox=box)
    while llm.engine.busy:
        llm.engine.step()
    assert request.over
    assert box[-1].finish_reason == "length"


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_removed_request_ends_whoever_waits_for_it(how: str) -> None:
    llm = llm_with(scripted())
    if how == "stream":
        with pytest.raises(RemovedError):
            for step in llm.stream(PROMPTS[0], params()):
                llm.engine.remove(step.request)
    else:
        step = llm.engine.step

        def and_remove(patience: float) -> list[Step]:
            steps = step(patience)
            for done in steps:
                llm.engine.remove(done.request)
            return steps

        llm.engine.step = and_remove  # type: ignore[method-assign]
        with pytest.raises(RemovedError):
            llm.generate(PROMPTS, params())
        llm.engine.step = step  # type: ignore[method-assign]
    assert texts(llm) == wanted()


def test_an_interruption_between_cache_and_tokens_ends_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_with(scripted())
    ids = [llm.engine.add(tokens, params()) for tokens in PROMPTS]
    found: dict[int, list[int]] = {i: [] for i in ids}
    keep, calls = llm.target.cache.commit, [0]

    def interrupted(*args: Any) -> None:
        keep(*args)
        calls[0] += 1
        if calls[0] == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(llm.target.cache, "commit", interrupted)
    failed = set()
    while llm.engine.busy:
        try:
            steps = llm.engine.step()
        except KeyboardInterrupt:
            failed = {r.id for r in llm.engine._running if r.error is not None}
            continue
        for step in steps:
            found[step.request] += step.token_ids
    assert len(failed) == 1
    for i, text in zip(ids, wanted(), strict=True):
        if i not in failed:
            # Tokens of the interrupted step itself were committed and not given to anybody.
            assert len(found[i]) >= NEW - 4 and set(found[i]) <= set(text)


# ---------------------------------------------------------------- memory


def test_all_requests_of_a_list_have_to_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage has one length for all slots: what one needs, all get."""
    llm = llm_with(max_batch=4)
    pair = llm.target.cache.pair_bytes
    monkeypatch.setattr(sakiyomi.model_executor.build, "available_bytes", lambda device: int(3 * 256 * pair / 0.9))
    long = [prompt(20, i) for i in range(4)]
    with pytest.raises(MemoryLimitError, match="4 requests of"):
        llm.generate(long, params(max_new_tokens=180))
    assert not llm.engine.busy and not llm.target.cache.bytes
    assert len(llm.generate(long[:3], params(max_new_tokens=180))) == 3


def test_memory_that_goes_away_ends_the_request_that_needs_more() -> None:
    llm = llm_with(scripted())
    cache = llm.target.cache
    short = llm.engine.add(PROMPTS[1], params())
    long = llm.engine.add(prompt(30), params(max_new_tokens=220))
    assert llm.engine.step()
    cache.sizing.available = lambda: 1000  # somebody else took it; there is room for two requests of 256 - not more
    longer = llm.engine.find(long)
    assert longer is not None
    longer.last = 10**6
    found: dict[int, list[Step]] = {short: [], long: []}
    while llm.engine.busy:
        for step in llm.engine.step():
            found[step.request].append(step)
    assert isinstance(found[long][-1].error, MemoryLimitError)
    assert found[short][-1].finish_reason == "length"


def test_without_memory_for_the_drafts_cache_text_goes_on_undrafted() -> None:
    draft = build_runner(model_of("llama"), compile=False)
    llm = llm_with(ModelDrafter(draft, VOCAB))
    draft.cache.sizing.available = lambda: 0
    done = llm.generate(PROMPTS, params())
    assert [out.token_ids for out in done] == wanted()
    assert not any(out.stats.drafted for out in done)
    draft.cache.sizing.available = None
    assert all(out.stats.drafted for out in llm.generate(PROMPTS, params()))


def test_probabilities_of_a_prompt_are_learnt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that runs out between two requests of a pass ends the second; nothing counts twice for the first."""
    options: dict[str, Any] = {"cache": "sirllm", "kv_budget": 60, "chunk_size": 32, "compile": False}
    alone = LLM((model_of("llama"), TOKENIZER), "none", **options)
    prompts = [prompt(12), prompt(10, 1)]
    expected = alone.generate(prompts[:1], params())[0].token_ids
    llm = LLM((model_of("llama"), TOKENIZER), "none", **options)
    learn, learnt = llm.target.eviction.add_prompt_log_probs, []

    def short(slot: int, *arguments: Any) -> None:
        learnt.append(slot)
        if len(learnt) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        learn(slot, *arguments)

    monkeypatch.setattr(llm.target.eviction, "add_prompt_log_probs", short)
    first, second = (llm.engine.submit(tokens, params()) for tokens in prompts)
    while llm.engine.busy:
        llm.engine.step()
    assert first.output == expected
    assert isinstance(second.error, MemoryLimitError)
    assert len(learnt) == len(set(learnt)) == 2


def test_a_loaded_model_is_not_doubled_without_memory_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sakiyomi.model_executor.weights.available_bytes", lambda device: 1000)
    packed = build_runner(model_of("llama"), compile=False)
    assert isinstance(packed.backend, TorchBackend)
    assert not caplog.records or "packed copy" in caplog.text


# ---------------------------------------------------------------- drafters


def test_a_falcon_with_automatic_gamma() -> None:
    """Its passes have no row for a request in a trial pass."""
    expected = wanted("falcon")
    drafter = Scripted(texts_of(PROMPTS, expected), "sometimes", VOCAB)
    llm = llm_with(drafter, "falcon")
    assert texts(llm, gamma="auto") == expected


def test_a_draft_of_fewer_rows_passes_over_tokens_that_it_lacks() -> None:
    """The target's vocabulary may be padded further than the draft's; a prompt of ids may hold what lies there."""
    small = tiny_llama(vocab=VOCAB - 8)
    llm = drafted(small)
    prompts = [[5, VOCAB - 3, 9], [5, 9, 20]]
    # Tokens that the draft lacks are made improbable, so that the second text can be drafted to its end.
    values = params(logit_bias=dict.fromkeys(range(VOCAB - 8, VOCAB), -50.0))
    expected = [out.token_ids for out in llm_with().generate(prompts, values)]
    for _ in range(2):
        done = llm.generate(prompts, values)
        assert [out.token_ids for out in done] == expected
        assert [bool(out.stats.drafted) for out in done] == [False, True]


def test_processors_see_the_targets_width_in_the_draft_too() -> None:
    widths = set()

    def watching(input_ids: Tensor, scores: Tensor) -> Tensor:
        widths.add(scores.shape[1])
        return scores

    llm = drafted(tiny_llama(vocab=VOCAB - 8))
    (out,) = llm.generate([[5, 9, 20]], params(logits_processors=[watching], logit_bias={3: 50.0}))
    assert widths == {VOCAB}
    assert out.stats.drafted


def test_a_draft_reads_a_long_prompt_between_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sakiyomi.drafters.model, "CHUNK", 8)
    monkeypatch.setattr(sakiyomi.drafters.model, "LONG", 4)
    llm = drafted(model_of("llama"))
    (out,) = llm.generate([prompt(40)], params(), rounds_trace=True)
    assert out.token_ids == greedy(model_of("llama"), prompt(40), NEW)
    drafts = [len(entry.tokens) for entry in out.rounds_trace or []]
    assert drafts[0] == drafts[1] == 0 and max(drafts) == 3


def rows(count: int, value: float = 1 / VOCAB, width: int = VOCAB) -> Tensor:
    return torch.full((count, width), value)


def drawn(ahead: Sequence[int], probs: Any, kind: Any = "chain") -> Draft:
    return Draft(TokenTree.chain(ahead), kind, tuple(Draw(i, "odd", i) for i in range(len(ahead))), probs)


def thrown(ahead: Sequence[int]) -> Draft:
    raise RuntimeError("the draft fell off the table")


FAULTS: dict[str, tuple[Any, str]] = {
    "throws": (thrown, "RuntimeError: the draft fell off the table"),
    "no draw": (lambda ahead: Draft(TokenTree.chain(ahead), "chain"), "have no draw"),
    "narrow rows": (lambda ahead: drawn(ahead, rows(len(ahead), width=7)), "rows of 7 probabilities"),
    "NaN": (lambda ahead: drawn(ahead, rows(len(ahead), torch.nan)), "sums to nan"),
    "too large a sum": (lambda ahead: drawn(ahead, rows(len(ahead), 2 / VOCAB)), "sums to 2 "),
    "negative": (lambda ahead: drawn(ahead, 2 / VOCAB - rows(len(ahead)) * torch.eye(VOCAB)[0] * 9), "as its least"),
    "a list of rows": (lambda ahead: drawn(ahead, rows(len(ahead)).tolist()), "probabilities are list"),
    "outside the vocabulary": (lambda ahead: Draft.chain([*ahead[:-1], VOCAB], "odd"), "outside the vocabulary"),
    "negative token": (lambda ahead: Draft.chain([-1, *ahead[1:]], "odd"), "token -1"),
    "a float": (lambda ahead: Draft.chain([float(t) for t in ahead], "odd"), "is a float"),  # type: ignore[misc]
    "a tensor": (lambda ahead: Draft.chain(list(torch.tensor(ahead)), "odd"), "is a Tensor"),  # type: ignore[arg-type]
    "a cycle": (
        lambda ahead: Draft(TokenTree((1, 2), (1, 0)), "point_mass", (Draw(0, "odd"), Draw(1, "odd"))),
        "hangs from node 1",
    ),
    "disorder": (
        lambda ahead: Draft(TokenTree((1, 2), (1, -1)), "point_mass", (Draw(0, "odd"), Draw(1, "odd"))),
        "node 0 hangs from node 1",
    ),
    "no draft": (lambda ahead: list(ahead), "a list in place of a Draft"),
    "a kind that the rule does not take": (
        lambda ahead: Draft(TokenTree((1, 2), (-1, -1)), "iid", (Draw(0, "odd", 0), Draw(1, "odd", 0)), rows(1)),
        'does not take a draft of kind "iid"',
    ),
}


class Odd(Scripted):
    """Right at first; from the third round on each draft for a prompt of ``length`` tokens is odd."""

    kind = "chain"

    def __init__(self, how: Any, length: int = len(PROMPTS[0])) -> None:
        super().__init__(texts_of(PROMPTS, wanted()), "sometimes", VOCAB)
        self.how, self.length, self.odd = how, length, 0

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        drafts = super().propose(contexts, gammas)
        for i, context in enumerate(contexts):
            if context.tokens[: self.length] in PROMPTS and len(self.asked) > 2:
                self.odd += 1
                drafts[i] = self.how(self._ahead(context.tokens, max(gammas[i], 2)))
        return drafts


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if "kind" not in fault])
def test_an_odd_draft_costs_its_request_the_drafter_and_nothing_else(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    how, message = FAULTS[fault]
    drafter = Odd(how)
    llm = llm_with(drafter)
    for _ in range(2):
        drafter.asked.clear()
        drafter.odd = 0
        done = llm.generate(PROMPTS, params())
        assert [out.token_ids for out in done] == wanted()
        assert drafter.odd == 1  # it is not asked again for this request
        # A drafter that throws concerns all that it was asked for.
        others = [len(drafter.asked) > 3, any(out.stats.drafted > 6 for out in done[1:])]
        assert others == [fault != "throws"] * 2
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and message in said[0]
    # The next request has its drafter again.
    (out,) = llm.generate([PROMPTS[1]], params())
    assert out.stats.drafted > 6


@pytest.mark.parametrize("fault", list(FAULTS))
def test_strict_ends_the_request(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    how, message = FAULTS[fault]
    values = {"temperature": 1.0, "acceptance": "block"} if "kind" in fault else {}
    llm = llm_with(Odd(how), strict=True)
    ids = [llm.engine.add(tokens, params(**values)) for tokens in PROMPTS]
    last: dict[int, Step] = {}
    while llm.engine.busy:
        last.update({step.request: step for step in llm.engine.step()})
    failed = [isinstance(last[i].error, DraftError) for i in ids]
    assert failed == [True, fault == "throws", fault == "throws"]
    assert message in str(last[ids[0]].error) and "Odd" not in caplog.text
    assert llm.target.cache.free == llm.target.cache.max_slots
    with pytest.raises(DraftError, match="strict=False continues without drafts"):
        llm.generate(PROMPTS[0:1], params(**values))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("answer", "message"),
    [(None, "NoneType"), ([], "0 drafts for 1 requests"), ([Draft.empty()] * 2, "2 drafts for 1")],
)
def test_an_answer_of_another_length(answer: Any, message: str, caplog: pytest.LogCaptureFixture) -> None:
    class Few(Scripted):
        def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> Any:
            return answer

    llm = llm_with(Few({}, "always", VOCAB))
    assert llm.generate(PROMPTS[:1], params())[0].token_ids == wanted()[0]
    assert message in caplog.text


@pytest.mark.thorough
def test_an_odd_draft_leaves_sampled_text_as_it_was() -> None:
    """Under a seed the text is the same with and without a drafter, whatever it does."""
    values: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    expected = texts(llm_with(), **values)
    for fault in ("throws", "NaN", "too large a sum", "a cycle"):
        assert texts(llm_with(Odd(FAULTS[fault][0])), **values) == expected


class DepthFirst(Branching):
    """The same trees, a branch at a time: levels do not lie one behind the other."""

    def draft(self, ahead: Sequence[int]) -> Draft:
        draft = super().draft(ahead)
        order: list[int] = []

        def walk(node: int) -> None:
            for child in draft.tree.children(node):
                order.append(child)
                walk(child)

        walk(-1)
        place = {node: i for i, node in enumerate(order)} | {-1: -1}
        tree = TokenTree(tuple(draft.tree.tokens[n] for n in order), tuple(place[draft.tree.parents[n]] for n in order))
        return Draft(tree, draft.kind, tuple(type(d)(place[d.node], d.drafter) for d in draft.draws))


def test_no_pass_reaches_beyond_the_context() -> None:
    """OPT's positions end there: one more would be an index error."""
    expected = [greedy(model_of("opt"), PROMPTS[0], NEW)]
    drafter = DepthFirst(texts_of(PROMPTS[:1], expected), "sometimes", VOCAB)
    limit = len(PROMPTS[0]) + NEW

    class Deep(type(drafter)):  # type: ignore[misc]
        def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
            return super().propose(contexts, [gamma + 5 for gamma in gammas])

    drafter.__class__ = Deep
    llm = llm_with(drafter, "opt", max_context=limit)
    seen = []
    score = llm.target.score

    def watching(segments: Sequence[SequenceRows], **options: Any) -> Tensor:
        seen.extend(max(BatchPlan([s]).positions) for s in segments)
        return score(segments, **options)

    llm.target.score = watching  # type: ignore[method-assign]
    (out,) = llm.generate(PROMPTS[:1], params(max_new_tokens=50))
    assert out.token_ids == expected[0]
    assert max(seen) < limit


def test_a_cut_draft_is_one_of_lower_depth() -> None:
    drafter = DepthFirst({}, "always", VOCAB)
    whole = drafter.draft([5, 6, 7])
    cut = whole.cut(2)
    cut.validate(VOCAB)
    assert max(cut.tree.depths()) == 1
    paths = {cut.tree.path_tokens(node) for node in range(len(cut))}
    depths = whole.tree.depths()
    assert paths == {whole.tree.path_tokens(node) for node in range(len(whole)) if depths[node] < 2}
    assert whole.cut(9) is whole


# ---------------------------------------------------------------- paths


def test_a_background_pass_does_not_touch_the_one_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may begin a pass between two layers of this one: each thread has the plan of its own pass."""
    monkeypatch.setattr(native, "native", lambda: None)
    packed = build_runner(model_of("llama"), compile=False)
    dense = packed.backend
    assert isinstance(dense, TorchBackend)
    slot = packed.cache.take()
    packed.cache.reserve(slot, 16)
    expected = packed.score([SequenceRows(slot, 0, PROMPTS[0], prompt=True)]).logits
    attention = packed.module.model.layers[1].self_attn
    forward, model = attention.forward, packed.module

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        def other() -> None:
            dense.begin(BatchPlan([]), 4)
            assert dense.calls() == 0

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return forward(*args, **kwargs)

    model.model.layers[1].self_attn.forward = meanwhile
    try:
        assert torch.equal(packed.score([SequenceRows(slot, 0, PROMPTS[0], prompt=True)]).logits, expected)
    finally:
        model.model.layers[1].self_attn.forward = forward


@pytest.mark.thorough
def test_exact_requests_do_not_depend_on_what_is_recorded() -> None:
    """Eager and traced passes are equal to the last bit."""
    target = tiny_llama(vocab=VOCAB, layers=1, dim=64).to(torch.bfloat16)
    draft = build_runner(tiny_llama(vocab=VOCAB, layers=1, seed=1), compile="auto")
    llm = LLM((target, TOKENIZER), ModelDrafter(draft, VOCAB), exact=True)
    plain = LLM((target, TOKENIZER), "none", exact=True)
    expected = texts(plain)
    assert texts(llm) == expected
    assert llm.wait()
    assert texts(llm) == expected
    assert texts(LLM((target, TOKENIZER), "none", exact=True, compile=False)) == expected
    assert [llm.generate([tokens], params())[0].token_ids for tokens in PROMPTS] == expected
    # Trees of all requests have more rows than the largest graph, and one alone has too.
    for gamma in (7, 20):
        trees = LLM((target, TOKENIZER), Branching(texts_of(PROMPTS, expected), "sometimes", VOCAB), exact=True)
        sizes = []
        run = trees.target.run
        trees.target.run = lambda plan, size, run=run, sizes=sizes, **how: sizes.append(size) or run(plan, size, **how)  # type: ignore[method-assign]
        assert texts(trees, gamma=gamma) == expected
        assert max(sizes) == 64


def longrope(long: float = 3.0) -> Any:
    """Of 32 positions, and 96 others with other factors."""
    import transformers

    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [long] * 4, "rope_theta": 10000.0}
    config = transformers.Phi3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters=rope | {"original_max_position_embeddings": 32},
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(config).eval()
    widen(model)
    return model


def test_longrope_stays_within_its_original_context(caplog: pytest.LogCaptureFixture) -> None:
    """Unless more is asked for: beyond it all positions change, those in the cache too."""
    model = longrope()
    llm = LLM((model, TOKENIZER), "none", compile=False)
    assert llm.max_context == 32
    assert "longrope" in caplog.text
    (out,) = llm.generate([prompt(12)], params(max_new_tokens=50))
    assert out.token_ids == greedy(model, prompt(12), 20)
    with pytest.raises(InputError, match=r"the context holds 32 .*longrope"):
        llm.generate([prompt(40)], params())
    with pytest.raises(
        UnsupportedError, match=r"with max_context=64 texts grow beyond 32 tokens, .*need max_context=32 or less"
    ):
        LLM((model, TOKENIZER), "none", compile=False, max_context=64, exact=True)
    with pytest.raises(InputError, match="max_context=200 exceeds the model's 128 positions"):
        LLM((model, TOKENIZER), "none", compile=False, max_context=200)


@pytest.mark.thorough
def test_longrope_beyond_its_original_context() -> None:
    """Texts that cross it while they are written or read, in one round or in a chunk, and such as begin behind it."""
    model, tokens = longrope(), [prompt(12), prompt(31, 1), prompt(50, 2)]
    wanted = [greedy(model, text, 26) for text in tokens]
    assert wanted[1] != greedy(longrope(long=1.0), tokens[1], 26), "the factors do not matter"
    drafter = Branching(texts_of(tokens, wanted), "sometimes", VOCAB)
    for draft, options in (("none", {}), (drafter, {}), ("none", {"chunk_size": 5})):
        llm = LLM((model, TOKENIZER), draft, compile=False, max_context=128, **options)
        assert llm.max_context == 128
        for chosen in ([1], [0, 1, 2]):
            done = llm.generate([tokens[i] for i in chosen], params(max_new_tokens=26))
            assert [out.token_ids for out in done] == [wanted[i] for i in chosen]


# ---------------------------------------------------------------- figures


def test_greedy_traces_tell_what_draft_and_target_thought() -> None:
    """Both as at temperature 1: that says more than 1.0."""
    small = copy.deepcopy(model_of("llama"))
    with torch.no_grad():
        for i, weight in enumerate(small.parameters()):
            weight += 0.03 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
    (out,) = drafted(small).generate(PROMPTS[:1], params(max_new_tokens=60), rounds_trace=True)
    tokens = PROMPTS[0] + out.token_ids
    kept = 0
    for place, entry in enumerate(out.trace, start=len(PROMPTS[0])):
        p = logits_after(model_of("llama"), tokens[:place]).softmax(-1)[entry.token_id]
        assert entry.target_prob == pytest.approx(float(p), rel=1e-3)
        if entry.status == "accepted":
            kept += 1
            q = logits_after(small, tokens[:place]).softmax(-1)[entry.token_id]
            assert entry.draft_prob == pytest.approx(float(q), rel=1e-3)
        else:
            assert entry.draft_prob is None
    assert all(q is not None for entry in out.rounds_trace or [] for q in entry.draft_probs)
    assert 0 < kept < NEW * 3 - 1


def test_refusals_behind_the_end_are_not_counted() -> None:
    """The path's second token ends the text; what was refused behind the third was never asked for."""

    class Late(Scripted):
        def draft(self, ahead: Sequence[int]) -> Draft:
            return Draft.chain([*ahead[:-1], (ahead[-1] + 1) % VOCAB], self.name)

    text = wanted()[0]
    place = next(i for i in range(2, NEW) if text[i] not in text[:i])
    drafter = Late(texts_of(PROMPTS[:1], [text]), "always", VOCAB)
    (out,) = llm_with(drafter).generate(PROMPTS[:1], params(gamma=place + 4, stop_token_ids=[text[place]]))
    assert out.finish_reason == "stop"
    assert out.stats.rejected == 0
    assert out.stats.alpha == 1.0


def test_an_audit_beyond_the_context_is_refused() -> None:
    with pytest.raises(InputError, match="has room for"):
        audit("tales", "none", prompts=["Once upon a time"], config=AuditConfig(max_new_tokens=1100))
