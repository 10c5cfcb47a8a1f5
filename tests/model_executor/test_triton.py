"""Attention on a GPU by the Triton kernels, on the CPU: the kernels by Triton's interpreter, the rest beside them.

Captures and the compiled kernels need a GPU (marked gpu); what is captured when, what a pass is told, and that rounds
run in native code is tried with stand-ins (``gpu_stand_ins``).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import gpu_stand_ins
from architectures import ALL, model_of, prompt
from drafters import Branching, texts_of
from gpu_stand_ins import Replayed, stand_in
from sakiyomi import LLM, SamplingParams
from sakiyomi.cache.slots import FIRST_ROOM
from sakiyomi.kernels import native
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.model_executor.attention.triton import TritonBackend
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.kernel_rounds import KernelRounds, Span
from sakiyomi.model_executor.runner import ModelRunner
from toys import save_model, tiny_llama, tiny_tokenizer

SERVED = [name for name in ALL if name not in ("gptj", "bloom", "mpt", "falcon-alibi")]
pytestmark = pytest.mark.skipif(native.native() is None, reason="the C++ kernels describe passes")


# ---------------------------------------------------------------- kernels


@pytest.mark.thorough
def test_kernels_compile_for_gpus_that_are_not_here() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).parent.parent / "compile_triton.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, encoding="utf-8")
    assert done.stdout.endswith("compiled\n"), done.stderr[-2000:]


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Any:
    """Compiled for a GPU, or interpreted (see ``conftest.py``)."""
    pytest.importorskip("triton")
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    request.addfinalizer(lambda: torch.set_default_device("cpu"))
    return importlib.import_module("sakiyomi.kernels.triton_kernels")


HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""The interpreter multiplies no matrices of bfloat16."""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(
        torch.get_default_device(), dtype
    )


def near(found: Tensor, wanted: Tensor) -> None:
    """Up to what the interpreter makes of bfloat16, which it does not round to the nearest."""
    half = wanted.dtype != torch.float32
    torch.testing.assert_close(found, wanted, atol=4e-2 if half else 2e-5, rtol=2e-2 if half else 1e-4)


TREE = (-1, 0, 0, 2, 2, 1, 5)
PLANS = {
    "one row": [SequenceRows(1, 40, [5])],
    "ragged, with filling": [SequenceRows(0, 3, [5]), SequenceRows(2, 130, [5, 6, 7]), SequenceRows(1, 0, [8])],
    "tree": [SequenceRows(1, 70, [1] * 7, TREE), SequenceRows(0, 9, [1, 2])],
    "tree in several passes": [SequenceRows(2, 67, [1] * 4, TREE, done=3)],
    "more than a tile": [SequenceRows(1, 33, [1] * 20), SequenceRows(0, 2, [1] * 6)],
    "block": [SequenceRows(0, 20, [1] * 5, block=True), SequenceRows(2, 4, [3])],
}


def written(plan: BatchPlan, size: int, tile: int) -> Tensor:
    """The plan as the CPU's kernels write it."""
    library: Any = native.native()
    session = library.sk_session(0)
    library.sk_begin(session, len(plan.parts), size, plan.packed)
    room = torch.zeros(4096, dtype=torch.int32, device="cpu")
    assert library.sk_device_plan(size, tile, 10 * size + 1, ctypes.c_void_p(room.data_ptr())) == -1, (
        "there is no such room"
    )
    assert library.sk_device_plan(size, tile, len(room), ctypes.c_void_p(room.data_ptr())) == max(
        length + rows for _, _, rows, length, _ in plan.table
    )
    library.sk_free_session(session)
    return room


