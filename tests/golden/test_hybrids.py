"""Models with recurrent layers: greedy text equals transformers' own, however drafts are rolled back and texts reused.

fp32 on the CPU; the oracle is transformers' ``generate``, which never rolls a state back.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from architectures import HYBRIDS, VOCAB, greedy, logits_after, make, model_of, prompt, references
from drafters import Branching, Scripted, texts_of
from sakiyomi import LLM, SamplingParams
from sakiyomi.cache.recurrent import Site, SiteState
from sakiyomi.cache.recurrent_store import TAIL, RecurrentStore
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.recurrences.short_conv import ShortConv
from toys import character_tokenizer

NEW = 16
PROMPTS = [prompt(11, 1), prompt(3, 2), prompt(19, 3)]
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True, gamma=4)
KINDS = ["lfm2", "qwen3_5", "kimi_linear", "granitemoehybrid", "mamba", "recurrent_gemma"]
"""One family of each kind of state."""
DENSE = ["lfm2", "qwen3_5", "falcon_h1", "mamba", "recurrent_gemma"]
"""The same without experts, which gather rows: in plain torch sums depend on the other rows of a pass."""
EXPERTS = ["lfm2_moe", "granitemoehybrid", "jamba", "kimi_linear"]


def wanted(name: str) -> list[list[int]]:
    return references(name, PROMPTS, NEW)


def llm_of(name: str, draft: Any = "none", **options: Any) -> LLM:
    return LLM((model_of(name), TOKENIZER), draft, **({"compile": False} | options))


def drafter(name: str, kind: Any = Branching) -> Scripted:
    drafted: Scripted = kind(texts_of(PROMPTS, wanted(name)), "sometimes", VOCAB)
    return drafted


def texts(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS, values: SamplingParams = GREEDY) -> list[list[int]]:
    done = llm.generate([list(tokens) for tokens in prompts], values)
    assert not llm.engine._speculation.broken, "the drafter raised"
    return [out.token_ids for out in done]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("how", ["chain", "tree", "chunks"])
def test_greedy_text_of_a_batch_and_alone(name: str, how: str) -> None:
    """Prompts are read at once where something is drafted, and in chunks where nothing is."""
    draft = {"chain": Scripted, "tree": Branching}.get(how)
    llm = llm_of(name, "none" if draft is None else drafter(name, draft), chunk_size=4 if how == "chunks" else 512)
    assert texts(llm) == wanted(name)
    assert texts(llm, PROMPTS[2:]) == wanted(name)[2:]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_in_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakiyomi.kernels.native.native", lambda: None)
    assert texts(llm_of(name, drafter(name))) == wanted(name)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_traced_passes(name: str) -> None:
    llm = llm_of(name, drafter(name), compile="auto")
    llm.wait()
    assert texts(llm) == wanted(name)
    assert any(map(llm.target.recorder.has, llm.target.sizes)), "passes are eager"
    assert not llm.target.recorder.failed


@pytest.mark.few(5)
@pytest.mark.parametrize("name", KINDS)
def test_rows_of_a_tree_in_levels_equal_those_of_texts(name: str) -> None:
    """A tree at once, the same in two passes, and what follows the path that is kept, beside another request."""
    model = model_of(name)
    runner = build_runner(model, compile=False, max_slots=3)
    begin, tree, parents = prompt(9, 5), [11, 12, 13, 14, 15, 16], (-1, 0, 0, 1, 2, 3)
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]]
    expected = torch.stack([logits_after(model, [*begin, *(tree[i] for i in path)]) for path in paths])
    one, two = runner.cache.take(), runner.cache.take()
    runner.cache.reserve(one, 60)
    runner.cache.reserve(two, 60)
    other = SequenceRows(two, 0, prompt(4, 6), prompt=True)
    runner.score([SequenceRows(one, 0, begin, prompt=True), other])
    whole = runner.score([SequenceRows(one, 9, tree, parents), SequenceRows(two, 4, [3, 4])]).logits[:6]
    close(whole, expected)
    runner.cache.roll_back(one, 9)
    begun = runner.score([SequenceRows(one, 9, tree[:3], parents[:3])]).logits
    rest = runner.score([SequenceRows(one, 12, tree[3:], parents, done=3)]).logits
    close(torch.cat([begun, rest]), expected)
    runner.cache.commit(one, 9, (0, 2, 4))
    after = runner.score([SequenceRows(one, 12, [9])]).logits[0]
    close(after, logits_after(model, [*begin, 11, 13, 15, 9]))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-3 * float(expected.abs().max()), rtol=1e-3)


# ---------------------------------------------------------------- what is seen to fail


class Forgetful(RecurrentStore):
    """Broken: rows of refused tokens stay."""

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """Nothing moves."""


def _previous_row(parents: tuple[int, ...]) -> Any:
    """Broken: every row goes on from the one before it, not from its parent."""
    return tuple((torch.tensor([row]), torch.tensor([row])) for row in range(len(parents)))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("broken", ["not rolled back", "wrong parent"])
def test_broken_states_are_found(name: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakiyomi.model_executor.build.prove", lambda runner: None)
    if broken == "wrong parent":
        monkeypatch.setattr("sakiyomi.kernels.native.native", lambda: None)
        monkeypatch.setattr("sakiyomi.cache.recurrent._levels", _previous_row)
    else:
        monkeypatch.setattr("sakiyomi.cache.layer_state.RecurrentStore", Forgetful)
    assert texts(llm_of(name, drafter(name), exact=False)) != wanted(name)


@pytest.mark.parametrize("broken", ["not rolled back", "wrong parent"])
def test_the_proof_at_load_finds_them(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the model runs text by text through its own forward."""
    if broken == "wrong parent":
        monkeypatch.setattr("sakiyomi.kernels.native.native", lambda: None)
        monkeypatch.setattr("sakiyomi.cache.recurrent._levels", _previous_row)
    else:
        monkeypatch.setattr("sakiyomi.cache.layer_state.RecurrentStore", Forgetful)
    build_runner(model_of("qwen3_5"), compile=False)
    assert "other logits through our cache" in caplog.text and "its own forward by itself" in caplog.text


