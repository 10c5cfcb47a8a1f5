"""Articles whose figures the report makes from the reader's own models; ``docs/articles/`` has a page for each.

A new figure of an article is a section (``run.SECTIONS``) and its name here. Imports no torch: the command line
reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sakiyomi.core.errors import InputError

__all__ = ["ARTICLES", "Article", "article", "articles_of"]


@dataclass(frozen=True)
class Article:
    """An article.

    Attributes:
        title: what it is about, and whose it is.
        sections: of the report, in the order of its figures.
    """

    title: str
    sections: tuple[str, ...]


ARTICLES: dict[str, Article] = {
    "ntt": Article(
        "NTT Communications: assisted generation and token tree verification",
        ("places", "sizes", "temperature", "ranks", "tree", "several"),
    ),
    "medusa": Article(
        "Medusa: several heads in place of a draft model", ("medusa", "heads", "sparse", "threshold", "temperature")
    ),
    "theory": Article(
        "The theory of speculative decoding, after Leviathan et al.",
        ("formulas", "operations", "traffic", "alphas", "drafts", "expected", "rounds", "lossless"),
    ),
    "huggingface": Article("Hugging Face: assisted generation", ("batch", "oracle", "tasks", "temperature", "sizes")),
    "locret": Article("Locret: retaining heads for long contexts", ("locret", "kept", "memory")),
}


def article(name: str) -> Article:
    """The article of this name.

    Raises:
        InputError: there is none.
    """
    if name not in ARTICLES:
        raise InputError(f"there is no article {name!r}; articles are {', '.join(ARTICLES)}")
    return ARTICLES[name]


def articles_of(section: str) -> list[str]:
    """Names of the articles that have this figure."""
    return [name for name, one in ARTICLES.items() if section in one.sections]
