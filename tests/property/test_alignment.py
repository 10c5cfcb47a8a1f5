"""Two tokenizers over one text: whatever is written, and however it is cut, the text stays what it is."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sakiyomi.drafters.cross_tokenizer.alignment import Lexicon, Mirror, continuation
from toys import byte_fallback_tokenizer, character_tokenizer, tiny_tokenizer, unigram_tokenizer, word_piece_tokenizer

ALL_BYTES = {
    "byte-level": tiny_tokenizer(),
    "SentencePiece, BPE": byte_fallback_tokenizer(),
    "SentencePiece, unigram": unigram_tokenizer(),
}
"""Tokenizers that can say every text."""
KINDS = ALL_BYTES | {"characters": character_tokenizer(), "word pieces": word_piece_tokenizer()}

WORDS = (
    """the| the| fox|ing| |  |a|abc|é|😀|👨‍👩‍👧|🇯🇵|、|。|おじいさん|山へ|ました|12345|!?|"I|'s|aaaaaaaa|れれれれ|know"""
)
words = st.sampled_from([*WORDS.split("|"), "\n", "\n\n", "\t", "\u3000"])
texts = st.one_of(st.lists(words, max_size=40).map("".join), st.text(max_size=60))


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """The bytes in some parts, characters cut in the middle where it comes so."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


cuts = st.lists(st.integers(0, 10_000), max_size=8)


@pytest.mark.parametrize("kind", ALL_BYTES)
def test_a_lexicon_says_what_its_tokenizer_decodes(kind: str) -> None:
    """Each token alone after another, whole characters and bytes."""
    tokenizer = ALL_BYTES[kind]
    lexicon = Lexicon.of(tokenizer)
    text = 'The fox, the 😀 and 山 said: "a\n\nbé"  おじいさん'
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert lexicon.bytes_of(tokens).decode().removeprefix(" ") == text
    assert lexicon.ends(tokens, text.encode())[-1] == len(text.encode())
    assert lexicon.piece(tokenizer.eos_token_id) == b""
    assert lexicon.piece(len(tokenizer) + 5) == b""


def test_bytes_of_a_replacement_character_that_is_in_the_text() -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    parts = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\ufffd")[0][0]
    vocab = {piece: i for i, piece in enumerate([*letters, parts[:2], parts])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[(parts[0], parts[1]), (parts[:2], parts[2])]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    lexicon = Lexicon.of(PreTrainedTokenizerFast(tokenizer_object=made))
    assert lexicon.encode("a\ufffd") == [vocab["a"], vocab[parts]]
    assert lexicon.says("a\ufffdb")
    assert {len(lexicon.piece(i)) for i in range(256)} == {1}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ALL_BYTES)
@given(text=texts, cuts=cuts)
def test_a_mirror_holds_the_text_whatever_the_cuts(kind: str, text: str, cuts: list[int]) -> None:
    mirror = Mirror(Lexicon.of(ALL_BYTES[kind]))
    given_so_far = b""
    for part in pieces_of(text.encode(), cuts):
        same, before = mirror.grow(part), list(mirror.tokens)
        given_so_far += part
        assert bytes(mirror.data) + mirror.pending == given_so_far
        said = mirror.lexicon.bytes_of(mirror.tokens)
        assert said.removeprefix(b" ") == bytes(mirror.data).removeprefix(b" ")
        assert same <= len(before)
        assert len(mirror.tokens) == len(mirror.ends)
        known = [end for end in mirror.ends if end >= 0]
        assert known == sorted(known)
    assert not mirror.tokens or mirror.ends[-1] == len(text.encode())


@pytest.mark.parametrize("kind", ["byte-level", "characters", "SentencePiece, BPE"])
@given(text=texts, cuts=cuts)
def test_growing_is_tokenising_from_scratch(kind: str, text: str, cuts: list[int]) -> None:
    """Unigram tokenizers have several best ways for a run of one character, and may keep another one than this."""
    lexicon = Lexicon.of(KINDS[kind])
    mirror, whole = Mirror(lexicon), Mirror(lexicon)
    whole.grow(text.encode())
    for part in pieces_of(text.encode(), cuts):
        mirror.grow(part)
    assert mirror.tokens == whole.tokens
    assert mirror.ends == whole.ends


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, cuts=cuts)
def test_what_is_said_to_be_the_same_is_the_same(kind: str, text: str, cuts: list[int]) -> None:
    """A draft's cache relies on it: tokens before the place that ``grow`` names are those from before."""
    mirror = Mirror(Lexicon.of(KINDS[kind]), start=(1,))
    for part in pieces_of(text.encode(), cuts):
        before = list(mirror.tokens)
        same = mirror.grow(part)
        assert 1 <= same <= len(mirror.tokens)
        assert mirror.tokens[:same] == before[:same]
        assert mirror.tokens[0] == 1


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, drop=st.integers(0, 50), more=texts)
def test_forgetting_drops_text_and_tokens_alike(kind: str, text: str, drop: int, more: str) -> None:
    mirror = Mirror(Lexicon.of(KINDS[kind]), start=(1, 2))
    mirror.grow(text.encode())
    mirror.forget(drop)
    assert text.encode().translate(None).endswith(bytes(mirror.data)) or kind in ("characters", "word pieces")
    assert mirror.tokens[:2] == [1, 2]
    assert len(mirror.tokens) == len(mirror.ends)
    data = bytes(mirror.data)
    mirror.grow(more.encode())
    assert bytes(mirror.data).startswith(data)


