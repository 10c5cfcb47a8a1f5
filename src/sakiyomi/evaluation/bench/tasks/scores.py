"""How right the answers to a task are, by the libraries that its field uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sakiyomi.core.errors import UnsupportedError

__all__ = ["scorer"]

Score = Callable[[Sequence[str], Sequence[Sequence[str]]], float]
"""Of answers and the right ones of each."""


def scorer(kind: str) -> tuple[str, Score] | None:
    """The name of a task's score, and what computes it; None: it has none.

    ``word_error_rate`` (lower is better; upper case, punctuation and spaces do not count; of several references the
    first counts), ``rouge_l`` (F measure, 0 to 100, of several references the best), ``bleu`` and, of code, of which
    nothing is run, ``chrf`` (0 to 100).

    Raises:
        UnsupportedError: its library is not installed.
    """
    found: dict[str, tuple[str, Callable[[], Score]]] = {
        "speech": ("word_error_rate", _word_errors),
        "summaries": ("rouge_l", _rouge),
        "translation": ("bleu", lambda: _sacrebleu("corpus_bleu")),
        "code": ("chrf", lambda: _sacrebleu("corpus_chrf")),
    }
    if kind not in found:
        return None
    name, make = found[kind]
    try:
        return name, make()
    except ImportError as error:
        raise UnsupportedError(
            f"{kind} are scored by {error.name}, which is not installed; pip install 'sakiyomi[tasks]'"
        ) from None


def _word_errors() -> Score:
    import jiwer

    plain: Any = jiwer.Compose(
        [jiwer.ToLowerCase(), jiwer.RemovePunctuation(), jiwer.RemoveMultipleSpaces(), jiwer.Strip()]
    )

    def score(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
        return float(jiwer.wer([plain(several[0]) for several in references], [plain(text) for text in answers]))

    return score


def _rouge() -> Score:
    from rouge_score.rouge_scorer import RougeScorer

    found: Any = RougeScorer(["rougeL"], use_stemmer=True)

    def score(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
        best = [
            max(found.score(right, text)["rougeL"].fmeasure for right in several)
            for text, several in zip(answers, references, strict=True)
        ]
        return float(100 * sum(best) / len(best))

    return score


def _sacrebleu(name: str) -> Score:
    import sacrebleu

    compute: Any = getattr(sacrebleu, name)

    def score(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
        most = max(map(len, references))
        columns = [[several[i] if i < len(several) else None for several in references] for i in range(most)]
        return float(compute(list(answers), columns).score)

    return score
