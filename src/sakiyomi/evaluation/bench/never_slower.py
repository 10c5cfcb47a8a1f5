"""Row never-slower: what gamma "auto" makes of batches of all sizes, against the same target without a draft."""

from __future__ import annotations

from itertools import cycle, islice
from statistics import median
from typing import Any

from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.drafts import wrong_draft
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Spread
from sakiyomi.evaluation.bench.speed import fitting

__all__ = ["never_slower"]

SHORT = 4  # times shorter than the other texts


def never_slower(row: PairRow) -> Row:
    """The pair's draft and one that is never right, texts of the configured length and short ones, all sizes of batch.

    Rounds learn from those before them: the laps of one draft are those of one server, from small batches to large
    ones. A ratio below 1 by no more than two equal things differ is no loss.
    """
    config, sizes = row.config, sorted(set(row.config.batch_sizes))
    everyone = list(islice(cycle(row.pair.prompts), sizes[-1]))
    lengths = sorted({max(1, config.max_new_tokens // SHORT), config.max_new_tokens})
    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    for name in ("the pair's", "never right"):  # the second one is made of the first
        llm = row.llm(draft=wrong_draft(row.pair, sizes[-1]) if name == "never right" else None, max_batch=sizes[-1])
        judge = row.pair.judge(llm, everyone)
        for size in fitting(sizes, llm, max(map(len, everyone)) + config.max_new_tokens, notes):
            for length in lengths:
                more: dict[str, Any] = {"together": True, "ignore_eos": True, "gamma": "auto", "max_new_tokens": length}
                ways = {"plain": EngineView(llm), "auto": llm}
                runs = {way: row.run(engine, prompts=everyone[:size], **more) for way, engine in ways.items()}
                standings = row.race(runs, judge, where=f"draft {name}, batch of {size}, {length} tokens")
                plain, auto = (standing.to_dict() for standing in standings)
                spread, ratio = Spread.of(standings), auto["ratio"]
                speeds = ", ".join(f"{each.name} {median(each.speeds):.4g}" for each in standings)
                row.say(f"draft {name}, batch of {size}, {length} tokens, tokens/s: {speeds}")
                lines.append({
                    "draft": name, "batch": size, "tokens": length,
                    "plain_tokens_per_second": plain["tokens_per_second"],
                    "auto_tokens_per_second": auto["tokens_per_second"],
                    "ratio": ratio, "A/A": spread and str(spread), "tau": auto["tau"],
                    "slower": ratio is not None and ratio < 1 and not (spread is not None and ratio in spread),
                    "equal": auto["equal"],
                })  # fmt: skip
    slower = [f"{line['batch']} x {line['tokens']} ({line['ratio']:.2f})" for line in lines if line["slower"]]
    notes.append(f"slower than plain: {', '.join(slower) or 'nowhere'}")
    conditions = row.conditions(llm, laps=config.repeats, gamma="auto")
    conditions.pop("perplexity_of", None)
    return Row("never-slower", "total tokens/s of auto against plain, by requests at once", lines, conditions, notes)
