"""Pages say what is there: links lead somewhere, commands are taken, named tests exist, the site has each page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from sakiyomi.cli import app

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "benchmarks" / "log").glob("*.md"))]
GENERATED = DOCS / "cli.md"  # by docs/make_cli.py, when the site is built
ASKED = (DOCS / "asked-elsewhere.md").read_text(encoding="utf-8")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_taken(command: str) -> None:
    """The command line parses it: commands, flags, values. Nothing runs."""
    words = shlex.split(command, comments=True)[1:]
    at, context = get_command(app), None
    while words and words[0] in getattr(at, "commands", {}):
        at, word = at.commands[words[0]], words.pop(0)
        context = typer.Context(at, info_name=word, parent=context)
    at.make_context(command, words, parent=context)


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^```(.*?)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    code = "\n".join(text for kind, text in blocks if (kind or "sh").split()[0] in ("sh", "bash"))
    lines = code.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("sakiyomi ") and not re.search(r"[|<>]|\.\.\.", line)]


@pytest.mark.few(4)
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_are_taken(page: Path) -> None:
    for command in commands(page):
        try:
            is_taken(command)
        except Exception as error:
            pytest.fail(f"{command}: {error}")


ARTICLES = sorted(page for page in (DOCS / "articles").glob("*.md") if "." in page.stem)


def tables(page: Path) -> list[int]:
    """Rows of each table of a page, in order."""
    found, before = [], ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append(0)
            found[-1] += 1
        before = line
    return found


@pytest.mark.parametrize("page", ARTICLES, ids=named)
def test_an_article_in_its_own_language_has_the_rows_and_pictures_of_the_english_page(page: Path) -> None:
    english = page.with_name(page.name.split(".")[0] + ".md")
    assert tables(page) == tables(english)
    pictures = [re.findall(r"\]\(([^)]+\.svg)\)", one.read_text(encoding="utf-8")) for one in (page, english)]
    assert pictures[0] == pictures[1]


def rows() -> list[list[str]]:
    lines = [line for line in ASKED.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.few(8)
@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_what_was_asked_elsewhere_has_a_command_and_a_test(row: list[str]) -> None:
    asked, where, _, command, test = row
    assert asked and re.search(r"#\d+", where)
    command, (file, _, name) = command.strip("`"), test.strip("`").partition("::")
    if command.startswith("sakiyomi "):
        is_taken(command)
    else:
        assert (ROOT / command.split()[1]).exists()
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def places(page: Path) -> set[str]:
    """What a link to a page can name behind a #: its headings, as sites and GitHub write them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in shown}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for file, place in re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        there = (page.parent / file).resolve() if file else page
        assert there.exists() or (there == GENERATED and page.parent == DOCS), file
        assert not place or there.suffix != ".md" or there == GENERATED or place in places(there), f"{file}#{place}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=named)
def test_a_page_is_short(page: Path) -> None:
    """At most 30 kB: longer pages are not read. The generated page of commands is no page that somebody writes."""
    assert page == GENERATED or page.stat().st_size <= 30_000
