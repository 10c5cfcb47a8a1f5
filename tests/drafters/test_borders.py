"""Parts of a text tokenised alone: what comes out is what the tokenizer makes of the whole."""

from __future__ import annotations

from typing import Any

import pytest

from sakiyomi.drafters.cross_tokenizer.alignment import Lexicon
from sakiyomi.drafters.cross_tokenizer.borders import Borders, Cut
from toys import (
    byte_fallback_tokenizer,
    character_tokenizer,
    tiny_tokenizer,
    unigram_tokenizer,
    word_piece_tokenizer,
)

TEXT = "the fox, the 12 foxes (and 7.5 more)  went on;\n\nthe END 山へ 😀 x_y. " * 3
KINDS = {
    "byte-level": tiny_tokenizer,
    "SentencePiece": byte_fallback_tokenizer,
    "unigram": unigram_tokenizer,
    "characters": lambda: character_tokenizer("".join(sorted(set(TEXT)))),
}


def borders_of(lexicon: Lexicon, data: bytes) -> list[int]:
    return [place for place in range(1, len(data)) if lexicon.borders.last(data, place) == place]


@pytest.mark.parametrize("kind", KINDS)
def test_from_every_border_on_the_tokens_are_those_of_the_whole(kind: str) -> None:
    lexicon, data = Lexicon(KINDS[kind]()), TEXT.encode()
    tokens, ends = lexicon.cut(TEXT)
    found = borders_of(lexicon, data)
    assert len(found) > len(TEXT) / 12
    for place in found:
        assert place in ends, "a token goes across a border"
        first = ends.index(place) + 1
        for _ in range(2):  # told by the tokenizer, and remembered
            assert lexicon.borders.cut(data, place) == (tokens[first:], ends[first:])


def test_what_comes_again_is_not_asked_for_again() -> None:
    lexicon, data = Lexicon(tiny_tokenizer()), TEXT.encode()
    asked: list[str] = []

    def counting(text: str) -> Cut:
        asked.append(text)
        return lexicon.cut(text)

    borders = Borders(lexicon.pieces, counting)
    asked.clear()
    first = borders.cut(data, borders.last(data, 30))
    assert asked
    asked.clear()
    assert borders.cut(data, borders.last(data, 30)) == first
    assert not asked


def test_a_tokenizer_by_other_rules_has_no_borders() -> None:
    """One whose tokens depend on how long the text is, and one that knows hardly any of the characters."""
    lexicon: Any = Lexicon(tiny_tokenizer())

    def moody(text: str) -> Cut:
        tokens, ends = lexicon.cut(text)
        return [(token + len(text)) % 7 for token in tokens], ends

    data = TEXT.encode()
    assert not any(Borders(lexicon.pieces, moody).last(data, place) for place in range(len(data)))
    few = Lexicon(word_piece_tokenizer())
    assert not any(few.borders.last(data, place) for place in range(len(data)))
    assert few.borders.apart(*b"qz")


def test_parts_that_the_tokenizer_does_not_know_are_left_to_it() -> None:
    lexicon = Lexicon(character_tokenizer("abcdefghijklmnopqrstuvwxyz ,.!?()'\"-"))
    data = "the fox 山 went".encode()
    assert lexicon.borders.last(data, 6)
    assert lexicon.borders.cut(data, lexicon.borders.last(data, 6)) is None
