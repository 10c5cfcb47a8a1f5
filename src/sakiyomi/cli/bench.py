"""``sakiyomi bench``: side-by-side measurements on this machine, and models to measure on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sakiyomi.cli.common import JsonOption
from sakiyomi.cli.output import note, progress, say
from sakiyomi.cli.rows import PlotOption, Started, measured, show
from sakiyomi.core.errors import InputError
from sakiyomi.core.memory import readable
from sakiyomi.evaluation.bench.config import BenchConfig, CardConfig, InflateConfig, Note
from sakiyomi.evaluation.bench.figures.config import ReportConfig
from sakiyomi.evaluation.bench.long.config import LocretConfig, LongConfig
from sakiyomi.evaluation.bench.spec.config import CompareConfig, MergeConfig, SpecConfig
from sakiyomi.evaluation.bench.tasks.config import TasksConfig
from sakiyomi.scale.cluster import WorkersOption


@dataclass(frozen=True)
class PlotFolderOption:
    """Where the pictures go.

    Attributes:
        plot: folder for pictures of the rows (needs matplotlib); made if it is not there.
    """

    plot: str | None = None


def bench(config: BenchConfig, picture: PlotOption, output: JsonOption) -> None:
    """Measure speed side by side.

    Interleaved laps, medians, equal outputs checked in the same run. Of our own contenders: draft, score and rest in
    ms a round; KV, keys and values of the largest pass; bw, what decoding passes of the target read, as a share of the
    memory's measured speed.

    Example: sakiyomi bench --model FOLDER --draft model:DRAFT_FOLDER
    """

    def start(note: Note) -> Started:
        from sakiyomi.evaluation.bench import plot, suites

        if picture.plot is not None:
            if config.rows and suites.TABLES.issuperset(config.rows):
                raise InputError(f"plot has nothing to draw of {', '.join(config.rows)}; ask for another row too")
            plot.check(picture.plot)
        return suites.run(config, note), plot.draw

    measured(start, output, picture.plot)


def long(config: LongConfig, pictures: PlotFolderOption, output: JsonOption) -> None:
    """Compare cache systems on long contexts.

    Every system answers the same prompts: right answers, keys and values, peak memory, speed. Then how memory grows
    with the length; of books perplexity and agreement with the full cache; of turns one conversation that grows.

    Example: sakiyomi bench long --model FOLDER
    """

    def start(note: Note) -> Started:
        from sakiyomi.evaluation.bench.long import plot
        from sakiyomi.evaluation.bench.long.run import run

        if pictures.plot is not None:
            plot.check(pictures.plot)
        return run(config, note, pictures=pictures.plot), plot.draw

    measured(start, output, pictures.plot)


def spec(config: SpecConfig, shared: WorkersOption, picture: PlotOption, output: JsonOption) -> None:
    """Compare drafters on questions of several kinds, as Spec-Bench does.

    Greedy, one request at a time, everyone by turns on each question; every answer is compared with the plain one.
    Speed-ups are over plain decoding beside it, the prompt's pass included; decode is the speed-up behind the prompt,
    tau the mean accepted tokens. Workers share the questions, each of which one of them has everyone answer; they must
    be equal machines, one worker each.

    Example: sakiyomi bench spec --model FOLDER --draft suffix
    """

    def start(note: Note) -> Started:
        from sakiyomi.evaluation.bench.spec.run import run
        from sakiyomi.evaluation.bench.spec.table import draw

        _check(picture)
        if shared.count is None:
            return run(config, note), draw
        from sakiyomi.scale.questions import share

        return run(config, note, share(shared)), draw

    measured(start, output, picture.plot)


def _check(picture: PlotOption) -> None:
    from sakiyomi.evaluation.bench import plot

    if picture.plot is not None:
        plot.check(picture.plot)


def tasks(config: TasksConfig, picture: PlotOption, output: JsonOption) -> None:
    """Measure a pair on its own tasks.

    Speech, summaries, translation, code and chat, by dtype (int8 and weights on the disk too) and temperature: plain
    and drafted, ours and transformers', with the score of the answers.

    Example: sakiyomi bench tasks summaries=articles.jsonl --target FOLDER --draft model:FOLDER
    """

    def start(note: Note) -> Started:
        from sakiyomi.evaluation.bench.tasks.run import draw, run

        _check(picture)
        return run(config, note), draw

    measured(start, output, picture.plot)


def locret(config: LocretConfig, pictures: PlotFolderOption, output: JsonOption) -> None:
    """Make the tables of the article on Locret.

    What fits in which memory on paper; then every system, as published, on the same prompts: memory and score, speed,
    keys and values in 4 bits, the combination with LoCoCo. With --plot also what each kept of one prompt.

    Example: sakiyomi bench locret --target retriever --heads retriever-retaining
    """

    def start(note: Note) -> Started:
        from sakiyomi.evaluation.bench.long import plot
        from sakiyomi.evaluation.bench.long.locret import run

        if pictures.plot is not None:
            plot.check(pictures.plot)
        return run(config, note, pictures=pictures.plot), plot.draw

    measured(start, output, pictures.plot)


def compare(config: CompareConfig, output: JsonOption) -> None:
    """Put result files side by side.

    On the questions and drafters that all of them have: another machine, another version, other settings.

    Example: sakiyomi bench spec compare here.json there.json
    """
    from sakiyomi.evaluation.bench.spec.results import Results
    from sakiyomi.evaluation.bench.spec.table import compared

    with progress("reading") as status:
        several = [Results.read(path) for path in config.files]
        row = compared(several)
        show([row], {}, status)
    output.emit({"files": list(config.files), "rows": [row.to_dict()]})


def merge(config: MergeConfig, picture: PlotOption, output: JsonOption) -> None:
    """Show result files as one table, and write them into one file.

    Parts of one measurement: other questions, other drafters, the same settings and machine. With one file its table
    is shown again.

    Example: sakiyomi bench spec merge a.json b.json
    """
    from sakiyomi.evaluation.bench.spec.results import Results, join
    from sakiyomi.evaluation.bench.spec.table import draw, rows

    _check(picture)
    if config.out is not None and Path(config.out).expanduser().exists():
        raise InputError(f"out is {config.out!r}, which is there already; name a new file")
    joined = join([Results.read(path) for path in config.files])
    tables = rows(joined)
    if config.out is not None:
        joined.path = Path(config.out).expanduser()
        joined.write()
    measured(lambda note: (tables, draw), output, picture.plot, doing="reading", conditions=joined.conditions)


def report(config: ReportConfig, output: JsonOption) -> None:
    """Make a page of figures from measurements here.

    Time by model size and temperature, ranks, alpha by draft, trees, rounds, the formulas beside measured points,
    Medusa, accuracy by memory, predictions: one HTML page that needs no other file, and pictures. Numbers are kept; a
    run that was broken off goes on.

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
            note(f"what was measured until now is on {page}; the same command goes on with the rest")
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


def inflate(config: InflateConfig, output: JsonOption) -> None:
    """Write a larger model that computes what a small one does.

    Real acceptance at a real size: new layers, heads and units are random inside and add nothing. It is checked before
    it is there.

    Example: sakiyomi bench inflate large-tales --params 134M
    """
    with progress("loading") as status:
        from sakiyomi.evaluation.bench.inflate import inflate as run

        found = run(config, status.update)
    say(
        f"{found['folder']}: the function of {found['from']} at {found['parameters'] / 1e6:.0f}M parameters, "
        f"{readable(found['bytes'])}, made in {found['seconds']:.0f} s",
        f"  {found['layers']} layers, hidden size {found['hidden_size']}, {found['heads']} heads, {found['kv_heads']} "
        f"key heads, {found['intermediate_size']} MLP units",
        f"  checked in float32: logits differ by {found['largest_logit_difference']:.2g} at most, "
        f"{found['equal_greedy_tokens']} of {found['equal_greedy_tokens']} greedy tokens are equal; random activations "
        f"reach {found['random_to_real_activations']:.2f} of the real ones",
    )
    output.emit(found)
