"""Distil a small draft from any causal LM, on text and on what that model writes.

The draft is a new Llama, or the model given with `init`. It guesses one token per pass, or several with masks
(`parallel`).
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from sakiyomi import theory
from sakiyomi.core.errors import LoadError, SakiyomiError
from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine import machine
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.model_executor.loading import load_model
from sakiyomi.train.acceptance import (
    MEASURING,
    Continuations,
    acceptance,
    distinct_ngrams,
    measured,
    measured_on,
    run_texts,
    worth,
)
from sakiyomi.train.commands import TrainDraft
from sakiyomi.train.export import Result, model_folder, read_card, save
from sakiyomi.train.hidden import SoftLabels, vocabulary
from sakiyomi.train.llama import draft_sizes, new_llama
from sakiyomi.train.loop import Watch, compile_layers, compiled_loss
from sakiyomi.train.losses import distillation_loss
from sakiyomi.train.parallel import MaskedRows, mask_token, rank_parallel
from sakiyomi.train.progress import Reporter
from sakiyomi.train.recipe import train
from sakiyomi.train.taught import Taught

LONGEST_GAMMA = 15
"""Most draft tokens whose verifying pass is timed."""
WORTH = 1.05
"""Speed-up from which a draft is recommended."""
MEASURED_PROMPTS, MEASURED_TOKENS = 8, 64


def train_draft(config: TrainDraft, command: str = "", watch: Watch | None = None) -> dict[str, Any]:
    """Run `sakiyomi train draft`, see `recipe.train`."""
    return train((_ParallelDraft if config.parallel > 1 else _Draft)(config), command, watch)


class _Draft(Taught[TrainDraft]):
    """A small Llama learns the target's probabilities on text and on what the target writes."""

    def check_target(self) -> None:
        """See `Taught`."""
        self.start = _start(self.config, self.vocab, self.tokenizer) if self.config.init else None

    def make(self) -> Any:
        """See `Recipe`."""
        config, target = self.config, self.target
        if self.start is not None:
            draft = self.start[0]
        else:
            sizes = draft_sizes(config.sizes, target)
            draft = new_llama(sizes, self.tokenizer, vocab=self.vocab, max_positions=self.positions)
            self.reporter.note(_sizes(draft, target))
        if isinstance(target, LlamaForCausalLM):
            compile_layers(target, config.loop.compile)
        share = 1.0 if config.loop.tokens else config.label_share
        self.labels = SoftLabels(target, config.top, int(config.label_gib * 2**30), share)
        self._divergence = compiled_loss(distillation_loss, config.loop.compile)
        return draft

    def loss(self, model: Any, ids: Tensor) -> Tensor:
        """See `Recipe`."""
        inputs, following = ids[:, :-1], ids[:, 1:]
        with torch.autocast(inputs.device.type, enabled=False):
            top_ids, top_probs = self.labels(inputs, following)
        hidden, places = self.read_rows(model, inputs, self.loop.progress.step)
        top_ids, top_probs = top_ids[:, places], top_probs[:, places]
        return self._divergence(hidden, model.lm_head.weight, top_ids, top_probs, self.config.greedy_weight)

    def read_rows(self, model: Any, ids: Tensor, step: int) -> tuple[Tensor, Any]:
        """What the draft's head reads in a step, (B, rows, hidden), and the places of (B, T) ids that rows stand at."""
        return model.model(input_ids=ids, use_cache=False).last_hidden_state, slice(None)

    def finish(self) -> Result:
        """See `Recipe`."""
        config, loop = self.config, self.loop
        measures: dict[str, dict[str, Any]] = self.measures(loop.model, sampled=True)
        for name, values in measures.items():
            values["target_distinct_4grams"] = distinct_ngrams(self.held_out[name].greedy)
        del self.target, self.labels  # two targets need not fit: what a step costs is measured with another
        save(config, loop.model, self.tokenizer)
        more = self.tell_speed(measures) | {
            "held_back": self.held_back,
            "init": None if self.start is None else self.start[1],
        }
        layers = loop.model.config.num_hidden_layers
        return Result(loop.model, layers, measures, loop.epochs(self.sources), more)

    def tell_speed(self, measures: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Add what the finished draft brings on this machine to the measures; what the card says of that."""
        if self.config.cost == "measured":
            gc.collect()  # cycles may still hold the target
            speed, told = measured_speed(self.config, self.held_out, self.reporter)
        else:
            speed, told = given_speed(self.config.given_cost), {}
        for values in measures.values():
            values |= expected(values, self.config.gamma, speed)
        return told | {"cost": speed.cost, "cost_source": speed.source}

    def measures(self, model: LlamaForCausalLM, *, sampled: bool = False) -> dict[str, dict[str, float]]:
        """See `Recipe`; `sampled`: beside what the target draws, too."""
        model.eval()
        gamma, target = self.config.gamma, self.target if sampled else None  # which takes longest to be asked
        found = {name: acceptance(model, target, texts, gamma) for name, texts in self.held_out.items()}
        model.train()
        return found


class _ParallelDraft(_Draft):
    """The same, where one pass guesses several tokens (PARD)."""

    def check_target(self) -> None:
        """See `Taught`."""
        super().check_target()
        self.mask = mask_token(self.config.mask, self.tokenizer, self.vocab)

    def make(self) -> Any:
        """See `Recipe`."""
        draft = super().make()
        draft.config.pard_token = self.mask
        return draft

    def read_rows(self, model: Any, ids: Tensor, step: int) -> tuple[Tensor, Any]:
        """See `_Draft`."""
        config = self.config
        rows = MaskedRows.drawn(ids.shape[1], config.parallel, np.random.default_rng((config.loop.seed, step)))
        return rows.read(model, ids, self.mask), rows.places

    def measures(self, model: LlamaForCausalLM, *, sampled: bool = False) -> dict[str, dict[str, float]]:
        """See `_Draft`."""
        return {
            name: measured(rank_parallel(model, self.mask, self.config.parallel, texts))
            for name, texts in self.held_out.items()
        }

    def tell_speed(self, measures: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """See `_Draft`."""
        gc.collect()  # cycles may still hold the target
        self.reporter.note(MEASURING)
        draft = f"model:{model_folder(self.config)}"
        for name, values in worth(self.config.target, draft, self.held_out, self.config.loop.compile).items():
            measures[name] |= values
        return {"measured_on": measured_on(self.config.target)}


def _start(config: TrainDraft, vocab: int, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, dict[str, Any]]:
    """The draft to start from, with what its card says.

    Raises:
        LoadError: it is no model of the target's vocabulary with a head after it.
    """
    loaded = load_model(config.init, dtype="float32", device="cpu")
    start = loaded.model
    if not (hasattr(start, "model") and hasattr(start, "lm_head")):
        raise LoadError(
            f"init {config.init!r} is a {type(start).__name__}, expected a model with `model` and `lm_head`"
        )
    if vocabulary(start) != vocab or loaded.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise LoadError(
            f"init {config.init!r} has another vocabulary than the target; train it with --tokenizer TARGET"
        )
    assert loaded.folder is not None, "a model that is named has a folder"
    return start, read_card(config.init, loaded.folder)


def _sizes(draft: Any, target: Any) -> str:
    """What is trained, in a line."""
    own, whole = (sum(weight.numel() for weight in model.parameters()) for model in (draft, target))
    shape = draft.config
    return (
        f"a draft of {own / 1e6:.2g}M parameters, {shape.num_hidden_layers} layers of {shape.hidden_size}, for a "
        f"target of {whole / 1e6:.3g}M"
    )


# ---------------------------------------------------------------- what it is worth on this machine


@dataclass(frozen=True)
class Speed:
    """Costs in plain target steps.

    Attributes:
        cost: of a draft step (c); None where it could not be measured.
        passes: of a target pass, by its number of tokens; linear between them, and as the last one beyond it.
        source: where the numbers are from, for the card.
    """

    cost: float | None
    passes: Mapping[int, float]
    source: str

    def verify(self, tokens: int) -> float:
        """Cost of a target pass over so many tokens."""
        return float(np.interp(tokens, list(self.passes), list(self.passes.values())))


def given_speed(cost: float) -> Speed:
    """Costs with a given c; a pass over more tokens is taken to cost as much as one, as theory has it."""
    return Speed(cost, {1: 1.0}, "given by --cost, a pass over more tokens taken to cost as much as one")


def measured_speed(
    config: TrainDraft, held_out: Mapping[str, Continuations], reporter: Reporter
) -> tuple[Speed, dict[str, Any]]:
    """Time the steps of target and draft as the engine runs them, and texts of held-out prompts, plain and drafted.

    Returns:
        The costs, none where the pair does not run; and for the card `verdict`, the speed-up here in words with the
        next command, and `measured`: tokens/s of both, speed-up, tokens a pass.
    """
    prompts = [prompt for texts in held_out.values() for prompt in texts.prompts][:MEASURED_PROMPTS]
    reporter.note(f"timing steps of the target and of the draft, and {len(prompts)} texts plain and with the draft")
    try:
        llm = LLM(config.target, draft=f"model:{model_folder(config)}")
        found, facts = machine.costs(llm.target, llm.draft), machine.conditions()
    except SakiyomiError as error:
        return Speed(None, {1: 1.0}, f"not measured: {error}"), {"verdict": f"the pair does not run here: {error}"}
    way = "recorded passes" if found["compiled"] else "eager passes"
    source = f"measured on {facts['processor']}, {facts['threads']} threads, target in {found['dtype']}, {way}"
    params = SamplingParams(max_new_tokens=MEASURED_TOKENS)
    texts = [[run_texts(one, [prompt], params) for one in (EngineView(llm), llm)] for prompt in (prompts[0], *prompts)]
    plain, drafted = (Stats.total(some) for some in zip(*texts[1:], strict=True))  # the first one warms up
    measured = {
        "texts": len(prompts),
        "plain_tokens_per_second": plain.tokens_per_second,
        "tokens_per_second": drafted.tokens_per_second,
        "speedup": drafted.tokens_per_second / plain.tokens_per_second,
        "tau": drafted.tau or 1.0,
    }
    return Speed(found["c"], found["v"], source), {"measured": measured, "verdict": verdict(config, measured)}


def verdict(config: TrainDraft, measured: Mapping[str, float]) -> str:
    """What to expect of a draft on this machine, and what to type next."""
    figures = (
        f"{measured['plain_tokens_per_second']:.3g} tokens/s plain and {measured['tokens_per_second']:.3g} with the "
        f"draft ({measured['speedup']:.2f} times, {measured['tau']:.2f} tokens a pass) on {measured['texts']} held-out "
        "prompts, greedy, on this machine"
    )
    use = f'sakiyomi generate "..." --target {config.target} --draft model:{config.loop.out}'
    if measured["speedup"] >= WORTH:
        return f"the draft makes it faster: {figures}\nuse it: {use}"
    return (
        f"the draft is not worth it yet: {figures}\nlonger training helps most (--minutes), then more text of the kind "
        f"that is to be written; without training: --draft suffix+prompt-lookup\nto try it all the same: {use}"
    )


def expected(measured: Mapping[str, float], gamma: int, speed: Speed) -> dict[str, Any]:
    """What the measured rates come to: alpha for sampled text, the greedy agreement in its place for greedy."""
    found: dict[str, Any] = {}
    for rate, kind in (("alpha", "sampled"), ("greedy_agreement", "greedy")):
        alpha = min(measured[rate], 1.0)
        tokens = theory.expected_tokens(alpha, gamma)
        found[f"expected_tokens_{kind}"] = tokens
        if speed.cost is None:
            continue
        found[f"expected_speedup_{kind}"] = tokens / (gamma * speed.cost + speed.verify(gamma + 1))
        longest = max(gamma, LONGEST_GAMMA)
        found[f"optimal_gamma_{kind}"] = theory.marginal_gamma([alpha], speed.cost, speed.verify, 0.0, longest)[0]
    return found
