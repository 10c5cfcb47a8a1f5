"""Models that benchmarks are run on: random Llamas of any size, and a pair for us and for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sakiyomi.core.dtypes import dtype_name
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.audit.reference import EngineReference, HFReference
from sakiyomi.evaluation.bench.config import BenchConfig
from sakiyomi.evaluation.bench.inflate import inflated
from sakiyomi.evaluation.bench.peers import Transformers, stop_tokens
from sakiyomi.evaluation.bench.quality import Quality
from sakiyomi.evaluation.bench.runner import Agreement
from sakiyomi.evaluation.loading import load
from sakiyomi.model_executor.loading import load_model
from sakiyomi.model_executor.loading.model import parse_device
from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["WAYS", "NearTies", "Numbers", "Pair", "random_llama", "random_prompts", "rounding"]

MEDIUM = (768, 12, 12, 2048, 32000)  # of random_llama: 134M parameters
MEASURED = 4  # texts on which a judge measures what rounding does
WAYS = ("plain", "assisted", "prompt lookup")
"""How transformers generates: alone, with a draft model, with drafts from the text itself."""


class Numbers:
    """Stands in for the tokenizer of a random model: the text of a token is its number."""

    eos_token_id = None
    bos_token_id = None
    all_special_ids: tuple[int, ...] = ()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Numbers, each with a space before it."""
        return "".join(f" {token}" for token in token_ids)


def random_llama(
    dim: int,
    layers: int,
    heads: int,
    hidden: int,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    spread: float = 3.0,
    seed: int = 0,
    device: str = "cpu",
    positions: int = 2048,
) -> Any:
    """A Llama with random weights, no end token, and logits whose standard deviation is ``spread``.

    Flat logits (a spread of 0.5, as fresh models have) would make top-p keep nearly all tokens and greedy search one
    near-tie after the other; those of trained models spread by 2 to 4.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
        # The last norm has unit rows, so that a logit is a sum of dim products.
        model.lm_head.weight.normal_(0.0, spread / dim**0.5)
    return model.to(parse_device(device), dtype).eval()


def described(model: Any) -> str:
    """A random model, for the conditions."""
    config, size = model.config, sum(parameter.numel() for parameter in model.parameters())
    return (
        f"random Llama, {size / 1e6:.0f}M parameters, {config.num_hidden_layers} layers, dim {config.hidden_size}, "
        f"vocabulary {config.vocab_size}"
    )


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Token ids, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    table: list[list[int]] = torch.randint(vocab_size, (count, length), generator=generator).tolist()
    return table


def rounding(llm: LLM) -> str | None:
    """What the quantization of the target changed, in words."""
    report = llm.target.weights.quantization
    return None if report is None else str(report)


@dataclass
class Pair:
    """Target and draft of a benchmark, and what is made from them."""

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
        return [tokenizer(text).input_ids[: self.config.prompt_tokens] for text in self.config.texts()]

    def llm(self, draft: Any = None, **options: Any) -> LLM:
        """Our engine on the same pair; ``draft`` None: that of the pair."""
        draft = f"model:{self.config.draft_model}" if draft is None else draft
        return load(self.config, draft, **options)

    def peer(self, way: str) -> Transformers:
        """The generation of transformers on the same pair; ``way`` is one of ``WAYS``."""
        draft = self.draft.model if way == "assisted" else None
        return Transformers(self.target.model, draft, self.config.gamma, self.stop, lookup=way == "prompt lookup")

    @property
    def stop(self) -> tuple[int, ...]:
        """End tokens."""
        return stop_tokens(self.target.model, self.target.tokenizer)

    @cached_property
    def quality(self) -> Quality:
        """Measures what the configuration gave to measure with."""
        limit = getattr(self.target.model.config.get_text_config(), "max_position_embeddings", None)
        return Quality(self.config, self.target.tokenizer, *([limit] if limit else []))

    def judge(self, llm: LLM | None = None, prompts: Sequence[Sequence[int]] | None = None) -> NearTies:
        """Compares outputs for these prompts: by transformers' logits, or by an engine's own if it rounds its weights.

        Args:
            llm: the engine; None: outputs are transformers'.
            prompts: others than the pair's.
        """
        rounded = llm is not None and llm.target.weights.quantization is not None
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

    def settings(self, llm: LLM) -> dict[str, Any]:
        """For the conditions of a target that drafts for itself: how an engine holds it, and what it is asked for."""
        return {
            "target": self.config.target,
            "dtype": dtype_name(llm.target.dtype),
            "rounding": rounding(llm),
            "gamma": self.config.gamma,
            "max_new_tokens": self.config.max_new_tokens,
        }


class NearTies:
    """Accepts outputs that are equal, or that part only where rounding decides (see ``hf_reference``).

    Args:
        model: a transformers model of the same weights, or a ``ModelRunner`` of quantized weights, which transformers
            does not have.
        prompts: of the texts, in order; those behind the last text are not looked at.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self._reference = EngineReference(model) if isinstance(model, ModelRunner) else HFReference(model)
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
            f"{len(apart)} of {len(found)} texts part ({what}): text {worst.text} at token {worst.position}, gap "
            f"{worst.gap:.2g} (top-2 gap {worst.top2_gap:.2g}), explained up to {worst.limit:.2g}"
        )
        return Agreement(False, not defects, note)
