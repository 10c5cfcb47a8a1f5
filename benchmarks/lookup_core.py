"""What drafts from text alone cost: microseconds a token read, and a round, by the length of the text.

The text is the source code of this package in the tokens of ``tales``, or files of your own, again and again until it
is long enough (each time another permutation of its lines, so that it is not one long repetition); and two texts that
are hard on a suffix automaton: one token for ever, and random tokens. Run alone on the machine:

    python benchmarks/lookup_core.py
    python benchmarks/lookup_core.py --python
    python benchmarks/lookup_core.py --chances

With --chances: how often the longest match was right, by its length and by the place in the draft, which is where the
starting values in ``drafters/lookup.py`` and ``drafters/suffix.py`` come from. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import sakiyomi
from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters import Context
from sakiyomi.drafters.lookup import LookupReader, PromptLookup
from sakiyomi.drafters.ngram import NgramDrafter
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.drafters.text_base import TextDrafter
from sakiyomi.kernels.build import native
from sakiyomi.sampling.rng import RequestNoise

GAMMA = 8
ROUNDS = 300
STEP = 3  # tokens that a round commits
DRAFTERS = {"prompt-lookup": PromptLookup, "suffix": SuffixDrafter, "ngram": lambda: NgramDrafter(1 << 20)}


def lines_of(paths: list[str]) -> list[str]:
    files = [Path(path) for path in paths] or sorted(Path(sakiyomi.__file__).parent.rglob("*.py"))
    return [line for path in files for line in path.read_text(encoding="utf-8").splitlines(keepends=True)]


def long_text(lines: list[str], tokens: int) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(sakiyomi.embedded("tales"))
    encoded = [ids for ids in tokenizer(lines, add_special_tokens=False)["input_ids"] if ids]
    rng, found = random.Random(0), list[int]()
    while len(found) < tokens:
        for ids in encoded:
            found += ids
        rng.shuffle(encoded)
    return found[:tokens]


def measure(make: Any, text: list[int], size: int) -> dict[str, float]:
    """Microseconds: a token of a prompt of ``size`` tokens, and a round behind it with what it reads and proposes."""
    drafter: TextDrafter = make()
    request = Context(0, text[:size], SamplingParams(), "greedy", RequestNoise(0), frozenset(), GAMMA)
    while True:
        before = drafter.prefill_seconds
        drafter.propose([request], [GAMMA])
        if drafter.prefill_seconds == before:
            break
    read, rounds = drafter.prefill_seconds, []
    for i in range(ROUNDS):
        request.tokens += text[size + STEP * i : size + STEP * (i + 1)]
        began = time.perf_counter()
        drafter.propose([request], [GAMMA])
        rounds.append(time.perf_counter() - began)
    return {"read_us_per_token": 1e6 * read / size, "round_us": 1e6 * statistics.median(rounds)}


def transformers_round(text: list[int], size: int) -> float:
    """Microseconds of one look-up of transformers."""
    candidates = PromptLookupCandidateGenerator(num_output_tokens=GAMMA, max_matching_ngram_size=2, max_length=1 << 30)
    times = []
    for i in range(ROUNDS // 10):
        ids = torch.tensor([text[: size + STEP * i]])
        began = time.perf_counter()
        candidates.get_candidates(ids)
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def chances(text: list[int]) -> None:
    right, tried = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    reader = LookupReader(16)
    for start, token in enumerate(text):
        length, place = reader.match()
        for depth in range(6 if length else 0):
            if start + depth >= len(text) or place + depth >= len(reader.text):
                break
            tried[length, depth] += 1
            if reader.text[place + depth] != text[start + depth]:
                break
            right[length, depth] += 1
        reader.read([token])
    print("length: share that was right at each place of the draft, where those before were (tries)")
    for length in range(1, 17):
        found = ((right[length, depth], tried[length, depth]) for depth in range(6))
        print(f"{length:6}: " + "  ".join(f"{hits / max(count, 1):.2f} ({count})" for hits, count in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", action="append", default=[], help="text file; repeat for more")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--python", action="store_true", help="without the compiled kernels")
    parser.add_argument("--chances", action="store_true", help="show how often matches are right instead")
    options = parser.parse_args()
    lines = lines_of(options.text)
    if options.chances:
        chances(long_text(lines, max(options.sizes)))
        return
    if not options.python:
        native()
    longest = max(options.sizes) + STEP * ROUNDS
    rng = random.Random(1)
    texts = {
        "source": long_text(lines, longest),
        "one token": [7] * longest,
        "random": [rng.randrange(4096) for _ in range(longest)],
    }
    found: list[dict[str, Any]] = []
    for kind, text in texts.items():
        for size in options.sizes:
            for name, make in DRAFTERS.items():
                entry = {"text": kind, "tokens": size, "drafter": name, **measure(make, text, size)}
                found.append(entry)
                print(
                    f"{kind:10} {size:7} tokens  {name:14} {entry['read_us_per_token']:6.2f} us a token read, "
                    f"{entry['round_us']:6.1f} us a round"
                )
            if kind == "source":
                theirs = transformers_round(text, size)
                found.append({"text": kind, "tokens": size, "drafter": "transformers", "round_us": theirs})
                print(f"{kind:10} {size:7} tokens  transformers   {'':24} {theirs:6.1f} us a round")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
