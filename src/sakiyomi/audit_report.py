"""What an audit is asked for and what it finds: plain data, see ``audit``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sakiyomi.errors import InputError
from sakiyomi.params import SamplingParams
from sakiyomi.referee import Divergence

if TYPE_CHECKING:
    from sakiyomi.kernels.rounding import RoundingReport

__all__ = ["AuditConfig", "AuditReport", "Check", "Texts"]

Texts = list[list[int]]


@dataclass(frozen=True)
class AuditConfig:
    """How much is checked.

    Attributes:
        max_new_tokens: tokens of each text.
        prompt_tokens: prompts are cut to this many tokens.
        gammas: draft tokens a round to check.
        seeds: seeds of sampled texts.
        temperature: of sampled texts.
    """

    max_new_tokens: int = 64
    prompt_tokens: int = 64
    gammas: tuple[int, ...] = (1, 2, 5)
    seeds: tuple[int, ...] = (0, 1)
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.gammas or not self.seeds:
            raise InputError("gammas or seeds is empty; give at least one of each")
        if self.prompt_tokens < 1:
            raise InputError(f"prompt_tokens is {self.prompt_tokens}; expected at least 1")
        if self.temperature <= 0:
            raise InputError(
                f"temperature is {self.temperature}; sampled texts need one above 0, greedy ones are checked anyway"
            )
        for gamma in self.gammas:
            for seed in self.seeds:
                self.sampled(seed, gamma)

    def greedy(self, gamma: int = 1) -> SamplingParams:
        """Parameters of a greedy text."""
        return SamplingParams(max_new_tokens=self.max_new_tokens, gamma=gamma)

    def sampled(self, seed: int, gamma: int = 1) -> SamplingParams:
        """Parameters of a sampled text."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=seed,
            gamma=gamma,
            acceptance="coupled",
        )


@dataclass(frozen=True)
class Check:
    """One comparison of texts.

    Attributes:
        rule: "greedy" or "coupled".
        what: "plain" or "drafted".
        against: the report's reference, "plain", or "logits": each token by itself, by the reference's logits.
        gamma: None for plain text.
        seed: None for greedy text.
        batch: texts at once.
        texts, equal, tokens: how many were compared, were equal, and their tokens.
        divergences: the others, explained or not.
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

    @property
    def defects(self) -> int:
        """Differences that nothing explains."""
        return sum(divergence.defect for divergence in self.divergences)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"defects": self.defects, "divergences": [d.to_dict() for d in self.divergences]}


@dataclass
class AuditReport:
    """All comparisons.

    Attributes:
        checks: in the order they were made.
        noise: shape noise of the reference itself, in logits.
        dtype: of the target.
        exact: whether our own texts had to be equal to the last token.
        drafter: name of the drafter; None if there was none, and then nothing was drafted.
        prompts: token ids.
        reference: whose greedy texts and logits are right: "transformers", or "own plain" where the weights were
            rounded and only our own engine computes with them.
        rounding: what the rounding changed; None where nobody knows, or nothing was rounded.
        tokenizer: of the target.
    """

    noise: float
    dtype: str
    exact: bool
    drafter: str | None
    prompts: Texts
    reference: str = "transformers"
    rounding: RoundingReport | None = None
    tokenizer: Any = field(default=None, repr=False)
    checks: list[Check] = field(default_factory=list)

    @property
    def defects(self) -> int:
        """Differences that nothing explains, over all checks."""
        return sum(check.defects for check in self.checks)

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
            "rounding": asdict(self.rounding) if self.rounding is not None else None,
            "checks": [check.to_dict() for check in self.checks],
        }
