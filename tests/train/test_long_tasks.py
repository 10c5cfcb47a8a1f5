"""Long-context tasks: length, spans, scores, depth, determinism, bad input."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.train.long_tasks import TASKS, Example, Noise, Texts, hits, named, read_filler
from sakiyomi.train.long_tasks.made import ADJECTIVES, COMMON, FACTS, HOPS, NOUNS, OFTEN, SELDOM, keys, repeated
from sakiyomi.train.tokenizer import train_tokenizer
from train_toys import stories

LENGTH = 600


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(stories(60), 300, 100_000)


def made(name: str, tokenizer: Any, seed: int = 0, length: int = LENGTH, depth: float | None = None) -> Example:
    return TASKS[name].make(np.random.default_rng(seed), length, tokenizer, depth)


def size(text: str, tokenizer: Any) -> int:
    return len(tokenizer(text)["input_ids"])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), length=st.integers(1200, 3000), depth=st.none() | st.floats(0, 1))
def test_length_spans_and_scores(
    name: str, tokenizer: PreTrainedTokenizerBase, seed: int, length: int, depth: float | None
) -> None:
    depth = None if name == "words" else depth
    task = TASKS[name]
    example = made(name, tokenizer, seed, length, depth)
    assert example.task == name
    longest = size(example.prompt(query_first=True), tokenizer)
    assert size(example.prompt(), tokenizer) < longest <= length
    assert longest > 0.9 * length
    found = {example.context[begin:end] for begin, end in example.spans}
    assert found == set(example.answers)
    assert task.score(f" {', '.join(example.answers)}.", example) == 1
    assert task.score("", example) == 0
    wrong = [answer[:-1] + ("1" if answer[-1] != "1" else "2") for answer in example.answers]
    assert task.score(" ".join(wrong), example) < 1 / len(example.answers)
    assert example == made(name, tokenizer, seed, length, depth)
    assert example.context != made(name, tokenizer, seed + 1, length, depth).context


@pytest.mark.parametrize("name", TASKS)
def test_the_question_in_front(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    example = made(name, tokenizer, length=1500)
    plain = example.prompt()
    assert plain == example.context + example.question
    assert example.asked in example.question
    assert example.prompt(query_first=True) == f"{example.asked}\n\n{plain}"
    assert not any(answer in example.question for answer in example.answers)
    assert TASKS[name].answer_tokens >= size(" ".join(example.answers), tokenizer) // 2


@pytest.mark.parametrize("name", [name for name in TASKS if name != "words"])
def test_the_depth_is_where_the_answer_stands(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        example = made(name, tokenizer, length=4000, depth=depth)
        assert example.spans[0][0] / len(example.context) == pytest.approx(depth, abs=0.05)


def test_without_a_depth_answers_stand_everywhere(tokenizer: PreTrainedTokenizerBase) -> None:
    examples = [made("passkey", tokenizer, seed) for seed in range(40)]
    places = [example.spans[0][0] / len(example.context) for example in examples]
    assert min(places) < 0.2
    assert max(places) > 0.8


def test_a_number_that_goes_on_is_another_one() -> None:
    assert hits("It is 48213.", ["48213"]) == 1
    assert hits("It is 482135.", ["48213"]) == 0
    assert hits('"48213", "7"', ["48213", "8"]) == 0.5


def test_the_scattered_tasks_have_distractors(tokenizer: PreTrainedTokenizerBase) -> None:
    example = made("multikey", tokenizer, length=1500)
    assert example.context.count("opens with") == FACTS
    assert made("kv", tokenizer, length=1500).context.count('": "') == FACTS
    dense = json.loads(made("kv-dense", tokenizer).context)
    assert len(dense) > 10


def test_a_chain_of_variables_leads_to_the_value(tokenizer: PreTrainedTokenizerBase) -> None:
    example = made("variables", tokenizer, length=2000, depth=0.0)
    links = dict(part.split(" = ") for part in example.context.replace(";", "").split("SET ")[1:])
    links = {name: text.split()[0] for name, text in links.items()}
    value = example.question.split()[-4].strip("?")
    value = next(text for text in links.values() if text.isdigit() and text in example.question)
    holds = {name for name in links if _followed(name, links) == value}
    assert holds == set(example.answers)
    assert len(links) == HOPS + 1


def _followed(name: str, links: dict[str, str]) -> str:
    while not name.isdigit():
        name = links[name]
    return name


def test_the_common_words_are_the_most_frequent(tokenizer: PreTrainedTokenizerBase) -> None:
    example = made("words", tokenizer, length=1500)
    words = example.context.split()
    counts = {word: words.count(word) for word in set(words)}
    assert {word for word, count in counts.items() if count == OFTEN} == set(example.answers)
    assert set(counts.values()) == {SELDOM, OFTEN}
    assert len(example.spans) == COMMON * OFTEN


def test_a_number_with_repeats() -> None:
    for seed in range(20):
        number = repeated(np.random.default_rng(seed), 10)
        assert len(number) == 10
        assert sum(one == two for one, two in pairwise(number)) >= 5


def test_keys_never_come_twice() -> None:
    source = keys(np.random.default_rng(0))
    some = [next(source) for _ in range(len(ADJECTIVES) * len(NOUNS) + 500)]
    assert len(set(some)) == len(some)


def test_filler_of_the_user(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(
        json.dumps({"text": "The cat sat. “Who is it?” The dog barked.\nNobody knew! 猫がいた。犬もいた。"}) + "\n",
        encoding="utf-8",
    )
    filler = read_filler([path])
    example = named("passkey", filler).make(np.random.default_rng(0), LENGTH, tokenizer, 0.5)
    assert "Nobody knew!" in example.context
    assert "rain" not in example.context
    document = ["The cat sat.", "“Who is it?”", "The dog barked.", "Nobody knew!", "猫がいた。", "犬もいた。"]
    begun = set[str]()
    for seed in range(40):
        sentences = filler.sentences(np.random.default_rng(seed))
        some = [next(sentences)]
        while some[-1] != document[-1]:
            some.append(next(sentences))
        assert some == document[-len(some) :], "it goes on to the document's end"
        begun.add(some[0])
    assert begun == set(document), "each sentence begins a text"
    with pytest.raises(LoadError, match="missing"):
        read_filler([tmp_path / "missing.txt"])
    with pytest.raises(InputError, match="no sentence"):
        Texts([" "])


def test_a_long_sentence_is_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    task = named("passkey", Texts(["word " * 2000]))
    example = task.make(np.random.default_rng(0), LENGTH, tokenizer)
    assert size(example.prompt(query_first=True), tokenizer) > 0.8 * LENGTH


@pytest.mark.parametrize("name", TASKS)
def test_too_short(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(InputError, match=r"length is 20 tokens, and the shortest text .* has (\d+)") as caught:
        made(name, tokenizer, length=20)
    least = int(str(caught.value).split()[-3])
    assert size(made(name, tokenizer, length=least).prompt(query_first=True), tokenizer) == least


def test_bad_settings(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(InputError, match=r"depth is 1\.5"):
        made("passkey", tokenizer, depth=1.5)
    with pytest.raises(InputError, match="stands everywhere"):
        made("words", tokenizer, length=1500, depth=0.5)


def test_the_table_holds_tasks_by_their_names() -> None:
    for name, task in TASKS.items():
        assert task.name == name
        assert task.answer_tokens > 0


def test_noise_of_other_lines(tokenizer: PreTrainedTokenizerBase) -> None:
    example = named("passkey", Noise(("Hum.",))).make(np.random.default_rng(0), LENGTH, tokenizer)
    assert example.context.count("Hum.") > 20
