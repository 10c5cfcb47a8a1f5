"""Train a Llama target and its tokenizer from text files, into a Hugging Face folder with a card."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from sakiyomi.train.commands import TrainTarget
from sakiyomi.train.counted import Library, encode_texts
from sakiyomi.train.data import Ids, TextSpec, read_documents, read_texts
from sakiyomi.train.export import Result, save
from sakiyomi.train.llama import new_llama
from sakiyomi.train.loop import compiled_loss
from sakiyomi.train.losses import next_token_loss
from sakiyomi.train.recipe import TextRecipe, train
from sakiyomi.train.rows import Stream, mixture_of
from sakiyomi.train.tokenizer import load_tokenizer, own_tokenizer, train_tokenizer

# Held-out tokens of the final measurement: 65,536 give the loss to about 0.01 nats.
FINAL_TOKENS = 65536


def train_target(config: TrainTarget, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train target`, see `recipe.train`."""
    return train(_Target(config), command)


class _Target(TextRecipe[TrainTarget]):
    """A Llama with random weights learns the next token of text."""

    def read(self) -> None:
        """See `Recipe`."""
        for path in self.valid.values():
            read_texts(path)  # refused before a tokenizer is trained
        self.tokenizer = tokenizer = load_or_train_tokenizer(self.config, self.specs)
        self.held_out = [
            encode_held_out(name, read_texts(path, tokenizer), tokenizer) for name, path in self.valid.items()
        ]
        library = Library(tokenizer, len(tokenizer))
        documents = [library.documents(spec.path) for spec in self.specs]
        self.mixture = mixture_of(self.specs, documents, Stream, self.config.loop.seed)

    def make(self) -> LlamaForCausalLM:
        """See `Recipe`; it may begin with fewer layers."""
        config, sizes = self.config, self.config.sizes
        self.grow_to, self.grow_at = sizes.layers, config.grow_at
        self._nats = compiled_loss(next_token_loss, config.loop.compile)
        return new_llama(
            sizes,
            self.tokenizer,
            layers=config.first_layers or sizes.layers,
            vocab=len(self.tokenizer),
            max_positions=sizes.max_positions,
        )

    def loss(self, model: LlamaForCausalLM, ids: Tensor) -> Tensor:
        """See `Recipe`."""
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        return self._nats(hidden, model.lm_head.weight, ids[:, 1:])

    def measures(self, model: LlamaForCausalLM, tokens: int = 0) -> dict[str, dict[str, float]]:
        """See `Recipe`; on so many tokens of each file."""
        return {item.name: bits_per_character(model, item, tokens or self.config.eval_tokens) for item in self.held_out}

    def finish(self) -> Result:
        """See `Recipe`."""
        model = self.loop.model
        measures = self.measures(model, FINAL_TOKENS)
        save(self.config, model, self.tokenizer)
        return Result(model, self.config.sizes.layers, measures, self.loop.epochs(self.specs))


def load_or_train_tokenizer(config: TrainTarget, specs: Sequence[TextSpec]) -> PreTrainedTokenizerBase:
    """The tokenizer of the run: the given folder, else the one below OUT (a resumed run), else a new one kept there.

    Raises:
        InputError: the one below OUT has another size than was asked for.
    """
    if config.tokenizer:
        return load_tokenizer(Path(config.tokenizer))
    sizes = config.sizes
    return own_tokenizer(
        config.loop.out, sizes.vocab, lambda: train_tokenizer(_texts(specs), sizes.vocab, sizes.max_positions)
    )


def _texts(specs: Sequence[TextSpec]) -> Iterator[str]:
    """Training text for the tokenizer, a file of n times the share per character read about n times."""
    documents = [[text for text in read_documents(spec.path) if isinstance(text, str)] for spec in specs]
    densities = [spec.stable / max(sum(map(len, texts)), 1) for spec, texts in zip(specs, documents, strict=True)]
    smallest = min((density for density in densities if density > 0), default=1.0)
    for density, texts in zip(densities, documents, strict=True):
        for _ in range(round(density / smallest)):
            yield from texts


# ---------------------------------------------------------------- held-out measures


ROW_TOKENS = 512
BATCH_ROWS = 8


@dataclass(frozen=True)
class HeldOut:
    """A held-out file as one token stream.

    Attributes:
        name: what reports call it.
        tokens: (N,) ids, documents in file order, each led by the end token.
        characters: characters that the tokens stand for.
    """

    name: str
    tokens: Ids
    characters: int


def encode_held_out(name: str, texts: Sequence[str], tokenizer: Any) -> HeldOut:
    """Texts as the token stream that is measured."""
    return HeldOut(name, np.concatenate(encode_texts(texts, tokenizer)), sum(map(len, texts)))


@torch.inference_mode()
def bits_per_character(model: PreTrainedModel, held_out: HeldOut, limit: int | None = None) -> dict[str, float]:
    """Loss on the first `limit` tokens of a held-out file, in rows of 512 tokens without context across rows.

    Returns:
        `nats_per_token`, `bits_per_character` and `tokens` scored.
    """
    causal: Any = model
    length = min(ROW_TOKENS, len(held_out.tokens) - 1)
    count = max(min(limit or len(held_out.tokens), len(held_out.tokens) - 1) // length, 1)
    inputs = torch.from_numpy(held_out.tokens[: count * length]).view(count, length)
    labels = torch.from_numpy(held_out.tokens[1 : count * length + 1]).view(count, length)
    total = 0.0
    training = model.training
    model.eval()
    for start in range(0, count, BATCH_ROWS):
        rows = inputs[start : start + BATCH_ROWS].to(model.device)
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            hidden = causal.model(input_ids=rows, use_cache=False).last_hidden_state
            loss = next_token_loss(hidden, causal.lm_head.weight, labels[start : start + BATCH_ROWS].to(model.device))
        total += float(loss) * rows.numel()
    model.train(training)
    tokens = inputs.numel()
    characters = held_out.characters * tokens / len(held_out.tokens)
    return {"nats_per_token": total / tokens, "bits_per_character": total / math.log(2) / characters, "tokens": tokens}
