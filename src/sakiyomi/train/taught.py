"""What recipes share whose model learns from a frozen target, on text and on what the target writes itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.engine.llm import LLM
from sakiyomi.model_executor.loading import load_model, stop_tokens
from sakiyomi.train.acceptance import NEW_TOKENS, PROMPT_TOKENS, continuations
from sakiyomi.train.config import TaughtConfig
from sakiyomi.train.data import Ids, Library, TextSpec, parse_texts
from sakiyomi.train.labels import vocabulary
from sakiyomi.train.recipe import TextRecipe
from sakiyomi.train.rows import FixedRows, mixture_of
from sakiyomi.train.samples import LONGEST_PROMPT, Plan, Samples, by, weights_digest
from sakiyomi.train.workers import Workers

__all__ = ["Taught", "load_target"]

# Where a target's configuration knows no limit, its positions are relative; a draft's need one all the same.
POSITIONS = 2048
Settings = TypeVar("Settings", bound=TaughtConfig)


class Taught(TextRecipe[Settings]):
    """A recipe with a frozen target.

    Attributes:
        target, tokenizer: of the run.
        positions, vocab: of the target.
        sources: files that rows come from, those of the target's samples too.
        texts: documents of each.
        mixture: rows of them.
        held_out: prompts, and what the target writes behind them.
        held_back: documents of the training text that are held out.
    """

    def prompts(self) -> list[TextSpec]:
        """Files whose beginnings the target continues."""
        return parse_texts("--prompts", self.config.sampling.prompts or self.config.text.text)

    def check_target(self) -> None:
        """Refuse what does not fit the target, before that writes anything."""

    def read(self) -> None:
        """See `Recipe`; the target writes its samples and its answers to the held-out prompts."""
        config = self.config
        self.target, self.tokenizer = target, _ = load_target(config.target)
        self.positions, self.vocab = _check_positions(config, target), vocabulary(target)
        self.check_target()
        library = Library(self.tokenizer, self.vocab)
        documents = _held_out(config, library, self.specs, self.valid)
        self.held_back = 0 if self.valid else sum(map(len, documents.values()))
        prompts = self.prompts()
        pools = [library.documents(spec.path) for spec in prompts]
        self.texts = [library.documents(spec.path) for spec in self.specs]
        # Batches of this size have no graph.
        llm = LLM((target, self.tokenizer), "none", compile=False, max_batch=config.sampling.sample_batch)
        self.sources = list(self.specs)
        if config.sampling.samples:
            samples = Samples(
                _plan(config, self.workers), weights_digest(target), self.tokenizer, prompts, self.held_back
            )
            samples.extend(by(llm), pools, self.reporter)
            if samples.count:
                self.sources = _with_samples(config, self.specs, samples.out)
                self.texts.append(library.documents(samples.out)[: config.sampling.samples])
        new_tokens = min(NEW_TOKENS, self.positions - PROMPT_TOKENS)
        measured = documents if self.workers.leads else {}
        self.held_out = {name: continuations(llm, some, new_tokens=new_tokens) for name, some in measured.items()}
        if config.text.passes == "no":
            target.float()
        rows = partial(FixedRows, length=config.loop.row)
        self.mixture = mixture_of(self.sources, self.texts, rows, config.loop.seed)


def _plan(config: TaughtConfig, workers: Workers) -> Plan:
    loop, asked = config.loop, config.sampling
    return Plan(
        Path(loop.out) / "samples.jsonl",
        asked.samples,
        asked.sample_minutes,
        asked.sample_tokens,
        asked.sample_batch,
        asked.temperatures,
        loop.seed,
        keep=loop.resume or not workers.leads,
    )


def load_target(name: str, passes: str = "bf16") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A frozen causal LM and its tokenizer.

    Args:
        name: embedded name, folder or hub id.
        passes: their precision; with "no" its weights are in float32, else in bfloat16.

    Raises:
        SakiyomiError: see `load_model`; or the tokenizer has no end token.
    """
    # Rows and labels are made on the CPU; a target elsewhere would need them moved.
    loaded = load_model(name, dtype="float32" if passes == "no" else "bfloat16", device="cpu")
    model: PreTrainedModel = loaded.model
    tokenizer: PreTrainedTokenizerBase = loaded.tokenizer
    if tokenizer.eos_token_id is None:
        raise LoadError(f"the tokenizer of {name!r} has no end token; set eos_token in its configuration")
    # A checkpoint's own taste (a repetition penalty, top-k) would bend what the target writes; the engine has none.
    model.generation_config = GenerationConfig(eos_token_id=list(stop_tokens(model, tokenizer)))
    return model.requires_grad_(False), tokenizer


def _check_positions(config: TaughtConfig, target: PreTrainedModel) -> int:
    """Positions of the target; its rows, samples and measurements must lie within them."""
    positions = int(getattr(target.config.get_text_config(), "max_position_embeddings", 0) or POSITIONS)
    if positions <= PROMPT_TOKENS:
        raise InputError(f"target {config.target!r} has {positions} positions, expected more than {PROMPT_TOKENS}")
    if config.loop.row > positions:
        raise InputError(
            f"row_tokens is {config.loop.row}, target {config.target!r} has {positions} positions; "
            "set --row-tokens to at most that"
        )
    tokens = config.sampling.sample_tokens
    if config.sampling.samples and LONGEST_PROMPT + tokens > positions:
        raise InputError(
            f"sample_tokens is {tokens}, target {config.target!r} has {positions} positions for them "
            f"and prompts of {LONGEST_PROMPT}; lower --sample-tokens, or set --samples 0"
        )
    return positions


def _held_out(
    config: TaughtConfig, library: Library, specs: Sequence[TextSpec], valid: dict[str, Path]
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


def _with_samples(config: TaughtConfig, specs: Sequence[TextSpec], samples: Path) -> list[TextSpec]:
    """Sources of the rows: the files, whose shares make room for that of the samples, and these."""
    stable, decay = config.sampling.sample_share, config.sampling.sample_share_decay
    all_stable, all_decay = sum(spec.stable for spec in specs), sum(spec.decay for spec in specs)
    files = [
        TextSpec(spec.path, spec.stable / all_stable * (1 - stable), spec.decay / all_decay * (1 - decay))
        for spec in specs
    ]
    return [*files, TextSpec(samples, stable, decay)]
