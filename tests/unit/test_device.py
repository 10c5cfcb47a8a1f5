"""The accelerator's attention, run on the CPU: the layout of static tensors must give what the model itself gives.

A failure here would mean wrong logits on every CUDA device. Capturing itself needs such a device (marked gpu).
"""

from __future__ import annotations

import pytest
import torch

from sakiyomi.kernels import native
from sakiyomi.kernels.device import DevicePass
from sakiyomi.kernels.plan import Segment
from sakiyomi.model import PackedModel
from toys import tiny_llama


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> PackedModel:
    monkeypatch.setattr(native, "native", lambda: None)
    model = PackedModel(tiny_llama(), max_slots=4, compile=False)
    model.cache.spare = 1
    model.state = DevicePass(model.cache)
    model._model.set_attn_implementation("sakiyomi_device")
    return model


def test_prompts_trees_and_ragged_batches_give_the_models_own_logits(packed: PackedModel) -> None:
    ids = torch.randint(0, 320, (1, 40), generator=torch.Generator().manual_seed(0))
    tokens = ids[0].tolist()
    with torch.no_grad():
        expected = tiny_llama()(ids).logits[0]
    first, second = packed.cache.take(), packed.cache.take()
    packed.cache.reserve(second, 300)
    prompt = packed.score([Segment(second, 0, tokens[:20], prompt=True), Segment(first, 0, tokens[:7], prompt=True)])
    torch.testing.assert_close(prompt, torch.cat([expected[:20], expected[:7]]), atol=2e-5, rtol=1e-4)
    tree = Segment(first, 7, [tokens[7], 3, tokens[8], 5, tokens[9]], (-1, 0, 0, 2, 2))
    logits = packed.score([tree, Segment(second, 20, tokens[20:24])])
    torch.testing.assert_close(logits[[0, 2, 4]], expected[7:10], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(logits[5:], expected[20:24], atol=2e-5, rtol=1e-4)
    packed.cache.keep(first, 7, [0, 2, 4])
    logits = packed.score([Segment(first, 10, tokens[10:12])])
    torch.testing.assert_close(logits, expected[10:12], atol=2e-5, rtol=1e-4)


def test_filler_rows_leave_the_cache_alone(packed: PackedModel) -> None:
    slot = packed.cache.take()
    packed.cache.reserve(slot, 200)
    packed.score([Segment(slot, 0, [5, 6, 7], prompt=True)])
    before = packed.cache.keys[0][slot, :, :3].clone()
    packed.score([Segment(slot, 3, [8, 9])])  # two rows in a pass of four
    assert torch.equal(packed.cache.keys[0][slot, :, :3], before)
    assert packed.cache.keys[0][slot, :, 5 : packed.cache.room - 1].abs().sum() == 0


@pytest.mark.gpu
def test_captured_passes_equal_eager_ones() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    tokens = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    logits = []
    for compile_ in (False, True):
        model = PackedModel(tiny_llama().cuda(), max_slots=2, compile=compile_)
        slot = model.cache.take()
        model.cache.reserve(slot, 100)
        model.score([Segment(slot, 0, tokens[:20], prompt=True)], last=True)
        rows = []
        for start in range(20, 60, 4):  # several replays of one capture
            rows.append(model.score([Segment(slot, start, tokens[start : start + 4])]).clone())
            model.cache.keep(slot, start, range(4))
        logits.append(torch.cat(rows))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
