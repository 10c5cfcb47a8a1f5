"""Finds the fastest size of a Medusa tree on this machine: heads x first guesses x nodes.

Tau of every tree is counted on texts that the target wrote to held-out prompts. The time of a round is measured by the
number of nodes: the target's pass, the heads, and everything between.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from sakiyomi.core.checks import at_least
from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.outputs import Generation, Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters.draft_length import MOST_NODES
from sakiyomi.drafters.medusa import MedusaDrafter
from sakiyomi.drafters.medusa_heads.ranks import Ranks, rank_texts
from sakiyomi.drafters.medusa_heads.tuned import FILE, Tuned, read_tuned, write_tuned
from sakiyomi.engine import machine
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.loading import load
from sakiyomi.evaluation.tuning.config import TuneConfig
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.session import SIZES
from sakiyomi.theory import expected_tree_tokens
from sakiyomi.train.counted import read_counted
from sakiyomi.train.samples import prompt_of

PROMPT_TOKENS = 64
Way = TypeVar("Way")
WIDTHS = (1, 2, 3, 4, 6, 8)
RUNS = 5
ROUNDS = 48  # tokens of a text that times rounds


def tune(config: TuneConfig, note: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Find the fastest size, write it beside the heads, and measure it against plain decoding.

    Args:
        config: the settings.
        note: told what is being done.

    Returns:
        ``best``, ``table``, ``accuracies``, ``measured`` and ``conditions``, as JSON values.

    Raises:
        InputError, LoadError, UnsupportedError: before any work is done, where that is possible.
    """
    at_least(config, prompts=1, new_tokens=2, max_nodes=1)
    if config.max_nodes > MOST_NODES:
        raise InputError(f"max_nodes is {config.max_nodes}; by default no tree has more than {MOST_NODES} nodes")
    if not config.valid:
        raise InputError("valid is not given; give held-out text with --valid FILE")
    folder = folder_of(config.heads)
    _check_folder(folder)
    note(f"loading {config.target}")
    llm = load(config, f"medusa:{config.heads}", max_batch=8, strict=True)
    llm.wait()
    drafter = llm.draft
    assert isinstance(drafter, MedusaDrafter)
    prompts = _prompts(config, llm)
    note(f"{config.target} answers {len(prompts)} prompts")
    answer = SamplingParams(max_new_tokens=config.new_tokens, gamma=1)
    texts = [done.token_ids for done in llm.generate(prompts, answer)]
    ranks = ranks_of(llm, drafter, prompts, texts)
    note("timing rounds")
    rounds = _rounds(llm, drafter, prompts, ranks, config.max_nodes)
    table = search(ranks, rounds)
    best = max(table, key=lambda row: row["tokens_per_second"])
    times: dict[str, Any] = {"round_ms": {nodes: 1000 * spent for nodes, spent in rounds.items()}}
    times |= {"heads_ms": 1000 * _heads_seconds(llm, drafter), "texts": len(ranks.texts), "places": ranks.places}
    known = {"target": llm.name, "dtype": dtype_name(llm.target.dtype), "quantize": config.quantize}
    conditions = machine.conditions(**known, **times)
    tuned = Tuned(
        max(1, best["heads"]), max(1, best["top_k"]), max(1, best["nodes"]), ranks.accuracies(), conditions, table
    )
    write_tuned(folder, tuned)
    note("measuring the best one")
    drafter.tuned = tuned
    paths = ranks.best(best["nodes"], best["heads"] or None, best["top_k"] or 1) if best["nodes"] else [(0,)]
    measured = _measured(llm, drafter, prompts, paths, config.new_tokens)
    return dataclasses.asdict(tuned) | {"best": best, "measured": measured, "file": str(folder / FILE)}


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written, before any work; an unreadable earlier result is removed."""
    try:
        read_tuned(folder)
    except LoadError:
        (folder / FILE).unlink(missing_ok=True)
    if not folder.is_dir():
        return  # said where heads are read
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LoadError(
            f"nothing can be written to {folder} ({error.strerror}); copy the heads to a folder of yours"
        ) from None


def search(ranks: Ranks, rounds: dict[int, float]) -> list[dict[str, Any]]:
    """Every size with its tau and its tokens per second; the first row is plain decoding.

    Args:
        ranks: of the heads on held-out answers.
        rounds: seconds of a round by the nodes of its tree, 0 for plain decoding; no other sizes are considered.
    """
    levels = ranks.accuracies()
    trees: dict[Any, tuple[int, int, int]] = {(): (0, 0, 0)}  # the first size that gives a tree
    for heads, width, nodes in itertools.product(range(1, ranks.heads + 1), WIDTHS, rounds.keys() - {0}):
        paths = ranks.best(nodes, heads, width)
        if len(paths) == nodes:
            trees.setdefault(tuple(sorted(paths)), (heads, width, nodes))
    table = []
    for paths, (heads, width, nodes) in trees.items():
        tau, expected = (ranks.replay(paths), expected_tree_tokens(levels, paths)) if paths else (1.0, 1.0)
        row: dict[str, Any] = {"heads": heads, "top_k": width, "nodes": nodes, "expected_tau": expected, "tau": tau}
        rates = {"tokens_per_second": tau / rounds[nodes], "speedup": tau * (rounds[0] / rounds[nodes])}
        table.append(row | rates)
    return sorted(table, key=lambda row: (row["heads"], row["top_k"], row["nodes"]))


def _prompts(config: TuneConfig, llm: LLM) -> list[list[int]]:
    documents = read_counted(Path(config.valid), llm.tokenizer, llm.vocab_size)
    found = [prompt_of(document, PROMPT_TOKENS) for document in documents]
    room = llm.max_context - config.new_tokens
    found = [prompt for prompt in found if 8 <= len(prompt) <= room][: config.prompts]
    if not found:
        raise InputError(
            f"{config.valid} has no prompt of 8 to {room} tokens; give longer texts, or fewer --new-tokens"
        )
    return found


def ranks_of(llm: LLM, drafter: MedusaDrafter, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> Ranks:
    """Ranks that heads gave to what the target wrote after each prompt."""
    target = llm.target

    def hidden_of(ids: Sequence[int]) -> torch.Tensor:
        with target.cache.lent(len(ids)) as slot:
            return target.score([SequenceRows(slot, 0, list(ids), prompt=True)]).features[HEAD]

    return rank_texts(hidden_of, drafter.guesser, prompts, texts)


def _rounds(
    llm: LLM, drafter: MedusaDrafter, prompts: Sequence[list[int]], ranks: Ranks, most: int
) -> dict[int, float]:
    """Median seconds of a whole round by the nodes of its tree, 0 for plain decoding.

    A pass has one of few numbers of rows: only trees that fill one are worth a look.
    """
    nodes = [rows - 1 for rows in SIZES if rows - 1 <= most]
    trees = {count: _tree(ranks.best(count)) for count in nodes}
    several = [prompts[number % len(prompts)] for number in range(RUNS + 1)]
    found = _interleaved(llm, drafter, trees, several, max_new_tokens=ROUNDS, ignore_eos=True)
    return {
        count: statistics.median((one.seconds - one.prefill_seconds) / max(one.rounds, 1) for one in _counted(texts))
        for count, texts in found.items()
    }


def _tree(paths: Sequence[tuple[int, ...]]) -> SamplingParams | None:
    """What asks for this tree; None for plain decoding."""
    return SamplingParams(tree=[list(path) for path in paths]) if paths else None


def _interleaved(
    llm: LLM,
    drafter: MedusaDrafter,
    ways: Mapping[Way, SamplingParams | None],
    prompts: Sequence[list[int]],
    **more: Any,
) -> dict[Way, list[Generation]]:
    """What each way makes of each prompt: all ways write one before the next one begins. None: without a draft."""
    plain, drafting = EngineView(llm, strict=True), EngineView(llm, drafter, strict=True)
    found: dict[Way, list[Generation]] = {way: [] for way in ways}
    for prompt in prompts:
        for way, params in ways.items():
            engine = plain if params is None else drafting
            found[way] += engine.generate([prompt], replace(params or SamplingParams(), **more))
    return found


def _counted(texts: Sequence[Generation]) -> list[Stats]:
    """Figures of all but the first text, which warms up, unless it is the only one."""
    return [text.stats for text in texts[1:] or texts]


def _heads_seconds(llm: LLM, drafter: MedusaDrafter) -> float:
    """Median seconds of the heads for one request."""
    hidden = torch.zeros(1, drafter.guesser.width, dtype=llm.target.dtype, device=llm.target.device)
    times = []
    for _ in range(21):
        began = time.perf_counter()
        drafter.guesser(hidden)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _measured(
    llm: LLM, drafter: MedusaDrafter, prompts: Sequence[list[int]], paths: Sequence[tuple[int, ...]], new_tokens: int
) -> dict[str, Any]:
    """Plain decoding, the best fixed tree and what is used by default, interleaved on some of the prompts."""
    ways = {"plain": None, "fixed": _tree(paths), "default": SamplingParams()}
    done = _interleaved(llm, drafter, ways, prompts[: RUNS + 1], max_new_tokens=new_tokens)
    equal = [len({tuple(text.token_ids) for text in texts}) == 1 for texts in zip(*done.values(), strict=True)]
    measured: dict[str, Any] = {"texts": len(equal), "equal": sum(equal)}
    base: list[float] = []
    for name, texts in done.items():
        parts = _counted(texts)
        rates = [part.committed / max(part.seconds - part.prefill_seconds, 1e-9) for part in parts]
        base = base or rates
        speedup = statistics.median(a / b for a, b in zip(rates, base, strict=True))
        known = {"tokens_per_second": statistics.median(rates), "speedup": speedup, "tau": Stats.total(parts).tau}
        measured[name] = known
    return measured
