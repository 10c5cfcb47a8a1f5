"""What one round costs outside the model's forwards: drawing gamma tokens, the target's gamma + 1 rows, the verdict.

Logits are synthetic (a Zipf-like row, or a flat one as of an untrained model); the draft's equal the target's, so that
all tokens are accepted and every row is read: the dearest round there is. Run alone on the machine:

    python benchmarks/bookkeeping_core.py --threads 1

The last line is one JSON object: median milliseconds a round, with the parts, and the best round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from sakiyomi import SamplingParams
from sakiyomi.core.tree import Draft
from sakiyomi.kernels.build import native
from sakiyomi.sampling.probs import best_token
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.rows import draw
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers import VERIFIERS, Rows

GOALS = {"greedy": 0.3, "temperature": 0.6, "top_k": 0.6, "top_p": 1.5, "coupled": 1.5, "coupled_top_p": 1.5}
CASES = {
    "greedy": ("greedy", {"temperature": 0.0}),
    "temperature": ("ratio", {"temperature": 0.8}),
    "top_k": ("ratio", {"temperature": 0.8, "top_k": 50}),
    "top_p": ("ratio", {"temperature": 0.8, "top_p": 0.95}),
    "coupled": ("coupled", {"temperature": 0.8}),
    "coupled_top_p": ("coupled", {"temperature": 0.8, "top_p": 0.95}),
}


def logits(shape: str, rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    noise = torch.randn(rows, vocab_size, generator=generator)
    if shape == "flat":
        return (noise * 0.3).to(dtype)
    ranks = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(rows)])
    return (noise * 0.5 - 1.6 * torch.log1p(ranks.float()) + 8.0).to(dtype)


def make_round(name: str, rows: torch.Tensor, gamma: int) -> Callable[[int], tuple[float, float, int]]:
    rule, options = CASES[name]
    vocab_size = rows.shape[1]
    params = SamplingParams(seed=1, **options)
    sampler = Sampler(params, vocab_size)
    verifier = VERIFIERS[rule]
    noise = RequestNoise(1, 0)
    stream = noise.fork("draft")
    probs = torch.empty(gamma, vocab_size)
    table = probs.numpy()
    count = rows.shape[0] // (gamma + 1)

    def one(index: int) -> tuple[float, float, int]:
        block = rows[(index % count) * (gamma + 1) :][: gamma + 1]
        position = index * (gamma + 1)
        start = time.perf_counter()
        tokens = []
        for i in range(gamma):
            if rule == "greedy":
                tokens.append(best_token(block[i]))
                continue
            support = sampler.fill(block[i], table[i])
            if rule == "coupled":
                tokens.append(noise.top(position + i, table[i], support=support)[0])
            else:
                tokens.append(draw(table[i], stream.uniform(), support))
        draft = Draft.chain(tokens, "draft", probs if rule == "ratio" else None)
        middle = time.perf_counter()
        verdict = verifier.verify(draft, Rows(block, sampler, position, draft.tree), noise)
        end = time.perf_counter()
        return middle - start, end - middle, len(verdict.path)

    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    native()  # as where a model is loaded
    result: dict[str, object] = {**vars(arguments), "torch": torch.__version__, "unit": "ms per round, median"}
    for shape in ("zipf", "flat"):
        rows = logits(shape, 8 * (arguments.gamma + 1), arguments.vocab_size, getattr(torch, arguments.dtype))
        rounds = {name: make_round(name, rows, arguments.gamma) for name in CASES}
        for name, one in rounds.items():
            times = [one(index) for index in range(arguments.rounds + 20)][20:]
            draft, verify = (1000 * statistics.median(column) for column in list(zip(*times, strict=True))[:2])
            total = 1000 * statistics.median(a + b for a, b, _ in times)
            best = 1000 * min(a + b for a, b, _ in times)
            accepted = statistics.mean(row[2] for row in times)
            parts = f"best {best:.3f} draft {draft:.3f} accepted {accepted:.2f}"
            print(f"{shape:5s} {name:14s} {total:.3f} (goal {GOALS[name]}) {parts}")
            result[f"{shape}/{name}"] = {
                "total": round(total, 4),
                "draft": round(draft, 4),
                "verify": round(verify, 4),
                "best": round(best, 4),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
