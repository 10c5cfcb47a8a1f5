"""Drafters by kind of question: what is asked, what is counted, what is kept in files and how these are joined."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from sakiyomi.cli import app
from sakiyomi.core.errors import InputError, LoadError, SakiyomiError, UnsupportedError
from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.chat_template import Dialogue
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.runner import Contender, TimedRun, race
from sakiyomi.evaluation.bench.spec import run as run_module
from sakiyomi.evaluation.bench.spec.config import SpecConfig
from sakiyomi.evaluation.bench.spec.results import (
    PLAIN,
    Question,
    Record,
    Results,
    chosen,
    digest,
    join,
    own_questions,
    read_questions,
)
from sakiyomi.evaluation.bench.spec.run import Talk, run
from sakiyomi.evaluation.bench.spec.table import compared, draw, figures, rows, since
from toys import save_model, tiny_llama, tiny_tokenizer

SPEC_BENCH = Path(__file__).parents[3] / "shared" / "data" / "bench" / "spec_bench_question.jsonl"
LINES = (
    {"question_id": 1, "category": "qa", "turns": ["Who lived in the wood?"]},
    {"question_id": 2, "category": "writing", "turns": ["Once upon a time", "And then?"]},
    {"question_id": 3, "category": "qa", "turns": ["Where was the sea?"]},
)


def write(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SpecConfig:
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    save_model(folder / "target", tiny_llama(), tokenizer)
    save_model(folder / "draft", tiny_llama(seed=1, layers=1), tokenizer)
    return SpecConfig(
        target=str(folder / "target"),
        draft=("prompt-lookup", f"model:{folder / 'draft'}"),
        questions=str(write(folder / "questions.jsonl", LINES)),
        count=1,
        max_new_tokens=12,
        gamma=2,
        repeats=1,
        compile=False,
    )


# ---------------------------------------------------------------- questions


def test_in_spec_bench_the_categories_of_mt_bench_are_one(tmp_path: Path) -> None:
    own = [{"question_id": i, "category": name, "turns": ["a", "b"]} for i, name in enumerate(("writing", "stem"))]
    alone = read_questions(write(tmp_path / "mt.jsonl", own))
    assert [question.category for question in alone] == ["writing", "stem"]
    more = [*own, {"question_id": "x", "category": "math_reasoning", "turns": ["c"]}]
    together = read_questions(write(tmp_path / "spec.jsonl", more))
    assert [question.category for question in together] == ["mt-bench", "mt-bench", "math_reasoning"]
    assert [question.id for question in chosen(together, ("stem",), 5)] == [1]
    assert [question.id for question in chosen(together, ("mt-bench,math_reasoning",), 1)] == [0, "x"]
    assert digest(alone) != digest(together) == digest(read_questions(tmp_path / "spec.jsonl"))


def test_the_file_of_spec_bench_is_read() -> None:
    if not SPEC_BENCH.is_file():
        pytest.skip(f"{SPEC_BENCH} is not there")
    found = read_questions(SPEC_BENCH)
    assert len(found) == 480
    categories = ["mt-bench", "translation", "summarization", "qa", "math_reasoning", "rag"]
    assert list(dict.fromkeys(question.category for question in found)) == categories
    assert all(len(question.turns) == 1 + (question.category == "mt-bench") for question in found)


def test_own_questions_have_the_categories_of_speed_bench() -> None:
    found = own_questions()
    assert len({question.id for question in found}) == len(found) == 33
    assert len({question.category for question in found}) == 11
    assert any(len(question.turns) > 1 for question in found)


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (None, LoadError, "cannot be read"),
        ("", InputError, "no question"),
        ("Once upon a time\n", LoadError, "question_id"),
        ('{"question_id": 1, "category": "qa"}\n', LoadError, "turns"),
        ('{"question_id": 1, "category": "qa", "turns": []}\n', LoadError, "list of texts"),
        ('{"question_id": 1, "category": "qa", "turns": ["a", " "]}\n', LoadError, "list of texts"),
        ('{"question_id": 1, "category": 2, "turns": ["a"]}\n', LoadError, "category"),
        ('{"question_id": 1, "category": "qa", "turns": ["a"]}\n' * 2, LoadError, "twice"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: str | None, kind: type[SakiyomiError], words: str) -> None:
    path = tmp_path / "questions.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(kind, match=words):
        read_questions(path)


def test_unknown_categories_and_wrong_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="no category 'poems'"):
        chosen(own_questions(), ("poems",), 1)
    for wrong in ({"count": 0}, {"max_new_tokens": 1}, {"repeats": 0}, {"prompt_tokens": 1}):
        with pytest.raises(InputError, match="expected at least"):
            SpecConfig(**wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------- asking


class Parrot:
    """Answers every prompt with a word of its own, and keeps the prompts."""

    def __init__(self, word: str) -> None:
        self.word, self.prompts = word, list[list[int]]()

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Any]:
        self.prompts += [list(prompt) for prompt in prompts]
        stats = Stats(tokens=3, rounds=2, committed=2, seconds=0.5, prefill_seconds=0.1)
        return [SimpleNamespace(text=self.word, token_ids=[1, 2, 3], stats=stats) for _ in prompts]


def test_the_plain_answer_stands_in_everyones_next_prompt() -> None:
    tokenizer = tiny_tokenizer()
    talk = Talk(Dialogue(tokenizer), 100, Question(1, "qa", ("Who is it?", "And then?"), "qa"))
    plain, other = Parrot(" A fox."), Parrot(" A bear.")
    params = SamplingParams()
    found = talk.run(plain, params)  # type: ignore[arg-type]
    assert (found.tokens, found.seconds, found.figures["prefill_seconds"]) == (6, 1.0, 0.2)
    assert tokenizer.decode(plain.prompts[1]) == "Who is it? A fox. And then?"
    talk.run(other, params)  # type: ignore[arg-type]
    assert other.prompts == plain.prompts and talk.answers == [" A fox.", " A fox."]


def test_a_chat_template_is_used_and_long_prompts_lose_their_middle() -> None:
    tokenizer = tiny_tokenizer()
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    long = "one two three four five six seven eight nine ten " * 4
    talk = Talk(Dialogue(tokenizer, template), 24, Question(1, "qa", (long + "THE END",), "qa"))
    way = Parrot("x")
    talk.run(way, SamplingParams())  # type: ignore[arg-type]
    (prompt,) = way.prompts
    text = tokenizer.decode(prompt)
    assert len(prompt) == 24 and text.startswith("[user]one") and text.endswith("ND[assistant]")


def test_a_race_without_a_warm_up_counts_its_first_run() -> None:
    speeds = iter((1.0, 2.0))
    (standing,) = race([Contender("one", lambda: TimedRun(next(speeds), 4))], repeats=2, warm_up=0)
    assert standing.speeds == [4.0, 2.0]


@pytest.mark.thorough
def test_every_drafter_has_a_row_and_the_plain_text(config: SpecConfig) -> None:
    table, accepted = run(config)
    names = [PLAIN, *config.draft]
    assert [line["name"] for line in table.lines] == [line["name"] for line in accepted.lines] == names
    plain = table.lines[0]
    assert plain["qa"] == plain["writing"] == plain["all"] == plain["decode"] == plain["tau"] == 1.0
    for line in table.lines[1:]:
        assert line["equal"] == "2/2" and line["defects"] == 0 and line["all"] > 0
        assert set(line["by_category"]) == {"qa", "writing"}
    assert max(line["tau"] for line in table.lines) > 1.0
    assert table.conditions["questions"] == "qa 1, writing 1"
    assert any("one run" in note for note in table.notes)


def test_another_text_is_a_defect_and_has_no_speed(config: SpecConfig) -> None:
    llm = LLM(config.target, "none", compile=False, max_batch=2)

    class Wrong(EngineView):
        def generate(self, prompts: Any, params: SamplingParams) -> Any:
            (done,) = super().generate(prompts, params)
            return [replace(done, token_ids=[(token + 7) % 300 for token in done.token_ids])]

    talk = Talk(Dialogue(llm.tokenizer), 100, Question(1, "qa", ("Once upon a time",), "qa"))
    ways = {PLAIN: EngineView(llm), "wrong": Wrong(llm)}
    found = run_module._ask(config, llm, talk, ways, lambda text: None)
    assert [(record.equal, record.explained) for record in found] == [(True, True), (False, False)]
    assert "no near-tie" in found[1].note
    results = Results({}, records={(record.question, record.draft): record for record in found})
    line = rows(results)[0].lines[1]
    assert line["qa"] is line["all"] is line["tokens_per_second"] is None
    assert (line["equal"], line["defects"]) == ("0/1", 1)


@pytest.mark.thorough
def test_what_is_known_is_not_measured_again(
    config: SpecConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.jsonl"
    first = replace(config, out=str(file), draft=("prompt-lookup",))
    before = run(first)[0]
    asked: list[tuple[Any, list[str]]] = []
    real = run_module._ask

    def ask(own: SpecConfig, llm: LLM, talk: Talk, ways: dict[str, Any], note: Callable[[str], None]) -> list[Record]:
        asked.append((talk.question.id, list(ways)))
        return real(own, llm, talk, ways, note)

    monkeypatch.setattr(run_module, "_ask", ask)
    assert run(first)[0].lines == before.lines and not asked
    # A further drafter runs beside plain decoding of its own; a line that was not finished is measured again.
    file.write_text(file.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    again = run(replace(first, draft=("prompt-lookup", "suffix")))[0]
    assert asked == [(1, [PLAIN, "suffix"]), (2, [PLAIN, "prompt-lookup", "suffix"])]
    assert [line["name"] for line in again.lines] == [PLAIN, "prompt-lookup", "suffix"]
    assert len(Results.read(file).records) == 6
    with pytest.raises(InputError, match=r"other settings or another machine cannot be joined .gamma 2, now 3"):
        run(replace(first, gamma=3))


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"draft": ("wishes",)}, InputError, "unknown draft"),
        ({"draft": ("suffix:memory.bin",), "repeats": 2}, InputError, "--repeats 1"),
        ({"draft": ("self-evicted",)}, UnsupportedError, "rows.py --rows evicted"),
        ({"categories": ("poems",)}, InputError, "no category"),
        ({"template": "no.jinja"}, LoadError, "template"),
        ({"max_new_tokens": 512}, InputError, "ask for fewer"),
        ({"system": "Be kind."}, InputError, "system prompt"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    config: SpecConfig, changed: dict[str, Any], kind: type[SakiyomiError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        run(replace(config, **changed))


# ---------------------------------------------------------------- results


def counts(tokens: float, seconds: float, **more: float) -> dict[str, float]:
    rest = {"rounds": tokens - 1, "committed": tokens - 1, "drafted": 0.0, "accepted": 0.0, "prefill_seconds": 0.0}
    return {"tokens": tokens, "seconds": seconds} | rest | more


def record(question: int, draft: str = PLAIN, seconds: float = 1.0, category: str = "qa", **changed: Any) -> Record:
    plain = (counts(11, 1.0),)
    runs = plain if draft == PLAIN else (counts(11, seconds, rounds=5.0),)
    return replace(Record(question, category, draft, runs, plain, True, True), **changed)


def results(*records: Record, path: Path | None = None, **settings: Any) -> Results:
    found = Results({"target": "toy", "gamma": 2} | settings, {}, {(r.question, r.draft): r for r in records}, path)
    if path is not None:
        found.write()
    return found


def test_speed_ups_are_means_of_speeds_and_tokens_are_those_of_all_passes() -> None:
    slow = record(2, "a", seconds=2.0, plain=(counts(21, 1.0),), runs=(counts(21, 2.0, prefill_seconds=1.0),))
    found = figures([record(1, "a", seconds=0.5), slow])
    assert found["speedup"] == pytest.approx((22 + 10.5) / (11 + 21))
    assert found["decode"] == pytest.approx((20 + 20) / (10 + 20))
    assert found["tau"] == pytest.approx((10 + 20) / (5 + 20))
    assert (found["equal"], found["near_ties"], found["defects"]) == (2, 0, 0)


def test_near_ties_keep_their_speed_and_are_counted() -> None:
    found = figures([record(1, "a", 0.5, equal=False, note="near-ties"), record(2, "a", 0.5)])
    assert found["speedup"] == pytest.approx(2.0) and (found["equal"], found["near_ties"]) == (1, 1)


def test_parts_of_one_measurement_are_joined(tmp_path: Path) -> None:
    one = results(record(1), record(1, "a", 0.5), path=tmp_path / "one.jsonl")
    two = results(record(2), record(2, "a", 0.25, category="all"), path=tmp_path / "two.jsonl")
    joined = join([Results.read(path) for path in (one.path, two.path) if path])
    assert joined.records == one.records | two.records
    line = rows(joined)[0].lines[1]
    assert (line["qa"], line["all."], line["all"]) == (2.0, 4.0, 3.0)  # a category of that name hides nothing
    with pytest.raises(InputError, match=r"gamma 2, in .* 'auto'"):
        join([one, results(record(3), path=tmp_path / "three.jsonl", gamma="auto")])


def test_files_side_by_side_are_compared_where_both_have_something(tmp_path: Path) -> None:
    one = results(record(1), record(1, "a", 0.5), record(2, "a", 9.0), path=tmp_path / "one.jsonl")
    two = results(record(1), record(1, "a", 0.25), path=tmp_path / "two.jsonl", gamma=3)
    row = compared([one, two])
    found = {(line["name"], line["category"]): line for line in row.lines}
    assert (found["a", "all"]["one x"], found["a", "all"]["two x"], found["a", "all"]["two tok/s"]) == (2.0, 4.0, 2.0)
    assert found["a", "qa"]["questions"] == 1 and row.notes == ["gamma: one 2, two 3"]
    with pytest.raises(InputError, match="two or more"):
        compared([one])
    with pytest.raises(InputError, match="in common"):
        compared([one, results(record(7), path=tmp_path / "two.jsonl")])


def test_acceptance_that_fell_since_is_told(tmp_path: Path) -> None:
    def asked(name: str, rounds: float, numbers: Sequence[int]) -> Results:
        runs = {number: (counts(101, 1.0, rounds=rounds + number % 3),) for number in numbers}
        return results(*(record(i, "a", runs=runs[i]) for i in numbers), path=tmp_path / name)

    before = asked("before.jsonl", 25, range(20))
    row = since(asked("now.jsonl", 40, range(5, 25)), before)
    assert [(line["category"], line["questions"], line["fell"]) for line in row.lines] == [
        ("qa", 15, "yes"),
        ("all", 15, "yes"),
    ]
    assert row.lines[0]["tau then"] == pytest.approx(100 / 26)
    assert "a, qa: acceptance has fallen, tau 3.85 -> 2.44 (-37%)" in row.notes
    assert all(line["fell"] is None for line in since(asked("same.jsonl", 26, range(20)), before).lines)
    with pytest.raises(InputError, match="no question and drafter"):
        since(asked("others.jsonl", 40, range(90, 95)), before)


def test_files_call_runs_as_they_always_did() -> None:
    """Their key is older than the name in the code: we read files of earlier versions, and those read ours."""
    kept = record(1).to_dict()
    assert kept["laps"] == record(1).runs and "runs" not in kept
    assert Record.of(json.loads(json.dumps(kept))) == record(1)


def test_other_files_are_no_results(tmp_path: Path) -> None:
    questions = write(tmp_path / "questions.jsonl", LINES)
    with pytest.raises(LoadError, match="no results"):
        Results.read(questions)
    with pytest.raises(LoadError, match="cannot be read"):
        Results.read(tmp_path / "none.jsonl")
    good = results(record(1), path=tmp_path / "good.jsonl")
    assert good.path is not None
    for line in ("{}", "[1]", json.dumps(record(1).to_dict() | {"laps": []}), json.dumps({"question": 1})):
        good.path.write_text(good.path.read_text(encoding="utf-8").splitlines()[0] + f"\n{line}\n", encoding="utf-8")
        with pytest.raises(LoadError, match="line 2"):
            Results.read(good.path)
    with pytest.raises(LoadError, match="cannot be read"):
        Results.kept(tmp_path)
    with pytest.raises(LoadError, match="cannot write"):
        Results.kept(tmp_path / "no" / "where.jsonl")
    with pytest.raises(InputError, match="no result"):
        rows(results(path=tmp_path / "empty.jsonl"))


# ---------------------------------------------------------------- pictures and the command line


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_speed_ups_are_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    wrong = record(1, "b", explained=False, equal=False, note="no near-tie")
    row = rows(results(record(1), record(1, "a", 0.5), record(2, "a", 0.3, category="rag"), wrong))[0]
    path = tmp_path / f"bars.{suffix}"
    draw([row], str(path), {"processor": "one"})
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


@pytest.mark.thorough
def test_the_command_line_measures_merges_and_compares(config: SpecConfig, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runner = CliRunner()
    flags = ["--target", config.target, "--questions", str(config.questions), "--no-compile", "--draft", "suffix"]
    flags += ["--count", "1", "--max-new-tokens", "6", "--repeats", "1", "--gamma", "2", "--json"]
    files = [str(tmp_path / f"{name}.jsonl") for name in ("qa", "writing", "both")]
    for category, file in zip(("qa", "writing"), files, strict=False):
        done = runner.invoke(app, ["bench", "spec", *flags, "--categories", category, "--out", file])
        assert done.exit_code == 0, done.output
        value = json.loads(done.stdout.splitlines()[-1])
        assert value["rows"][0]["lines"][1]["equal"] == "1/1" and category in done.stdout
    picture = tmp_path / "both.png"
    merge = ["bench", "spec", "merge", *files[:2], "--out", files[2], "--plot", str(picture), "--json"]
    done = runner.invoke(app, merge)
    assert done.exit_code == 0 and picture.is_file(), done.output
    assert json.loads(done.stdout.splitlines()[-1])["rows"][0]["lines"][1]["equal"] == "2/2"
    assert len(Results.read(files[2]).records) == 4
    done = runner.invoke(app, ["bench", "spec", "compare", files[2], files[0], "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["rows"][0]["lines"][0]["both x"] == 1.0
    for wrong, code in (
        (merge, 2),  # the file is there now
        (["bench", "spec", "compare", files[0]], 2),
        (["bench", "spec", "merge"], 2),
        (["bench", "spec", *flags, "--out", str(config.questions)], 1),  # a file of something else stays as it is
        (["bench", "spec", "--count", "2", "merge", *files[:2]], 2),
        (["bench", "spec", "--plot", str(tmp_path / "bars.gif")], 2),
        (["bench", "spec", "--questions", str(tmp_path / "none.jsonl")], 1),
    ):
        done = runner.invoke(app, wrong)
        assert done.exit_code == code and "error:" in done.stderr, done.output
