"""What an audit is asked for and what it finds: plain data, see ``audit``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import ACCEPTANCES, SamplingParams
from sakiyomi.evaluation.audit.chi_square import Fit
from sakiyomi.evaluation.audit.hf_reference import Divergence
from sakiyomi.kernels.quantization import QuantizationReport

__all__ = ["AuditConfig", "AuditReport", "Check", "SampledCheck", "Texts", "shape_name"]

Texts = list[list[int]]
ODDS = 1e-6
"""Of a false alarm among all sampled checks of an audit together."""
POWER, AWAY = 0.999, 0.02
"""Tokens are played until a distribution so far from the target's is seen with this chance."""
TREE = (1, 2, 1)
"""Counts of the tree that is checked beside the chains: siblings at two depths."""
Shape = dict[str, Any]


@dataclass(frozen=True)
class AuditConfig:
    """How much is checked.

    Attributes:
        max_new_tokens: tokens of each text.
        prompt_tokens: prompts are cut to this many tokens.
        gammas: draft tokens a round to check.
        seeds: seeds of sampled texts.
        temperature: of sampled texts.
        sampled: whether the distribution of tokens is tested for the rules whose text depends on the draft.
        verifiers: acceptance rules to check, the distribution under those named too; none: all that are lossless.
        samples: most tokens that are played for one test; fewer do where they are enough.
        texts: that the pair itself writes for one test of the whole; 0: only recorded rows are played.
    """

    max_new_tokens: int = 64
    prompt_tokens: int = 64
    gammas: tuple[int, ...] = (1, 2, 5)
    seeds: tuple[int, ...] = (0, 1)
    temperature: float = 1.0
    sampled: bool = False
    verifiers: tuple[str, ...] = ()
    samples: int = 120_000
    texts: int = 32

    def __post_init__(self) -> None:
        if not self.gammas or not self.seeds:
            raise InputError("gammas or seeds is empty; give at least one of each")
        if self.prompt_tokens < 1:
            raise InputError(f"prompt_tokens is {self.prompt_tokens}; expected at least 1")
        if self.temperature <= 0:
            raise InputError(
                f"temperature is {self.temperature}; sampled texts need one above 0, greedy ones are checked anyway"
            )
        if self.samples < 1 or self.texts < 0:
            raise InputError(f"samples is {self.samples} and texts {self.texts}; expected at least 1, and not below 0")
        known = [name for name in ACCEPTANCES if name != "auto"]
        if unknown := [name for name in self.verifiers if name not in known]:
            raise InputError(f"verifiers names {unknown[0]!r}; this version has {', '.join(known)}")
        for shape in self.shapes():
            for seed in self.seeds:
                self.seeded(seed, shape)

    def shapes(self) -> list[Shape]:
        """What is drafted in a round, as parameters: a chain of each length, and a tree."""
        return [*({"gamma": gamma} for gamma in self.gammas), {"tree": TREE}]

    def greedy(self, shape: Shape | None = None) -> SamplingParams:
        """Parameters of a greedy text."""
        return SamplingParams(max_new_tokens=self.max_new_tokens, **(shape or {}))

    def seeded(self, seed: int, shape: Shape | None = None, rule: str = "coupled") -> SamplingParams:
        """Parameters of a sampled text."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=seed,
            acceptance=rule,  # type: ignore[arg-type]
            **(shape or {}),
        )


@dataclass(frozen=True)
class Check:
    """One comparison of texts.

    Attributes:
        rule: "greedy", or the name of a rule whose text depends on the seed alone: "coupled".
        what: "plain" or "drafted".
        against: the report's reference, "plain", or "logits": each token by itself, by the reference's logits.
        gamma: None for plain text, and for a tree.
        seed: None for greedy text.
        batch: texts at once.
        texts, equal, tokens: how many were compared, were equal, and their tokens.
        divergences: the others, explained or not.
        drafter: its name; None for plain text.
        tree: a tree was drafted.
    """

    rule: str
    what: str
    against: str
    gamma: int | None
    seed: int | None
    batch: int
    texts: int
    equal: int
    tokens: int
    divergences: tuple[Divergence, ...] = ()
    drafter: str | None = None
    tree: bool = False

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


def shape_name(shape: Shape) -> str:
    """What is drafted in a round, in words."""
    return "tree" if "tree" in shape else f"gamma {shape['gamma']}"


@dataclass
class AuditReport:
    """All comparisons.

    Attributes:
        noise: shape noise of the reference itself, in logits.
        dtype: of the target.
        exact: whether our own texts had to be equal to the last token.
        drafter: names of the drafters, joined by a comma; None if there was none, and then nothing was drafted.
        prompts: token ids.
        reference: whose greedy texts and logits are right: "transformers", or "own plain" where the weights were
            rounded and only our own engine computes with them.
        quantization: what the rounding changed; None where nobody knows, or nothing was rounded.
        tokenizer: of the target.
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
    tokenizer: Any = field(default=None, repr=False)
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
        return {
            "ok": self.ok,
            "defects": self.defects,
            "noise": self.noise,
            "dtype": self.dtype,
            "exact": self.exact,
            "drafter": self.drafter,
            "reference": self.reference,
            "rounding": asdict(self.quantization) if self.quantization is not None else None,
            "checks": [check.to_dict() for check in self.checks],
            "sampled": [check.to_dict() for check in self.sampled],
            "untested": self.untested,
            "false_alarm_odds": ODDS if self.sampled else 0.0,
        }
