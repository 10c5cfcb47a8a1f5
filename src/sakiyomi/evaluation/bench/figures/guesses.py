"""Figures of guesses: what rounds keep of a draft, ranks of a draft model and of Medusa heads, typical acceptance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.outputs import RoundTrace
from sakiyomi.drafters.medusa_heads.ranks import Ranks, rank_texts
from sakiyomi.evaluation.bench.figures.trees import place_lines, tree_lines
from sakiyomi.evaluation.bench.figures.work import Work
from sakiyomi.evaluation.bench.medusa import EPSILONS, WARM, typical
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.predictions import predictions
from sakiyomi.evaluation.tuning.medusa_search import ranks_of
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers.typical import threshold as limit

TEMPERATURES = {"T=0": 0.0, "T=1": 1.0}
GUESSES, PLACED = 3, 16  # predictions at a place, and places
TREE: dict[str, Any] = {"gamma": 4, "tree": "best-first", "nodes": 12}
SERIES = 60  # rounds that are drawn one by one
SHOWN = 10  # ranks
ARTICLE = {1: 0.7, 2: 0.8}
"""Shares that the article on assisted generation gives for the first guess, and for the first two."""
TOPS = (1, 2, 3, 5, 10)
TREES = (1, 3, 7, 15, 31, 63)
NODES = 31


def places(work: Work) -> Row:
    """The target's predictions after the last tokens of the first prompt."""
    found = predictions(work.alone.target, work.pair.prompts[0], GUESSES)
    lines = place_lines(found, work.text)[-PLACED:]
    right = sum(line["then"] == line["guesses"][0][0] for line in lines[:-1])
    return work.measured(lines, places=len(lines), first_guess_right=f"{right} of {len(lines) - 1}")


def _traced(work: Work, prompts: Sequence[list[int]], **more: Any) -> list[RoundTrace]:
    """Rounds with the pair's draft that drafted something.

    Raises:
        UnsupportedError: there are none.
    """
    engine, params = work.engine(work.draft), work.params(**more)
    done = [engine.generate([prompt], params, rounds_trace=True)[0] for prompt in prompts]
    found = [traced for text in done for traced in text.rounds_trace or () if traced.tokens]
    if not found:
        raise UnsupportedError("no round drafted anything; give a longer text (--max-new-tokens)")
    return found


def tree(work: Work) -> Row:
    """The round of a first text that shows most: several branches, and something accepted."""
    found = _traced(work, work.pair.prompts[:1], **TREE)
    # The first of those that used most branches: it has something to show.
    chosen = max(found, key=lambda traced: (_off_first(traced), len(traced.path), len(traced.tokens)))
    known = {"round": chosen.round, "nodes": TREE["nodes"], "depth": TREE["gamma"], "of_rounds": len(found)}
    return work.measured(tree_lines(chosen, work.text), **known)


def _off_first(traced: RoundTrace) -> int:
    """Accepted nodes that were not the first child of their parent."""
    return sum(traced.parents[node] in traced.parents[:node] for node in traced.path)


def rounds(work: Work) -> Row:
    """How many draft tokens each round kept; chains, greedy and sampled."""
    gamma = work.config.gamma
    lines: list[dict[str, Any]] = [{"accepted": count} for count in range(gamma + 1)]
    known: dict[str, Any] = {}
    series = {}
    for name, temperature in TEMPERATURES.items():
        # The ratio rule has rounds that are independent draws, as the formula takes them.
        traces = _traced(work, work.pair.prompts, temperature=temperature, seed=7, acceptance="ratio", tree="chain")
        found = [len(traced.path) for traced in traces if len(traced.tokens) == gamma]
        if not found:
            raise UnsupportedError("no round drafted a whole chain; give a longer text (--max-new-tokens)")
        alpha = sum(found) / sum(count + (count < gamma) for count in found)
        for count, line in enumerate(lines):
            line[name] = found.count(count) / len(found)
            line[f"{name}, alike"] = alpha**count * (1 - alpha if count < gamma else 1)
        series[name] = found[:SERIES]
        known |= {f"rounds_{name}": len(found), f"alpha_{name}": alpha}
    lines[0]["series"] = series
    return work.measured(lines, gamma=gamma, **known)


