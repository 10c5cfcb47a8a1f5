"""``sakiyomi audit``: is the output the target's own? Exit code 1 if a defect was found."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from sakiyomi.cli.common import JsonOption
from sakiyomi.cli.output import progress, say, table
from sakiyomi.core.checks import at_least
from sakiyomi.engine.config import LLMConfig
from sakiyomi.evaluation.audit.config import AuditConfig
from sakiyomi.scale.cluster import WorkersOption

if TYPE_CHECKING:
    from sakiyomi.evaluation.audit.report import AuditReport

DEFECT = 1


@dataclass(frozen=True)
class PromptOptions:
    """What is checked.

    Attributes:
        prompts: file of prompts: one a line, or .jsonl with text, prompt, turns or a chat (messages); by
            default a few beginnings of stories.
        count: most prompts that are used.
        drafts: other drafters to check beside the same target (again for each).
    """

    prompts: str | None = None
    count: int = 4
    drafts: tuple[str, ...] = ()


def audit(
    model: LLMConfig, asked: PromptOptions, config: AuditConfig, shared: WorkersOption, output: JsonOption
) -> None:
    """Check that the output is the target's own.

    Compares greedy text with transformers, and drafted with plain text, under the coupled rule sampled text too;
    --sampled tests the distribution under the other rules. With --quantize or an evicting cache everything is compared
    with plain text of the same target. Workers share the prompts and the tests. Exit code 1 if a defect was found.

    Example: sakiyomi audit --model FOLDER --draft model:DRAFT_FOLDER --sampled
    """
    at_least(asked, count=1)
    from sakiyomi.core.prompts import STORIES, read_prompts

    texts = [*STORIES] if asked.prompts is None else read_prompts(asked.prompts)
    with progress("loading") as status:
        if shared.count is None:
            from sakiyomi.evaluation.audit.audit import audit as run
        else:
            from sakiyomi.scale import audits

            run = functools.partial(audits.audit, shared)
        values = dataclasses.asdict(model)
        report = run(
            target=values.pop("target"),
            draft=values.pop("draft"),
            prompts=texts[: asked.count],
            drafts=asked.drafts,
            config=config,
            options=values,
            note=status.update,
        )
    _show(model, report)
    output.emit({"target": model.target, "draft": model.draft, **report.to_dict()})
    if not report.ok:
        raise typer.Exit(DEFECT)


def _show(model: LLMConfig, report: AuditReport) -> None:
    say(
        f"target {model.target} in {report.dtype}, draft {model.draft}, exact {'yes' if report.exact else 'no'}; "
        f"noise of {report.reference} between pass shapes: {report.noise:.2g} logits; gaps are explained up to 4 times "
        "that"
    )
    if report.quantization is not None:
        say(f"{report.quantization}; the same target without a draft is the reference")
    table(
        [
            {
                "rule": check.rule,
                "text": check.what,
                "draft": check.drafter,
                "against": check.against,
                "gamma": "tree" if check.tree else check.gamma,
                "seed": check.seed,
                "batch": check.batch,
                "equal": f"{check.equal} of {check.texts}",
                "tokens": check.tokens,
                "near-ties": len(check.divergences) - check.defects,
                "defects": check.defects,
            }
            for check in report.checks
        ]
    )
    if report.sampled:
        _show_sampled(report)
    for check in report.checks:
        for found in check.divergences:
            what = "DEFECT" if found.defect else "near-tie"
            say(
                f"{what}: {check.rule} {check.what}, gamma {check.gamma or '-'}, "
                f"text {found.text}, token {found.position}: expected {_word(report.words, found.expected)}, "
                f"got {_word(report.words, found.got)}; gap {found.gap:.3g}, "
                f"top-2 gap {found.top2_gap:.3g}, explained up to {found.limit:.3g}"
            )
    if report.drafter is None:
        say("there was no draft: only plain text was checked; pass --draft model:FOLDER")
    for rule in report.untested:
        say(f"{rule} was not tested: it takes no draft of these drafters")
    say("no defect" if report.ok else f"{report.defects} DEFECTS: the output is not the target's own")


def _show_sampled(report: AuditReport) -> None:
    from sakiyomi.evaluation.audit.report import AWAY, ODDS, POWER

    table(
        [
            {
                "rule": check.rule,
                "draft": check.drafter,
                "test": check.how,
                "drafted": check.shape,
                "tokens": check.fit.tokens,
                "accepted": f"{check.accepted / check.drafted:.0%}" if check.drafted else None,
                "chi-square": f"{check.fit.statistic:.1f} ({check.fit.freedom})",
                "p": f"{check.fit.p:.2g}",
                "TV": f"{check.fit.distance:.4f}" if check.fit.freedom else None,
                "by chance": f"{check.fit.noise:.4f}" if check.fit.freedom else None,
                f"power at {AWAY}": f"{check.fit.power:.4f}",
                f"{POWER} from": f"{check.fit.seen:.3f}" if check.fit.freedom else None,
                "": "" if check.fit.ok else "DEFECT",
            }
            for check in report.sampled
        ]
    )
    say(
        "whole: texts of the pair itself; played: rows of the pair, played through the engine and the rule; "
        "neighbours: the same texts, against the requests beside them. A total variation as in the last column is seen "
        f"with power {POWER}. Odds of a false alarm in all: {ODDS:g}"
    )
    weak = [check for check in report.sampled if check.how != "whole" and check.fit.ok and check.fit.power < POWER]
    if weak:
        least = min(check.fit.power for check in weak)
        say(
            f"{len(weak)} tests were given too few tokens: their power is down to {least:.3f}; raise --samples for "
            f"{POWER}"
        )


def _word(words: Mapping[int, str], token: int) -> str:
    return "the end" if token < 0 else f"{words[token]!r} ({token})"
