"""Tokens one by one: their texts, and their places in a prompt."""

from __future__ import annotations

import pytest

from sakiyomi.core.tokens import TokenNames, token_places
from toys import byte_fallback_tokenizer, tiny_tokenizer, unigram_tokenizer, word_piece_tokenizer


def test_the_texts_of_sentence_pieces_have_their_spaces() -> None:
    tokenizer = byte_fallback_tokenizer(("▁", "a", "▁▁", "▁a", "▁the", "a▁b"))
    tokenizer.add_tokens(["▁<PRE>"], special_tokens=True)
    tokenizer.add_tokens(["<call>"])
    names = TokenNames(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["▁", "▁▁", "▁the", "a▁b", "▁<PRE>", "<call>", "<0x0A>", "</s>"])
    assert [names(i)[0] for i in ids] == [" ", "  ", " the", "a b", " <PRE>", "<call>", "\n", "</s>"]
    assert names(3 + 0xE3) == ("\N{REPLACEMENT CHARACTER}", b"\xe3")


def test_the_bytes_of_byte_level_tokens_join_to_the_text() -> None:
    tokenizer, text = tiny_tokenizer(), "naïve 😀 ▁ 漢"
    assert b"".join(TokenNames(tokenizer)(i)[1] for i in tokenizer(text).input_ids).decode() == text


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("the fox", {"▁the": 0, "▁fox": 3}),
        ("<s>the<s> fox", {"<s>": 6, "▁the": 3, "▁fox": 9}),
        ("<s>\n the", {"<s>": 0, "▁the": 4}),
    ],
)
def test_places_in_a_prompt_as_it_was_given(text: str, begins: dict[str, int]) -> None:
    """Of each token where it stands last."""
    tokenizer = unigram_tokenizer()
    tokenizer.add_tokens(["<s>"], special_tokens=True)
    tokens = tokenizer(text).input_ids
    places = token_places(tokens, text, tokenizer)
    assert places == sorted(places)
    found = dict(zip(tokenizer.convert_ids_to_tokens(tokens), places, strict=True))
    assert {name: found[name] for name in begins} == begins


def test_places_of_special_tokens_that_the_tokenizer_adds() -> None:
    tokenizer = unigram_tokenizer()
    the, fox = tokenizer.convert_tokens_to_ids(["▁the", "▁fox"])
    tokens = [tokenizer.eos_token_id, the, fox]
    assert token_places(tokens, "the fox", tokenizer) == [0, 0, 3]
    assert token_places(tokens, tokenizer.decode(tokens), tokenizer) == [0, 4, 8]


def test_places_where_decoding_joins_words_by_spaces_of_its_own() -> None:
    tokenizer = word_piece_tokenizer()
    tokens = tokenizer.convert_tokens_to_ids(["do", "##ing", "you", "!"])
    assert token_places(tokens, "doing you!", tokenizer) == [0, 2, 5, 9]
    assert token_places(tokens, "DOING YOU!", tokenizer)[-1] <= len("DOING YOU!")
