"""``sakiyomi bench``: side-by-side measurements on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sakiyomi.cli.common import JsonOption
from sakiyomi.cli.output import note, progress, say
from sakiyomi.cli.rows import MarkdownOption, PlotFolderOption, PlotOption, Started, measured, show
from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.config import BenchConfig, CardConfig, Note
from sakiyomi.evaluation.bench.figures.config import ReportConfig
from sakiyomi.evaluation.bench.long.config import LocretConfig, LongConfig
from sakiyomi.evaluation.bench.spec.config import SpecConfig
from sakiyomi.evaluation.bench.tasks.config import TasksConfig
from sakiyomi.scale.cluster import WorkersOption


@dataclass(frozen=True)
class FilesArgument:
    """Which results.

    Attributes:
        files: results of bench spec. They are compared with the first one; where several hold a result, the last one
            counts.
    """

    files: tuple[str, ...] = field(default=(), metadata={"argument": "FILE..."})


@dataclass(frozen=True)
class OutOption:
    """Where results go.

    Attributes:
        out: file for all of them together.
    """

    out: str | None = None


def bench(config: BenchConfig, picture: PlotOption, written: MarkdownOption, output: JsonOption) -> None:
    """Measure speed side by side.

    Contenders run interleaved, figures are medians, and outputs are compared in the same run. Columns: draft, score and
    rest are milliseconds per round; KV is the size of keys and values in the largest pass; bw is what the target's
    decoding passes read, as a share of the memory's measured speed.

    Example: sakiyomi bench --model FOLDER --draft model:DRAFT_FOLDER
    """

    def start(note: Note) -> Started:
        from sakiyomi.evaluation.bench import plot, suites

        return suites.run(config, note), plot.draw

    measured(start, output, picture, written)


def long(config: LongConfig, pictures: PlotFolderOption, output: JsonOption) -> None:
    """Compare cache systems on long contexts.

    Every system answers the same prompts: right answers, keys and values, peak memory, speed. Then how memory grows
    with the length; of books perplexity and agreement with the full cache; of turns one conversation that grows.

    Example: sakiyomi bench long --model FOLDER
    """

    def start(note: Note) -> Started:
        from sakiyomi.evaluation.bench.long import plot
        from sakiyomi.evaluation.bench.long.run import run

        return run(config, note, pictures=pictures.plot), plot.draw

    measured(start, output, pictures)


def spec(config: SpecConfig, shared: WorkersOption, picture: PlotOption, output: JsonOption) -> None:
    """Compare drafters on questions of several kinds, as Spec-Bench does.

    Greedy, one request at a time. All drafters run interleaved on each question, and every answer is compared with the
    plain one. Speed-ups include the prompt's pass; decode is the speed-up after the prompt; tau is the mean number of
    accepted tokens. Workers share the questions, and all drafters answer a question on the same worker. Workers must be
    equal machines, one worker each.

    Example: sakiyomi bench spec --model FOLDER --draft suffix
    """

    def start(note: Note) -> Started:
        from sakiyomi.evaluation.bench.spec.run import run
        from sakiyomi.evaluation.bench.spec.table import draw

        if shared.count is None:
            return run(config, note), draw
        from sakiyomi.scale.questions import share

        return run(config, note, share(shared)), draw

    measured(start, output, picture)


def tasks(config: TasksConfig, picture: PlotOption, output: JsonOption) -> None:
    """Measure a pair on its own tasks.

    Speech, summaries, translation, code and chat, by dtype (int8 and weights on the disk too) and temperature: plain
    and drafted, ours and transformers', with the score of the answers.

    Example: sakiyomi bench tasks summaries=articles.jsonl --target FOLDER --draft model:FOLDER
    """

    def start(note: Note) -> Started:
        from sakiyomi.evaluation.bench.tasks.run import draw, run

        return run(config, note), draw

    measured(start, output, picture)


def locret(config: LocretConfig, pictures: PlotFolderOption, output: JsonOption) -> None:
    """Make the tables of the article on Locret.

    What fits in which memory on paper; then every system, as published, on the same prompts: memory and score, speed,
    keys and values in 4 bits, the combination with LoCoCo. With --plot also what each kept of one prompt.

    Example: sakiyomi bench locret --target retriever --heads retriever-retaining
    """

    def start(note: Note) -> Started:
        from sakiyomi.evaluation.bench.long import plot
        from sakiyomi.evaluation.bench.long.locret import run

        return run(config, note, pictures=pictures.plot), plot.draw

    measured(start, output, pictures)


def compare(given: FilesArgument, output: JsonOption) -> None:
    """Put result files side by side.

    On the questions and drafters that all of them have: another machine, another version, other settings.

    Example: sakiyomi bench spec compare here.json there.json
    """
    from sakiyomi.evaluation.bench.spec.results import Results
    from sakiyomi.evaluation.bench.spec.table import compared

    with progress("reading") as status:
        several = [Results.read(path) for path in given.files]
        row = compared(several)
        show([row], {}, status)
    output.emit({"files": list(given.files), "rows": [row.to_dict()]})


def merge(given: FilesArgument, config: OutOption, picture: PlotOption, output: JsonOption) -> None:
    """Show result files as one table, and write them into one file.

    Parts of one measurement: other questions, other drafters, the same settings and machine. With one file its table
    is shown again.

    Example: sakiyomi bench spec merge a.json b.json
    """
    from sakiyomi.evaluation.bench.spec.results import Results, join
    from sakiyomi.evaluation.bench.spec.table import draw, rows

    picture.check()
    if config.out is not None and Path(config.out).expanduser().exists():
        raise InputError(f"out is {config.out!r}, which is there already; name a new file")
    joined = join([Results.read(path) for path in given.files])
    tables = rows(joined)
    if config.out is not None:
        joined.path = Path(config.out).expanduser()
        joined.write()
    measured(lambda note: (tables, draw), output, picture, doing="reading", conditions=joined.conditions)


def report(config: ReportConfig, output: JsonOption) -> None:
    """Make a page of figures from measurements here.

    Time by model size and temperature, ranks, alpha by draft, trees, rounds, the formulas beside measured points,
    Medusa, accuracy by memory, predictions: one HTML page that needs no other file, and pictures. Numbers are kept; a
    run that was stopped continues.

    Example: sakiyomi bench report OUT_FOLDER --model FOLDER
    """

    def start(note: Note) -> Started:
        from sakiyomi.evaluation.bench.figures.run import run

        return run(config, note), None

    page = f"{config.out}/index.html"
    try:
        measured(start, output, page=page)
    except KeyboardInterrupt:
        if Path(page).is_file():
            note(f"what was measured until now is on {page}; the same command measures the rest")
        raise


def card(config: CardConfig, output: JsonOption) -> None:
    """Measure a model on this machine, and write one page and one JSON file to send back.

    Machine, speeds plain and with a draft, of transformers, and of llama.cpp where it is installed, whether all texts
    are equal, acceptance.

    Example: sakiyomi bench card FOLDER --draft model:DRAFT_FOLDER --out my-machine
    """
    with progress("loading") as status:
        from sakiyomi.evaluation.bench.card import card as run

        found = run(config, status.update)
    say(Path(found["page"]).read_text(encoding="utf-8"), f"written: {found['page']} and {found['json']}")
    output.emit(found)
