"""Train a Llama target and its tokenizer from text files, into a Hugging Face folder with a card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from sakiyomi.train.commands import TrainTarget
from sakiyomi.train.counted import Library
from sakiyomi.train.data import TextSpec, read_documents, read_texts
from sakiyomi.train.evaluate import bits_per_character, encode_held_out
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
        self.loop_options = {"grow_to": sizes.layers, "grow_at": config.grow_at}
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
