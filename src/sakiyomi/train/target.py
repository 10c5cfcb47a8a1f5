"""Train a Llama target and its tokenizer from text files, into a Hugging Face folder with a card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from sakiyomi.train.commands import TrainTarget
from sakiyomi.train.data import TextSpec, encode_file, read_documents
from sakiyomi.train.evaluate import bits_per_character, encode_held_out, read_held_out
from sakiyomi.train.export import Result, save
from sakiyomi.train.llama import new_llama
from sakiyomi.train.loop import Loop, compiled_loss
from sakiyomi.train.losses import next_token_loss
from sakiyomi.train.optim import text_optimizers
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
        texts = {name: read_held_out(path) for name, path in self.valid.items()}
        self.tokenizer = load_or_train_tokenizer(self.config, self.specs)
        self.held_out = [encode_held_out(name, some, self.tokenizer) for name, some in texts.items()]
        documents = [encode_file(spec.path, self.tokenizer, len(self.tokenizer)) for spec in self.specs]
        self.mixture = mixture_of(self.specs, documents, Stream, self.config.loop.seed)

    def loop(self) -> Loop:
        """See `Recipe`."""
        config, tokenizer = self.config, self.tokenizer
        layers = config.first_layers or config.sizes.layers
        model = new_llama(
            config.sizes, tokenizer, layers=layers, vocab=len(tokenizer), max_positions=config.sizes.max_positions
        )
        loss = compiled_loss(next_token_loss, config.loop.compile)

        def batch_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            return loss(hidden, model.lm_head.weight, ids[:, 1:])

        return Loop(
            config,
            model,
            batch_loss,
            self.mixture,
            lambda model: self._measures(model, config.eval_tokens),
            optimizers=text_optimizers(config),
            precision=config.text.passes,
            grow_to=config.sizes.layers,
            grow_at=config.grow_at,
        )

    def finish(self, loop: Loop) -> Result:
        """See `Recipe`."""
        measures = self._measures(loop.model, FINAL_TOKENS)
        save(self.config, loop.model, self.tokenizer)
        return Result(loop.model, self.config.sizes.layers, measures, loop.epochs(self.specs))

    def _measures(self, model: LlamaForCausalLM, tokens: int) -> dict[str, dict[str, float]]:
        return {item.name: bits_per_character(model, item, tokens) for item in self.held_out}


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
