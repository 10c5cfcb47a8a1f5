"""``sakiyomi tune``: the drafter and the sizes that are fastest on this machine."""

from __future__ import annotations

import sys
from typing import Any

import typer

from sakiyomi.cli.common import INTERRUPTED, JsonOption
from sakiyomi.cli.output import progress, say, table
from sakiyomi.evaluation.tuning.config import PairConfig, TuneConfig


def pair(config: PairConfig, output: JsonOption) -> None:
    """Find the drafter and gamma that are fastest for a target on this machine.

    Every drafter that the target can use here, and every one that is given, generates some texts. Their acceptance,
    and the time of draft, pass and the rest of a round, predict the speed of every draft length; the best few are
    measured on other prompts. The fastest one is kept, and used by draft auto from then on; it may be not to
    speculate.

    With --train MINUTES the target first answers prompts, and a drafter learns from the answers; the command says what
    it trains and, after two minutes, what to expect. Stop it at any time: the same command continues.

    Example: sakiyomi tune --model FOLDER --train 60
    """
    if config.watch:
        _watch(config, output)
        return
    with progress("loading") as status:
        from sakiyomi.evaluation.tuning.search import tune

        trained = _trained(config, status) if config.train else {}
        if trained and not trained["finished"]:
            say("stopped; what was written is kept, and the same command continues")
            output.emit({"trained": trained})
            raise typer.Exit(INTERRUPTED)
        found = tune(trained.pop("config", config), status.update, faster=bool(trained))
    if trained:
        found["trained"] = trained
    table([_drafter(row) for row in found["drafters"] if "refused" not in row], title="drafters, at chains of 8")
    say(*(f"{row['draft']}: {row['refused']}" for row in found["drafters"] if "refused" in row), "")
    table(_configurations(found), title="configurations, tokens/s behind the prompt")
    say(*_summary(found))
    output.emit(found)


def _trained(config: PairConfig, status: Any) -> dict[str, Any]:
    """Train a drafter; what was made, and the settings with which it is measured."""
    from sakiyomi.evaluation.tuning.training import measured_config, train_drafter

    def ask(line: str) -> bool:
        if config.yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return True
        return typer.confirm("Go on?", default=True, err=True)

    found = train_drafter(config, status.update, ask, status.stop)
    status.start()
    return found | ({"config": measured_config(config, found)} if found["finished"] else {})


def _watch(config: PairConfig, output: JsonOption) -> None:
    """Measure the chosen draft again; the command fails where its acceptance has fallen."""
    with progress("loading") as status:
        from sakiyomi.evaluation.tuning.drift import watch

        found = watch(config, status.update)
    say(
        f"{found['draft']}, gamma {found['gamma']}: tau {found['tau']:.2f} (+-{found['tau_error']:.1%}) on "
        f"{found['texts']} texts, {found['chosen_tau']:.2f} (+-{found['chosen_error']:.1%}) when it was chosen",
        f"acceptance has fallen by {-found['change']:.0%}: run sakiyomi tune with prompts like these, or train the "
        "draft on such texts"
        if found["fell"]
        else f"acceptance has not fallen ({found['change']:+.0%})",
    )
    output.emit(found)
    if found["fell"]:
        raise typer.Exit(1)


def _drafter(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "draft": row["draft"],
        "drafts": row["hit"],
        "alpha": row["alpha"],
        "by place": " ".join(f"{alpha:.2f}" for alpha in row["alphas"][:4]),
        "by rank": " ".join(f"{share:.2f}" for share in row["by_rank"][:3]) or None,
        "step ms": row["draft_ms"] or None,
        "c": row["c"] or None,
        "other ms": row["overhead_ms"],
    }