def draft_ranks(model: ModelRunner, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> Ranks:
    """Ranks that a draft model gives to the tokens of a text, each after those before it."""

    def ahead(ids: Sequence[int]) -> Tensor:
        # A head looks one token further than a draft model: its row at a place is the draft's at the next one.
        with model.cache.lent(len(ids)) as slot:
            return model.score([SequenceRows(slot, 0, list(ids))]).logits.roll(-1, 0)

    return rank_texts(ahead, lambda rows: rows[None], prompts, texts)


def ranks(work: Work) -> Row:
    """Of a text that the target writes greedily, and of one that it samples."""
    model = work.drafter(work.draft).model
    lines: list[dict[str, Any]] = [{"rank": rank} for rank in range(1, SHOWN + 1)]
    places = 0
    for name, temperature in TEMPERATURES.items():
        found = draft_ranks(model, work.pair.prompts, work.written(temperature=temperature, seed=7))
        share, places = found.accuracies()[0], places + found.places
        for line in lines:
            line |= {name: share[line["rank"] - 1], f"{name}, up to here": sum(share[: line["rank"]])}
    return work.measured([line | {"article, up to here": ARTICLE.get(line["rank"])} for line in lines], places=places)


def _head_ranks(work: Work) -> Ranks:
    """Ranks that the heads give to what the target writes greedily."""
    texts = work.written(temperature=0.0, seed=7)
    return ranks_of(work.alone, work.drafter(work.medusa), work.pair.prompts, texts)


def heads(work: Work) -> Row:
    """Accuracy of each head, and tokens a pass of the best trees of some sizes, counted on the same text."""
    found = _head_ranks(work)
    lines: list[dict[str, Any]] = [
        {"name": f"head {head}", **{f"top {top}": sum(chances[:top]) for top in TOPS}}
        for head, chances in enumerate(found.accuracies(), start=1)
    ]
    for nodes in TREES:
        paths = found.best(nodes)
        depth = max(map(len, paths), default=0)
        lines.append({"name": f"tree of {nodes}", "nodes": nodes, "depth": depth, "tau": found.replay(paths)})
    return work.measured(lines, heads=work.medusa.partition(":")[2], places=found.places)


def sparse(work: Work) -> Row:
    """The best tree of so many nodes, and how often each node was accepted when the text was replayed with it."""
    found = _head_ranks(work)
    paths = found.best(NODES)
    shares = found.accepted(paths)
    numbers = {path: node for node, path in enumerate(paths)}
    lines: list[dict[str, Any]] = [
        {
            "node": node,
            "parent": numbers.get(path[:-1], -1),
            "head": len(path),
            "guess": path[-1] + 1,
            "accepted": shares[path],
            "path": list(path),
        }
        for path, node in numbers.items()
    ]
    return work.measured(lines, nodes=len(paths), tau=found.replay(paths), places=found.places)


def threshold(work: Work) -> Row:
    """The row ``typical`` of the benchmark, with epsilon in each line (None: lossless) and guesses that it takes."""
    work.medusa  # noqa: B018 - refuse before anything is loaded
    row = typical(work)
    epsilons, taken = (None, None, *EPSILONS), _taken(work)
    lines = [{**line, "epsilon": at, "taken": taken.get(at)} for line, at in zip(row.lines, epsilons, strict=True)]
    return replace(row, lines=lines)


@torch.inference_mode()
def _taken(work: Work) -> dict[float | None, float]:
    """By epsilon, the share of places of one and the same text at which the first head's first guess is typical."""
    asked: dict[str, Any] = {"temperature": WARM, "seed": 7, "gamma": "auto"}
    target, drafter = work.alone.target, work.drafter(work.medusa)
    sampler = Sampler(work.params(**asked), work.alone.vocab_size)
    rows = []
    for prompt, text in zip(work.pair.prompts, work.written(**asked), strict=True):
        ids = [*prompt, *text]
        with target.cache.lent(len(ids)) as slot:
            found = target.score([SequenceRows(slot, 0, ids, prompt=True)])
            # After the token at i the head guesses that at i + 2, which the target expects after i + 1.
            guesses = drafter.guesser(found.features[HEAD][len(prompt) - 1 : -2])[0].argmax(-1).tolist()
            rows += list(zip(sampler.probs(found.logits[len(prompt) : -1]).numpy(), guesses, strict=True))
    return {
        epsilon: sum(float(row[guess]) > limit(row, epsilon, math.sqrt(epsilon)) for row, guess in rows) / len(rows)
        for epsilon in EPSILONS
    }
