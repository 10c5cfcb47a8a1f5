"""Questions with their right answers, from a .jsonl or a folder of ``datasets``, and how right answers are.

Questions are texts, or sounds in parts. Answers are scored by libraries: jiwer, rouge-score, sacrebleu.
"""

from __future__ import annotations

import importlib
import io
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sakiyomi.core.audio import Audio
from sakiyomi.core.errors import InputError, LoadError, SakiyomiError, UnsupportedError
from sakiyomi.evaluation.bench.long.readers import read_object, read_rows

SLOWEST = 8000
"""Lowest sampling rate (samples a second) of speech, that of a telephone."""
STATE, SPLITS = "state.json", "dataset_dict.json"
"""Of a folder that ``datasets`` saved, and of one with several of them."""


@dataclass(frozen=True)
class Question:
    """One line of a file.

    Attributes:
        prompts: what the model is given; of a long sound the parts, one after the other.
        references: right answers; none: the task has no score.
    """

    prompts: tuple[str | Audio, ...]
    references: tuple[str, ...]


def read_questions(
    kind: str, path: Path, names: Mapping[str, str], count: int, *, language: str | None, seconds: float | None
) -> list[Question]:
    """The first questions of a file.

    Args:
        kind: of ``config.KINDS``.
        path: of a .jsonl, or of a folder that ``datasets`` saved.
        names: what the fields ``source``, ``audio`` and ``reference`` are called there.
        count: most of them.
        language: of the sounds.
        seconds: most that the model hears at once; longer sounds are cut at silences. None: it reads text.

    Raises:
        LoadError: the file, or a sound, cannot be read, or a line has nothing to ask.
        InputError: it holds nothing, has no references, or a sampling rate is too low for speech.
        UnsupportedError: it is a folder, and pyarrow is not installed.
    """
    rows = _saved(path) if path.is_dir() else read_rows(path, {})
    found = []
    for number, row in enumerate(itertools.islice(rows, count), start=1):
        where = f"row {number} of {str(path)!r}"
        references = _references(row.get(names["reference"]), where)
        if not references and kind != "chat":
            raise InputError(
                f"{where} has no {names['reference']!r}, by which {kind} are scored; add a text or a list of texts, or "
                "name the field with --columns reference=NAME"
            )
        prompts: tuple[str | Audio, ...]
        if kind == "speech":
            prompts = _sound(row.get(names["audio"]), path, where, language, seconds)
        else:
            source = row.get(names["source"])
            if not isinstance(source, str) or not source:
                raise LoadError(
                    f"{where} has no text as {names['source']!r}; name the field with --columns source=NAME"
                )
            prompts = (source,)
        found.append(Question(prompts, references))
    if not found:
        raise InputError(f"there is no question in {str(path)!r}; expected one or more")
    return found


def _references(value: Any, where: str) -> tuple[str, ...]:
    several = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(text, str) for text in several):
        raise LoadError(f"the reference of {where} is {value!r:.60}; expected a text or a list of texts")
    return tuple(text for text in several if text.strip())


def _sound(value: Any, path: Path, where: str, language: str | None, seconds: float | None) -> tuple[Audio, ...]:
    """The parts of a sound: of a file beside the questions, or as ``datasets`` holds it."""
    if isinstance(value, dict) and (value.get("bytes") or value.get("path")):
        file = io.BytesIO(value["bytes"]) if value.get("bytes") else value["path"]
    elif isinstance(value, str) and value:
        file = path.parent / value
    else:
        raise LoadError(f"{where} names no sound file; expected its path, or name the field with --columns audio=NAME")
    try:
        sound = Audio.read(file, language=language)
    except SakiyomiError as error:
        raise type(error)(f"the sound of {where}: {error.message}") from None
    if sound.sampling_rate < SLOWEST:
        raise InputError(
            f"the sound of {where} has {sound.sampling_rate} samples a second; speech needs {SLOWEST} or more: "
            "record it anew, or correct the rate in the file"
        )
    if seconds is None:
        raise InputError(f"{where} is a sound, and the target reads text; load a speech model (whisper)")
    return tuple(sound.split(seconds, at_silences=True))


def _saved(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a folder that ``datasets`` saved, as they are stored: sounds in their own files' bytes."""
    if (path / SPLITS).is_file():
        splits = read_object(path / SPLITS).get("splits", [])
        if len(splits) != 1:
            raise InputError(f"{str(path)!r} has the splits {', '.join(splits)}; give the folder of one of them")
        path = path / splits[0]
    if not (path / STATE).is_file():
        raise LoadError(f"{str(path)!r} is no folder that datasets saved (save_to_disk); give one, or a .jsonl")
    try:
        from pyarrow import ArrowInvalid, ipc
    except ImportError:
        raise UnsupportedError(
            f"{str(path)!r} is a folder of datasets, which pyarrow reads; pip install 'sakiyomi[tasks]', "
            "or give a .jsonl"
        ) from None
    for part in read_object(path / STATE).get("_data_files", []):
        file = path / part["filename"]
        try:
            with file.open("rb") as stream:
                for batch in ipc.open_stream(stream):
                    yield from batch.to_pylist()
        except (OSError, ArrowInvalid) as error:
            raise LoadError(f"{str(file)!r} cannot be read ({error}); save the dataset again") from None


Score = Callable[[Sequence[str], Sequence[Sequence[str]]], float]
"""Of answers and the right ones of each."""


def _word_errors(jiwer: Any, answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Word error rate, lower is better; case, punctuation and spaces do not count. Of several references the first."""
    plain = jiwer.Compose([jiwer.ToLowerCase(), jiwer.RemovePunctuation(), jiwer.RemoveMultipleSpaces(), jiwer.Strip()])
    return float(jiwer.wer([plain(several[0]) for several in references], [plain(text) for text in answers]))


def _rouge(scorer: Any, answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """F measure of ROUGE-L, 0 to 100; of several references the best."""
    found = scorer.RougeScorer(["rougeL"], use_stemmer=True)
    pairs = zip(answers, references, strict=True)
    return statistics.fmean(100 * found.score_multi(several, text)["rougeL"].fmeasure for text, several in pairs)


def _corpus(name: str, sacrebleu: Any, answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """A score of sacrebleu over all texts, 0 to 100."""
    columns = itertools.zip_longest(*references)  # one for each reference of a text; None where a text has fewer
    return float(getattr(sacrebleu, name)(list(answers), [*map(list, columns)]).score)


SCORES: dict[str, tuple[str, str, Callable[[Any, Sequence[str], Sequence[Sequence[str]]], float]]] = {
    "speech": ("word_error_rate", "jiwer", _word_errors),
    "summaries": ("rouge_l", "rouge_score.rouge_scorer", _rouge),
    "translation": ("bleu", "sacrebleu", partial(_corpus, "corpus_bleu")),
    "code": ("chrf", "sacrebleu", partial(_corpus, "corpus_chrf")),  # nothing is run
}
"""By kind of task the name of its score, the library that has it, and what computes it."""


def scorer(kind: str) -> tuple[str, Score] | None:
    """The name of a task's score, and what computes it; None: it has none.

    Raises:
        UnsupportedError: its library is not installed.
    """
    if kind not in SCORES:
        return None
    name, library, compute = SCORES[kind]
    try:
        return name, partial(compute, importlib.import_module(library))
    except ImportError:
        raise UnsupportedError(
            f"{kind} are scored by {library.partition('.')[0]}, which is not installed; pip install 'sakiyomi[tasks]'"
        ) from None
