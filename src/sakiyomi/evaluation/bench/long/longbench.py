"""LongBench's files (Bai et al. 2023, arXiv 2308.14508), with the templates of the user's own copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.evaluation.bench.long import metrics
from sakiyomi.evaluation.bench.long.files import Item, read_object, read_rows, require

__all__ = ["METRICS", "read_longbench"]


def _over(metric: Callable[..., float], **options: Any) -> Callable[[str, str, Sequence[str]], float]:
    """A rule that needs no list of classes."""

    def score(text: str, answer: str, classes: Sequence[str]) -> float:
        return metric(text, answer, **options)

    return score


_QA, _QA_ZH = _over(metrics.f1), _over(metrics.f1, characters=True)
_ROUGE, _ROUGE_ZH = _over(metrics.rouge_l), _over(metrics.rouge_l, characters=True)
_RETRIEVAL, _CODE = _over(metrics.retrieval), _over(metrics.code_similarity)

METRICS: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    "narrativeqa": _QA,
    "qasper": _QA,
    "multifieldqa_en": _QA,
    "multifieldqa_zh": _QA_ZH,
    "hotpotqa": _QA,
    "2wikimqa": _QA,
    "musique": _QA,
    "dureader": _ROUGE_ZH,
    "gov_report": _ROUGE,
    "qmsum": _ROUGE,
    "multi_news": _ROUGE,
    "vcsum": _ROUGE_ZH,
    "trec": metrics.classification,
    "triviaqa": _QA,
    "samsum": _ROUGE,
    "lsht": metrics.classification,
    "passage_count": _over(metrics.count),
    "passage_retrieval_en": _RETRIEVAL,
    "passage_retrieval_zh": _RETRIEVAL,
    "lcc": _CODE,
    "repobench-p": _CODE,
}
"""The rule of each task."""
FIRST_LINE = {"trec", "triviaqa", "samsum", "lsht"}
"""Few-shot tasks: a model goes on with the next example, and only its first line is the answer."""


def read_longbench(path: Path, templates: Path | None = None) -> Iterator[Item]:
    """Questions of ``{input, context, answers, all_classes, dataset}`` rows; an answer's score is the best over
    ``answers``.

    Args:
        path: a .jsonl file.
        templates: folder with ``dataset2prompt.json`` and ``dataset2maxlen.json`` (longer names that end so will do);
            None: that of the file.

    Raises:
        LoadError: a file cannot be read.
        InputError: a task is not known, or has no template.
    """
    folder = path.parent if templates is None else templates
    prompts, lengths = (read_object(_find(folder, name)) for name in ("dataset2prompt.json", "dataset2maxlen.json"))
    for row in read_rows(path, needs=("input", "context", "answers", "dataset")):
        name = str(row["dataset"])
        task = name.removesuffix("_e")  # of LongBench-E, which has the same tasks at even lengths
        if task not in METRICS or task not in prompts or task not in lengths:
            raise InputError(f"dataset {name!r} in {str(path)!r} is not known; known are {', '.join(METRICS)}")
        answers = [str(answer) for answer in require(row, "answers", list, path)]
        classes = [str(each) for each in row.get("all_classes") or ()]
        prompt = str(prompts[task]).replace("{context}", str(row["context"])).replace("{input}", str(row["input"]))
        score = partial(_score, task=task, answers=answers, classes=classes)
        yield Item(task, prompt, int(lengths[task]), score)


def _score(text: str, task: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    if task in FIRST_LINE:
        text = text.lstrip("\n").split("\n")[0]
    return max((METRICS[task](text, answer, classes) for answer in answers), default=0.0)


def _find(folder: Path, name: str) -> Path:
    if (folder / name).is_file():
        return folder / name
    found = sorted(folder.glob(f"*{name}")) if folder.is_dir() else []
    if not found:
        raise LoadError(
            f"there is no {name} in {str(folder)!r}; it is in LongBench's folder config, and --templates names its "
            "folder"
        )
    return found[0]
