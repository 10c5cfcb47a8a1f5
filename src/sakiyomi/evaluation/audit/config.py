"""What an audit checks: the only home of these defaults. Imports no torch, because the command line reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sakiyomi.core.checks import at_least
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import ACCEPTANCES, SamplingParams

TREE = (1, 2, 1)
"""Counts of the tree that is checked beside the chains: siblings at two depths."""
Shape = dict[str, Any]


@dataclass(frozen=True)
class AuditConfig:
    """How much is checked.

    Attributes:
        prompt_tokens: prompts are cut to this many tokens, chats are not.
        max_new_tokens: new tokens of each text.
        gammas: draft tokens a round to check (again for each).
        seeds: seeds of the sampled texts (again for each).
        temperature: of the sampled texts.
        sampled: also test the distribution of text whose rule makes it depend on the draft (ratio, block, traversal),
            until one .02 of total variation away would be seen; takes minutes.
        verifiers: acceptance rules to check, the distribution under those named too (again for each); all lossless
            ones if none is.
        samples: most tokens that are played for each rule and kind of draft; fewer do where they are enough.
        texts: that the pair itself writes for each rule, drafter and shape; 0: only recorded rows are played.
    """

    prompt_tokens: int = 64
    max_new_tokens: int = 64
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
        at_least(self, prompt_tokens=1)
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


def shape_name(shape: Shape) -> str:
    """What is drafted in a round, in words."""
    return "tree" if "tree" in shape else f"gamma {shape['gamma']}"