def _configurations(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What was run, and of each drafter that was not its best prediction; JSON has all."""
    shown, seen = [], set()
    for row in found["table"]:
        if "measured_speedup" in row or row["draft"] not in seen:
            shown.append(
                {
                    "draft": row["draft"],
                    "gamma": None if row["draft"] == "none" else str(row["gamma"]),
                    "tau": row["predicted_tau"],
                    "+-": f"{row['sampling']:.1%}",
                    "predicted": row["predicted_tokens_per_second"],
                    "speed-up": row["predicted_speedup"],
                    "measured": row.get("measured_tokens_per_second"),
                    "speed-up, measured": row.get("measured_speedup"),
                    "off by": f"{row['error']:+.0%}" if "error" in row else None,
                    "": "<- best" if row == found["best"] else None,
                }
            )
        seen.add(row["draft"])
    return shown


def _summary(found: dict[str, Any]) -> list[str]:
    best, facts, errors = found["best"], found["conditions"], found["errors"]
    low, high = found["A/A"]
    curve = ", ".join(f"{rows} {ratio:.2f}" for rows, ratio in found["v"].items())
    lines = [
        f"a plain round takes {found['plain_ms']:.2f} ms; passes by rows, in passes of one row: {curve}",
        f"two runs of plain decoding: {low:.2f} to {high:.2f} times one another (A/A)",
    ]
    if errors:
        lines.append(
            f"predicted against measured speed-up of {errors['of']}: off by {errors['median']:.1%} (median), "
            f"{errors['worst']:.1%} at worst; by the choice of texts alone {errors['sampling']:.1%} is to be expected "
            f"({facts['calibrated_on']} to calibrate, {facts['compared_on']} to compare)"
        )
    if best["draft"] == "none":
        lines.append("do not speculate: plain decoding is fastest here")
    else:
        lines.append(
            f"best: --draft {best['draft']} --gamma {best['gamma']}, {best['measured_speedup']:.2f} times plain"
        )
    if found["of_fastest"] < 1.0:
        lines.append(f"that is {found['of_fastest']:.1%} of the fastest one of all that were run")
    if not facts["temperature"]:
        lines.append(
            f"{found['equal']} of {found['texts']} texts are equal"
            + ("" if facts["dtype"] == "float32" else f" ({facts['dtype']} rounds passes of other sizes differently)")
        )
    lines.append(f"it took {facts['seconds']:.0f} s")
    if found["file"]:
        lines.append(f"kept in {found['file']}; draft auto uses it")
    else:
        lines.append("nothing was kept; draft auto stays as it was")
    if "trained" in found:
        lines.append(f"the trained drafter is in {found['trained']['folder']}")
    return lines


def medusa(config: TuneConfig, output: JsonOption) -> None:
    """Search the tree of Medusa heads that is fastest here.

    The target answers held-out prompts, and each head ranks the tokens of the answers; sizes (heads x first guesses x
    nodes) are compared by these ranks and by measured passes. The result is kept beside the heads, and used from then
    on.

    Example: sakiyomi tune medusa tales-medusa
    """
    with progress("loading") as status:
        from sakiyomi.evaluation.tuning.medusa_search import tune

        found = tune(config, status.update)
    best, measured = found["best"], found["measured"]
    table(_shown(found["table"], best), title="heads x first guesses (top_k) x nodes")
    say("")
    table(
        [
            {"head": number, **{f"top {top}": sum(chances[:top]) for top in (1, 2, 3, 5, 10)}}
            for number, chances in enumerate(found["accuracies"], start=1)
        ],
        title="how often the first guesses of a head hold the token that came",
    )
    say("")
    table([{"way": name, **measured[name]} for name in ("plain", "fixed", "default")], title="measured")
    facts = found["conditions"]
    say(
        f"best: {best['heads']} heads, the first {best['top_k']} guesses of each, {best['nodes']} nodes: tau "
        f"{best['tau']:.2f}, {best['speedup']:.2f} times plain"
        if best["nodes"]
        else "plain decoding is fastest here: speculating with these heads is slower",
        f"all heads take {facts['heads_ms']:.2f} ms a round; {measured['equal']} of {measured['texts']} texts are equal"
        + ("" if facts["dtype"] == "float32" else f" ({facts['dtype']} rounds passes of other sizes differently)"),
        f"kept in {found['file']}",
    )
    output.emit(found)


def _shown(rows: list[dict[str, object]], best: dict[str, object]) -> list[dict[str, object]]:
    """The best width of every number of heads and nodes, so that the table can be read; JSON has all."""
    kept: dict[tuple[object, object], dict[str, object]] = {}
    for row in rows:
        key = (row["heads"], row["nodes"])
        if key not in kept or row["tokens_per_second"] > kept[key]["tokens_per_second"]:  # type: ignore[operator]
            kept[key] = row
    return [{**row, "": "<- best" if row == best else None} for row in kept.values()]
