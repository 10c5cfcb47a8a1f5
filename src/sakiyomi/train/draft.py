"""Distil a small draft, a Llama or what is given to start from, from any causal LM, on text and on what that writes."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.engine.llm import LLM
from sakiyomi.model_executor.loading import load_model, stop_tokens
from sakiyomi.train.acceptance import NEW_TOKENS, PROMPT_TOKENS, acceptance, continuations, distinct_ngrams
from sakiyomi.train.config import DraftConfig
from sakiyomi.train.data import Ids, Library, TextSpec, parse_texts
from sakiyomi.train.expect import Speed, expected, given_speed, measured_speed
from sakiyomi.train.export import Result, read_card, save
from sakiyomi.train.labels import SoftLabels, vocabulary
from sakiyomi.train.llama import new_llama
from sakiyomi.train.loop import Loop, compile_layers, compiled_loss
from sakiyomi.train.losses import distillation_loss
from sakiyomi.train.optim import text_optimizers
from sakiyomi.train.recipe import TextRecipe, train
from sakiyomi.train.report import Reporter
from sakiyomi.train.rows import FixedRows, mixture_of
from sakiyomi.train.samples import LONGEST_PROMPT, Plan, Samples

# Where a target's configuration knows no limit, its positions are relative; the draft's need one all the same.
POSITIONS = 2048


def train_draft(config: DraftConfig, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train draft`, see `recipe.train`."""
    return train(_Draft(config), command)


class _Draft(TextRecipe[DraftConfig]):
    """A small Llama learns the target's probabilities on text and on what the target writes."""

    def prompts(self) -> list[TextSpec]:
        """Files whose beginnings the target continues."""
        return parse_texts("--prompts", self.config.sampling.prompts or self.config.text.text)

    def read(self) -> None:
        """See `Recipe`; the target writes its samples and its answers to the held-out prompts."""
        config = self.config
        target, self.tokenizer = load_target(config.target)
        self.positions, self.vocab = _check_positions(config, target), vocabulary(target)
        self.start = _start(config, self.vocab, self.tokenizer) if config.init else None
        library = Library(self.tokenizer, self.vocab)
        documents = _held_out(config, library, self.specs, self.valid)
        self.held_back = 0 if self.valid else sum(map(len, documents.values()))
        prompts = self.prompts()
        pools = [library.documents(spec.path) for spec in prompts]
        texts = [library.documents(spec.path) for spec in self.specs]
        # Batches of this size have no graph.
        llm = LLM((target, self.tokenizer), "none", compile=False, max_batch=config.sampling.sample_batch)
        self.sources = list(self.specs)
        if config.sampling.samples:
            samples = Samples(_plan(config), target, self.tokenizer, prompts, self.held_back)
            samples.extend(llm, pools, self.reporter)
            if samples.count:
                self.sources = _with_samples(config, self.specs, samples.path)
                texts.append(library.documents(samples.path)[: config.sampling.samples])
        new_tokens = min(NEW_TOKENS, self.positions - PROMPT_TOKENS)
        self.held_out = {name: continuations(llm, some, new_tokens=new_tokens) for name, some in documents.items()}
        rows = partial(FixedRows, length=config.loop.row_tokens[0])
        self.mixture = mixture_of(self.sources, texts, rows, config.loop.seed)
        self.target = target

    def loop(self) -> Loop:
        """See `Recipe`."""
        config, target = self.config, self.target
        if self.start is not None:
            draft = self.start[0]
        else:
            draft = new_llama(config.sizes, self.tokenizer, vocab=self.vocab, max_positions=self.positions)
        if isinstance(target, LlamaForCausalLM):
            compile_layers(target, config.loop.compile)
        self.labels = SoftLabels(target, config.top, int(config.label_gib * 2**30))
        loss = compiled_loss(distillation_loss, config.loop.compile)

        def batch_loss(model: Any, ids: Tensor) -> Tensor:
            # One row in, one row of labels out: the last column has no label of its own to be compared with.
            inputs = ids[:, :-1]
            with torch.autocast(inputs.device.type, enabled=False):
                top_ids, top_probs = self.labels(inputs)
            hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
            return loss(hidden, model.lm_head.weight, top_ids, top_probs, config.greedy_weight)

        return Loop(config, draft, batch_loss, self.mixture, self._measures, optimizers=text_optimizers(config))

    def finish(self, loop: Loop) -> Result:
        """See `Recipe`."""
        config = self.config
        measures: dict[str, dict[str, Any]] = self._measures(loop.model)
        for name, values in measures.items():
            values["target_distinct_4grams"] = distinct_ngrams(self.held_out[name].greedy)
        del self.target, self.labels  # two targets need not fit: what a step costs is measured with another
        save(config, loop.model, self.tokenizer)
        speed = _speed(config, self.reporter)
        for values in measures.values():
            values |= expected(values, config.gamma, speed)
        more = {
            "cost": speed.cost,
            "cost_source": speed.source,
            "held_back": self.held_back,
            "init": None if self.start is None else self.start[1],
        }
        layers = loop.model.config.num_hidden_layers
        return Result(loop.model, layers, measures, loop.epochs(self.sources), more)

    def _measures(self, model: LlamaForCausalLM) -> dict[str, dict[str, float]]:
        model.eval()
        found = {
            name: acceptance(model, self.target, texts, self.config.gamma) for name, texts in self.held_out.items()
        }
        model.train()
        return found