class Remembering(nn.Module):
    """A layer that keeps a state of its own, which nothing here knows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor) -> Tensor:
        mixed: Tensor = self.inner(hidden_states + hidden_states.cumsum(1))
        return mixed


def test_a_state_that_nobody_serves_is_found_at_load(caplog: pytest.LogCaptureFixture) -> None:
    model = make(HYBRIDS["lfm2"]())
    model.model.layers[1].feed_forward = Remembering(model.model.layers[1].feed_forward)
    build_runner(model, compile=False)
    assert "keep something that is not served" in caplog.text and "its own forward by itself" in caplog.text


# ---------------------------------------------------------------- texts that are reused


@pytest.mark.few(1)
@pytest.mark.parametrize("name", HYBRIDS)
def test_conversations_and_sharing_change_no_text(name: str) -> None:
    """Prompts that go on, go back a little, to a chunk's border, to the beginning; and requests that begin alike."""
    model, begin = model_of(name), prompt(50, 7)
    llm = llm_of(name, chunk_size=16)
    few = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with llm.conversation() as conversation:

        def say(tokens: list[int]) -> int:
            out = conversation.generate(tokens, few)
            assert out.token_ids == greedy(model, tokens, 4)
            return out.stats.reused

        assert say(begin) == 0
        grown = begin + greedy(model, begin, 4)
        assert say([*grown, *prompt(5, 8)]) == len(grown) - 1
        assert say([*grown[:51], 5, 6]) == 50, "the copy at the end of the first prompt"
        assert say([*begin[:40], 7]) in (16, 32), "a border of a chunk"
        assert say([*begin[:5], 7]) == 0
    alike = [[*begin, *prompt(3, seed)] for seed in (9, 10, 11)]
    done = llm.generate(alike, few)
    assert [out.token_ids for out in done] == [greedy(model, tokens, 4) for tokens in alike]
    assert sum(out.stats.reused for out in done) >= 2 * 32


