"""An encoder-decoder pair that listens: words played as tones, one chord a letter, in; the letters out.

The recordings are made here from text, so that a model of speech recognition's shape can be trained in minutes and
every answer is known. They pass through transformers' own feature extractor, as recordings of people would.

python recipes/tones.py --out tones --text stories.jsonl
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from held_out import Example
from pairs import PAIR_LOOP, PairConfig, PairSizes, padded, train_pair
from sakiyomi.cli.train import script
from sakiyomi.core.errors import InputError
from sakiyomi.train.config import LoopOptions
from sakiyomi.train.settings import require, setting
from sounds import LETTERS, RATE, recording, spelled
from texts import FixedTexts

__all__ = ["ToneRows", "Tones", "letters_tokenizer", "train_tones"]

START, END = "<|startoftranscript|>", "<|endoftext|>"
MEASURED_ROWS = 32
"""Rows of the held-out batch."""


@dataclass(frozen=True, kw_only=True)
class TonesConfig(PairConfig):
    """A Whisper pair that writes down words which are played as tones.

    Attributes:
        row_tokens: Most letters of a recording; step s uses the (s mod n)-th; 2 at least.
        step_tokens: Letters of one optimizer step; a multiple of every row length.
        bands: Mel bands of the feature extractor.
        seconds: Length of a recording that the encoder reads; shorter ones are filled up.
    """

    loop: LoopOptions = field(default=dataclasses.replace(PAIR_LOOP, row_tokens=(36,), step_tokens=1152))
    sizes: PairSizes = field(
        default=PairSizes(
            hidden=128,
            encoder_layers=2,
            heads=4,
            intermediate=384,
            draft_hidden=64,
            draft_heads=2,
            draft_intermediate=192,
        )
    )
    bands: int = setting(40, least=8)
    seconds: int = setting(4, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        # The slowest letters have to fit into the recording behind the silence in front.
        most, rows = 10 * self.seconds - 2, self.loop.row_tokens
        for length in rows:
            require(length <= most, "row_tokens", rows, f"at most {most} letters in {self.seconds} seconds")


def train_tones(config: TonesConfig, command: str = "") -> dict[str, Any]:
    """Train the pair.

    Args:
        config: the settings.
        command: the command line, for the cards.

    Returns:
        The summary that `--json` prints; `finished` is False after SIGINT.
    """
    return train_pair(config, partial(Tones, config), command)


class Tones:
    """See `pairs.Task`.

    Args:
        config: of the run.
        texts, held_out: documents to train on, and others.
    """

    def __init__(self, config: TonesConfig, texts: Sequence[str], held_out: Sequence[str]) -> None:
        self._config = config
        self.tokenizer = letters_tokenizer()
        self.extractor = WhisperFeatureExtractor(
            feature_size=config.bands, chunk_length=config.seconds, sampling_rate=RATE
        )
        self.processor = WhisperProcessor(self.extractor, self.tokenizer)
        # One more for the start token.
        self.most_tokens = max(config.loop.row_tokens) + 1
        self.rows = ToneRows(texts, self.tokenizer, self.extractor, seed=config.loop.seed)
        # The same generator with another seed, on other text.
        seed, length = config.loop.seed + 1, max(config.loop.row_tokens)
        others = ToneRows(held_out, self.tokenizer, self.extractor, seed=seed)
        self.held_out = {"tones": others.batch(0, MEASURED_ROWS, length, False)}
        rng = np.random.default_rng((seed, 1))
        self.examples = [
            Example("tones", "", others.words(rng, length - 1), (seed, 1, number)) for number in range(config.examples)
        ]

    def new_model(self, part: str) -> WhisperForConditionalGeneration:
        """A Whisper with random weights."""
        config, tokenizer = self._config, self.tokenizer
        end = tokenizer.eos_token_id
        return WhisperForConditionalGeneration(
            WhisperConfig(
                vocab_size=len(tokenizer),
                num_mel_bins=config.bands,
                max_source_positions=self.extractor.nb_max_frames // 2,
                max_target_positions=-(-self.most_tokens // 32) * 32,
                dropout=0.0,
                decoder_start_token_id=tokenizer.get_vocab()[START],
                bos_token_id=end,
                eos_token_id=end,
                pad_token_id=end,
                suppress_tokens=None,
                begin_suppress_tokens=None,
                **config.sizes.of_part(part),
            )
        )

    def questions(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Recordings as `input_features`."""
        sounds = [recording(example.target, example.seed) for example in examples]
        return {"input_features": self.extractor(sounds, sampling_rate=RATE, return_tensors="np")["input_features"]}


class ToneRows(FixedTexts):
    """Batches of recordings and their letters, made while they are asked for.

    Args:
        documents: texts, whose words are played.
        tokenizer, extractor: of the model.
        seed: of the choice of words and of the sounds.
    """

    def __init__(self, documents: Sequence[str], tokenizer: Any, extractor: Any, *, seed: int) -> None:
        super().__init__([words for text in documents if (words := spelled(text))])
        if not self._documents:
            raise InputError("the text has no word in the letters a to z; give English text")
        self._tokenizer, self._extractor, self._seed = tokenizer, extractor, seed

    def batch(self, step: int, rows: int, length: int, decaying: bool) -> dict[str, Any]:
        """`input_features` (rows, bands, frames), `inputs`, `labels`, `known` (rows, length): up to so many letters."""
        rng = np.random.default_rng((self._seed, step))
        texts = [self.words(rng, length - 1) for _ in range(rows)]
        sounds = [recording(text, (self._seed, step, row)) for row, text in enumerate(texts)]
        features = self._extractor(sounds, sampling_rate=RATE, return_tensors="np")["input_features"]
        end, start = self._tokenizer.eos_token_id, self._tokenizer.get_vocab()[START]
        ids = [[*self._tokenizer(text, add_special_tokens=False)["input_ids"], end] for text in texts]
        labels, known = padded(ids, length, end)
        inputs = np.concatenate((np.full((rows, 1), start), labels[:, :-1]), axis=1)
        return {"input_features": features, "inputs": inputs, "labels": labels, "known": known}

    def words(self, rng: np.random.Generator, most: int) -> str:
        """Words that follow each other in a text, as many as have `most` letters and spaces together."""
        document = self._documents[int(rng.integers(len(self._documents)))]
        start = int(rng.integers(len(document)))
        text = document[start][:most]
        for word in document[start + 1 :]:
            if len(text) + 1 + len(word) > most:
                break
            text = f"{text} {word}"
        return text


def letters_tokenizer() -> WhisperTokenizer:
    """One token a letter, one for the space, and the two that Whisper begins and ends with."""
    vocab = {token: place for place, token in enumerate((END, START, "Ġ", *LETTERS))}
    tokenizer = WhisperTokenizer(vocab=vocab, merges=[], pad_token=END)
    tokenizer.add_special_tokens({"additional_special_tokens": [START]})
    return tokenizer


if __name__ == "__main__":
    script(
        TonesConfig,
        train_tones,
        "Train a Whisper pair, target and draft, that writes down the words of TEXT, which it plays as tones.",
    )
