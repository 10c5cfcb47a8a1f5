"""What recipes share whose model learns from a frozen target, on text and on what the target writes itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sakiyomi.core.errors import InputError
from sakiyomi.engine.llm import LLM
from sakiyomi.model_executor.loading import load_model, stop_tokens
from sakiyomi.train.acceptance import NEW_TOKENS, PROMPT_TOKENS, continuations
from sakiyomi.train.config import TaughtConfig
from sakiyomi.train.counted import Library
from sakiyomi.train.data import Ids, TextSpec, parse_texts
from sakiyomi.train.hidden import vocabulary
from sakiyomi.train.recipe import TextRecipe
from sakiyomi.train.rows import FixedRows, mixture_of
from sakiyomi.train.samples import Plan, Samples, by, prompt_of, weights_digest
from sakiyomi.train.tokenizer import check_end

# Where a target's configuration knows no limit, its positions are relative; a draft's need one all the same.
POSITIONS = 2048
FEWEST_NEW = 8  # tokens that a held-out prompt must leave room for, where the target has so many positions
Settings = TypeVar("Settings", bound=TaughtConfig)


class Taught(TextRecipe[Settings]):
    """A recipe with a frozen target.

    Attributes:
        target, tokenizer: of the run.
        positions, vocab: of the target.
        sources: files that rows come from, those of the target's samples too.
        texts: documents of each.
        held_out: prompts, and what the target writes after them.
        held_back: documents of the training text that are held out.
    """

    marked: ClassVar[bool] = False
    """Whether rows mark tokens that are read and not learnt, as `Library` does: prompts, and what users say."""

    def prompts(self) -> list[TextSpec]:
        """Files whose beginnings or questions the target continues."""
        return parse_texts("--prompts", self.config.sampling.prompts or self.config.text.text)

    def check_target(self) -> None:
        """Refuse what does not fit the target, before that writes anything."""

    def read(self) -> None:
        """See `Recipe`; the target writes its samples and its answers to the held-out prompts."""
        config = self.config
        self.target, self.tokenizer = target, _ = load_target(config.target)
        self.positions, self.vocab = _check_positions(config, target), vocabulary(target)
        self.check_target()
        library = Library(self.tokenizer, self.vocab, marked=self.marked)
        paths = [spec.path for spec in self.specs]
        held = library.held_out(self.valid, paths, config.eval_prompts, PROMPT_TOKENS, config.loop.seed)
        self.held_back = 0 if self.valid else sum(map(len, held.values()))
        # Batches of this size have no graph.
        llm = LLM((target, self.tokenizer), "none", compile=False, max_batch=config.sampling.sample_batch)
        questions = held_out_prompts(held, llm.max_context, min(FEWEST_NEW, self.positions - PROMPT_TOKENS))
        self.texts, self.sources = [library.documents(spec.path) for spec in self.specs], list(self.specs)
        if config.sampling.samples:
            self._write_samples(library, llm)
        measured = questions if self.workers.leads else {}
        self.held_out = {name: continuations(llm, some, new_tokens=NEW_TOKENS) for name, some in measured.items()}
        if self.passes == "no":
            target.float()
        rows = partial(FixedRows, length=config.loop.row)
        self.mixture = mixture_of(self.sources, self.texts, rows, config.loop.seed)

    def _write_samples(self, library: Library, llm: LLM) -> None:
        """Have the target write, and make room for what it wrote among the sources."""
        loop, asked, prompts = self.config.loop, self.config.sampling, self.prompts()
        room = self.positions - asked.sample_tokens
        pools = [library.prompts(spec.path, room, "--sample-tokens", self.reporter.note) for spec in prompts]
        plan = Plan(
            Path(loop.out) / "samples.jsonl",
            asked.samples,
            asked.sample_minutes,
            asked.sample_tokens,
            asked.sample_batch,
            asked.temperatures,
            loop.seed,
            keep=loop.resume or not self.workers.leads,
        )
        samples = Samples(plan, weights_digest(self.target), self.tokenizer, prompts, self.held_back)
        samples.extend(by(llm), pools, self.reporter.note)
        if samples.count:
            stable, decay = asked.sample_share, asked.sample_share_decay
            totals = [sum(shares) for shares in zip(*((spec.stable, spec.decay) for spec in self.specs), strict=True)]
            self.sources = [
                TextSpec(spec.path, spec.stable / totals[0] * (1 - stable), spec.decay / totals[1] * (1 - decay))
                for spec in self.specs
            ]
            self.sources.append(TextSpec(samples.out, stable, decay))
            self.texts.append(library.documents(samples.out)[: asked.samples])


def held_out_prompts(
    documents: dict[str, list[Ids]], positions: int, fewest: int = FEWEST_NEW
) -> dict[str, list[list[int]]]:
    """What a target continues for the measurements: beginnings of texts, first prompts of chats.

    Args:
        documents: by name, with marks.
        positions: of the target.
        fewest: tokens that a prompt must leave room for.

    Raises:
        InputError: of some name no prompt leaves room for an answer.
    """
    found = {}
    for name, some in documents.items():
        prompts = [prompt_of(document, PROMPT_TOKENS) for document in some]
        found[name] = [prompt for prompt in prompts if len(prompt) <= positions - fewest]
        if not found[name]:
            raise InputError(f"no held-out prompt of {name!r} leaves room in the target's {positions} positions")
    return found


def load_target(
    name: str, passes: str = "bf16", device: object = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A frozen causal LM and its tokenizer.

    Args:
        name: embedded name, folder or hub id.
        passes: their precision; with "no" its weights are in float32, else in bfloat16.
        device: where it goes.

    Raises:
        SakiyomiError: see `load_model`; or the tokenizer has no end token.
    """
    loaded = load_model(name, dtype="float32" if passes == "no" else "bfloat16", device="cpu")
    model: PreTrainedModel = loaded.model
    tokenizer: PreTrainedTokenizerBase = loaded.tokenizer
    check_end(tokenizer, name)
    # A checkpoint's own taste (a repetition penalty, top-k) would bend what the target writes; the engine has none.
    model.generation_config = GenerationConfig(eos_token_id=list(stop_tokens(model, tokenizer)))
    nn.Module.to(model, device)  # type: ignore[call-overload]
    return model.requires_grad_(False), tokenizer


def _check_positions(config: TaughtConfig, target: PreTrainedModel) -> int:
    """Positions of the target; its rows and measurements must lie within them."""
    positions = int(getattr(target.config.get_text_config(), "max_position_embeddings", 0) or POSITIONS)
    if positions <= PROMPT_TOKENS:
        raise InputError(f"target {config.target!r} has {positions} positions, expected more than {PROMPT_TOKENS}")
    if config.loop.row > positions:
        raise InputError(
            f"row_tokens is {config.loop.row}, target {config.target!r} has {positions} positions; "
            "set --row-tokens to at most that"
        )
    return positions
