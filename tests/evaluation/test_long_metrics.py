"""Rules that judge long answers, and the readers of three forms of files, on small made examples."""

from __future__ import annotations

import gzip
import itertools
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sakiyomi.core.errors import InputError, LoadError, SakiyomiError
from sakiyomi.evaluation.bench.long import metrics
from sakiyomi.evaluation.bench.long.metrics import METRICS
from sakiyomi.evaluation.bench.long.readers import read_infinitebench, read_leval, read_longbench


def write(path: Path, *rows: Any) -> Path:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("The fox.", "a fox", 1.0),
        ("red red fox", "red fox fox", 2 * 2 / 6),  # each word as often as in both
        ("fox", "hound", 0.0),
        ("", "hound", 0.0),
        ("the", "a", 0.0),  # nothing is left of either
    ],
)
def test_f1(text: str, answer: str, expected: float) -> None:
    assert metrics.f1(text, answer) == pytest.approx(expected)


def test_overlap_of_characters() -> None:
    assert metrics.f1("狐狸。", "狐", split=metrics.characters) == pytest.approx(2 * 1 / 3)
    assert metrics.rouge_l("山、川", "川山", split=metrics.characters) == pytest.approx(2 * 1 / 4)


def test_rouge_is_a_subsequence() -> None:
    assert metrics.rouge_l("the old fox ran", "the fox ran home") == pytest.approx(2 * 3 / 8)
    assert metrics.rouge_l("ran fox", "fox ran") == pytest.approx(2 * 1 / 4)  # order counts
    assert metrics.rouge_l("", "fox") == 0.0


def test_common_length_is_that_of_the_plain_recursion() -> None:
    def plain(first: str, second: str) -> int:
        if not first or not second:
            return 0
        if first[-1] == second[-1]:
            return 1 + plain(first[:-1], second[:-1])
        return max(plain(first[:-1], second), plain(first, second[:-1]))

    words = ["".join(word) for size in range(5) for word in itertools.product("ab", repeat=size)]
    for first, second in itertools.product(words, words):
        assert metrics.common_length(first, second) == plain(first, second), (first, second)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" (C) the fox", "C"),
        ("The answer is D.", "D"),
        ("A fox ran to B", "B"),  # "A" is a word there
        ("A. a fox", "A"),
        ("Big dogs", None),
        ("", None),
    ],
)
def test_letters(text: str, letter: str | None) -> None:
    assert metrics.best_letter(text) == letter


def test_classes_share_a_point() -> None:
    classes = ["Food", "Fast food", "Sport"]
    assert metrics.classification("Food", "Food", classes) == 1.0
    assert metrics.classification("Food or Sport", "Food", classes) == 0.5
    assert metrics.classification("Sport", "Food", classes) == 0.0
    assert metrics.classification("Large Food", "Large Food", ["Food", "Large Food"]) == 1.0  # part of the right name


def test_numbers() -> None:
    assert metrics.retrieval("Paragraph 7, or 12", "Paragraph 7") == 0.5
    assert metrics.retrieval("段落7", "段落7") == 1.0
    assert metrics.retrieval("none", "Paragraph 7") == 0.0
    assert metrics.retrieval("There are 3 of them", "3") == 1.0
    assert metrics.first_number("key: 071.5", "071") == 1.0
    assert metrics.first_number("none", "071") == 0.0
    assert metrics.prefix_share("1, 4, 9, 8", "1 4 8") == pytest.approx(2 / 3)


def test_code() -> None:
    assert metrics.code_similarity("# first\nx = 1\ny = 2", "x = 1") == 1.0
    assert metrics.code_similarity("x = 2", "x = 1") == pytest.approx(2 * 4 / 10)
    assert metrics.code_similarity("```", "x") == 0.0


def test_words() -> None:
    assert metrics.contains_word('{"a": "b-1"}', "b-1") == 1.0
    assert metrics.contains_word("b-12", "b-1") == 0.0
    assert metrics.contains_word("it is Alice!", "ALICE", upper=True) == 1.0
    assert METRICS["first line"]("\n The sea.\nAnd more", "the sea", ()) == 1.0
    assert METRICS["first line"]("The sea and more", "the sea", ()) == 0.0


# ---------------------------------------------------------------- L-Eval


