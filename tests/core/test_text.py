"""The stream against a slow clear version that decodes everything after every token."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from sakiyomi.core.errors import InputError
from sakiyomi.core.text import TextStream
from toys import (
    CORPUS,
    byte_fallback_tokenizer,
    character_tokenizer,
    tiny_tokenizer,
    word_piece_tokenizer,
)

KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": tiny_tokenizer,
    "byte-fallback": byte_fallback_tokenizer,
    "characters": character_tokenizer,
    "word pieces": word_piece_tokenizer,
}
TOKENIZERS = {name: make() for name, make in KINDS.items()}
JAPANESE = "むかしむかし、あるところに、おじいさんと😀がいました。👨‍👩‍👧 🇯🇵!"


def run(stream: TextStream, ids: Sequence[int], cuts: Sequence[int]) -> tuple[list[str], int | None]:
    """Push the ids cut at the places given; the deltas, and the number of tokens used at a stop."""
    deltas = []
    for start, end in pairwise([0, *cuts, len(ids)]):
        delta, used = stream.push(list(ids[start:end]))
        deltas.append(delta)
        if used is not None:
            return deltas, start + used
    deltas.append(stream.finish())
    return deltas, None


def whole(kind: str, ids: Sequence[int]) -> str:
    return str(TOKENIZERS[kind].decode(list(ids), skip_special_tokens=True))


@st.composite
def tokens_and_cuts(draw: st.DrawFn, kind: str, most: int = 60) -> tuple[list[int], list[int]]:
    ids = draw(st.lists(st.integers(0, len(TOKENIZERS[kind]) - 1), max_size=most))
    cuts = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=len(ids))))
    return ids, cuts


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_joined_deltas_are_the_decoded_tokens(kind: str, data: st.DataObject) -> None:
    ids, cuts = data.draw(tokens_and_cuts(kind))
    stream = TextStream(TOKENIZERS[kind])
    deltas, used = run(stream, ids, cuts)
    assert used is None
    assert "".join(deltas) == whole(kind, ids) == stream.text


@pytest.mark.few(1)
@given(text=st.text(st.sampled_from("aé あ漢😀👨‍👩‍👧\n<"), max_size=80), data=st.data())
@settings(deadline=None, max_examples=200)
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_no_half_character_is_ever_given(kind: str, text: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))))
    deltas, _ = run(TextStream(tokenizer), ids, cuts)
    assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)
    assert "".join(deltas) == whole(kind, ids)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_japanese_and_emoji_token_by_token(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    text = JAPANESE.replace(" ", "")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)
    stream = TextStream(tokenizer)
    deltas = [stream.push([i])[0] for i in ids]
    assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)
    assert "".join(deltas) + stream.finish() == text
    assert sum(map(bool, deltas)) >= 2, "the text should come while it is written"


def test_characters_come_one_by_one_from_bytes() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("漢字", add_special_tokens=False)
    assert len(ids) == 6
    stream = TextStream(tokenizer)
    assert [stream.push([i])[0] for i in ids] == ["", "", "漢", "", "", "字"]


def test_a_character_that_never_becomes_whole_is_shown_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("ab漢", add_special_tokens=False)[:-1]
    stream = TextStream(tokenizer)
    assert stream.push(ids) == ("ab", None)
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_leave_no_text_and_do_not_part_a_character() -> None:
    for kind in ("byte-level", "byte-fallback"):
        tokenizer = TOKENIZERS[kind]
        ids = tokenizer.encode("a漢", add_special_tokens=False)
        ids.insert(-1, tokenizer.eos_token_id)
        stream = TextStream(tokenizer)
        assert "".join(stream.push([i])[0] for i in ids) + stream.finish() == "a漢"


def test_tokens_beyond_the_vocabulary_leave_no_text() -> None:
    # A model may have more rows than its tokenizer has tokens.
    stream = TextStream(TOKENIZERS["byte-level"])
    assert stream.push([5000])[0] + stream.finish() == ""


def test_a_space_after_tokens_without_text_survives_the_cut_of_the_window() -> None:
    # The first token of a decoded window loses its space, so a window must not begin with tokens that leave no text.
    tokenizer = TOKENIZERS["byte-fallback"]
    a, the = tokenizer.convert_tokens_to_ids(["a", "▁the"])
    for count in range(20, 30):
        ids = [a] * count + [5000, the, the]
        deltas, _ = run(TextStream(tokenizer), ids, range(1, len(ids)))
        assert "".join(deltas) == whole("byte-fallback", ids)


# --- behind a prompt --------------------------------------------------------------------------------------------------


def behind(kind: str, before: Sequence[int], ids: Sequence[int]) -> str:
    """What the text of all tokens has behind that of the first ones, whose last character may become another one."""
    first, both = whole(kind, before), whole(kind, [*before, *ids])
    return both[len(os.path.commonprefix([first, both])) :]  # noqa: RUF071


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_a_continuation_is_what_all_tokens_have_behind_the_prompt(kind: str, data: st.DataObject) -> None:
    before = data.draw(st.lists(st.integers(0, len(TOKENIZERS[kind]) - 1), max_size=40))
    ids, cuts = data.draw(tokens_and_cuts(kind, most=30))
    deltas, _ = run(TextStream(TOKENIZERS[kind], before=before), ids, cuts)
    assert "".join(deltas) == behind(kind, before, ids)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_continuation_are_the_whole_text_wherever_it_is_cut(kind: str, size: int) -> None:
    text = {"word pieces": "do you know ? do n't", "characters": "abc xyz. あい😀 a"}.get(
        kind, f" the a, {JAPANESE} a the\n\na"
    )
    ids = TOKENIZERS[kind].encode(text, add_special_tokens=False)
    if kind == "word pieces":
        ids = TOKENIZERS[kind].convert_tokens_to_ids(text.split())
    ids = [TOKENIZERS[kind].eos_token_id, *ids]
    for cut in range(len(ids) + 1):
        before, rest = ids[:cut], ids[cut:]
        deltas, _ = run(TextStream(TOKENIZERS[kind], before=before), rest, range(size, len(rest), size))
        assert "".join(deltas) == behind(kind, before, rest)
        assert whole(kind, before).rstrip("\N{REPLACEMENT CHARACTER}") + "".join(deltas) == whole(kind, ids) or (
            not TOKENIZERS[kind].clean_up_tokenization_spaces
        )


def test_the_space_that_a_continuation_begins_with_comes_at_once() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    a, the = tokenizer.convert_tokens_to_ids(["▁a", "▁the"])
    start = tokenizer.bos_token_id
    assert TextStream(tokenizer, before=[start, a]).push([the]) == (" the", None)
    assert TextStream(tokenizer, before=[start]).push([the]) == ("the", None), "the first word of the text"
    assert TextStream(tokenizer, before=[a, start, start]).push([the]) == (" the", None), "as behind a template's marks"
    assert TextStream(tokenizer, [" the"], before=[a]).push([a, the, a]) == (" a", 2)


def test_a_character_that_the_prompt_has_begun_belongs_to_its_continuation() -> None:
    for kind in ("byte-level", "byte-fallback"):
        ids = TOKENIZERS[kind].encode("a漢b", add_special_tokens=False)
        stream = TextStream(TOKENIZERS[kind], before=ids[:-3])
        assert "".join(stream.push([i])[0] for i in ids[-3:]) + stream.finish() == "漢b"
        assert TextStream(TOKENIZERS[kind], before=ids[:-2]).finish() == "", "its end is unknown, as in the prompt"


@pytest.mark.parametrize("last", ["漢" * 5000, " the a" * 5000, "\n" * 5000, ""])
def test_a_long_prompt_costs_no_more_than_a_short_one(last: str) -> None:
    tokenizer = Counting(TOKENIZERS["byte-fallback"])
    special, a, the = TOKENIZERS["byte-fallback"].convert_tokens_to_ids(["</s>", "▁a", "▁the"])
    before = [a] * 5000 + TOKENIZERS["byte-fallback"].encode(last, add_special_tokens=False) + [special] * 5000
    ids = [the, a] * 20
    TextStream(tokenizer)
    tokenizer.decoded = 0
    stream = TextStream(tokenizer, before=before)
    assert "".join(stream.push([i])[0] for i in ids) + stream.finish() == " the a" * 20
    assert tokenizer.decoded < 2500 + (0 if last in ("", " the a" * 5000) else 6 * len(last.encode())), (
        "a run is decoded whole"
    )
    stream, tokenizer.decoded = TextStream(tokenizer, before=before), 0
    assert "".join(stream.push([special])[0] for _ in range(20)) == "" and tokenizer.decoded == 0


@pytest.mark.parametrize("written", ["", "a"])
def test_special_tokens_in_a_row_cost_little(written: str) -> None:
    special = MARKED.convert_tokens_to_ids("<|im_end|>")
    stream = TextStream(MARKED, ["x<|im_end|><|im_end|>y", "ax"])
    stream.push(MARKED.encode(written, add_special_tokens=False))
    for _ in range(500):
        stream.push([special])
    assert len(stream._stops._marks) <= 3
    assert stream.push(MARKED.encode("x<|im_end|><|im_end|>y", add_special_tokens=False))[0] == ""


# --- stop strings -----------------------------------------------------------------------------------------------------


def slow_stop(kind: str, ids: Sequence[int], stop: Sequence[str]) -> tuple[str, int] | None:
    """Decode everything after every token: the text before the first stop string, and the tokens up to it."""
    for used in range(1, len(ids) + 1):
        text = whole(kind, ids[:used])
        if used < len(ids):
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        places = [text.find(s) for s in stop if s in text]
        if places:
            return text[: min(places)], used
    return None


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["byte-level", "characters"])
@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_stop_strings_against_the_slow_version(kind: str, data: st.DataObject) -> None:
    ids, cuts = data.draw(tokens_and_cuts(kind))
    text = whole(kind, ids)
    stop = data.draw(st.lists(st.text(st.sampled_from(text or "a"), min_size=1, max_size=4), min_size=1, max_size=3))
    stop = [s for s in stop if "\N{REPLACEMENT CHARACTER}" not in s] or ["zz"]
    stream = TextStream(TOKENIZERS[kind], stop)
    deltas, used = run(stream, ids, cuts)
    expected = slow_stop(kind, ids, stop)
    if expected is None:
        assert used is None
        assert "".join(deltas) == text
    else:
        assert ("".join(deltas), used) == expected
    assert stream.text == "".join(deltas)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_the_split_into_pushes_changes_nothing(kind: str, data: st.DataObject) -> None:
    ids, cuts = data.draw(tokens_and_cuts(kind))
    source = whole(kind, ids) + "a\n"
    stop = data.draw(st.lists(st.text(st.sampled_from(source), min_size=1, max_size=3), min_size=1, max_size=3))
    one_by_one = run(TextStream(TOKENIZERS[kind], stop), ids, range(1, len(ids)))
    pushed = run(TextStream(TOKENIZERS[kind], stop), ids, cuts)
    assert ("".join(pushed[0]), pushed[1]) == ("".join(one_by_one[0]), one_by_one[1])


def test_stop_inside_one_push_counts_its_tokens() -> None:
    tokenizer = TOKENIZERS["characters"]
    ids = tokenizer.encode("ab.xyz", add_special_tokens=False)
    stream = TextStream(tokenizer, [".x"])
    assert stream.push(ids) == ("ab", 4)
    assert stream.stopped
    assert stream.finish() == ""


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    tokenizer = TOKENIZERS["characters"]
    stream = TextStream(tokenizer, ["..!"])
    pushed = [stream.push(tokenizer.encode(c, add_special_tokens=False))[0] for c in "a...x"]
    assert pushed == ["a", "", "", ".", "..x"]
    assert stream.push(tokenizer.encode("..", add_special_tokens=False)) == ("", None)
    assert stream.finish() == ".."


def test_a_newline_byte_stops_at_once() -> None:
    # In Llama's vocabulary the newline is a byte token; waiting for the end of the run would take one token too many.
    tokenizer = TOKENIZERS["byte-fallback"]
    newline, a = 3 + 0x0A, tokenizer.convert_tokens_to_ids("a")
    stream = TextStream(tokenizer, ["\n\n"])
    assert stream.push([a, newline, newline, a]) == ("a", 3)


def test_a_newline_byte_stops_although_the_next_character_is_unfinished() -> None:
    # With the first byte of a character behind it, the run decodes to replacement characters and the newline is gone.
    tokenizer = TOKENIZERS["byte-fallback"]
    newline, unfinished, a = 3 + 0x0A, 3 + 0xE3, tokenizer.convert_tokens_to_ids("a")
    assert "\n" not in whole("byte-fallback", [a, newline, unfinished])
    assert TextStream(tokenizer, ["\n"]).push([a, newline, unfinished]) == ("a", 2)


def test_the_earliest_of_several_stop_strings_counts() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    stream = TextStream(tokenizer, ["world", "wor"])
    assert stream.push(ids)[0] == "hello "


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="empty"):
        TextStream(TOKENIZERS["byte-level"], ["a", ""])


# --- stop strings with special tokens -------------------------------------------------------------------------------


def marked() -> tuple[PreTrainedTokenizerFast, dict[str, int]]:
    """A tokenizer with two special tokens and one that is not special."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|im_end|>", "<|eot|>"], special_tokens=True)
    tokenizer.add_tokens(["<call>"])
    return tokenizer, {name: tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|eot|>", "<call>")}


MARKED, _ = marked()


@pytest.mark.parametrize("size", [1, 2, 50])
@pytest.mark.parametrize(
    ("written", "stop", "given", "matched"),
    [
        ("a b<|im_end|>\nc", ["<|im_end|>"], "a b", "<|im_end|>"),
        ("a b<|im_end|>\nc", ["<|im_end|>\n"], "a b", "<|im_end|>\n"),
        ("a b\n<|im_end|>c", ["\n<|im_end|>"], "a b", "\n<|im_end|>"),
        ("a b\n<|im_end|>c", ["b\n<|im_end|>c"], "a ", "b\n<|im_end|>c"),
        ("a<|im_end|>b<|im_end|><|eot|>c", ["<|im_end|><|eot|>"], "ab", "<|im_end|><|eot|>"),
        ("a<|im_end|>b<|eot|>c", ["<|im_end|>c", "b<|eot|>"], "a", "b<|eot|>"),
        ("a<|eot|>b<|im_end|>c", ["<|im_end|>"], "ab", "<|im_end|>"),
        ("ab<|im_end|>c", ["<|im_end|>", "c"], "ab", "<|im_end|>"),
        ("abc<|im_end|>", ["<|im_end|>", "b"], "a", "b"),
        ("a<call>b", ["<call>"], "a", "<call>"),
        ("a<|im_end|>bc", ["<|im_end|>c", "|"], "abc", None),
        ("a<|im_end|>bc", ["abc"], "", "abc"),
        ("é<|im_end|>", ["é<|im_end|>"], "", "é<|im_end|>"),
    ],
)
def test_a_stop_string_may_name_special_tokens(
    written: str, stop: list[str], given: str, matched: str | None, size: int
) -> None:
    ids = MARKED.encode(written, add_special_tokens=False)
    stream = TextStream(MARKED, stop)
    deltas, used = run(stream, ids, range(size, len(ids), size))
    assert ("".join(deltas), stream.matched) == (given, matched)
    if matched is not None:
        assert matched in MARKED.decode(ids[:used]) + MARKED.decode(ids[:used], skip_special_tokens=True)


def test_a_stop_string_in_letters_that_spell_a_special_token_counts_as_well() -> None:
    letters = [i for letter in "ab<|im_end|>c" for i in MARKED.encode(letter, add_special_tokens=False)]
    stream = TextStream(MARKED, ["<|im_end|>"])
    assert "".join(stream.push([i])[0] for i in letters[:-1]) == "ab" and stream.stopped


def test_a_special_token_between_halves_of_a_character_and_behind_bytes() -> None:
    tokenizer = byte_fallback_tokenizer()
    a, the, end, newline = *tokenizer.convert_tokens_to_ids(["a", "▁the", "</s>"]), 3 + 0x0A
    stream = TextStream(tokenizer, ["\n</s>"], before=[a])
    assert stream.push([the, newline, end, a]) == (" the", 3)
    stream = TextStream(tokenizer, ["</s>"], before=[a])
    assert (stream.push([the, newline, end, a]), stream.matched) == ((" the\n", 3), "</s>")


def test_the_end_of_a_text_that_is_tidied_stays_before_a_special_token() -> None:
    tokenizer = TOKENIZERS["word pieces"]
    ids = tokenizer.convert_tokens_to_ids(["you", "do", "[SEP]"])
    assert TextStream(tokenizer, ["[SEP]"]).push(ids) == ("you do", 3)


def test_special_tokens_that_are_shown_are_text() -> None:
    end = MARKED.convert_tokens_to_ids("<|im_end|>")
    ids = MARKED.encode("a<|im_end|>b<|eot|>c", add_special_tokens=False)
    stream = TextStream(MARKED, ["b<|eot|>"], frozenset({end}))
    assert stream.push(ids)[0] == "a<|im_end|>" and stream.matched == "b<|eot|>"


# --- places -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "characters"])
@pytest.mark.parametrize("stop", [(), ("zz", "\n\n\n")])
def test_the_place_of_a_token_is_the_length_of_the_text_before_it(kind: str, stop: tuple[str, ...]) -> None:
    ids = TOKENIZERS[kind].encode("abc あ漢😀 a the\n\nxyz", add_special_tokens=False)
    before, ids = ids[:4], ids[4:]
    stream = TextStream(TOKENIZERS[kind], stop, before=before)
    found = []
    for i in ids:
        found.append(stream.place)
        stream.push([i])
    finished = len(whole(kind, before))
    expected = [
        len(whole(kind, [*before, *ids[:n]]).rstrip("\N{REPLACEMENT CHARACTER}")) - finished for n in range(len(ids))
    ]
    # In a run of bytes an unfinished character turns all of them into replacement characters; a place does not go back.
    assert found == [max(expected[: n + 1]) for n in range(len(ids))]


# --- cost -------------------------------------------------------------------------------------------------------------


class Counting:
    """A tokenizer that counts how many tokens it was asked to decode."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.decoded = 0
        self.all_special_ids = tokenizer.all_special_ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.decoded += len(token_ids)
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]:
        return list(self.tokenizer.convert_tokens_to_ids(tokens))

    def convert_ids_to_tokens(self, index: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(index))


@pytest.mark.parametrize("text", [" ".join(CORPUS) * 4, "漢字" * 300, "\n" * 500])
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_work_per_token_is_bounded(kind: str, text: str) -> None:
    tokenizer = Counting(TOKENIZERS[kind])
    ids = TOKENIZERS[kind].encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, ["never here"])
    tokenizer.decoded = 0
    for i in ids:
        stream.push([i])
    stream.finish()
    assert tokenizer.decoded < 300 * len(ids)
    assert stream.text == whole(kind, ids)


def test_stray_bytes_for_ever_stay_cheap() -> None:
    tokenizer = Counting(TOKENIZERS["byte-level"])
    stray = TOKENIZERS["byte-level"].encode("漢", add_special_tokens=False)[:2]
    ids = stray * 500
    stream = TextStream(tokenizer)
    for i in ids:
        stream.push([i])
    stream.finish()
    assert tokenizer.decoded < 300 * len(ids)
    assert stream.text == whole("byte-level", ids)


@pytest.mark.thorough
def test_a_push_takes_microseconds() -> None:
    ids = TOKENIZERS["byte-level"].encode(" ".join(CORPUS) * 20, add_special_tokens=False)
    stream = TextStream(TOKENIZERS["byte-level"], ["never here"])
    start = perf_counter()
    for place in range(0, len(ids), 4):
        stream.push(ids[place : place + 4])
    assert (perf_counter() - start) / (len(ids) / 4) < 200e-6
