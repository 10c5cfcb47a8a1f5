"""Siblings that the target chooses from, and drafts that are never right, for batches of all sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch

from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, declared
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Spread, Standing
from sakiyomi.evaluation.bench.speed import fitting
from sakiyomi.model_executor.build import build_runner

__all__ = ["coverage", "never_slower", "useless"]

SIBLINGS = (1, 2, 4)
SHORT = 4  # times shorter than the other texts


def coverage(row: PairRow) -> Row:
    """Sampled at temperature 1: how often one of 1, 2 or 4 siblings is what the target chooses; no speeds."""
    llm = row.llm()
    lines = []
    for rule, tree in (("coupled", "best-first"), ("ratio", "static")):
        for count in SIBLINGS:
            row.note(f"{rule}, {count} siblings")
            params = row.params(gamma=1, temperature=1.0, ignore_eos=True, acceptance=rule, nodes=count, tree=tree)
            rounds = [
                traced
                for i, prompt in enumerate(row.pair.prompts)
                for traced in llm.generate([prompt], replace(params, seed=i), rounds_trace=True)[0].rounds_trace
                if traced.tokens
            ]
            lines.append({
                "name": f"{rule}, {count} sibling{'s' if count > 1 else ''}",
                "rounds": len(rounds),
                "coverage": sum(bool(traced.path) for traced in rounds) / max(len(rounds), 1),
            })  # fmt: skip
    conditions = row.conditions(llm, gamma=1, temperature=1.0)
    return Row("coverage", "share of rounds whose first level held the target's choice", lines, conditions)


@declared("greedy with a draft that is never right, tokens/s")
def useless(row: PairRow) -> Races:
    """Plain, and with a draft whose every token is another one: gamma auto, which finds out, and a fixed gamma."""
    llm = row.llm(draft=_wrong_draft(row.pair, 1))
    yield Race(
        {
            "plain": row.run(EngineView(llm), ignore_eos=True),
            "auto": row.run(llm, ignore_eos=True, gamma="auto"),
            "chain, gamma auto": row.run(llm, ignore_eos=True, gamma="auto", tree="chain"),
            f"chain of {row.config.gamma}": row.run(llm, ignore_eos=True),
        },
        row.pair.judge(llm),
    )
    return row.conditions(llm, draft_is="the same with its vocabulary rolled by one")


@declared("total tokens/s of auto against plain, by requests at once")
def never_slower(row: PairRow) -> Races:
    """The pair's draft and one that is never right, texts of the configured length and short ones, all sizes of batch.

    Rounds learn from those before them: the runs of one draft are those of one server, from small batches to large
    ones. A ratio below 1 by no more than two equal things differ is no loss.
    """
    config, sizes = row.config, sorted(set(row.config.batch_sizes))
    everyone = list(islice(cycle(row.pair.prompts), sizes[-1]))
    lengths = sorted({max(1, config.max_new_tokens // SHORT), config.max_new_tokens})
    for name in ("the pair's", "never right"):  # the second one is made of the first
        llm = row.llm(draft=_wrong_draft(row.pair, sizes[-1]) if name == "never right" else None, max_batch=sizes[-1])
        judge, ways = row.pair.judge(llm, everyone), {"plain": EngineView(llm), "auto": llm}
        for size in fitting(sizes, llm, max(map(len, everyone)) + config.max_new_tokens, row.notes):
            for length in lengths:
                more: dict[str, Any] = {"together": True, "ignore_eos": True, "gamma": "auto", "max_new_tokens": length}
                runs = {way: row.run(engine, prompts=everyone[:size], **more) for way, engine in ways.items()}
                where = f"draft {name}, batch of {size}, {length} tokens"
                known = {"draft": name, "batch": size, "tokens": length}
                standings = yield Race(runs, judge, where, partial(_line, known))
                speeds = ", ".join(f"{each.name} {median(each.speeds):.4g}" for each in standings)
                row.say(f"{where}, tokens/s: {speeds}")
    slower = [f"{line['batch']} x {line['tokens']} ({line['ratio']:.2f})" for line in row.lines if line["slower"]]
    row.notes.append(f"slower than plain: {', '.join(slower) or 'nowhere'}")
    return row.conditions(llm, gamma="auto")


def _line(known: dict[str, Any], standings: Sequence[Standing]) -> list[dict[str, Any]]:
    plain, auto = (standing.to_dict() for standing in standings)
    spread, ratio = Spread.of(standings), auto["ratio"]
    figures = {
        "plain_tokens_per_second": plain["tokens_per_second"],
        "auto_tokens_per_second": auto["tokens_per_second"],
        "ratio": ratio,
        "A/A": spread and str(spread),
        "tau": auto["tau"],
        "slower": ratio is not None and ratio < 1 and not (spread is not None and ratio in spread),
        "equal": auto["equal"],
    }
    return [known | figures]


def _wrong_draft(pair: Pair, max_slots: int) -> ModelDrafter:
    """The pair's draft model, for so many requests, each of whose tokens is called by the next one's number."""
    model = pair.draft.model
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().roll(1, 0).clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    compile: bool | str = "auto" if pair.config.compile else False
    packed = build_runner(model, max_slots=max_slots, compile=compile)
    return ModelDrafter(packed, int(pair.target.model.get_output_embeddings().out_features))
