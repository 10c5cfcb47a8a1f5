"""``sakiyomi bench report``: measures the sections, keeps their numbers as JSON, draws them and writes one page.

A new section is a function that measures, named in ``MEASURES``, and its words and panels in ``figures.toml``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.files import whole_file
from sakiyomi.drafters.medusa_heads.backbone import check_heads
from sakiyomi.drafters.medusa_heads.formats import read_heads
from sakiyomi.engine import machine
from sakiyomi.evaluation.bench.config import Note, silent
from sakiyomi.evaluation.bench.figures import alphas, commands, guesses, speeds, theory
from sakiyomi.evaluation.bench.figures.config import COMMON, ReportConfig, article, words
from sakiyomi.evaluation.bench.figures.page import Section, Shown, page
from sakiyomi.evaluation.bench.figures.work import Work
from sakiyomi.evaluation.bench.long.plot import check
from sakiyomi.evaluation.bench.pictures import THEMES, picture
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.study import attempted
from sakiyomi.model_executor.loading.families import read_config, text_config

MEASURES: dict[str, Callable[[Work], Row]] = {
    measure.__name__.removesuffix("_of"): measure
    for measure in (
        *(guesses.places, guesses.ranks, guesses.tree, guesses.rounds, guesses.heads, guesses.sparse),
        *(guesses.threshold, speeds.sizes, speeds.temperature, speeds.medusa, speeds.several, alphas.drafts),
        *(alphas.alphas, theory.expected, theory.formulas, theory.operations, theory.traffic_of, theory.lossless),
        *(commands.oracle, commands.batch, commands.tasks, commands.memory, commands.locret, commands.kept),
        commands.predicted,
    )
}
SECTIONS = {name: Section.declared(MEASURES[name], own) for name, own in words()["section"].items()}
"""In the order of the page."""


def run(config: ReportConfig, note: Note = silent) -> Iterator[Row]:
    """Give each section's numbers when it is done; one that fails says so, and the others run.

    After each, its pictures and the page are written, so that what was measured is there whenever a run ends.

    Raises:
        InputError: a section is not known, the folder cannot be written, or there is nothing to draw again.
        UnsupportedError: matplotlib is not installed, or the heads are another model's.
        LoadError: what is in the folder is damaged, or a file or heads are not there.
    """
    unknown = [name for name in config.sections if name not in SECTIONS]
    if unknown:
        raise InputError(f"there is no section {unknown[0]!r}; sections are {', '.join(SECTIONS)}")
    folder = Path(config.out)
    kept = _kept(folder)
    wanted = config.wanted(SECTIONS)
    if not config.redraw:
        _check_given(config, {*COMMON, *(name for section in wanted for name in SECTIONS[section].reads)})
    check(config.out, "out")
    if config.redraw:
        wanted = tuple(name for name in wanted if name in kept)
        if not wanted:
            raise InputError(f"{config.out} holds no numbers of these sections; leave redraw out to measure them")

    def rows() -> Iterator[Row]:
        work = Work(config, note)
        for number, name in enumerate(wanted, start=1):
            asked, record = config.asked(SECTIONS[name].reads), kept.get(name)
            # Failed sections are measured again.
            same = record is not None and record["asked"] == asked and record["row"]["error"] is None
            if not config.redraw and (config.again or not same):
                place = f"section {number} of {len(wanted)}"
                work.begin(name, lambda text, place=place: note(f"{place}, {text}"))  # type: ignore[misc]
                kept[name] = _measured(name, work)
                _write(folder / "data" / f"{name}.json", json.dumps(kept[name], indent=1).encode())
            row = _row(kept[name])
            _draw(folder, name, row, config.pictures)
            _write(folder / "index.html", _page(folder, kept, config).encode())
            yield row

    return rows()


def _check_given(config: ReportConfig, reads: Set[str]) -> None:
    """Refuse files that are not there, and heads of another model, before anything is measured.

    Args:
        config: the settings.
        reads: names of settings that the sections read.

    Raises:
        LoadError, UnsupportedError: see ``run``.
    """
    for name in sorted(reads & {"prompts", "models", "predictions", "tasks"}):
        value = getattr(config, name)
        for given in [value] if isinstance(value, str) else value or ():
            if not Path(given).expanduser().exists():
                raise LoadError(f"{name}: there is no file or folder {given!r}; check the path")
    target = folder_of(config.target)
    if config.heads is not None and "heads" in reads and target.is_dir():  # else its sizes are not known yet
        sizes, heads = text_config(read_config(target)), read_heads(folder_of(config.heads)).heads
        check_heads(heads, int(sizes.hidden_size), int(sizes.vocab_size), config.heads)


def _measured(name: str, work: Work) -> dict[str, Any]:
    """A section's numbers with its settings, command and machine, as JSON values."""
    section, config = SECTIONS[name], work.report
    work.note(section.title)
    if config.again:
        work.forget()
    row = attempted(name, section.title, lambda: section.measure(work))
    if not row.title:
        row = replace(row, title=section.numbers)
    return {
        "asked": config.asked(section.reads),
        "command": config.command(name, section.reads),
        "machine": machine.conditions(),
        "row": row.to_dict(),
    }


def _kept(folder: Path) -> dict[str, dict[str, Any]]:
    """What earlier runs measured, by section, in the order of the page."""
    found = {}
    for name in SECTIONS:
        path = folder / "data" / f"{name}.json"
        if path.is_file():
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                _row(record), record["asked"], record["command"], record["machine"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise LoadError(
                    f"{path} is damaged ({error!r}); delete it, and the section is measured again"
                ) from None
            found[name] = record
    return found


def _row(record: dict[str, Any]) -> Row:
    row = dict(record["row"])
    return Row(row["row"], row["title"], row["lines"], row["conditions"], row["notes"], row["error"])


def _draw(folder: Path, name: str, row: Row, kind: str) -> None:
    for theme in THEMES:
        path = _place(folder, name, theme.name, kind)
        if row.error is None:
            _write(path, picture(SECTIONS[name].paint, row, theme, kind, SECTIONS[name].title))
        else:
            path.unlink(missing_ok=True)


def _place(folder: Path, name: str, theme: str, kind: str) -> Path:
    return folder / f"{name}{'' if theme == 'light' else '-' + theme}.{kind}"


def _page(folder: Path, kept: dict[str, dict[str, Any]], config: ReportConfig) -> str:
    """Of all that the folder holds; where an article is asked for, its sections in its order."""
    shown, kind = [], config.pictures
    for name in config.wanted(SECTIONS) if config.article else SECTIONS:
        if name not in kept:
            continue
        section = SECTIONS[name]
        row, record = _row(kept[name]), kept[name]
        places = {theme.name: _place(folder, name, theme.name, kind) for theme in THEMES}
        if row.error is None and not all(path.is_file() for path in places.values()):
            _draw(folder, name, row, kind)
        pictures = {theme: path.read_bytes() for theme, path in places.items() if row.error is None}
        shown.append(Shown(name, section, row, record["command"], record["machine"], pictures, kind))
    title = article(config.article)["title"] if config.article else "Reading ahead"
    return page(f"{title}, measured here", shown)


def _write(path: Path, content: bytes) -> None:
    with whole_file(path, "give another folder") as fresh:
        fresh.write_bytes(content)
