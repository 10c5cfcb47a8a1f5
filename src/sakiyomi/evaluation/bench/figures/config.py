"""What the report measures; the only home of these defaults. Imports no torch: the command line reads them."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.config import BenchConfig, PairSettings

PICTURES = ("png", "svg")
COUNT = re.compile(r"\d+(\.\d+)?[KMB]?", re.IGNORECASE)  # of parameters


@cache
def words() -> dict[str, dict[str, Any]]:
    """What ``figures.toml`` says of articles, sections and formulas; ``docs/articles/`` has a page each article."""
    return tomllib.loads(Path(__file__).with_name("figures.toml").read_text(encoding="utf-8"))


def article(name: str) -> dict[str, Any]:
    """Title and sections of an article, the sections in the order of its figures.

    Raises:
        InputError: there is none of this name.
    """
    known = words()["article"]
    if name not in known:
        raise InputError(f"there is no article {name!r}; articles are {', '.join(known)}")
    return dict(known[name])


@dataclass(frozen=True)
class ReportConfig(PairSettings):
    """A page of figures about a target and its drafts.

    Attributes:
        out: folder of the page; index.html, a picture a section for light and for dark, and data/ with all numbers.
        sections: sections to make (again for each), all if none is given: places, sizes, temperature, ranks, drafts,
            alphas, medusa, tree, several, rounds, expected, formulas, operations, traffic, lossless, heads,
            sparse, threshold, oracle, batch, tasks, memory, locret, kept, predicted.
        article: make the sections of one article: ntt, medusa, theory, huggingface, locret.
        redraw: measure nothing: draw all pictures and the page again from the numbers in the folder.
        again: measure again what the folder has already. Otherwise sections that were measured with these settings are
            kept, so that an interrupted run continues.
        pictures: png or svg.
        sizes: for sections sizes and medusa, further targets (again for each) beside the target as it is: checkpoints
            of one family, folder or hub id, with heads in FOLDER/medusa.
        temperatures: for section temperature (again for each).
        models: for sections drafts and alphas a folder of models of one tokenizer: the largest is a target, the others
            its drafts; for section several its smaller models are further drafts of the pair's target.
        predictions: for section predicted, what `tune --all --json` printed; measured here if not given.
        tasks: for section tasks, files of what `bench tasks --json` printed (again for each); the pair's own prompts,
            as chat, if none is given.
        memory_target: for sections memory, locret and kept, the model that answers long prompts.
        memory_lengths: for sections memory, locret and kept (of these two the last counts), tokens of the prompts
            (again for each).
        gamma: draft tokens a round, where it is not "auto" or what the section varies.
        max_new_tokens: new tokens of each text; of sections batch and tasks, which race many, 48 at most.
        count: maximum number of prompts; sections sizes, medusa, temperature and tasks, which race many ways, use two.
    """

    out: str = field(metadata={"argument": "OUT_FOLDER"})
    sections: tuple[str, ...] = ()
    article: str | None = None
    redraw: bool = False
    again: bool = False
    pictures: str = "png"
    sizes: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5)
    models: str | None = None
    predictions: str | None = None
    tasks: tuple[str, ...] = ()
    memory_target: str = "retriever"
    memory_lengths: tuple[str, ...] = ("1024", "4096")
    repeats: int = field(default=3, kw_only=True)
    max_new_tokens: int = field(default=96, kw_only=True)
    count: int = field(default=4, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sizes == ("none",):
            object.__setattr__(self, "sizes", ())
        for size in self.sizes:
            if COUNT.fullmatch(size) and not Path(size).is_dir():
                raise InputError(
                    f"size {size!r} is a number of parameters; expected a checkpoint. python benchmarks/inflate.py "
                    f"FOLDER --params {size} in the source repository writes a model of that size; give its FOLDER"
                )
        if not self.temperatures or min(self.temperatures) < 0:
            raise InputError(f"temperatures is {self.temperatures}; expected one or more, none below 0")
        if self.redraw and self.again:
            raise InputError("redraw measures nothing and again measures anew; leave one of the two out")
        if self.article is not None:
            if self.sections:
                raise InputError(f"article {self.article!r} is a list of sections; leave out sections, or the article")
            article(self.article)
        if self.pictures not in PICTURES:
            raise InputError(f"pictures is {self.pictures!r}; expected {' or '.join(PICTURES)}")

    def bench(self, **changed: Any) -> BenchConfig:
        """The settings as rows of ``bench`` take them, some of them changed."""
        return BenchConfig(**{name: getattr(self, name) for name in (*COMMON, "heads")} | changed)

    def wanted(self, known: Iterable[str]) -> tuple[str, ...]:
        """The sections that are asked for; ``known``: all of them."""
        if self.article is not None:
            return tuple(article(self.article)["sections"])
        return self.sections or tuple(known)

    def asked(self, more: tuple[str, ...]) -> dict[str, Any]:
        """Settings that a section depends on, as JSON values: what it measured before counts while they are the same.

        Args:
            more: fields that it reads beside the common ones.
        """
        found = {name: getattr(self, name) for name in (*COMMON, *more)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def command(self, section: str, more: tuple[str, ...]) -> str:
        """The command line that measures one section as here."""
        words = ["sakiyomi", "bench", "report", "OUT", "--sections", section]
        usual = {field.name: field.default for field in fields(self)}
        for name in (*COMMON, *more):
            value, flag = getattr(self, name), "--" + name.replace("_", "-")
            if value == usual[name]:
                continue
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{flag[2:]}")
            elif isinstance(value, tuple):
                words += [word for part in value or ("none",) for word in (flag, str(part))]
            else:
                words += [flag, str(value)]
        return shlex.join(words)


COMMON = tuple(field.name for field in fields(PairSettings) if field.name != "heads")
"""Settings that every section depends on; what else a section reads, it says itself."""