@pytest.mark.parametrize("kind", ALL_BYTES)
@given(text=texts, where=st.integers(0, 1000))
def test_a_continuation_says_the_text_after_any_tokens(kind: str, text: str, where: int) -> None:
    """The tail may end anywhere, inside a character too: tail and continuation together are the text."""
    lexicon = Lexicon.of(ALL_BYTES[kind])
    tokens = lexicon.encode(text)
    cut = where % (len(tokens) + 1)
    tail, committed = tokens[:cut], list(tokens[:cut])
    said = lexicon.bytes_of(tail)
    fresh = lexicon.bytes_of(tokens)[len(said) :]
    ahead = continuation(lexicon, lexicon.tail(tail), fresh)
    assert tail == committed
    assert lexicon.bytes_of([*tail, *ahead.tokens]).removeprefix(b" ") == lexicon.bytes_of(tokens).removeprefix(b" ")
    assert ahead.ends == sorted(ahead.ends)
    assert not ahead.ends or not tail or ahead.ends[-1] == len(fresh)


@given(text=texts, where=st.integers(0, 1000))
def test_a_continuation_of_its_own_tokens_is_the_rest(text: str, where: int) -> None:
    """Byte-level: cut anywhere, the tokens that follow are the tokenizer's own, and it is natural."""
    lexicon = Lexicon.of(ALL_BYTES["byte-level"])
    tokens = lexicon.encode(text)
    cut = where % (len(tokens) + 1)
    ahead = continuation(lexicon, lexicon.tail(tokens[:cut]), lexicon.bytes_of(tokens[cut:]))
    assert ahead.tokens == tokens[cut:]
    assert ahead.natural


@pytest.mark.parametrize("kind", KINDS)
@given(beginning=st.one_of(words.map(str.encode), st.binary(min_size=1, max_size=3)))
def test_longer_tokens_are_those_that_begin_so(kind: str, beginning: bytes) -> None:
    lexicon = Lexicon.of(KINDS[kind])
    found = {lexicon.piece(token) for token in lexicon.longer(beginning)}
    assert found == {piece for piece in lexicon.pieces if piece.startswith(beginning) and piece != beginning}


def test_committed_tokens_stand_where_the_tokenizer_would_join_them() -> None:
    lexicon = Lexicon.of(tiny_tokenizer())
    whole = lexicon.encode(" the")
    letters = [lexicon.ids[bytes([value])] for value in b" t"]
    assert len(whole) < 4
    ahead = continuation(lexicon, lexicon.tail(letters), b"he fox")
    assert not ahead.natural
    assert lexicon.bytes_of(ahead.tokens) == b"he fox"


def test_an_unfinished_character_is_left_out() -> None:
    lexicon = Lexicon.of(tiny_tokenizer())
    data = "山😀".encode()
    ahead = continuation(lexicon, b"a", data[:-1])
    assert lexicon.bytes_of(ahead.tokens) == "山".encode()
    begun = [lexicon.ids[data[:1]]]
    assert lexicon.bytes_of(continuation(lexicon, lexicon.tail(begun), data[1:]).tokens) == data[1:]


def test_what_a_tokenizer_does_not_know_is_left_out() -> None:
    """Characters without a token: a line break becomes a space, others are passed over."""
    mirror = Mirror(Lexicon.of(character_tokenizer("abc ")))
    mirror.grow("ab\nc山a".encode())
    assert bytes(mirror.data).decode() == "ab c山a"
    assert mirror.lexicon.bytes_of(mirror.tokens) == b"ab ca"
    lexicon = Lexicon.of(character_tokenizer("abc "))
    ahead = continuation(lexicon, b"ab", "c山a".encode())
    assert lexicon.bytes_of(ahead.tokens) == b"c", "nothing may be said after what cannot be said"
