"""What `sakiyomi bench spec` measures; the only home of these defaults. Imports no torch: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass

from sakiyomi.core.checks import at_least
from sakiyomi.evaluation.settings import TargetSettings


@dataclass(frozen=True, kw_only=True)
class SpecConfig(TargetSettings):
    """Which drafters are measured, on which questions.

    Attributes:
        draft: drafter to measure (again for each). By default all that the target can use here: prompt-lookup, suffix,
            ngram, its own first layers, itself in 8 bits, its draft model and Medusa heads, and suffix merged with the
            draft model.
        questions: .jsonl with question_id, category and turns, the format of Spec-Bench, MT-bench and SPEED-Bench; by
            default a few questions in the categories of SPEED-Bench that come with the package.
        categories: only these (again for each, or with commas).
        count: most questions of each category.
        max_new_tokens: of each answer; Spec-Bench has 1024.
        prompt_tokens: longest prompt; longer ones are cut in the middle. By default the context's limit.
        gamma: draft tokens a round, or auto.
        repeats: runs over each question; medians are reported. Spec-Bench has 3.
        template: auto (the tokenizer's chat template, or plain text if it has none), none (plain text), or a Jinja
            file.
        system: system message.
        out: file for the results, a line for each question and drafter. Results that the file already has are not
            measured again.
        against: an earlier file of results: report where tokens per pass have fallen since, on questions of both.
        quantize: int8 or int4: quantize the target's weights.
        exact: bit-equal answers for every drafter.
        compile: record decoding passes before they are measured; otherwise everything runs eagerly.
    """

    draft: tuple[str, ...] = ()
    questions: str | None = None
    categories: tuple[str, ...] = ()
    count: int = 4
    max_new_tokens: int = 128
    prompt_tokens: int | None = None
    gamma: int | str = "auto"
    repeats: int = 2
    template: str = "auto"
    system: str = ""
    out: str | None = None
    against: str | None = None
    quantize: str | None = None
    exact: bool = False
    compile: bool = True

    def __post_init__(self) -> None:
        at_least(self, count=1, max_new_tokens=2, repeats=1, prompt_tokens=2)
