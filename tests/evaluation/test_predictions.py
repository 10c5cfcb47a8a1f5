"""What a target expects at every place of a text, against transformers' own logits."""

from __future__ import annotations

import pytest
import torch

from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.predictions import predictions
from sakiyomi.model_executor.build import build_runner
from sakiyomi.sampling.probs import leading
from toys import tiny_llama


def test_predictions_are_those_of_the_model() -> None:
    """Longer than one stretch of logits, so that their border is in it."""
    model = tiny_llama()
    tokens = torch.randint(320, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    found = predictions(build_runner(model, max_slots=1, compile=False), tokens, 3)
    with torch.no_grad():
        probs = model(input_ids=torch.tensor([tokens])).logits[0].softmax(-1)
    assert len(found) == 151
    assert (found[0].token, found[0].prob, found[0].top) == (tokens[0], None, ())
    for i, place in enumerate(found[1:]):
        best = probs[i].topk(3)
        assert [token for token, _ in place.top] == best.indices.tolist()
        assert [prob for _, prob in place.top] == pytest.approx(best.values.tolist(), rel=1e-3)
        if i < 149:
            assert place.token == tokens[i + 1]
            assert place.prob == pytest.approx(float(probs[i, tokens[i + 1]]), rel=1e-3)
    assert (found[-1].token, found[-1].prob) == (-1, None)


def test_what_cannot_be_meant() -> None:
    model = build_runner(tiny_llama(max_position_embeddings=8), max_slots=1, compile=False)
    for tokens, count in (([], 1), ([1] * 9, 1), ([1], 0)):
        with pytest.raises(InputError):
            predictions(model, tokens, count)
    assert model.cache.free == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("size", [1, 5, 17, 320, 5000, 32001])
def test_leading_tokens_and_their_log_softmax(
    size: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the compiled kernel and without; of equal ones the lower token first."""
    logits = (torch.randn(rows, size, generator=torch.Generator().manual_seed(size)) * 3).to(dtype)
    logits[:, size // 2] = logits[:, 0]
    for _ in range(2):
        for row, (tokens, scores) in zip(logits, leading(logits, 8), strict=True):
            order = row.float().sort(descending=True, stable=True).indices[:8].tolist()
            assert tokens == order
            assert scores == pytest.approx(row.float().log_softmax(-1)[order].tolist(), abs=2e-5)
        monkeypatch.setattr("sakiyomi.sampling.probs.loaded", lambda: None)


def test_leading_of_a_row_that_is_none() -> None:
    row = torch.randn(10)
    with pytest.raises(InputError):
        leading(torch.stack([row, torch.full((10,), torch.nan)]), 3)
    infinite = torch.zeros(10)
    infinite[4] = torch.inf
    assert leading(torch.stack([row, infinite]), 3)[1] == ([4], [0.0])
    row = torch.full((10,), -torch.inf)
    row[7] = 1.0
    tokens, scores = leading(row[None], 3)[0]
    assert (tokens[0], scores[0]) == (7, 0.0)
