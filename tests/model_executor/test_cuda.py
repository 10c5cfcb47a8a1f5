"""The accelerator's attention, run on the CPU: the layout of static tensors must give what the model itself gives.

A failure here would mean wrong logits on every CUDA device. Capturing itself needs such a device (marked gpu); what is
captured when, and when it is dropped, is tried with a capture that runs the forward again.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from architectures import ALL, model_of, prompt
from sakiyomi import LLM
from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.policies import POLICIES
from sakiyomi.cache.slots import FIRST_ROOM, SlotCache
from sakiyomi.core.errors import MemoryLimitError
from sakiyomi.core.memory import available_bytes
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.engine import Engine
from sakiyomi.kernels import native
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.model_executor.attention import cuda as device
from sakiyomi.model_executor.attention.cuda import CudaBackend, CudaGraphs
from sakiyomi.model_executor.attention.op import register
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.session import SIZES
from toys import tiny_llama, tiny_tokenizer

SERVED = [name for name in ALL if name != "gptj"]


def on_a_device(monkeypatch: pytest.MonkeyPatch, model: Any) -> ModelRunner:
    """Made as for an accelerator, without captures."""
    monkeypatch.setattr(native, "native", lambda: None)
    made = build_runner(model, max_slots=4, compile=False)
    made.cache.sizing.spare = 1
    register(CudaBackend.operator, CudaBackend.attend, CudaBackend.cross)
    made.backend = CudaBackend(made.weights.needs(exact=False, evicts=False), made.cache)
    made.module.set_attn_implementation(CudaBackend.operator)
    return made


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    return on_a_device(monkeypatch, tiny_llama())


class Replayed(CudaGraphs):
    """Captures as far as that is possible here: replaying is running the forward again, into the same logits.

    Attributes:
        made: the shapes that were captured, in order.
        pools: what each was given to share.
    """

    def __init__(self, model: ModelRunner) -> None:
        assert isinstance(model.backend, CudaBackend)
        super().__init__(model.forward, model.backend)
        self.made: list[tuple[int, ...]] = []
        self.pools: list[Any] = []

    def _capture(self, ids: Tensor, positions: Tensor) -> tuple[Any, Tensor, Tensor, Any]:
        frame, backend = self._backend.frame, self._backend
        self.made.append((frame.rows, frame.slots, frame.depth, frame.columns))
        self.pools.append(self._pool())
        graph, own_ids, own_positions, given = super()._capture(ids, positions)

        def replay() -> None:
            calls = backend.count  # a replay calls no operator of ours
            (logits, states), (fresh, others) = given, self._forward(own_ids, own_positions)
            for own, other in zip((logits, *states), (fresh, *others), strict=True):
                own.copy_(other)
            backend.count = calls

        graph.replay, graph.pool = replay, lambda: id(graph)
        return graph, own_ids, own_positions, given


class Anything:
    """Stands in for streams and graphs."""

    def wait_stream(self, other: Anything) -> None:
        pass


@pytest.fixture
def captured(packed: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    for name in ("device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, Anything)
    packed.recorder = Replayed(packed)
    return packed


def made(model: ModelRunner) -> list[tuple[int, ...]]:
    assert isinstance(model.recorder, Replayed)
    return model.recorder.made


# ---------------------------------------------------------------- attention


def test_prompts_trees_and_ragged_batches_give_the_models_own_logits(packed: ModelRunner) -> None:
    ids = torch.randint(0, 320, (1, 40), generator=torch.Generator().manual_seed(0))
    tokens = ids[0].tolist()
    with torch.no_grad():
        expected = tiny_llama()(ids).logits[0]
    first, second = packed.cache.take(), packed.cache.take()
    packed.cache.reserve(second, 300)
    prompt = packed.score(
        [SequenceRows(second, 0, tokens[:20], prompt=True), SequenceRows(first, 0, tokens[:7], prompt=True)]
    ).logits
    torch.testing.assert_close(prompt, torch.cat([expected[:20], expected[:7]]), atol=2e-5, rtol=1e-4)
    tree = SequenceRows(first, 7, [tokens[7], 3, tokens[8], 5, tokens[9]], (-1, 0, 0, 2, 2))
    logits = packed.score([tree, SequenceRows(second, 20, tokens[20:24])]).logits
    torch.testing.assert_close(logits[[0, 2, 4]], expected[7:10], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(logits[5:], expected[20:24], atol=2e-5, rtol=1e-4)
    packed.cache.commit(first, 7, [0, 2, 4])
    logits = packed.score([SequenceRows(first, 10, tokens[10:12])]).logits
    torch.testing.assert_close(logits, expected[10:12], atol=2e-5, rtol=1e-4)


def test_a_tree_in_several_passes(packed: ModelRunner) -> None:
    """As a drafter reads it, level by level, beside another request."""
    tokens = list(range(20, 40))
    with torch.no_grad():
        expected = tiny_llama()(torch.tensor([tokens])).logits[0]
    first, second = packed.cache.take(), packed.cache.take()
    for slot in (first, second):
        packed.cache.reserve(slot, 100)
        packed.score([SequenceRows(slot, 0, tokens[:6], prompt=True)], last=True)
    parents = (-1, 0, 0, 2, 1)  # rows 0, 2 and 3 are the text
    rows = [tokens[6], 3, tokens[7], tokens[8], 4]
    found = [packed.score([SequenceRows(second, 6, [9]), SequenceRows(first, 6, rows[:1], parents[:1])]).logits[1]]
    found += [packed.score([SequenceRows(first, 7, rows[1:3], parents[:3], done=1)]).logits[1]]
    found += [packed.score([SequenceRows(first, 9, rows[3:], parents, done=3), SequenceRows(second, 7, [9])]).logits[0]]
    torch.testing.assert_close(torch.stack(found), expected[6:9], atol=2e-5, rtol=1e-4)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", SERVED)
def test_every_architecture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, softcaps, shared key heads, values of another size: a prompt in chunks, a tree, one row."""
    model = model_of(name)
    tokens = prompt(30)
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0]
    packed = on_a_device(monkeypatch, model)
    with packed.cache.lent(60) as other, packed.cache.lent(60) as slot:
        packed.score([SequenceRows(other, 0, prompt(11, 1), prompt=True)])
        found = [packed.score([SequenceRows(slot, 0, tokens[:9], prompt=True)]).logits]
        found += [packed.score([SequenceRows(slot, 9, tokens[9:20], prompt=True)]).logits]
        tree = SequenceRows(slot, 20, [tokens[20], 3, tokens[21], 5, tokens[22]], (-1, 0, 0, 2, 2))
        found += [packed.score([SequenceRows(other, 11, [4]), tree]).logits[[1, 3, 5]]]
        packed.cache.commit(slot, 20, [0, 2, 4])
        found += [packed.score([SequenceRows(slot, i, tokens[i : i + 1])]).logits for i in range(23, 30)]
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-3)