def test_leval(tmp_path: Path) -> None:
    rows = [
        {
            "input": "A long story.",
            "instructions": ["Who?\n(A) he\n(B) she", "When?", "What is said?"],
            "outputs": ["(B) she", "1,894", "The role of art"],
            "evaluation": "exam",
        },
        {"input": "A paper.", "instructions": ["Which?"], "outputs": ["relu, tanh"], "evaluation": "f1"},
        {"input": "A report.", "instructions": ["Sum up."], "outputs": ["it is so"], "evaluation": "rouge"},
        {"input": "A report.", "instructions": ["Sum up."], "outputs": ["it is so"], "evaluation": "LLM"},
    ]
    found = list(read_leval(write(tmp_path / "story.jsonl.gz", *rows)))
    assert [item.task for item in found] == ["story"] * 5  # what a model would judge is left out
    choice, number, text, overlap, summary = found
    assert "A long story." in choice.prompt and "(A) he" in choice.prompt and "letter" in choice.prompt
    assert [choice.score(answer) for answer in ("B", "(B) he", "A", "it is so")] == [1, 1, 0, 0]
    assert [number.score(answer) for answer in ("3 + 4 = 7. The answer is 1894.", "no 1894", "1895")] == [1, 1, 0]
    assert [text.score(answer) for answer in ("the role of art\n", "art")] == [1, 0]
    assert overlap.score("relu") == pytest.approx(2 * 1 / 3)
    assert summary.score("so it is") == pytest.approx(2 * 2 / 6)
    assert (choice.answer_tokens, number.answer_tokens, summary.answer_tokens) == (32, 256, 512)


def test_leval_of_several_right_letters(tmp_path: Path) -> None:
    row = {"input": "x", "instructions": ["Which?"], "outputs": ["BD"], "evaluation": "exam"}
    (item,) = read_leval(write(tmp_path / "a.jsonl", row))
    assert [item.score(answer) for answer in ("DB", "BD.", "B", "")] == [1, 1, 0, 0]


def test_leval_with_another_number_of_answers_is_refused(tmp_path: Path) -> None:
    row = {"input": "A story.", "instructions": ["Who?", "Where?"], "outputs": ["A fox"], "evaluation": "f1"}
    with pytest.raises(LoadError, match="2 instructions and 1 outputs; expected one output for each"):
        list(read_leval(write(tmp_path / "a.jsonl", row)))


def test_leval_that_people_judge_is_refused(tmp_path: Path) -> None:
    row = {"input": "x", "instructions": ["?"], "outputs": ["y"], "evaluation": "human"}
    with pytest.raises(InputError, match="judged by a person"):
        list(read_leval(write(tmp_path / "a.jsonl", row)))


# ---------------------------------------------------------------- LongBench


def longbench(folder: Path, *rows: Any, **prompts: str) -> Path:
    prompts = {"qasper": "Read {context} and answer {input}:", "trec": "{context}\n{input}", **prompts}
    write(folder / "my_dataset2prompt.json", prompts)
    write(folder / "dataset2maxlen.json", dict.fromkeys(prompts, 17))
    return write(folder / "data.jsonl", *rows)


def test_longbench(tmp_path: Path) -> None:
    first = {"input": "why", "context": "{input} text", "answers": ["a fox", "a hound"], "dataset": "qasper_e"}
    second = {"input": "q", "context": "c", "answers": ["Food"], "all_classes": ["Food", "Sport"], "dataset": "trec"}
    path = longbench(tmp_path, first, second)
    question, label = read_longbench(path)
    assert (question.task, question.answer_tokens) == ("qasper", 17)
    assert question.prompt == "Read why text and answer why:"
    assert question.score("the hound") == 1.0  # the best of the answers
    assert label.score("\nFood\nSport") == 1.0  # of a few-shot task the first line
    assert next(iter(read_longbench(path, tmp_path))).task == "qasper"


@pytest.mark.parametrize(
    ("row", "kind", "words"),
    [
        ({"input": "q", "context": "c", "answers": [], "dataset": "mine"}, InputError, "dataset 'mine'"),
        ({"input": "q", "context": "c", "answers": [], "dataset": "lcc"}, InputError, "dataset 'lcc'"),
        ({"input": "q", "context": "c", "dataset": "qasper"}, LoadError, "'answers'"),
        ({"input": "q", "context": "c", "answers": "x", "dataset": "qasper"}, LoadError, "a list"),
        ("text", LoadError, "expected a JSON object with input"),
    ],
)
def test_longbench_refuses(tmp_path: Path, row: Any, kind: type[SakiyomiError], words: str) -> None:
    with pytest.raises(kind, match=words):
        list(read_longbench(longbench(tmp_path, row)))


