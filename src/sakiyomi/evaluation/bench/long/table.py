"""The table: every system on the same prompts, what it got right, what it held and how fast it was.

Where memory is limited, a system that does not fit is tried again at shorter contexts: the starred line.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.config import Note
from sakiyomi.evaluation.bench.long.config import LongConfig
from sakiyomi.evaluation.bench.long.questions import Question, Source
from sakiyomi.evaluation.bench.long.systems import System
from sakiyomi.evaluation.bench.report import Row

Perform = Callable[[Sequence[Mapping[str, Any]]], Iterable[dict[str, Any]]]
"""Does jobs and gives their records, each with the place of its ``job``: here, or in a process of their own."""
EXPECTED = {"one-shot": 2.0, "full": 1.0, "reduced": 1.0, "bounded": 0.0}
"""Exponent of memory by length that a class of systems has on paper."""
RETRIES = 3
Kept = Callable[[System, int, Question, list[list[list[int]]]], None]
"""Told what a system kept of the first prompt of each length: by layer and head the places."""


@dataclass(frozen=True)
class Bench:
    """What the rows have in common.

    Attributes:
        config: lengths, limit and so on.
        source: of the prompts.
        systems: in order.
        perform: does the work.
        note: is told what is going on.
        kept: is told what stayed of a prompt; None: not wanted.
        tokenizer: of the target, for rows that make prompts of their own.
    """

    config: LongConfig
    source: Source
    systems: Sequence[System]
    perform: Perform
    note: Note
    kept: Kept | None = None
    tokenizer: Any = None

    def work(self, kind: str, systems: Sequence[System], batches: Sequence[Any], **more: Any) -> Iterable[Any]:
        """Records of a job each system; all of them have the same batches."""
        jobs = [{"kind": kind, "system": asdict(system), "batches": batches, **more} for system in systems]
        return self.perform(jobs)

    def records(self, system: System, batches: Sequence[tuple[int, Sequence[Question]]]) -> Iterable[dict[str, Any]]:
        """Answers of one system, for each length."""
        if system.query_first and any(q.ahead is None for _, questions in batches for q in questions):
            error = "questions of a file are not known apart from their text; query-first is for made tasks"
            return [{"length": length, "error": error, "over": False} for length, _ in batches]
        asked = [{"length": length, "questions": [q.asked(system.query_first) for q in own]} for length, own in batches]
        return self.work("answers", [system], asked, kept=self.kept is not None)


def table(bench: Bench) -> Row:
    """Every system with every budget at every length."""
    config = bench.config
    prompts = {}
    for length in config.numbers("lengths", least=8):
        bench.note(f"prompts of {length} tokens")
        prompts[length] = bench.source(length)
    lines: list[dict[str, Any]] = []
    why: list[tuple[str, int | None, str]] = []
    for system in bench.systems:
        for line in _of_system(bench, system, prompts):
            if line["note"]:
                why.append((line["name"], line["length"], line["note"]))
            lines.append({key: value for key, value in line.items() if key != "note"})
    _beside_full(lines)
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
    title = (
        "right answers in percent (± standard deviation over seeds, s.e. standard error over prompts), keys and "
        "values, memory and speed"
    )
    return Row("long", title, lines, conditions, reasons(why))


def reasons(found: Iterable[tuple[str, int | None, str]]) -> list[str]:
    """Why there are no figures, each reason of a system once.

    Args:
        found: (system, tokens of the context, reason), in order.
    """
    lengths: dict[tuple[str, str], list[str]] = {}
    for name, length, why in found:
        lengths.setdefault((name, why), []).extend([str(length)] * (length is not None))
    places = {key: f", {', '.join(own)} tokens" if own else "" for key, own in lengths.items()}
    return [f"{name}{place}: {why}" for (name, why), place in places.items()]


def _beside_full(lines: Sequence[dict[str, Any]]) -> None:
    """Right answers as a share of those of the full cache at the same length, where it was measured and has any."""
    full = {line["length"]: line.get("accuracy") for line in lines if line["spec"] == "full"}
    for line in lines if any(full.values()) and len({line["spec"] for line in lines}) > 1 else ():
        if "accuracy" in line:
            best = full.get(line["length"])
            line["of_full"] = line["accuracy"] / best if best else None


def _of_system(bench: Bench, system: System, prompts: Mapping[int, Sequence[Question]]) -> Iterator[dict[str, Any]]:
    """Lines of one system, shortest context first; behind one that is over the memory the starred one."""
    bench.note(f"{system.name}{f', budget {system.budget}' if system.budget else ''}")
    left = list(prompts)
    fitting = 0
    for record in bench.records(system, list(prompts.items())):
        length = left.pop(0) if left else None
        if length is None:
            break
        if "texts" in record:
            fitting = length
            if bench.kept is not None and record.get("kept"):
                bench.kept(system, length, prompts[length][0], record["kept"])
            yield measured(system, length, prompts[length], record)
            continue
        yield _without(system, length, record)
        if record["over"]:
            for longer in left:
                yield _without(system, longer, {"over": True, "error": f"{length} tokens are too many already"})
            left = []
            yield from _starred(bench, system, fitting, length)
            break
    for length in left:  # a process that ended before its time, and said so with its last record
        yield _without(system, length, {"over": False, "error": "not reached"})


def _starred(bench: Bench, system: System, fitting: int, below: int) -> Iterator[dict[str, Any]]:
    """The longest context that fits, if one longer than those measured does."""

    def fits(length: int) -> bool:
        if length <= fitting:
            return True
        bench.note(f"{system.name}: does a context of {length} tokens fit?")
        # The one that takes most; the others of this length are as long.
        try:
            question = max(bench.source(length), key=lambda q: len(q.tokens) + q.answer_tokens)
        except InputError:  # a task has no prompt as short as that
            return False
        return all("texts" in record for record in bench.records(system, [(length, [question])]))

    length = longest(fits, below)
    for _ in range(RETRIES):
        if length is None or length <= fitting:
            return
        questions = bench.source(length)
        (record, *_) = bench.records(system, [(length, questions)])
        if "texts" in record:
            yield measured(system, length, questions, record, starred=True)
            return
        length = length * 7 // 8  # one prompt fitted, and what others left behind did not


def measured(
    system: System, length: int, questions: Sequence[Question], record: Mapping[str, Any], *, starred: bool = False
) -> dict[str, Any]:
    """One line of the table.

    Args:
        system: whose it is.
        length: tokens of the longest prompt.
        questions: that were asked.
        record: what came of them.
        starred: it is the longest context that fits, not one that was asked for.
    """
    scores = [question.score(text) for question, text in zip(questions, record["texts"], strict=True)]

    def mean(**where: Any) -> float:
        return statistics.fmean(
            score
            for question, score in zip(questions, scores, strict=True)
            if all(getattr(question, key) == value for key, value in where.items())
        )

    names = list(dict.fromkeys(question.task for question in questions))
    seeds = {seed: mean(seed=seed) for seed in sorted({question.seed for question in questions})}
    line = _head(system, length, starred=starred)
    # With one task its share is the whole.
    line["tasks"] = {name: mean(task=name) for name in names}
    if len(names) > 1:
        line |= {name: 100 * share for name, share in line["tasks"].items()}
    line |= {
        "accuracy": statistics.fmean(scores),
        "accuracy_spread": statistics.stdev(seeds.values()) if len(seeds) > 1 else None,
        "accuracy_error": statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None,
        "seeds": {str(seed): share for seed, share in seeds.items()},
        "kv_bytes": record["kv_bytes"],
        **({"far_bytes": record["far_bytes"]} if record["far_bytes"] else {}),
        "peak_bytes": record["peak_bytes"],
        "grown_bytes": record["grown_bytes"],
        "prefill_tokens_per_second": statistics.median(record["prefill"]),
        "decode_tokens_per_second": statistics.median(record["decode"]) if record["decode"] else None,
        "decode_low_high": [min(record["decode"]), max(record["decode"])] if record["decode"] else None,
        "state": "",
        "note": "",
    }
    return line


def _without(system: System, length: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """A line that has a reason in the place of figures."""
    state = "OOM" if record["over"] else "refused"
    return _head(system, length) | {"state": state, "note": record["error"]}


def _head(system: System, length: int, *, starred: bool = False) -> dict[str, Any]:
    return {
        "name": system.name + " *" * starred,
        "spec": system.spec,
        "kind": system.kind,
        "budget": system.budget,
        "pairs": system.pairs(length),
        "length": length,
        "starred": starred,
    }


def growth(row: Row) -> Row | None:
    """How each system's memory grows with the length, from the lines of the table; None with one length."""
    lines = []
    groups: dict[tuple[str, str | None], list[Mapping[str, Any]]] = {}
    for line in row.lines:
        if line.get("kv_bytes") is not None:
            groups.setdefault((line["spec"], line["budget"]), []).append(line)
    for group in groups.values():
        group.sort(key=lambda line: int(line["length"]))
        first, last = group[0], group[-1]
        if first["length"] == last["length"]:
            continue
        lengths, sizes, grown = ([line[key] for line in group] for key in ("length", "kv_bytes", "grown_bytes"))
        slopes, ends = {"kv_slope": slope(lengths, sizes)}, {"kv_from_bytes": sizes[0], "kv_to_bytes": sizes[-1]}
        if None not in grown:  # the system had a process of its own
            slopes["process_slope"] = slope(lengths, grown)
            ends |= {"grown_from_bytes": grown[0], "grown_to_bytes": grown[-1]}
        head = {"name": first["name"], "budget": first["budget"], "class": first["kind"]}
        span = {"from": first["length"], "to": last["length"]}
        lines.append({**head, **span, **slopes, "on_paper": _on_paper(first), **ends})
    title = "exponent of memory by length: 2 quadratic, 1 linear, 0 flat; grown: of the process since it was ready"
    return Row("memory", title, lines, dict(row.conditions)) if lines else None


def _on_paper(line: Mapping[str, Any]) -> float:
    """A budget that is a share of the context grows with it."""
    return 1.0 if line["budget"] is not None and "/" in line["budget"] else EXPECTED[line["kind"]]


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
        middle = (good + bad) // 2
        if middle in (good, bad):
            break
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