@pytest.mark.few(2)
@pytest.mark.parametrize("name", HYBRIDS)
def test_prefixes_change_no_text(name: str, tmp_path: Path) -> None:
    begin, few = prompt(32, 12), SamplingParams(max_new_tokens=6, ignore_eos=True)
    llm_of(name, chunk_size=16).prefix(begin).save(tmp_path / "begin.safetensors")
    llm = llm_of(name, chunk_size=16)
    prefix = llm.load_prefix(tmp_path / "begin.safetensors")
    ends = [prompt(5, 13), prompt(1, 14)]
    done = llm.generate(ends, few, prefix=prefix)
    assert [out.token_ids for out in done] == [greedy(model_of(name), [*begin, *end], 6) for end in ends]
    assert [out.stats.reused for out in done] == [32, 32]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", KINDS)
def test_any_of_the_last_tokens_can_be_taken_back(name: str) -> None:
    """Long after the prompt: to any token behind the older copy of the last few, and on with other tokens."""
    model = model_of(name)
    runner = build_runner(model, compile=False)
    text = prompt(70, 20)
    with runner.cache.lent(100) as slot:
        runner.score([SequenceRows(slot, 0, text[:10], prompt=True)])
        for at in range(10, 70):
            row = runner.score([SequenceRows(slot, at, text[at : at + 1])]).logits[0]
        close(row, logits_after(model, text))
        for length in (69, 65, 70 - TAIL):
            assert runner.cache.resume(slot, length) == length
            close(runner.score([SequenceRows(slot, length, [5])]).logits[0], logits_after(model, [*text[:length], 5]))
            runner.cache.roll_back(slot, length)
        assert runner.cache.resume(slot, 30) == 10, "the end of the prompt"
        row = runner.score([SequenceRows(slot, 10, text[10:13])]).logits[-1]
        close(row, logits_after(model, text[:13]))


def test_a_pass_that_runs_again_writes_the_same() -> None:
    """Where memory runs out in a pass, requests are scored alone, with the same rows."""
    runner = build_runner(model_of("qwen3_5"), compile=False)
    text = prompt(30, 21)
    with runner.cache.lent(60) as slot:
        for length, rows, asked in ((0, text[:9], True), (9, text[9:12], False), (12, text[12:20], True)):
            first, again = (
                runner.score([SequenceRows(slot, length, rows, prompt=asked)]).logits.clone() for _ in range(2)
            )
            assert torch.equal(first, again)


# ---------------------------------------------------------------- other options


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DENSE + EXPERTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_rows_do_not_depend_on_their_company(name: str, dtype: torch.dtype) -> None:
    pair = copy.deepcopy(model_of(name)).to(dtype), TOKENIZER
    plain = LLM(pair, "none", exact=True, compile=False)
    batch = texts(plain)
    assert [texts(plain, [tokens])[0] for tokens in PROMPTS] == batch
    assert texts(LLM(pair, drafter(name), exact=True, compile=False)) == batch