def _plan(config: DraftConfig) -> Plan:
    loop, asked = config.loop, config.sampling
    return Plan(
        Path(loop.out) / "samples.jsonl",
        asked.samples,
        asked.sample_minutes,
        asked.sample_tokens,
        asked.sample_batch,
        asked.temperatures,
        loop.seed,
        keep=loop.resume,
    )


def load_target(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A frozen causal LM in bf16 and its tokenizer.

    Args:
        name: embedded name, folder or hub id.

    Raises:
        SakiyomiError: see `load_model`; or the tokenizer has no end token.
    """
    # Rows and labels are made on the CPU; a target elsewhere would need them moved.
    loaded = load_model(name, dtype="bfloat16", device="cpu")
    model: PreTrainedModel = loaded.model
    tokenizer: PreTrainedTokenizerBase = loaded.tokenizer
    if tokenizer.eos_token_id is None:
        raise LoadError(f"the tokenizer of {name!r} has no end token; set eos_token in its configuration")
    # A checkpoint's own taste (a repetition penalty, top-k) would bend what the target writes; the engine has none.
    model.generation_config = GenerationConfig(eos_token_id=list(stop_tokens(model, tokenizer)))
    return model.requires_grad_(False), tokenizer


def _check_positions(config: DraftConfig, target: PreTrainedModel) -> int:
    """Positions of the target; its rows, samples and measurements must lie within them."""
    positions = int(getattr(target.config.get_text_config(), "max_position_embeddings", 0) or POSITIONS)
    if positions <= PROMPT_TOKENS:
        raise InputError(f"target {config.target!r} has {positions} positions, expected more than {PROMPT_TOKENS}")
    if config.loop.row_tokens[0] > positions:
        raise InputError(
            f"row_tokens is {config.loop.row_tokens[0]}, target {config.target!r} has {positions} positions; "
            "set --row-tokens to at most that"
        )
    tokens = config.sampling.sample_tokens
    if config.sampling.samples and LONGEST_PROMPT + tokens > positions:
        raise InputError(
            f"sample_tokens is {tokens}, target {config.target!r} has {positions} positions for them "
            f"and prompts of {LONGEST_PROMPT}; lower --sample-tokens, or set --samples 0"
        )
    return positions


def _start(config: DraftConfig, vocab: int, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, dict[str, Any]]:
    """The draft to start from, with what its card says.

    Raises:
        LoadError: it is no model of the target's vocabulary with a head behind it.
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


def _held_out(
    config: DraftConfig, library: Library, specs: Sequence[TextSpec], valid: dict[str, Path]
) -> dict[str, list[Ids]]:
    """Documents for the measurements, by name; without held-out files some of the training text, which loses them.

    Raises:
        InputError: a file has no document long enough, or there is too little text to hold some back.
    """
    if not valid:
        paths = [spec.path for spec in specs]
        return {"held_back": library.hold_back(paths, config.eval_prompts, PROMPT_TOKENS, config.loop.seed)}
    found: dict[str, list[Ids]] = {}
    for name, path in valid.items():
        long = [document for document in library.documents(path) if len(document) > PROMPT_TOKENS]
        if not long:
            raise InputError(
                f"held-out file {path} has no document of more than {PROMPT_TOKENS} tokens, the length of a prompt; "
                "give longer texts with --valid, or none to have some of the training text held back"
            )
        found[name] = long[: config.eval_prompts]
    return found


def _with_samples(config: DraftConfig, specs: Sequence[TextSpec], samples: Path) -> list[TextSpec]:
    """Sources of the rows: the files, whose shares make room for that of the samples, and these."""
    stable, decay = config.sampling.sample_share, config.sampling.sample_share_decay
    all_stable, all_decay = sum(spec.stable for spec in specs), sum(spec.decay for spec in specs)
    files = [
        TextSpec(spec.path, spec.stable / all_stable * (1 - stable), spec.decay / all_decay * (1 - decay))
        for spec in specs
    ]
    return [*files, TextSpec(samples, stable, decay)]


def _speed(config: DraftConfig, reporter: Reporter) -> Speed:
    """What a draft step costs, as given or as measured with the finished draft."""
    if config.cost != "measured":
        return given_speed(config.given_cost)
    gc.collect()  # cycles may still hold the target
    return measured_speed(config, reporter)
