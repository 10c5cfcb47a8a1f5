"""A self-test for ``exact=True``: finds the row counts at which a pass computes every row independently."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.cache.cross_attention import Source
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.model_executor.runner import ModelRunner

TRIAL = 80  # tokens of the self-test
LARGE = 1 << 24  # bytes of weights; a larger model is tested on fewer tokens
TRIED = (1, 4, 8, 16, 32, 64)


@contextmanager
def _listening(model: nn.Module) -> Generator[dict[str, Tensor], None, None]:
    """The last output of each module, (rows, width), by name."""
    made: dict[str, Tensor] = {}

    def listen(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            out = output[0] if isinstance(output, tuple) else output
            if isinstance(out, Tensor) and out.ndim > 1:
                made[name] = out.reshape(-1, out.shape[-1]).clone()  # kernels reuse their memory

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv1d):  # its rows are the last dimension
                continue
            hooks.enter_context(module.register_forward_hook(listen(name)))
        yield made


def invariant_sizes(runner: ModelRunner) -> tuple[int, ...]:
    """Row counts at which a row has the same bits at every place of a pass.

    The same 64 tokens are scored in one pass and in passes of each size. Many rows are compared: a kernel that computes
    a few elements of some rows in another way (the end of a vector loop) often rounds them alike. The outputs of all
    modules are compared, not only the logits: rounding on the way (to bfloat16, or to 8 bits before a product) hides
    most differences in the last bit.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, runner.vocab_size, (TRIAL,), generator=generator).tolist()
    # A small model has narrow rows, each of which shows less; its passes are cheap.
    least, each = (24, 64) if (runner.weights.bytes or LARGE) < LARGE else (8, 4)
    with runner.cache.lent(TRIAL) as slot, _listening(runner.module) as made, runner.eagerly():
        _pretend_source(runner, slot)
        most = runner.max_context  # the model may have fewer positions than the test has columns

        def run(segment: SequenceRows, size: int) -> Tensor:
            plan = BatchPlan([segment])
            plan.positions = [position % most for position in plan.positions]
            return runner.run(plan, size).logits

        run(SequenceRows(slot, 0, ids[:16], prompt=True), 16)

        def rows(start: int, end: int, size: int) -> dict[str, Tensor]:
            """Results for some tokens behind the first 16, by passes of this size."""
            made.clear()
            segment = SequenceRows(slot, 16 + start, ids[16 + start : 16 + end])
            found = {"logits": run(segment, size).clone()}
            found |= {name: out[: end - start] for name, out in made.items() if len(out) == size}
            return found | _written(runner, slot, 16 + start, 16 + end)

        reference, good = rows(0, 64, 64), []
        for size in TRIED:
            count = min(64, max(least, each * size)) if size > 1 else least
            starts = [0, *range((size + 1) // 2, count, size)]  # the first pass is only half full
            if all(
                name in reference and torch.equal(out, reference[name][start:end])
                for start, end in itertools.pairwise([*starts, count])
                for name, out in rows(start, end, size).items()
            ):
                good.append(size)
        return tuple(good) if len(good) > 1 else ()


def _written(runner: ModelRunner, slot: int, start: int, end: int) -> dict[str, Tensor]:
    """Keys and values of these tokens, by layer and heads, (tokens, width)."""
    found: dict[str, Tensor] = {}
    for layer in range(len(runner.cache.shapes)):
        for part in runner.cache.parts(layer, slot):
            own = slice(start - part.dropped, end - part.dropped)
            for kind, pairs in (("keys", part.keys), ("values", part.values)):
                found[f"{kind} {layer} {part.heads}"] = pairs[:, own].transpose(0, 1).flatten(1).clone()
    return found


def _pretend_source(runner: ModelRunner, slot: int) -> None:
    """Give a slot a source of random numbers for cross-attention."""
    encoder = runner.weights.encoder
    if runner.sources is not None and encoder is not None:
        runner.sources.reserve(slot, 40)
        runner.sources.fill(slot, Source({}, 40), encoder.noise(40))