@pytest.mark.few(2)
@pytest.mark.parametrize(
    # In plain torch, attention before a state rounds by the rows of its pass, unless exact=True.
    ("name", "native"),
    [(name, True) for name in DENSE + EXPERTS] + [(name, False) for name in DENSE if name != "falcon_h1"],
)
def test_a_row_of_a_tree_is_that_of_a_text(name: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit with kernels: tokens one by one, as rows of a tree, and after its commit, from states and rows that
    were folded at other lengths."""
    if not native:
        monkeypatch.setattr("sakiyomi.kernels.native.native", lambda: None)
    runner = build_runner(model_of(name), compile=False, max_slots=2)
    store, text = _store(runner), prompt(60, 40)
    one, two = runner.cache.take(), runner.cache.take()
    for slot in (one, two):
        runner.cache.reserve(slot, 90)
        runner.score([SequenceRows(slot, 0, text[:7], prompt=True)])
    for at in range(7, 58):
        runner.run(BatchPlan([SequenceRows(one, at, text[at : at + 1])]), 8)
    for at in range(7, 58, 3):
        other = [text[at], 9, text[at + 1], 8, text[at + 2]]
        runner.run(BatchPlan([SequenceRows(two, at, other, (-1, 0, 0, 2, 2))]), 8)
        runner.cache.commit(two, at, (0, 2, 4))
    for slot in (one, two):
        store._copy(slot, 58)
    for site in store.sites.values():
        first, second = site.copies[one][58], site.copies[two][58]
        # Vector functions of plain torch round a number by where it lies, on some machines.
        assert torch.equal(first, second) if native else torch.allclose(first, second, rtol=1e-5, atol=1e-5)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid", "falcon_h1"])
@pytest.mark.parametrize("options", [{"cache": "h2o[local=4]", "kv_budget": 200}, {"cache": "quant-8[residual=200]"}])
def test_policies_act_on_the_attention_layers(name: str, options: dict[str, Any]) -> None:
    """Budgets that everything fits in: nothing is lost."""
    assert texts(llm_of(name, drafter(name), **options)) == wanted(name)


def test_a_draft_with_recurrent_layers() -> None:
    """The draft is the target, so that it is always right; and another one, so that it is not."""
    for seed in (0, 3):
        draft = build_runner(make(HYBRIDS["qwen3_5"](), seed=seed), compile=False)
        llm = llm_of("qwen3_5", ModelDrafter(draft, VOCAB))
        for params in (GREEDY, SamplingParams(max_new_tokens=NEW, ignore_eos=True, gamma=3, tree="static", nodes=6)):
            assert texts(llm, values=params) == wanted("qwen3_5")


def test_states_count_in_memory_figures() -> None:
    runner = build_runner(model_of("mamba"), compile=False)
    assert runner.cache.shapes == ()
    runner.cache.reserve(0, 10)
    assert runner.cache.bytes >= sum(site.states.nbytes for site in _store(runner).sites.values()) > 0


def _store(runner: Any) -> RecurrentStore:
    (store,) = runner.cache.states.stores
    assert isinstance(store, RecurrentStore)
    return store


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KINDS)
def test_a_users_model_of_the_same_class_computes_as_before(name: str) -> None:
    """In another thread, while ours runs: class, module file and the user's object have none of our functions."""
    own, ids = make(HYBRIDS[name](), seed=4), torch.tensor([prompt(12, 30)])
    with torch.no_grad():
        before = own(input_ids=ids).logits
    llm, found, stop = llm_of(name), [], threading.Event()

    def run() -> None:
        while not stop.is_set():
            with torch.no_grad():
                found.append(own(input_ids=ids).logits)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert texts(llm) == wanted(name)
    finally:
        stop.set()
        thread.join()
    assert found and all(torch.allclose(before, logits, atol=1e-5) for logits in found)
    assert greedy(model_of(name), PROMPTS[0], NEW) == wanted(name)[0], "the model that was given"
    assert all("forward" not in vars(module) for module in model_of(name).modules())


def test_a_window_is_that_of_the_parent() -> None:
    """The slow clear version of a convolution: each row over its own path."""
    conv, weight = ShortConv(), torch.randn(5, 3)
    rows, parents = torch.randn(7, 5), (-1, 0, 0, 1, 2, 3, 3)
    site = Site(conv)
    site.learn([rows[None]], [weight])
    state = SiteState(site, np.zeros(1, np.int64))
    state.grow(1, 48)
    plan = BatchPlan([SequenceRows(0, 0, list(range(7)), parents)])
    (out,) = state.forward([rows[None]], [weight], plan)
    for row in range(7):
        path = plan.path(0, row).tolist()
        text = torch.cat([torch.zeros(2, 5), rows[path]])[-3:]
        assert torch.allclose(out[row], (text.t() * weight).sum(-1), atol=1e-6)
