"""What an audit finds: plain data, see ``audit``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sakiyomi.evaluation.audit.chi_square import Fit
from sakiyomi.evaluation.audit.reference import Divergence
from sakiyomi.kernels.quantization import QuantizationReport

Texts = list[list[int]]
ODDS = 1e-6
"""Of a false alarm among all sampled checks of an audit together."""
POWER, AWAY = 0.999, 0.02
"""Tokens are played until a distribution so far from the target's is seen with this chance."""


@dataclass(frozen=True)
class Check:
    """One comparison of texts.

    Attributes:
        rule: "greedy", or the name of a rule whose text depends on the seed alone: "coupled".
        what: "plain" or "drafted".
        against: the report's reference, "plain", or "logits": each token by itself, by the reference's logits.
        seed: None for greedy text.
        batch: texts at once.
        texts, equal, tokens: how many were compared, were equal, and their tokens.
        gamma: None for plain text, and for a tree.
        divergences: the others, explained or not.
        drafter: its name; None for plain text.
        tree: a tree was drafted.
    """

    rule: str
    what: str
    against: str
    seed: int | None
    batch: int
    texts: int
    equal: int
    tokens: int
    gamma: int | None = None
    divergences: tuple[Divergence, ...] = ()
    drafter: str | None = None
    tree: bool = False

    @classmethod
    def joined(cls, same: Sequence[Check]) -> Check:
        """One comparison of what several compared apart; batch is the largest."""
        found = tuple(divergence for check in same for divergence in check.divergences)
        counts = {name: sum(getattr(check, name) for check in same) for name in ("texts", "equal", "tokens")}
        return replace(same[0], batch=max(check.batch for check in same), divergences=found, **counts)

    @property
    def defects(self) -> int:
        """Differences that nothing explains."""
        return sum(divergence.defect for divergence in self.divergences)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"defects": self.defects, "divergences": [d.to_dict() for d in self.divergences]}


@dataclass(frozen=True)
class SampledCheck:
    """One test of the distribution of sampled tokens.

    Attributes:
        how: "whole": texts of the pair itself; "played": rows of the pair, recorded and played through the engine;
            "neighbours": the same texts, each token against that of the request beside it.
        rule: name of the acceptance rule.
        drafter: its name; None: nothing was drafted.
        shape: what was drafted in a round, or the kind of draft where rows were played.
        texts: that were written.
        drafted, accepted: tokens of drafts; where none were accepted or refused, nothing was shown.
        fit: the test.
    """

    how: str
    rule: str
    drafter: str | None
    shape: str
    texts: int
    drafted: int
    accepted: int
    fit: Fit

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"fit": self.fit.to_dict()}


@dataclass
class AuditReport:
    """All comparisons.

    Attributes:
        noise: shape noise of the reference itself, in logits.
        dtype: of the target.
        exact: whether our own texts had to be equal to the last token.
        drafter: names of the drafters, joined by a comma; None if there was none, and then nothing was drafted.
        prompts: token ids.
        reference: whose greedy texts and logits are right: "transformers", or "own plain" where the weights are
            quantized, so that only our own engine computes with them.
        quantization: what the quantization changed; None where that is not known, or the weights are not quantized.
        words: the tokens of differences, as text.
        checks: comparisons of texts.
        sampled: tests of sampled text; their odds of a false alarm are ``ODDS`` all together.
        untested: rules that take no draft of these drafters.
    """

    noise: float
    dtype: str
    exact: bool
    drafter: str | None
    prompts: Texts
    reference: str = "transformers"
    quantization: QuantizationReport | None = None
    words: dict[int, str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    sampled: list[SampledCheck] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)

    @property
    def defects(self) -> int:
        """Differences that nothing explains, over all checks, and tests of sampled text that failed."""
        return sum(check.defects for check in self.checks) + sum(not check.fit.ok for check in self.sampled)

    @property
    def ok(self) -> bool:
        """No defect was found."""
        return self.defects == 0

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the prompts."""
        same = ("ok", "defects", "noise", "dtype", "exact", "drafter", "reference")
        return {name: getattr(self, name) for name in same} | {
            "rounding": asdict(self.quantization) if self.quantization is not None else None,
            "checks": [check.to_dict() for check in self.checks],
            "sampled": [check.to_dict() for check in self.sampled],
            "untested": self.untested,
            "false_alarm_odds": ODDS if self.sampled else 0.0,
        }
