"""Cache systems side by side over long contexts: prompts, measurements, refusals, limits; each row runs on toys."""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sakiyomi.cli import app
from sakiyomi.core.errors import InputError, LoadError, MemoryLimitError
from sakiyomi.core.memory import parse_bytes, peak_bytes, resident_bytes
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench.config import silent
from sakiyomi.evaluation.bench.long import table as tables
from sakiyomi.evaluation.bench.long.books import Passage, compared, followed, passages
from sakiyomi.evaluation.bench.long.config import LongConfig, budget_pairs
from sakiyomi.evaluation.bench.long.jobs import Bench, Job, Line, Watch, apart, lines
from sakiyomi.evaluation.bench.long.questions import Question, middle_cut, source
from sakiyomi.evaluation.bench.long.run import run
from sakiyomi.evaluation.bench.long.systems import Answer, Loader, System, systems
from sakiyomi.evaluation.bench.long.table import answers, growth, longest, slope
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.train.long_tasks import TASKS, hits
from toys import save_model, tiny_llama, tiny_tokenizer

OPTIONS = {"dtype": "auto", "device": "auto", "compile": False, "chunk_size": None}
STORY = "Once upon a time there was a little fox who lived in a wood. "


@dataclass(frozen=True)
class Story:
    """Stands in for a made task: a story of some length, right if the answer is as long as wished."""

    answer_tokens: int = 4

    def make(self, rng: np.random.Generator, length: int, tokenizer: Any, depth: float | None = None) -> Any:
        begin = f"{int(rng.integers(10**6))}. "
        text = begin + STORY * length
        while len(tokenizer(text + " And so")["input_ids"]) > length:
            text = text[: len(text) * 9 // 10]
        return SimpleNamespace(
            prompt=lambda query_first=False: "And so" * query_first + text + " And so",
            spans=((0, len(begin)),),
            answers=(),
        )


def odd(text: str, answers: Sequence[str]) -> float:
    """Judges stories by the length of the answer; made tasks have answers."""
    return hits(text, answers) if answers else float(len(text) % 2)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakiyomi.evaluation.bench.long.questions.hits", odd)
    monkeypatch.setitem(TASKS, "story", Story())  # type: ignore[arg-type]
    monkeypatch.setitem(TASKS, "tale", Story(3))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return tiny_llama(), tiny_tokenizer()


def toy_config(**changed: Any) -> LongConfig:
    values = {
        "systems": ("full",),
        "tasks": ("story",),
        "lengths": ("32", "64"),
        "count": 2,
        "seeds": ("0", "1"),
        "memory": False,
    }
    return LongConfig(**(values | {"target": "toy"} | changed))


def table(*given: Any) -> Row:
    return tables.table(Bench(*given))


# ---------------------------------------------------------------- what is asked for


def test_lists_are_words_or_commas() -> None:
    config = LongConfig(systems=("full, h2o[sinks=4,local=32],tova", "locret:a/b"), lengths=("64", "8,64"))
    assert config.systems == ("full", "h2o[sinks=4,local=32]", "tova", "locret:a/b")
    assert config.numbers("lengths") == [8, 64]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"systems": (",",)}, "systems is empty"),
        ({"lengths": ("4",)}, "lengths is 4"),
        ({"lengths": ("1k",)}, "lengths is 1k"),
        ({"seeds": ("-1",)}, "seeds is -1"),
        ({"budgets": ("9/8",)}, "budget is '9/8'"),
        ({"budgets": ("0",)}, "budget is '0'"),
        ({"count": 0}, "count is 0"),
        ({"turns": -1}, "turns is -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"format": "mine"}, "format is 'mine'"),
        ({"questions": "a.jsonl"}, "go together"),
        ({"templates": "."}, "templates belong"),
        ({"memory_limit": "much"}, "'much' is no number of bytes"),
        ({"memory_limit": "1GB", "memory": False}, "memory_limit needs"),
    ],
)
def test_what_cannot_be_meant_is_refused(changed: Mapping[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        LongConfig(**changed)


def test_budgets_and_bytes() -> None:
    assert [budget_pairs(text, 1001) for text in ("512", "1/8", "1/2000")] == [512, 125, 1]
    assert [parse_bytes(text) for text in ("12", "1.5kB", "2 MiB", "2GiB")] == [12, 1500, 2 << 20, 2 << 30]


def test_systems_with_a_budget_come_once_for_each() -> None:
    found = systems(("full", "h2o", "quant-4", "h2o+quant-4", "locret:models/heads"), ("64", "1/8"))
    assert [(system.name, system.budget) for system in found] == [
        ("full", None),
        ("h2o", "64"),
        ("h2o", "1/8"),
        ("quant-4", None),
        ("h2o+quant-4", "64"),
        ("h2o+quant-4", "1/8"),
        ("locret:heads", "64"),
        ("locret:heads", "1/8"),
    ]
    assert [system.kind for system in found[:4]] == ["full", "bounded", "bounded", "reduced"]
    assert found[2].pairs(800) == 100


# ---------------------------------------------------------------- prompts


def test_prompts_depend_on_their_own_place_alone() -> None:
    tokenizer = tiny_tokenizer()
    alone = source(toy_config(), tokenizer)(64)
    more = source(toy_config(tasks=("tale", "story"), seeds=("1", "2")), tokenizer)(64)
    assert [q.tokens for q in alone if q.seed == 1] == [q.tokens for q in more if (q.seed, q.task) == (1, "story")]
    assert len({q.tokens for q in alone}) == len(alone) == 4
    assert all(len(q.tokens) <= 64 for q in more)
    assert {(q.task, q.answer_tokens) for q in more} == {("story", 4), ("tale", 3)}
    fewer = source(toy_config(max_new_tokens=2), tokenizer)(64)
    assert {q.answer_tokens for q in fewer} == {2}


def test_prompts_of_a_file_are_drawn_by_seed_and_cut_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    rows = [{"input": STORY * 9, "instructions": [f"Who is number {i}?"], "outputs": ["fox"]} for i in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    tokenizer = tiny_tokenizer()
    config = toy_config(questions=str(path), format="leval", count=3)
    found = source(config, tokenizer)(40)
    assert [q.seed for q in found] == [0] * 3 + [1] * 3
    assert [q.tokens for q in found[:3]] != [q.tokens for q in found[3:]]
    assert all(len(q.tokens) == 40 for q in found)
    for question in found:
        text = tokenizer.decode(list(question.tokens))
        assert text.startswith("Once upon") and text.endswith("?\nAnswer:")
        assert question.score("a fox\n") == 1.0


def test_the_middle_is_cut() -> None:
    assert middle_cut(range(10), 5) == [0, 1, 2, 8, 9]
    assert middle_cut(range(10), 4) == [0, 1, 8, 9]
    assert middle_cut(range(3), 5) == [0, 1, 2]


@pytest.mark.parametrize("task", [task for task in TASKS if task not in ("story", "tale")])
def test_every_made_task_has_prompts_and_marks(task: str) -> None:
    tokenizer = tiny_tokenizer()
    found = source(toy_config(tasks=(task,), count=3, seeds=("0",)), tokenizer)(1200)
    assert [q.task for q in found] == [task] * 3
    for question in found:
        assert 600 < len(question.tokens) <= 1200 and question.ahead is not None
        assert len(question.tokens) < len(question.ahead) <= 1200
        assert question.spans
        assert all(0 <= begin < end <= len(question.tokens) for begin, end in question.spans)
        assert question.score("nothing of it") == 0.0


def test_marks_stand_where_the_answer_does() -> None:
    tokenizer = tiny_tokenizer()
    for question in source(toy_config(tasks=("passkey",)), tokenizer)(400):
        ((begin, end),) = question.spans
        assert question.score(tokenizer.decode(list(question.tokens[begin:end]))) == 1.0


# ---------------------------------------------------------------- numbers


def test_slopes() -> None:
    lengths = [1024, 4096, 16384]
    assert slope(lengths, [7.0 * n**2 for n in lengths]) == pytest.approx(2)
    assert slope(lengths, [1e6] * 3) == pytest.approx(0)
    assert slope(lengths, [0, 5.0 * 4096, 5.0 * 16384]) == pytest.approx(1)  # what did not grow is left out
    assert slope(lengths, [0, 0, 4.0]) is None


@pytest.mark.parametrize("fitting", [31, 33, 100, 511, 600, 1000])
def test_the_longest_that_fits_is_found_to_an_eighth(fitting: int) -> None:
    tried = []

    def fits(length: int) -> bool:
        tried.append(length)
        return length <= fitting

    found = longest(fits, 1024)
    assert (found is None) == (fitting < 32)
    if found is not None:
        assert found <= fitting < found + max(found // 8, 1) + 1
        assert found in tried
    assert len(tried) <= 9 and min(tried) >= 32


# ---------------------------------------------------------------- the table


def question(seed: int, right: str, task: str = "story", tokens: int = 4) -> Question:
    return Question(task, seed, tuple(range(tokens)), 4, lambda text: float(text == right))


def given(length: int) -> list[Question]:
    """A source of two questions a seed."""
    return [question(seed, right, tokens=length) for seed in (0, 1) for right in ("a", "b")]


class Toy:
    """A system whose answers are known, and that holds contexts up to so many tokens.

    Attributes:
        asked: length and prompts of every call, the first prompt of each length once more in front.
    """

    far_bytes = 0

    def __init__(self, texts: str, most: int = 10**6) -> None:
        self.texts, self.most, self.asked = texts, most, list[tuple[int, list[Sequence[int]]]]()

    def release(self) -> None:
        """Nothing is held."""

    def __call__(self, system: System, length: int) -> Any:
        if length > self.most:
            raise MemoryLimitError("900 MB were held")
        self.asked.append((length, []))
        return self

    @property
    def kv_bytes(self) -> int:
        return 100 * self.asked[-1][0]

    def predicted_bytes(self, columns: int) -> int:
        return 0

    def answer(self, tokens: Sequence[int], most: int, *, kept: bool = False) -> Answer:
        prompts = self.asked[-1][1]
        prompts.append(tokens)
        return Answer(self.texts[(len(prompts) - 2) % len(self.texts)], 6, len(tokens) / 20, 1.0)

    def perform(self, job: Job) -> Iterator[Line]:
        return lines(job, self)  # type: ignore[arg-type]


def test_right_answers_and_their_spread() -> None:
    row = table(toy_config(), given, [System("full", None)], Toy("abaa").perform, silent)
    first, second = row.lines
    assert first["accuracy"] == 0.75 and first["seeds"] == {"0": 1.0, "1": 0.5}
    assert first["accuracy_spread"] == pytest.approx(math.sqrt(0.125))
    assert first["accuracy_error"] == pytest.approx(0.25)
    assert (first["prefill_tokens_per_second"], first["decode_tokens_per_second"]) == (20.0, 5.0)
    assert second["kv_bytes"] == 2 * first["kv_bytes"]
    known = [line | {"grown_bytes": 100 * line["length"] ** 2} for line in row.lines]
    memory = growth(dataclasses.replace(row, lines=known))
    assert memory is not None
    (line,) = memory.lines
    assert (line["kv_slope"], line["process_slope"]) == (pytest.approx(1), pytest.approx(2))
    assert (line["from"], line["to"], line["on_paper"]) == (32, 64, 1.0)
    assert growth(dataclasses.replace(row, lines=row.lines[:1])) is None
    json.dumps([row.to_dict(), memory.to_dict()])
    assert {"right", "±", "KV MB", "peak MB"} <= set(row.table()[0])


def test_right_answers_beside_those_of_full() -> None:
    def perform(job: Job) -> Iterator[Line]:
        return Toy({"full": "abaa", "h2o": "aaxx"}[job.system.spec]).perform(job)

    both = [System("full", None), System("h2o", "8")]
    row = table(toy_config(lengths=("32",)), given, both, perform, silent)
    assert [line["of_full"] for line in row.lines] == [1.0, pytest.approx(0.25 / 0.75)]
    assert "of_full" not in table(toy_config(lengths=("32",)), given, both[:1], perform, silent).lines[0]


def test_shares_of_tasks_stand_beside_the_whole() -> None:
    def two(length: int) -> list[Question]:
        return [question(0, "a", "story"), question(0, "b", "tale")]

    (line,) = table(toy_config(lengths=("32",)), two, [System("full", None)], Toy("aa").perform, silent).lines
    assert (line["story"], line["tale"], line["accuracy"]) == (100.0, 0.0, 0.5)
    assert line["accuracy_spread"] == 0.0 or line["accuracy_spread"] is None


def test_over_the_limit_the_longest_that_fits_has_a_star() -> None:
    toy = Toy("a", most=300)
    config = toy_config(lengths=("64", "512", "1024"), memory=True, memory_limit="900GB")
    row = table(config, given, [System("full", None)], toy.perform, silent)
    assert [(line["name"], line["state"]) for line in row.lines] == [
        ("full", ""),
        ("full", "OOM"),
        ("full", "OOM"),
        ("full *", ""),
    ]
    starred = row.lines[-1]
    assert starred["length"] == 288 and starred["starred"]  # an eighth of 256 below what would not fit
    # One question is enough to try a length; what stands in the table is measured on all.
    tried = [(length, len(prompts) - 1) for length, prompts in toy.asked]
    assert (288, 1) in tried and tried[-1] == (288, 4)
    assert "900 MB were held" in row.notes[0] and "512 tokens are too many already" in row.notes[1]


def test_no_star_where_a_length_that_was_asked_for_is_as_good() -> None:
    config = toy_config(lengths=("64", "66"), memory=True, memory_limit="900GB")
    row = table(config, given, [System("full", None)], Toy("a", most=64).perform, silent)
    assert [line["state"] for line in row.lines] == ["", "OOM"]
    row = table(config, given, [System("full", None)], Toy("a", most=8).perform, silent)
    assert [line["state"] for line in row.lines] == ["OOM", "OOM"]  # nothing fits

    def long(length: int) -> list[Question]:
        if length < 60:
            raise InputError("no room for a question")
        return given(length)

    row = table(config, long, [System("full", None)], Toy("a", most=40).perform, silent)
    assert [line["state"] for line in row.lines] == ["OOM", "OOM"]  # and nothing shorter can be asked


# ---------------------------------------------------------------- on a toy


@pytest.mark.thorough
def test_systems_answer_the_same_prompts(pair: tuple[Any, Any]) -> None:
    rows = list(run(toy_config(systems=("full", "one-shot", "nonesuch")), target=pair))
    assert [row.name for row in rows] == ["long", "memory"]
    lines = rows[0].lines
    assert [(line["name"], line["state"]) for line in lines] == [
        *[("full", "")] * 2,
        *[("one-shot", "")] * 2,
        *[("nonesuch", "refused")] * 2,
    ]
    assert [line["accuracy"] for line in lines[:2]] == [line["accuracy"] for line in lines[2:4]]
    assert all(line["peak_bytes"] is None for line in lines[:4])  # they share this process
    (note,) = rows[0].notes  # the same reason at both lengths
    assert note.startswith("nonesuch, 32, 64 tokens: cache='nonesuch'")
    for line in lines[:4]:
        assert line["prefill_tokens_per_second"] > 0 and line["decode_tokens_per_second"] > 0
    json.dumps([row.to_dict() for row in rows])


@pytest.mark.thorough
def test_one_shot_writes_what_full_writes(pair: tuple[Any, Any]) -> None:
    make = Loader(OPTIONS | {"target": pair})
    questions = [list(range(3, 3 + n)) for n in (20, 70, 71)]
    full, once = ({}, {})
    written = []
    for spec, figures in (("full", full), ("one-shot", once)):
        make.release()
        running = make(System(spec, None), 71)
        written.append([running.answer(question, 6).text for question in questions])
        figures["kv_bytes"] = running.kv_bytes
    assert written[0] == written[1]
    assert len(set(written[0])) > 1
    model, _ = pair
    config = model.config
    width = 2 * config.num_hidden_layers * config.num_key_value_heads * config.hidden_size // 4 * 4
    assert once["kv_bytes"] == width * (71 + 6 - 1)  # the last token was never read
    assert full["kv_bytes"] >= once["kv_bytes"] and full["kv_bytes"] % width == 0


@pytest.mark.thorough
def test_pairs_that_are_kept_elsewhere_are_counted_apart(pair: tuple[Any, Any]) -> None:
    names = ("full", "minference[vertical=8,slash=8,block=8]", "infllm[block=8,sinks=4,local=8]")
    config = toy_config(systems=names, budgets=("48",), chunk_size=32)
    row, memory = run(dataclasses.replace(config, lengths=("128", "400")), target=pair)
    _, full, _, in_part, _, recalled = row.lines
    assert recalled["state"] == in_part["state"] == "", row.notes
    assert in_part["kv_bytes"] == full["kv_bytes"] and memory.lines[1]["class"] == "full"
    assert recalled["far_bytes"] >= full["kv_bytes"] // 2 and "far_bytes" not in full
    assert memory.lines[2]["class"] == "reduced" and memory.lines[2]["on_paper"] == 1.0


@pytest.mark.thorough
def test_a_context_beyond_the_positions_is_refused(pair: tuple[Any, Any]) -> None:
    (row,) = run(toy_config(lengths=("600",), count=1, seeds=("0",)), target=pair)
    assert row.lines[0]["state"] == "refused" and "512" in row.notes[0]


def test_a_loaded_pair_has_no_process_of_its_own(pair: tuple[Any, Any]) -> None:
    with pytest.raises(InputError, match="processes of its own"):
        run(toy_config(memory=True), target=pair)
    with pytest.raises(InputError, match="there is no task 'nonesuch'"):
        run(toy_config(tasks=("nonesuch",)), target=pair)
    with pytest.raises(LoadError, match="no tokenizer"):
        run(toy_config(target="/nowhere/at/all"))


def test_query_first_prompts_have_the_question_in_front() -> None:
    config, (system,) = toy_config(lengths=("64",)), systems(("full+query-first",), ("1/8",))
    assert (system.cache, system.budget, system.kind) == ("full", None, "full")
    tokenizer, toy = tiny_tokenizer(), Toy("a")
    row = table(config, source(config, tokenizer), [system], toy.perform, silent)
    assert row.lines[0]["name"] == "full+query-first"
    ((_, (_, *asked)),) = toy.asked
    assert len(asked) == 4 and all(tokenizer.decode(list(tokens)).startswith("And so") for tokens in asked)
    row = table(config, given, [system], toy.perform, silent)
    assert row.lines[0]["state"] == "refused" and "made tasks" in row.notes[0]


@pytest.mark.thorough
def test_a_row_that_fails_says_so_and_the_others_run(pair: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(STORY, encoding="utf-8")
    config = toy_config(books=str(tmp_path / "book.txt"), turns=1, turn_tokens=32, lengths=("32",))
    table_row, books_row, turns_row = run(config, target=pair)
    assert books_row.error is not None and "give longer ones" in books_row.error
    assert table_row.error is turns_row.error is None and len(turns_row.lines) == 1


# ---------------------------------------------------------------- memory


def test_the_peak_of_a_process_is_its_own() -> None:
    """Linux gives a process the peak of the one that started it; this one has torch in its memory."""
    assert peak_bytes() > 150_000_000
    code = "from sakiyomi.core.memory import peak_bytes; print(peak_bytes())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert 0 < int(result.stdout) < 100_000_000


def touched(count: int) -> mmap.mmap:
    """So much memory that the process did not have: what it has freed before may be its own still."""
    block = mmap.mmap(-1, count)
    for place in range(0, count, mmap.PAGESIZE):
        block[place] = 1
    return block


def test_what_is_held_at_once_is_seen() -> None:
    watch = Watch("cpu", None)
    watch.begin(0)
    assert watch.ready is not None
    block = touched(40_000_000)
    del block
    assert watch.peak() - watch.ready > 30_000_000


def test_the_limit_is_kept_before_and_after() -> None:
    watch = Watch("cpu", resident_bytes() + 20_000_000)
    with pytest.raises(MemoryLimitError, match="more are needed"):
        watch.begin(30_000_000)
    watch.begin(0)
    block = touched(40_000_000)
    with pytest.raises(MemoryLimitError, match="held at once"):
        watch.peak()
    block.close()


@pytest.mark.parametrize(
    ("error", "state"),
    [(MemoryLimitError("much"), "OOM"), (MemoryError(), "OOM"), (InputError("no"), "refused")],
)
def test_errors_of_users_become_lines(error: Exception, state: str) -> None:
    def measure(make: Loader, system: System, length: int, given: Any, watch: Watch) -> Line:
        raise error

    (line,) = lines(Job(measure, System("full", None), {64: None}), Toy("a"))  # type: ignore[arg-type]
    assert (line["length"], line["state"]) == (64, state)
    assert line["note"]


def test_defects_of_ours_are_raised() -> None:
    def measure(make: Loader, system: System, length: int, given: Any, watch: Watch) -> Line:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        next(lines(Job(measure, System("full", None), {64: None}), Toy("a")))  # type: ignore[arg-type]


def test_bytes_are_known_before_they_are_taken(pair: tuple[Any, Any]) -> None:
    llm = LLM(pair, draft="none", compile=False, max_batch=1)
    cache = llm.target.cache
    needed = cache.needs(1, 300)
    assert needed >= 300 * cache.pair_bytes and cache.bytes == 0
    llm.generate([list(range(3, 300))], SamplingParams(max_new_tokens=3))
    assert cache.bytes == needed == cache.needs(1, 300)


@pytest.mark.thorough
def test_a_job_in_a_process_of_its_own(tmp_path: Path) -> None:
    save_model(tmp_path / "toy", tiny_llama(), tiny_tokenizer())
    asked = {"tasks": ("passkey",), "lengths": ("400",), "count": 1, "seeds": ("0",)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sakiyomi.evaluation.bench.long.questions.hits", hits)  # another process knows no test
        (row,) = run(toy_config(target=str(tmp_path / "toy"), memory=True, **asked))
    (line,) = row.lines
    assert line["state"] == "", row.notes
    assert line["peak_bytes"] > 100_000_000 > abs(line["grown_bytes"])
    assert line["kv_bytes"] > 0


@pytest.mark.thorough
def test_what_each_kept_is_drawn(pair: tuple[Any, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    config = toy_config(systems=("full", "streaming[sinks=2,local=8]"), budgets=("24",), chunk_size=16)
    (row, *_) = run(config, target=pair, pictures=str(tmp_path))
    full, _, bounded, _ = row.lines
    assert bounded["state"] == "", row.notes
    assert bounded["kv_bytes"] <= full["kv_bytes"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept-streaming-sinks-2-local-8-24.png"]


@pytest.mark.thorough
def test_what_was_kept_are_places_of_the_prompt(pair: tuple[Any, Any]) -> None:
    make = Loader(OPTIONS | {"target": pair, "chunk_size": 16})
    system = System("streaming[sinks=2,local=8]", "24")
    question = Question("story", 0, tuple(range(3, 63)), 3, len)
    found = answers(make, system, 60, [question, question], Watch("cpu", None), kept=True)
    model, _ = pair
    expected = [0, 1, *range(60 - 22, 60)]
    assert found["kept"] == [[expected] * model.config.num_key_value_heads] * model.config.num_hidden_layers


class Ends:
    """Ends the process that it is sent to."""

    def __init__(self, *how: Any) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        call, *given = self.how
        return call, tuple(given)


@pytest.mark.parametrize(
    ("measure", "given", "states", "words"),
    [
        (answers, Ends(signal.raise_signal, signal.SIGKILL), ["OOM", "OOM"], "memory is short"),
        (answers, Ends(sys.exit, 3), ["refused", "refused"], "exit code 3"),
        (len, None, ["refused", "refused"], "TypeError: len() takes exactly one argument"),  # what it said last
    ],
)
def test_who_is_killed_kills_nobody(measure: Any, given: Any, states: list[str], words: str) -> None:
    found = list(apart(Job(measure, System("full", None), {32: given, 64: None}), {}))
    assert [(line["length"], line["state"]) for line in found] == list(zip((32, 64), states, strict=True))
    assert words in found[0]["note"] and "not measured after 32 tokens" in found[1]["note"]


# ---------------------------------------------------------------- books


@torch.no_grad()
def test_what_follows_is_judged_as_transformers_does(pair: tuple[Any, Any]) -> None:
    model, tokenizer = pair
    ids = tokenizer(STORY * 3)["input_ids"]
    losses, best = followed(LLM(pair, draft="none", compile=False), ids[:40], ids[40:60])
    rows = model(input_ids=torch.tensor([ids])).logits[0, 39:59].float()
    expected = torch.nn.functional.cross_entropy(rows, torch.tensor(ids[40:60]), reduction="none")
    assert torch.allclose(torch.tensor(losses), expected, atol=1e-4)
    assert best == rows.argmax(-1).tolist()


def test_passages_begin_with_a_chapter() -> None:
    tokenizer = tiny_tokenizer()
    book = STORY * 40 + "\n\n" + STORY * 20 + "\n\nCHAPTER 2. THE SEA\n\n" + STORY * 40
    config = toy_config(books="unused", follow=16)
    found = passages_of(config, tokenizer, book)
    assert [passage.seed for passage in found] == [0, 1]
    for passage in found:
        assert (len(passage.context), len(passage.following)) == (64, 16)
        assert tokenizer.decode(list(passage.following)).startswith("CHAPTER 2")
    plain = passages_of(config, tokenizer, (STORY * 20 + "\n\n") * 5)
    assert tokenizer.decode(list(plain[0].following)).startswith("Once upon")
    with pytest.raises(InputError, match="no text in"):
        passages_of(config, tokenizer, STORY)


def passages_of(config: LongConfig, tokenizer: Any, text: str) -> list[Passage]:
    folder = Path(config.books or "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sakiyomi.evaluation.bench.long.books.read_text", lambda path: text)
        return passages(dataclasses.replace(config, books=str(folder)), tokenizer, 64)


def test_agreement_and_perplexity_by_hand() -> None:
    given = [Passage(0, (), ()), Passage(1, (), ())]
    losses, best = [math.log(2), math.log(2)], [[1, 2], [3, 4]]
    figures = compared(given, losses, best, [[1, 2], [3, 5]])
    assert figures["perplexity"] == pytest.approx(2)
    assert figures["agreement"] == 0.75
    assert figures["agreement_spread"] == pytest.approx(math.sqrt(0.125))
    assert figures["perplexity_spread"] == pytest.approx(0)
    assert compared(given, losses, best, None)["agreement"] is None


@pytest.mark.thorough
def test_row_of_books(pair: tuple[Any, Any], tmp_path: Path) -> None:
    book = tmp_path / "books.jsonl"
    book.write_text(json.dumps({"text": (STORY * 20 + "\n\n") * 5}), encoding="utf-8")
    config = toy_config(books=str(book), follow=8, systems=("one-shot", "nonesuch"), lengths=("32",))
    row = list(run(config, target=pair))[-1]
    assert row.name == "books"
    # Full is what the others are compared with, whether it was asked for or not.
    full, other = row.lines
    assert (full["name"], full["agreement"], full["state"]) == ("full", 1.0, "")
    assert full["perplexity"] > 1
    assert (other["name"], other["state"]) == ("nonesuch", "refused")


# ---------------------------------------------------------------- turns


@pytest.mark.thorough
def test_row_of_turns(pair: tuple[Any, Any]) -> None:
    config = toy_config(turns=5, turn_tokens=40, tasks=("story", "tale"), systems=("full", "one-shot"))
    row = list(run(config, target=pair))[-1]
    assert row.name == "turns"
    (line,) = row.lines  # one-shot keeps nothing
    assert line["turns"] == 5 and line["state"] == ""
    series = line["series"]
    assert series["tokens"] == sorted(series["tokens"]) and series["tokens"][-1] == line["tokens_held"] > 150
    assert series["kv"] == sorted(series["kv"]) and len(series["resident"]) == 5
    assert line["kv_to_bytes"] >= line["tokens_held"] * 256 // 2
    shown = [f"{turn}: {series['kv'][turn - 1] / 1e6:.3g}" for turn in (1, 2, 4, 5)]
    assert row.notes == [f"full, KV MB after turn: {', '.join(shown)}"]


@pytest.mark.thorough
def test_turns_that_do_not_fit_end_early(pair: tuple[Any, Any]) -> None:
    row = list(run(toy_config(turns=9, turn_tokens=100, seeds=("0",), lengths=("32",)), target=pair))[-1]
    (line,) = row.lines
    assert line["state"] == "ended early" and 3 <= line["turns"] < 9
    assert any("512" in note for note in row.notes)


# ---------------------------------------------------------------- the command


@pytest.mark.thorough
def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_model(tmp_path / "toy", tiny_llama(), tiny_tokenizer())
    words = "--systems full --tasks story --lengths 32,64 --count 1 --seeds 0,1 --no-memory --json"
    places = ["--target", str(tmp_path / "toy"), "--plot", str(tmp_path / "pictures")]
    result = CliRunner().invoke(app, ["bench", "long", *words.split(), *places])
    assert result.exit_code == 0, result.output
    assert "right" in result.stdout
    found = json.loads(result.stdout.splitlines()[-1])
    assert [row["row"] for row in found["rows"]] == ["long", "memory"]
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == ["accuracy.png", "memory.png"]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--lengths none", 2, "lengths is none"),
        ("--format leval", 2, "go together"),
        ("--target /nowhere/at/all", 1, "no folder"),
        ("--dtype int3", 2, "dtype is 'int3'"),
        ("--target tales --books /nowhere/books.jsonl", 1, "/nowhere/books.jsonl"),
        ("--target tales --turns 2 --tasks nonesuch", 2, "there is no task"),
        ("--plot /dev/null/here", 2, "plot is"),
    ],
)
def test_the_command_refuses(flags: str, code: int, words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "long", *flags.split()])
    assert result.exit_code == code and words in result.stderr, result.output
