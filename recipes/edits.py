"""An encoder-decoder pair that corrects text: text with mistakes in, the right text out; and a story to be continued.

python recipes/edits.py --out edits --text stories.jsonl
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tokenizers import processors
from transformers import PegasusConfig, PegasusForConditionalGeneration, PreTrainedTokenizerBase

from defects import Spoiler, sentences
from held_out import Example
from pairs import PairConfig, padded, train_pair
from sakiyomi.cli.train import script
from sakiyomi.core.errors import InputError
from sakiyomi.train.data import Ids
from sakiyomi.train.settings import setting
from sakiyomi.train.tokenizer import own_tokenizer, train_tokenizer
from texts import FixedTexts

__all__ = ["CONTINUE", "FIX", "EditRows", "Edits", "edit_tokenizer", "train_edits"]

FIX, CONTINUE = "fix: ", "continue: "
"""Which of the two tasks a source is: one whose answer stands in the source, and one whose does not."""

MOST_READ = 3
"""Sentences of a story that is to be continued."""
SHUFFLED = 0.25
"""Share of the rows before the decay that are words in any order: copying is learnt from them."""
POSITIONS = 256
"""Of encoder and decoder."""
TABLE_SPREAD = 0.1
"""Of the table of embeddings at the start: beside sinusoids, 0.02 would not be seen."""
MEASURED_ROWS = 32
"""Rows of a held-out batch."""
SOURCE_STEP = 32
"""Sources are filled up to a multiple of so many tokens: every shape is a graph where layers are compiled."""


@dataclass(frozen=True, kw_only=True)
class EditsConfig(PairConfig):
    """A Pegasus pair that puts mistakes of a text right, and that continues stories.

    Attributes:
        vocab: Pieces of the tokenizer to train, special tokens included.
        continue_share: Share of the rows that continue a story, so that text without a source can be measured.
    """

    vocab: int = setting(1024, least=1)
    continue_share: float = setting(0.2, least=0, most=1)


def train_edits(config: EditsConfig, command: str = "") -> dict[str, Any]:
    """Train the pair.

    Args:
        config: the settings.
        command: the command line, for the cards.

    Returns:
        The summary that `--json` prints; `finished` is False after SIGINT.
    """
    return train_pair(config, partial(Edits, config), command)


class Edits:
    """See `pairs.Task`.

    Args:
        config: of the run.
        texts, held_out: documents to train on, and others.
    """

    def __init__(self, config: EditsConfig, texts: Sequence[str], held_out: Sequence[str]) -> None:
        self._config = config
        self.tokenizer = self.processor = own_tokenizer(
            config.loop.out, config.vocab, lambda: edit_tokenizer(texts, config.vocab, 2 * max(config.loop.row_tokens))
        )
        self.most_tokens = 2 * max(config.loop.row_tokens)
        spoiler = Spoiler([*texts, *held_out])
        self.rows = EditRows(texts, self.tokenizer, spoiler, continued=config.continue_share, seed=config.loop.seed)
        # The same generator with another seed, on other text.
        seed, length = config.loop.seed + 1, max(config.loop.row_tokens)
        others = {
            name: EditRows(held_out, self.tokenizer, spoiler, continued=share, seed=seed)
            for name, share in (("fix", 0.0), ("continue", 1.0))
        }
        self.held_out: dict[str, dict[str, Any]] = {
            name: rows.batch(0, MEASURED_ROWS, length, True) for name, rows in others.items()
        }
        self.examples = [
            rows.example(np.random.default_rng((seed, 1, number)), length)
            for rows in others.values()
            for number in range(config.examples)
        ]

    def new_model(self, part: str) -> PegasusForConditionalGeneration:
        """A Pegasus with random weights.

        Its positions are sinusoids, by which a decoder finds its place in a source within 100,000 tokens of training; a
        T5 of the same size, whose positions are relative, had not begun to copy after 400,000. Norms stand before what
        they feed, so that layers can be put between (`benchmarks/inflate.py`).
        """
        config, tokenizer = self._config, self.tokenizer
        model = PegasusForConditionalGeneration(
            PegasusConfig(
                vocab_size=len(tokenizer),
                max_position_embeddings=POSITIONS,
                dropout=0.0,
                attention_dropout=0.0,
                activation_dropout=0.0,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                decoder_start_token_id=tokenizer.pad_token_id,
                forced_eos_token_id=None,
                **config.sizes.of_part(part),
            )
        )
        torch.nn.init.normal_(model.model.shared.weight, std=TABLE_SPREAD)
        return model

    def questions(self, examples: Sequence[Example]) -> dict[str, Ids]:
        """Sources as `input_ids` and `attention_mask`."""
        ids = _sources(self.tokenizer, examples)
        source, mask = padded(ids, max(map(len, ids)), self.tokenizer.pad_token_id)
        return {"input_ids": source, "attention_mask": mask}


class EditRows(FixedTexts):
    """Batches of sources and answers, made while they are asked for: a step gives the same ones whenever it is asked.

    Args:
        documents: texts.
        tokenizer: of the model; it ends a text with the end token.
        spoiler: makes the mistakes.
        continued: share of the rows that continue a story instead of correcting a text.
        seed: of the choice of sentences and of the mistakes.
    """

    def __init__(
        self,
        documents: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        spoiler: Spoiler,
        *,
        continued: float,
        seed: int,
    ) -> None:
        self._spoiler, self._tokenizer, self._continued, self._seed = spoiler, tokenizer, continued, seed
        super().__init__([found for text in documents if len(found := sentences(text)) > 1])
        if not self._documents:
            raise InputError("the text has no document of two sentences or more; give text in sentences")
        flat = [sentence for document in self._documents for sentence in document]
        lengths = iter([len(ids) for ids in tokenizer(flat, add_special_tokens=False, verbose=False)["input_ids"]])
        # With one more for the space that stands before a sentence.
        self._lengths = [[next(lengths) + 1 for _ in document] for document in self._documents]

    def batch(self, step: int, rows: int, length: int, decaying: bool) -> dict[str, Ids]:
        """`input_ids` and `attention_mask` (rows, S); `inputs`, `labels`, `known` (rows, length), see `pairs.Task`."""
        rng = np.random.default_rng((self._seed, step))
        made = [
            self._shuffled(rng, length) if not decaying and rng.random() < SHUFFLED else self.example(rng, length)
            for _ in range(rows)
        ]
        sources = _sources(self._tokenizer, made)
        targets = self._tokenizer([example.target for example in made], verbose=False)["input_ids"]
        pad = self._tokenizer.pad_token_id
        longest = -(-max(map(len, sources)) // SOURCE_STEP) * SOURCE_STEP
        source, mask = padded(sources, longest, pad)
        labels, known = padded([ids[:length] for ids in targets], length, pad)
        inputs = np.concatenate((np.full((rows, 1), pad), labels[:, :-1]), axis=1)
        return {"input_ids": source, "attention_mask": mask, "inputs": inputs, "labels": labels, "known": known}

    def example(self, rng: np.random.Generator, length: int) -> Example:
        """A source and its answer of about `length` tokens at most: whole sentences, one at least."""
        index = int(rng.integers(len(self._documents)))
        document, lengths = self._documents[index], self._lengths[index]
        if rng.random() >= self._continued:
            start = int(rng.integers(len(document)))
            text = " ".join(document[start : _end(lengths, start, length)])
            return Example("fix", FIX + self._spoiler.spoil(text, rng), text)
        start = int(rng.integers(1, len(document)))
        text = " ".join(document[start : _end(lengths, start, length)])
        return Example("continue", CONTINUE + " ".join(document[max(0, start - MOST_READ) : start]), text)

    def _shuffled(self, rng: np.random.Generator, length: int) -> Example:
        """Words of a document in any order, to be copied: there is nothing to guess them from but the source."""
        words = " ".join(self._documents[int(rng.integers(len(self._documents)))]).split()
        text = " ".join(rng.permutation(words)[: length // 2].tolist())
        return Example("fix", FIX + text, text)


def _sources(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[list[int]]:
    """Token ids, cut where the encoder has no more positions."""
    ids: list[list[int]] = tokenizer([example.source for example in examples], verbose=False)["input_ids"]
    return [row[:POSITIONS] for row in ids]


def _end(lengths: Sequence[int], start: int, length: int) -> int:
    """Where the sentences end that fit into `length` tokens, the end token included."""
    fits = int(np.searchsorted(np.cumsum(lengths[start:]), length - 1, side="right"))
    return start + max(1, fits)


def edit_tokenizer(texts: Sequence[str], pieces: int, max_length: int) -> PreTrainedTokenizerBase:
    """A BPE tokenizer that ends what it encodes with the end token, as encoders expect it."""
    tokenizer = train_tokenizer([" ".join(sentences(text)) for text in texts], pieces, max_length)
    end = str(tokenizer.eos_token)
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]),
        ]
    )
    return tokenizer


if __name__ == "__main__":
    script(
        EditsConfig,
        train_edits,
        "Train a Pegasus pair, target and draft, that corrects text, with mistakes put into TEXT, and continues "
        "stories.",
    )