def test_longbench_needs_its_templates(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", {"input": "", "context": "", "answers": [], "dataset": "lcc"})
    with pytest.raises(LoadError, match="--templates"):
        list(read_longbench(path))
    (tmp_path / "dataset2prompt.json").write_text("[", encoding="utf-8")
    with pytest.raises(LoadError, match="no JSON"):
        list(read_longbench(path))


@pytest.mark.parametrize(
    ("task", "text", "answer", "expected"),
    [
        ("multifieldqa_zh", "狐狸", "狐狸。", 1.0),
        ("gov_report", "one two", "one two three", 2 * 2 / 5),
        ("passage_count", "5", "5", 1.0),
        ("passage_retrieval_en", "Paragraph 5", "Paragraph 6", 0.0),
        ("lcc", "return x", "return x", 1.0),
    ],
)
def test_longbench_rules(task: str, text: str, answer: str, expected: float, tmp_path: Path) -> None:
    row = {"input": "q", "context": "c", "answers": [answer], "dataset": task}
    (item,) = read_longbench(longbench(tmp_path, row, **{task: "{context}"}))
    assert item.score(text) == pytest.approx(expected)


def test_every_task_of_the_collections_has_a_metric() -> None:
    known = tomllib.loads(Path(metrics.__file__).with_name("tasks.toml").read_text(encoding="utf-8"))
    assert len(known["longbench"]) == 21 and len(known["infinitebench"]) == 12
    assert {*known["longbench"].values(), *(task["metric"] for task in known["infinitebench"].values())} <= set(METRICS)


# ---------------------------------------------------------------- InfiniteBench


@pytest.mark.parametrize(
    ("task", "answer", "options", "right", "wrong"),
    [
        ("passkey", "71432", [], " 71432. Remember", "7143"),
        ("number_string", ["1122334455"], [], "1122334455", "112233445"),
        ("kv_retrieval", "a-b-1", [], '"a-b-1"', "a-b-12"),
        ("longdialogue_qa_eng", ["ALICE"], [], "It is alice.", "Bob"),
        ("longbook_choice_eng", ["a hound"], ["a fox", "a hound"], "B", "A"),
        ("longbook_qa_eng", ["the fox", "it"], [], "fox", "hound"),
        ("longbook_qa_chn", ["狐狸"], [], "狐狸", "山"),
        ("longbook_sum_eng", "so it is", [], "so it is", "no"),
        ("math_find", 2.5, [], "It is 2.50", "25"),
        ("code_run", 41, [], "The value is 41", "41 or 42"),
        ("code_debug", ["run"], ["walk", "run"], "B. run", "A"),
        ("code_debug", ["run"], ["walk", "run"], "the function run", "the function walk"),
    ],
)
def test_infinitebench(tmp_path: Path, task: str, answer: Any, options: list[str], right: str, wrong: str) -> None:
    row = {"id": 1, "context": "a long text", "input": "what?", "answer": answer, "options": options}
    (item,) = read_infinitebench(write(tmp_path / f"{task}.jsonl", row))
    assert item.task == task and "a long text" in item.prompt
    assert item.score(right) == 1.0
    assert item.score(wrong) == 0.0
    assert all(f"{letter}. {option}" in item.prompt for letter, option in zip("AB", options, strict=False))


def test_infinitebench_counts_steps(tmp_path: Path) -> None:
    row = {"context": "1 + 3 + 4", "input": "", "answer": [1, 4, 8]}
    (item,) = read_infinitebench(write(tmp_path / "math_calc.jsonl", row))
    assert item.score("1, 4, 9") == pytest.approx(2 / 3)


def test_infinitebench_goes_by_the_name_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="passkey"):
        list(read_infinitebench(write(tmp_path / "mine.jsonl", {"context": "", "input": "", "answer": ""})))


def test_files_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no question"):
        list(read_infinitebench(write(tmp_path / "passkey.jsonl")))
    with pytest.raises(LoadError, match="cannot be read"):
        list(read_infinitebench(tmp_path / "gone" / "passkey.jsonl"))
