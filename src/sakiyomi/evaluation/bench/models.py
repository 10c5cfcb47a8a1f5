"""The pair that benchmarks run on, for us and for transformers, and the judge of their texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sakiyomi.core.dtypes import dtype_name
from sakiyomi.engine.chat_template import prompt_ids
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.audit.reference import EngineReference, HFReference
from sakiyomi.evaluation.bench.config import BenchConfig
from sakiyomi.evaluation.bench.peers import Transformers, stop_tokens
from sakiyomi.evaluation.bench.quality import Quality
from sakiyomi.evaluation.bench.runner import Agreement
from sakiyomi.evaluation.loading import load
from sakiyomi.model_executor.loading import load_model, same_tokenizer
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.weights import quantizes

MEASURED = 4  # texts on which a judge measures what rounding does
WAYS = ("plain", "assisted", "prompt lookup")
"""How transformers generates: alone, with a draft model, with drafts from the text itself."""


def inflated(*configs: Any) -> str | None:
    """Names the models among these that were inflated (``benchmarks/inflate.py``); None if none was."""
    notes = [note for config in configs if (note := getattr(config, "sakiyomi_inflated", None))]
    return ", ".join(f"{note['from']} at {note['params'] / 1e6:.0f}M parameters" for note in notes) or None


def rounding(llm: LLM) -> str | None:
    """A summary of the target's quantization; None if it is not quantized."""
    report = llm.target.weights.quantization
    if report is not None:
        return str(report)
    return "rows in 8 bits, weights as the file has them" if quantizes(llm.target.weights) else None


@dataclass
class Pair:
    """Target and draft of a benchmark, loaded when they are needed."""

    config: BenchConfig

    @cached_property
    def target(self) -> Any:
        """As transformers runs it (``loading.Loaded``)."""
        return load_model(self.config.target, dtype=self.config.dtype, device=self.config.device)

    @cached_property
    def draft(self) -> Any:
        """As transformers runs it."""
        return load_model(self.config.draft_model, dtype=self.config.dtype, device=self.config.device)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Token ids."""
        tokenizer = self.target.tokenizer
        return [prompt_ids(tokenizer, text, self.config.prompt_tokens) for text in self.config.texts()]

    def llm(self, draft: Any = None, **options: Any) -> LLM:
        """Our engine on the same pair; ``draft`` None: that of the pair."""
        draft = f"model:{self.config.draft_model}" if draft is None else draft
        return load(self.config, draft, **options)

    def peer(self, way: str) -> Transformers:
        """The generation of transformers on the same pair; ``way`` is one of ``WAYS``."""
        if way != "assisted":
            return Transformers(self.target.model, None, self.config.gamma, self.stop, lookup=way == "prompt lookup")
        own, theirs = self.target.tokenizer, self.draft.tokenizer
        tokenizers = None if same_tokenizer(own, theirs) else (own, theirs)
        return Transformers(self.target.model, self.draft.model, self.config.gamma, self.stop, tokenizers=tokenizers)

    @property
    def stop(self) -> tuple[int, ...]:
        """End tokens."""
        return stop_tokens(self.target.model, self.target.tokenizer)

    @cached_property
    def quality(self) -> Quality:
        """Measures the quality of contenders, if the configuration asks for it."""
        limit = getattr(self.target.model.config.get_text_config(), "max_position_embeddings", None)
        return Quality(self.config, self.target.tokenizer, *([limit] if limit else []))

    def judge(self, llm: LLM | None = None, prompts: Sequence[Sequence[int]] | None = None) -> NearTies:
        """Compares outputs for these prompts: by transformers' logits, or by the engine's if its weights are quantized.

        Args:
            llm: the engine; None: outputs are transformers'.
            prompts: others than the pair's.
        """
        rounded = llm is not None and quantizes(llm.target.weights)
        model = llm.target if llm is not None and rounded else self.target.model
        return NearTies(model, self.prompts if prompts is None else prompts)

    @property
    def names(self) -> dict[str, str | None]:
        """For the conditions: the names of both, and whether one was inflated."""
        note = inflated(self.target.model.config, self.draft.model.config)
        return {"target": self.config.target, "draft": self.config.draft_model, "inflated": note}

    @property
    def dtypes(self) -> dict[str, str]:
        """For the conditions."""
        models = {"dtype": self.target.model, "draft_dtype": self.draft.model}
        return {name: dtype_name(model.dtype) for name, model in models.items()}


class NearTies:
    """Accepts outputs that are equal, or that differ only at a near-tie (see ``audit.reference``).

    Args:
        model: a transformers model of the same weights, a ``ModelRunner`` of quantized weights, which transformers
            does not have, or another reference.
        prompts: of the texts, in order; prompts after the last text are ignored.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        of = EngineReference if isinstance(model, ModelRunner) else HFReference
        self._reference = model if isinstance(model, HFReference) else of(model)
        self._prompts = prompts
        self._measured = 0

    def __call__(self, expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> Agreement:
        """See ``runner.Judge``."""
        if expected == got:
            return Agreement(True, True)
        # Of a smaller batch there are fewer texts than prompts.
        texts = list(zip(self._prompts, expected, strict=False))
        for prompt, text in texts[self._measured : MEASURED]:
            self._reference.measure(prompt, text)
        self._measured = max(self._measured, min(MEASURED, len(texts)))
        found = [
            self._reference.compare(i, prompt, right, text)
            for i, (prompt, right, text) in enumerate(zip(self._prompts[: len(expected)], expected, got, strict=True))
        ]
        apart = [divergence for divergence in found if divergence is not None]
        defects = [divergence for divergence in apart if divergence.defect]
        worst = max(defects or apart, key=lambda divergence: divergence.gap)
        what = "no near-tie" if defects else "near-ties"
        note = (
            f"{len(apart)} of {len(found)} texts differ ({what}): text {worst.text} at token {worst.position}, gap "
            f"{worst.gap:.2g} (top-2 gap {worst.top2_gap:.2g}), explained up to {worst.limit:.2g}"
        )
        return Agreement(False, not defects, note)
