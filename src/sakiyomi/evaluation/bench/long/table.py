"""Row ``long``: right answers, memory and speed of every system on the same prompts; row ``memory``: how memory grows.

If a system does not fit into the memory limit, the longest context that fits is searched; its line has a star.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.long.jobs import Bench, Line, Watch, means, row, spread
from sakiyomi.evaluation.bench.long.questions import Question
from sakiyomi.evaluation.bench.long.systems import Answer, Loader, System
from sakiyomi.evaluation.bench.report import Row

EXPECTED = {"one-shot": 2.0, "full": 1.0, "reduced": 1.0, "bounded": 0.0}
"""Exponent of memory by length that a class of systems has on paper."""
RETRIES = 3
WARM = 64  # tokens of a warm-up prompt, which loads kernels and allocates buffers
TITLE = (
    "right answers in percent (± standard deviation over seeds, s.e. standard error over prompts), keys and values, "
    "memory and speed"
)


def answers(
    make: Loader, system: System, length: int, given: Sequence[Question], watch: Watch, *, kept: bool = False
) -> Line:
    """Right answers of a system to these questions, its memory and its speed; see ``jobs.Measure``.

    Args:
        make, system, length, given, watch: see there.
        kept: also report which pairs of the first prompt were kept.
    """
    prompts = [question.prompt(system.query_first) for question in given]
    running = make(system, length)
    running.answer(prompts[0][:WARM], 2)
    most = max(len(prompt) + question.answer_tokens for prompt, question in zip(prompts, given, strict=True))
    watch.begin(running.predicted_bytes(most))
    assert watch.ready is not None
    found, peak = list[Answer](), 0
    for prompt, question in zip(prompts, given, strict=True):
        found.append(running.answer(prompt, question.answer_tokens, kept=kept and not found))
        peak = watch.peak()
    reading = [len(prompt) / answer.prefill_seconds for prompt, answer in zip(prompts, found, strict=True)]
    writing = [(answer.tokens - 1) / answer.decode_seconds for answer in found if answer.tokens > 1]
    return right(given, [answer.text for answer in found]) | {
        "kv_bytes": running.kv_bytes,
        **({"far_bytes": running.far_bytes} if running.far_bytes else {}),
        "peak_bytes": peak,
        "grown_bytes": peak - watch.ready,
        "prefill_tokens_per_second": statistics.median(reading),
        "decode_tokens_per_second": statistics.median(writing) if writing else None,
        "decode_low_high": [min(writing), max(writing)] if writing else None,
        **({"kept": found[0].kept} if found[0].kept else {}),
    }


def right(questions: Sequence[Question], texts: Sequence[str]) -> Line:
    """Share of right answers, over all questions, by task and by seed."""
    scores = [question.score(text) for question, text in zip(questions, texts, strict=True)]
    tasks = means((question.task for question in questions), scores)
    seeds = means((question.seed for question in questions), scores)
    shown = {name: 100 * share for name, share in tasks.items()} if len(tasks) > 1 else {}
    deviation = spread(scores)
    return {"tasks": tasks, **shown} | {
        "accuracy": statistics.fmean(scores),
        "accuracy_spread": spread(seeds.values()),
        "accuracy_error": None if deviation is None else deviation / len(scores) ** 0.5,
        "seeds": seeds,
    }


def table(bench: Bench) -> Row:
    """Every system with every budget at every length."""
    config, prompts = bench.config, dict[int, list[Question]]()
    for length in config.numbers("lengths"):
        bench.note(f"prompts of {length} tokens")
        prompts[length] = bench.source(length)
    found = [line for system in bench.systems for line in _of_system(bench, system, prompts)]
    _beside_full(found)
    per_seed = len(next(iter(prompts.values()))) // len(config.seeds)
    conditions = {
        "target": config.target,
        "prompts": f"{per_seed} of each length and seed",
        "seeds": ",".join(config.seeds),
        "dtype": config.dtype,
        "graphs": "recorded" if config.compile else "eager",
        "chunk_size": config.chunk_size,
        "limit_bytes": config.limit_bytes,
        "peak": "of the process, or the GPU, while it answers" if config.memory else None,
    }
    return row("long", TITLE, found, conditions)


def _beside_full(found: Sequence[Line]) -> None:
    """Right answers as a share of those of the full cache at the same length, where it was measured and has any."""
    full = {line["length"]: line.get("accuracy") for line in found if line["spec"] == "full"}
    for line in found if any(full.values()) and len({line["spec"] for line in found}) > 1 else ():
        if "accuracy" in line:
            best = full.get(line["length"])
            line["of_full"] = line["accuracy"] / best if best else None


def _of_system(bench: Bench, system: System, prompts: Mapping[int, Sequence[Question]]) -> Iterator[Line]:
    """Lines of one system, shortest context first; where one is over the memory the starred one comes last."""
    found = bench.lines("prompts", partial(answers, kept=bench.kept is not None), system, prompts)
    for line in found:
        kept = line.pop("kept", None)
        if bench.kept is not None and kept:
            bench.kept(system, prompts[line["length"]][0], kept)
        yield line
    over = [line["length"] for line in found if line["state"] == "OOM"]
    if over:
        fitting = max((line["length"] for line in found if not line["state"]), default=0)
        yield from _starred(bench, system, fitting, over[0])


def _starred(bench: Bench, system: System, fitting: int, below: int) -> Iterator[Line]:
    """The longest context that fits, if one longer than those measured does."""

    def fits(length: int) -> bool:
        if length <= fitting:
            return True
        try:
            # The longest one; the others of this length are about as long.
            question = max(bench.source(length), key=lambda q: len(q.tokens) + q.answer_tokens)
        except InputError:  # the task has no prompt that short
            return False
        return not bench.lines(f"do {length} tokens fit", answers, system, {length: [question]})[0]["state"]

    length = longest(fits, below)
    for _ in range(RETRIES):
        if length is None or length <= fitting:
            return
        (line,) = bench.lines(f"{length} tokens", answers, system, {length: bench.source(length)})
        if not line["state"]:
            yield line | {"name": f"{system.name} *", "starred": True}
            return
        length = length * 7 // 8  # one prompt fitted, and all of them did not


def growth(measured: Row) -> Row | None:
    """How each system's memory grows with the length, from the lines of the table; None with one length."""
    groups: dict[tuple[str, str | None], list[Mapping[str, Any]]] = defaultdict(list)
    for line in sorted(measured.lines, key=lambda line: int(line["length"])):
        if line.get("kv_bytes") is not None:
            groups[line["spec"], line["budget"]].append(line)
    order = dict.fromkeys((line["spec"], line["budget"]) for line in measured.lines)
    found = []
    for group in (groups[key] for key in order if key in groups):
        lengths, sizes, grown = ([line[key] for line in group] for key in ("length", "kv_bytes", "grown_bytes"))
        if lengths[0] == lengths[-1]:
            continue
        head = {"name": group[0]["name"], "budget": group[0]["budget"], "class": group[0]["kind"]}
        slopes, ends = {"kv_slope": slope(lengths, sizes)}, {"kv_from_bytes": sizes[0], "kv_to_bytes": sizes[-1]}
        if None not in grown:  # the system had a process of its own
            slopes["process_slope"] = slope(lengths, grown)
            ends |= {"grown_from_bytes": grown[0], "grown_to_bytes": grown[-1]}
        # A budget that is a share of the context grows with it.
        paper = 1.0 if "/" in (group[0]["budget"] or "") else EXPECTED[group[0]["kind"]]
        found.append(head | {"from": lengths[0], "to": lengths[-1]} | slopes | {"on_paper": paper} | ends)
    title = "exponent of memory by length: 2 quadratic, 1 linear, 0 flat; grown: of the process since it was ready"
    return Row("memory", title, found, dict(measured.conditions)) if found else None


def slope(lengths: Sequence[int], sizes: Sequence[float]) -> float | None:
    """Exponent of growth: the slope of the line through log size by log length (least squares).

    Args:
        lengths: tokens.
        sizes: bytes; those below 1 are left out, since nothing grew.

    Returns:
        0: flat, 1: linear, 2: quadratic. None where fewer than two lengths are left.
    """
    points = [(math.log(n), math.log(size)) for n, size in zip(lengths, sizes, strict=True) if size >= 1]
    if len({x for x, _ in points}) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def longest(fits: Callable[[int], bool], below: int, *, least: int = 32, steps: int = 3) -> int | None:
    """The longest length that fits, to an eighth: halved until one does, then the gap above it halved ``steps`` times.

    Args:
        fits: tries a length.
        below: a length that does not fit.
        least: none below this is tried.
        steps: tries in the gap.

    Returns:
        A length that was seen to fit; None if none was.
    """
    good, bad = below // 2, below
    while good >= least and not fits(good):
        good, bad = good // 2, good
    if good < least:
        return None
    for _ in range(steps):
        if (middle := (good + bad) // 2) > good:
            good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
