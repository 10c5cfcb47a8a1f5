"""Prompt and continuation are one text, with vocabularies that others have made."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from transformers import PreTrainedTokenizerFast

from real_tokenizers import NAMES, examples, real_tokenizer
from sakiyomi.core.text import TextStream

CUTS = 100
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
TEXTS = (
    "Once upon a time, in  a\n\n\n wood ... \t\n  she said: “I don't know!” (12345)",
    "def f(x):\n    return x + 1  # naïve ½ ﷽\n\n\nprint(f(2))\r\n",
    "むかしむかし、あるところに😀👨\u200d👩\u200d👧がいました。 𓀀 Việt Nam, Ελλάδα ∀x∈ℝ",
)


def texts_of(name: str) -> list[str]:
    """Ours, and those that the vocabulary comes with."""
    return [*TEXTS, *(text for text, _ in examples(name))]


def written(name: str, tokenizer: PreTrainedTokenizerFast, chance: random.Random) -> list[int]:
    """Tokens of some texts, with special and other added tokens between them."""
    added, ids = sorted(tokenizer.added_tokens_decoder), []
    for text in chance.sample(texts_of(name), 3):
        ids += chance.sample(added, min(len(added), chance.randint(0, 2)))
        ids += tokenizer.encode(text, add_special_tokens=False)
    return ids


def read(stream: TextStream, ids: Sequence[int], size: int) -> str:
    found = []
    for start in range(0, len(ids), size):
        text, used = stream.push(ids[start : start + size])
        found.append(text)
        if used is not None:
            break
    return "".join([*found, stream.finish()])


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_and_its_continuation_are_the_text_of_all_tokens(name: str) -> None:
    tokenizer, chance = real_tokenizer(name), random.Random(0)
    for _ in range(CUTS):
        ids = written(name, tokenizer, chance)
        cut = chance.randint(0, len(ids))
        whole, before = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:cut]))
        if not whole.startswith(before):
            before = before.rstrip(_UNKNOWN)  # of a character that the rest begins with
        assert whole.startswith(before)
        rest, size = ids[cut:], chance.choice([1, 2, 5])
        assert before + read(TextStream(tokenizer, before=ids[:cut]), rest, size) == whole
        expected = whole[len(before) :]
        if expected:
            start = chance.randrange(len(expected))
            stop = expected[start : start + chance.randint(1, 6)]
            stopped = TextStream(tokenizer, [stop, "never there"], before=ids[:cut])
            assert read(stopped, rest, size) == expected[: expected.index(stop)] and stopped.matched == stop


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_string_that_names_a_special_token(name: str) -> None:
    tokenizer, chance = real_tokenizer(name), random.Random(1)
    end = tokenizer.eos_token
    for size in (1, 2, 5):
        first, second = chance.sample(TEXTS, 2)
        ids = [i for text in (first, second) for i in (*tokenizer.encode(text), tokenizer.eos_token_id)]
        before = tokenizer.encode("And then", add_special_tokens=False)
        expected = TextStream(tokenizer, before=before)
        said = read(expected, ids[: ids.index(tokenizer.eos_token_id)], size)
        for stop in (end, said[-3:] + end):
            stream = TextStream(tokenizer, [stop], before=before)
            assert read(stream, ids, size) == said.removesuffix(stop.removesuffix(end)) and stream.matched == stop