def test_no_key_is_copied(packed: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernels take no mask together with shared key heads, nor a mask of another dtype.

    They would fall back to copying the whole cache, in float32, in every layer.
    """
    calls: list[tuple[Tensor, Tensor, Tensor | None, bool]] = []
    attention = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append((q, k, options.get("attn_mask"), options.get("enable_gqa", False)))
        return attention(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    slot = packed.cache.take()
    packed.cache.reserve(slot, 200)
    packed.score([SequenceRows(slot, 0, [5, 6, 7], prompt=True)])
    packed.score([SequenceRows(slot, 3, [8, 9, 10])])
    assert len(calls) == 4
    for q, k, mask, shared in calls:
        assert k.untyped_storage().data_ptr() in {keys.untyped_storage().data_ptr() for keys in packed.cache.keys}
        assert (mask is None) or (not shared and mask.dtype == q.dtype and q.shape[1] == k.shape[1])
    assert [mask is None for _, _, mask, _ in calls] == [True, True, False, False]


def test_a_prompt_is_not_padded_to_the_slots_below_its_own(packed: ModelRunner) -> None:
    for _ in range(4):
        slot = packed.cache.take()
    packed.cache.reserve(slot, 200)
    packed.score([SequenceRows(slot, 0, list(range(100)), prompt=True)], last=True)
    assert isinstance(packed.backend, CudaBackend)
    assert not packed.backend.frames, "tensors for a length that never comes again"


def test_filler_rows_leave_the_cache_alone(packed: ModelRunner) -> None:
    slot = packed.cache.take()
    packed.cache.reserve(slot, 200)
    packed.score([SequenceRows(slot, 0, [5, 6, 7], prompt=True)])
    before = packed.cache.keys[0][slot, :, :3].clone()
    packed.score([SequenceRows(slot, 3, [8, 9])])  # two rows in a pass of four
    assert torch.equal(packed.cache.keys[0][slot, :, :3], before)
    assert packed.cache.keys[0][slot, :, 5 : packed.cache.room - 1].abs().sum() == 0


@pytest.mark.parametrize("window", [0, 1, 4, 9])
@pytest.mark.parametrize("parents", [None, (-1,), (-1, 0, 0, 2, 2, 1, 5), (-1, -1, 0, 1, 3)])
def test_what_a_row_sees(parents: tuple[int, ...] | None, window: int) -> None:
    """Against the definition: the prefix and its own path, as far back as the window reaches."""
    count = 6 if parents is None else len(parents)
    links = range(-1, count - 1) if parents is None else parents
    for length in (0, 3, 8):
        plan = BatchPlan([SequenceRows(0, length, list(range(count)), parents)])
        expected = torch.zeros(count, length + count, dtype=torch.bool)
        for row in range(count):
            path = [row]
            while links[path[-1]] >= 0:
                path.append(links[path[-1]])
            columns = [length + node for node in path] + list(range(length))[::-1]
            expected[row, columns[:window] if window else columns] = True
        assert torch.equal(plan.visible(0, window), expected)
        for done in range(1, count if parents else 0):  # the same rows, some of them from passes before
            plan = BatchPlan([SequenceRows(0, length + done, list(range(count - done)), parents, done=done)])
            assert torch.equal(plan.visible(0, window), expected[done:])


# ---------------------------------------------------------------- captures


def test_one_capture_a_shape_and_the_same_text(captured: ModelRunner) -> None:
    engine = Engine(captured, None, tiny_tokenizer(), max_context=512)
    plain = build_runner(tiny_llama(), compile=False)
    other = Engine(plain, None, tiny_tokenizer(), max_context=512)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    texts = [
        [done.token_ids for done in each.complete([each.submit([5 + i, 6, 7], params) for i in range(3)])]
        for each in (engine, other)
    ]
    assert texts[0] == texts[1]
    assert made(captured) == [(4, 4, 1, FIRST_ROOM)], "prompts have no capture, rounds have one"


@pytest.mark.thorough
def test_growth_drops_what_was_captured(captured: ModelRunner) -> None:
    """A replay would read and write the tensors that were freed; memory of graphs that are gone is not shared."""
    captured.cache.on_move = captured.moved
    slot = captured.cache.take()
    captured.cache.reserve(slot, 100)
    captured.score([SequenceRows(slot, 0, [5, 6, 7], prompt=True)], last=True)
    for row in (3, 4):
        captured.score([SequenceRows(slot, row, [8])])
    captured.score([SequenceRows(slot, 5, [8, 9])])
    assert made(captured) == [(1, 1, 1, FIRST_ROOM), (4, 1, 2, FIRST_ROOM)]
    captured.cache.reserve(slot, FIRST_ROOM)
    captured.score([SequenceRows(slot, 7, [8])])
    assert made(captured)[2:] == [(1, 1, 1, FIRST_ROOM)]
    assert isinstance(captured.recorder, Replayed)
    first, second, third = captured.recorder.pools
    assert (first, third) == (None, None) and second is not None


def test_the_longest_unused_shapes_go_first(captured: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has logits of its own: all of them would fill the device."""
    monkeypatch.setattr(device, "KEPT", 2)
    slot = captured.cache.take()
    captured.cache.reserve(slot, 100)
    for count in (1, 2, 3, 1, 3):
        captured.score([SequenceRows(slot, 0, [5] * count)])
    assert [key[2] for key in made(captured)] == [1, 2, 4, 1]


def test_a_trial_pass_is_one_of_those_that_it_stands_for(captured: ModelRunner) -> None:
    """And the time of a capture is no pass's: gamma would follow it for hundreds of rounds."""
    slot = captured.cache.take()
    captured.cache.reserve(slot, 100)
    captured.score([SequenceRows(slot, 0, [5, 6, 7], prompt=True)], last=True)
    held = [tensor.clone() for tensor in (*captured.cache.keys, *captured.cache.values)]
    assert captured.pass_seconds(3) > 0
    assert made(captured) == [(4, 1, 1, FIRST_ROOM)]
    assert captured.clock._seconds.keys() == {(4, True)}
    end = captured.cache.room - 1
    for before, now in zip(held, (*captured.cache.keys, *captured.cache.values), strict=True):
        assert torch.equal(before[:, :, :end], now[:, :, :end]), "of a request nothing changes"
    capture, slow = Replayed._capture, []

    def slowly(*arguments: Any) -> Any:
        slow.append(True)
        torch.manual_seed(0)
        for _ in range(50):
            torch.randn(200, 200) @ torch.randn(200, 200)
        return capture(*arguments)

    captured.recorder._capture = slowly.__get__(captured.recorder)  # type: ignore[union-attr, method-assign]
    captured.score([SequenceRows(slot, 3, [8])])
    assert slow and (1, True) not in captured.clock._seconds
    captured.score([SequenceRows(slot, 4, [8])])
    assert (1, True) in captured.clock._seconds


def test_before_the_first_request_a_trial_pass_works_too(captured: ModelRunner) -> None:
    captured.cache.on_move = captured.moved
    assert captured.pass_seconds(1) > 0


def test_the_first_pass_of_all_may_be_captured(captured: ModelRunner) -> None:
    """Its layers are counted once, though the forward ran several times."""
    slot = captured.cache.take()
    captured.cache.reserve(slot, 100)
    assert captured.score([SequenceRows(slot, 0, [5])]).logits.shape == (1, 320)
    assert captured._proven


def test_prompts_with_all_their_logits_are_not_captured(captured: ModelRunner) -> None:
    """As a judge or a perplexity asks for them: each has another length."""
    with captured.cache.lent(200) as slot:
        captured.score([SequenceRows(slot, 0, list(range(150)), prompt=True)])
    assert made(captured) == []


def test_what_cannot_be_captured_runs_eagerly(
    captured: ModelRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(Replayed, "_capture", fails)
    assert all(captured.recorded(size) for size in SIZES)
    slot = captured.cache.take()
    captured.cache.reserve(slot, 100)
    with torch.no_grad():
        expected = tiny_llama()(torch.tensor([[5, 6, 7]])).logits[0]
    rows = [captured.score([SequenceRows(slot, i, [5 + i])]).logits.clone() for i in range(3)]
    torch.testing.assert_close(torch.cat(rows), expected, atol=2e-5, rtol=1e-4)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "run eagerly" in line and "not permitted when stream" in line
    assert not captured.recorded(1)
    assert captured.pass_seconds(1) > 0


# ---------------------------------------------------------------- memory


def test_what_torch_keeps_for_its_next_tensors_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda place: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda place: 400)
    assert available_bytes("cuda:1") == 1300


def test_a_device_that_does_not_give_what_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request then ends with an error, as where it is known before; the others go on."""
    cache = SlotCache((LayerShape(1, 4, 4),), dtype=torch.float32, max_slots=2)
    cache.reserve(0, 10)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(MemoryLimitError, match=r"16,384 bytes for 1 requests of 512 tokens.*shorten the prompt"):
        cache.reserve(0, 500)
    assert cache.room == FIRST_ROOM


@pytest.mark.gpu
def test_captured_passes_equal_eager_ones() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    tokens = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    logits = []
    for compile_ in (False, True):
        model = build_runner(tiny_llama().cuda(), max_slots=2, compile=compile_)
        slot = model.cache.take()
        model.cache.reserve(slot, 100)
        model.score([SequenceRows(slot, 0, tokens[:20], prompt=True)], last=True)
        rows = []
        for start in range(20, 60, 4):  # several replays of one capture
            rows.append(model.score([SequenceRows(slot, start, tokens[start : start + 4])]).logits.clone())
            model.cache.commit(slot, start, range(4))
        model.cache.reserve(slot, 1000)  # drops the captures, and their memory
        rows.append(model.score([SequenceRows(slot, 56, tokens[56:60])]).logits.clone())
        logits.append(torch.cat(rows))
        assert model.recorder is None or not model.recorder.failed
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cache", [*(name for name in POLICIES if name != "locret"), "minference", "quant-4", "kvquant-4"]
)
def test_caches_give_the_texts_of_the_cpu(cache: str) -> None:
    """Where all pairs have room; and one that has to let some go comes to the end."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    prompts = torch.randint(5, 320, (3, 70), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    roomy: dict[str, Any] = {"kv_budget": 4096} if cache in POLICIES else {}
    tight: dict[str, Any] = {"kv_budget": 64} if cache in POLICIES else {}
    residual = "[residual=4096]" if "quant" in cache else ""

    def texts(model: Any, cache: str, **options: Any) -> list[tuple[int, ...]]:
        llm = LLM((model, tiny_tokenizer()), "none", cache=cache, chunk_size=32, **options)
        return [tuple(done.token_ids) for done in llm.generate(prompts, params)]

    assert texts(tiny_llama().cuda(), cache + residual, **roomy) == texts(tiny_llama(), "full", compile=False)
    assert {len(text) for text in texts(tiny_llama().cuda(), cache, **tight)} == {40}