@pytest.mark.thorough
@pytest.mark.parametrize("window", [0, 9, -8])
@pytest.mark.parametrize("name", PLANS)
def test_attention_is_what_the_plan_says(kernels: Any, name: str, window: int) -> None:
    """Against the definition, written and read: key heads that are shared, in parts and in one, fp32 and bf16."""
    plan = BatchPlan(PLANS[name])
    size = plan.rows if plan.rows == 1 else 32
    numbers = written(plan, size, kernels.TILE).to(torch.get_default_device())
    for dtype, dims, columns, softcap in ((torch.float32, (16, 16), 256, 0.0), (HALF, (24, 40), 64, 5.0)):
        q = random(1, size, 4, dims[0], seed=1, dtype=dtype).transpose(1, 2)
        k = random(1, size, 2, dims[0], seed=2, dtype=dtype).transpose(1, 2)
        v = random(1, size, 2, dims[1], seed=3, dtype=dtype).transpose(1, 2)
        stores = [random(3, 2, 160, dim, seed=4, dtype=dtype) for dim in dims]
        others = [store.clone() for store in stores]
        found = kernels.attend(q, k, v, *stores, numbers, columns, 0.3, softcap, window)
        wanted = gpu_stand_ins.attend(q, k, v, *others, numbers, columns, 0.3, softcap, window)
        near(found, wanted)
        assert all(torch.equal(a, b) for a, b in zip(stores, others, strict=True)), "the cache"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stands_between_products(kernels: Any, dtype: torch.dtype) -> None:
    x, weight = random(1, 5, 48, seed=1, dtype=dtype), random(48, seed=2, dtype=dtype)
    scaled = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    near(kernels.norm([x], weight, 1e-6, 2), weight * scaled.to(dtype))
    near(kernels.norm([x], weight, 1e-6, 1), (scaled * (1 + weight.float())).to(dtype))
    gate = random(1, 5, 48, seed=3, dtype=dtype)
    near(kernels.norm([x, gate], weight, 1e-6, 0), (scaled * weight.float() * F.silu(gate.float())).to(dtype))
    both = random(1, 5, 60, seed=4, dtype=dtype)
    for form, act in ((0, F.silu), (1, lambda x: F.gelu(x, approximate="tanh"))):
        near(kernels.gated(*both.chunk(2, -1), form), act(both[..., :30]) * both[..., 30:])
    q, k = (random(1, 5, heads, 24, seed=heads, dtype=dtype).transpose(1, 2) for heads in (3, 1))
    cos, sin = (random(1, 5, 24, seed=seed, dtype=dtype) for seed in (5, 6))
    for found, wanted in zip(
        (kernels.rotate(q, cos, sin), kernels.rotate(k, cos, sin)), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        near(found, wanted)
    part = kernels.rotate(q, cos[..., :16], sin[..., :16])
    near(part[..., :16], apply_rotary_pos_emb(q[..., :16], q[..., :16], cos[..., :16], sin[..., :16])[0])
    assert torch.equal(part[..., 16:], q[..., 16:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_a_commit_keeps(kernels: Any, dtype: torch.dtype) -> None:
    stores = [random(3, heads, 20, dim, seed=dim, dtype=dtype) for heads, dim in ((2, 6), (2, 10), (1, 6))]
    others = [store.clone() for store in stores]
    kernels.Keeper(stores)(1, 5, [0, 2, 5])
    gpu_stand_ins.Keeper(others)(1, 5, [0, 2, 5])
    assert all(torch.equal(a, b) for a, b in zip(stores, others, strict=True))


# ---------------------------------------------------------------- passes


def captures(model: ModelRunner) -> list[tuple[int, int]]:
    assert isinstance(model.recorder, Replayed)
    return model.recorder.made


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SERVED)
def test_every_architecture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, softcaps, shared key heads: a prompt in chunks, a tree beside another request, one row."""
    model = model_of(name)
    tokens = prompt(30)
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0]
    stand_in(monkeypatch)
    runner = build_runner(model, max_slots=4)
    if not isinstance(runner.backend, TritonBackend):
        pytest.skip("its attention is another one")
    with runner.cache.lent(60) as other, runner.cache.lent(60) as slot:
        runner.score([SequenceRows(other, 0, prompt(11, 1), prompt=True)])
        found = [runner.score([SequenceRows(slot, 0, tokens[:9], prompt=True)]).logits.clone()]
        found += [runner.score([SequenceRows(slot, 9, tokens[9:20], prompt=True)]).logits.clone()]
        tree = SequenceRows(slot, 20, [tokens[20], 3, tokens[21], 5, tokens[22]], (-1, 0, 0, 2, 2))
        found += [runner.score([SequenceRows(other, 11, [4]), tree]).logits[[1, 3, 5]]]
        runner.cache.commit(slot, 20, [0, 2, 4])
        found += [runner.score([SequenceRows(slot, i, tokens[i : i + 1])]).logits.clone() for i in range(23, 30)]
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-3)
    assert not runner.recorder.failed  # type: ignore[union-attr]


# ---------------------------------------------------------------- rounds


def runners(llm: LLM) -> list[ModelRunner]:
    model = getattr(llm.draft, "model", None)
    return [llm.target] if model is None else [llm.target, model]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model:{save_model(tmp_path_factory.mktemp('draft'), tiny_llama(), tiny_tokenizer())}"


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch, draft: str, temperature: float) -> None:
    """Plain, with a draft model, with trees; several requests, and one that grows beyond the first room."""
    prompts = [prompt(21, 1), prompt(3, 2), prompt(9, 3)]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=temperature, seed=3)
    loaded = (tiny_llama(), tiny_tokenizer())

    def texts(drafter: object, **options: int) -> tuple[LLM, list[tuple[int, ...]]]:
        llm = LLM(loaded, drafter, **options)  # type: ignore[arg-type]
        return llm, [tuple(out.token_ids) for out in llm.generate(prompts, params)]

    _, expected = texts("none")
    stand_in(monkeypatch)
    for drafter in ("none", draft, Branching(texts_of(prompts, expected), "sometimes", 320)):
        llm, found = texts(drafter)
        assert found == expected
        assert not llm.engine._speculation.broken
        for runner in runners(llm):
            assert isinstance(runner.backend, TritonBackend) and not runner.recorder.failed  # type: ignore[union-attr]
    long = prompt(FIRST_ROOM - 10, 4)
    several = [LLM(loaded, "none").generate([long], params)[0].token_ids for _ in range(2)]
    assert several[0] == several[1]


@pytest.mark.thorough
def test_rounds_run_in_native_code(monkeypatch: pytest.MonkeyPatch, draft: str) -> None:
    """A draft grows without Python between its levels, alone or in a whole round; a commit is one move."""
    stand_in(monkeypatch)
    llm = LLM((tiny_llama(), tiny_tokenizer()), draft)
    target, drafts = runners(llm)
    grown: list[int] = []
    rounds: list[int] = []
    run = KernelRounds.run

    def note(self: KernelRounds, *asked: Any, **how: Any) -> list[Span]:
        found = run(self, *asked, **how)
        if self._target is None:
            grown.extend(span.passes for span in found)
        else:
            rounds.extend(span.passes + 1 for span in found)
        return found

    monkeypatch.setattr(KernelRounds, "run", note)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, gamma=3)
    llm.generate([prompt(9, 1)], replace(params, logprobs=1))  # of which Python has a say in every round
    assert sum(grown) >= 3 * len(grown) > 0 and not rounds
    llm.generate([prompt(9, 1)], params)  # its first round shows that passes write into one place, and is Python's
    grown.clear()
    rounds.clear()
    llm.generate([prompt(9, 1)], params)
    assert sum(rounds) >= 3 * len(rounds) > 0 and not grown
    assert all(made.count(shape) == 1 for made in (captures(target), captures(drafts)) for shape in made)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_writes_the_texts_of_the_cpu(dtype: str) -> None:
    """The embedded model, alone and with each kind of draft; in bfloat16 up to near-ties, so less is asked there."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    texts = ["Once upon a time there was a little girl named Lily. She", "Tom and Anna went to the park to play."]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    wanted = [out.token_ids for out in LLM("tales", "none", dtype="float32", device="cpu").generate(texts, params)]
    for draft in ("none", "tales-draft", "tales-medusa", "eagle:tales-eagle", "suffix", "tales-draft+suffix"):
        llm = LLM("tales", draft, dtype=dtype, device="cuda")
        found = [out.token_ids for out in llm.generate(texts, params)]
        assert isinstance(llm.target.backend, TritonBackend) and not llm.target.recorder.failed  # type: ignore[union-attr]
        assert not llm.engine._speculation.broken
        shared = [
            next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), 60)
            for x, y in zip(found, wanted, strict=True)
        ]
        assert min(shared) >= (60 if dtype == "float32" else 10), (draft, shared)
