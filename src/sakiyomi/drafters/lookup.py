"""Prompt lookup: proposes what followed the last tokens earlier (Saxena 2023, "prompt lookup decoding").

The longest match is used, the newest of equally long ones. All runs of up to ``most`` tokens are in hash tables that
grow with the text, so no round has to search it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sakiyomi.core.errors import InputError
from sakiyomi.drafters.base import Context, DrafterContext
from sakiyomi.drafters.guessed_tree import GuessedTree
from sakiyomi.drafters.native_texts import doubles
from sakiyomi.drafters.text_base import Reader, TextDrafter

MOST = 12
# Share of tokens that the longest match predicts rightly, by its length (0, 1, ...): of the first token, and of later
# ones where those before them were right (their match is longer by as many); benchmarks/lookup_core.py prints them.
FIRST = (0.0, 0.22, 0.43, 0.56, 0.63, 0.72, 0.77, 0.80, 0.82, 0.84, 0.86, 0.88, 0.90)
LATER = (0.0, 0.40, 0.52, 0.60, 0.66, 0.75, 0.79, 0.82, 0.85, 0.87, 0.88, 0.90, 0.92)

Place = tuple[int, int]
"""Length of the match, and how many tokens were guessed behind it."""


def _priors(most: int) -> list[float]:
    """Chances of guesses by the length of the match, of first tokens and of later ones."""
    lengths = [min(length, len(FIRST) - 1) for length in range(most + 1)]
    return [priors[length] for priors in (FIRST, LATER) for length in lengths]


class LookupReader(Reader):
    """The runs of tokens in one text.

    Args:
        most: longest run that is compared.
    """

    def __init__(self, most: int = MOST) -> None:
        super().__init__(_priors(most))
        self.text: list[int] = []
        self._most, self._start = most, 0
        self._after: list[dict[int, int]] = [{} for _ in range(most)]  # place behind the newest run, by its number
        self._runs: list[int] = []  # numbers of the runs that end here: of the last token, of the last two, ...

    def read(self, tokens: Sequence[int]) -> None:
        """See ``Reader.read``."""
        for position, token in enumerate(tokens, start=len(self.text)):
            # A run is entered when its next token is known, so the last run never finds itself.
            for table, run in zip(self._after, self._runs, strict=False):
                table[run] = position
            self._runs = self._behind(token)
        self.text.extend(tokens)

    def _behind(self, token: int) -> list[int]:
        """Numbers of the runs that end with this token, behind those that end here."""
        return [token + 1, *((run << 32) | (token + 1) for run in self._runs[: self._most - 1])]

    def branch(self, head: Sequence[int]) -> None:
        """See ``Reader.branch``."""
        self._runs = []
        for token in head[-self._most :]:
            self._runs = self._behind(token)

    def match(self) -> tuple[int, int]:
        """Length of the longest run of last tokens that occurred before, and the position after it."""
        for length in range(len(self._runs), 0, -1):
            place = self._after[length - 1].get(self._runs[length - 1])
            if place is not None:
                return length, place
        return 0, 0

    def guess(self, context: Context, depth: int) -> GuessedTree:
        """See ``Reader.guess``."""
        length, self._start = self.match()
        return self._grow((length, 0), context, depth) if length else GuessedTree()

    def expand(self, place: Place) -> list[tuple[int, float, Place]]:
        """See ``Reader.expand``."""
        length, guessed = place
        # If the match overlaps the end of the text, the text repeats itself, and so does the draft.
        token = self.text[self._start + guessed % (len(self.text) - self._start)]
        kind = min(length + guessed, self._most) + (self._most + 1 if guessed else 0)
        behind = length, guessed + 1
        self._note(place, kind, token, behind)
        return [(token, self.calibration.chances[kind], behind)]


class PromptLookup(TextDrafter):
    """Drafts what followed the longest and newest match of the last tokens in prompt and output.

    Args:
        most: longest match that is looked for.

    Raises:
        InputError: it is no whole number of at least 1.
    """

    name = "prompt-lookup"
    compiled = True

    def __init__(self, most: int | str = MOST) -> None:
        if not str(most).isdecimal() or not 1 <= int(most) <= 64:
            raise InputError(
                f"prompt-lookup:{most} names no length; expected the tokens of the longest match, 1 to 64, for "
                f"instance prompt-lookup:{MOST}"
            )
        self.most = int(most)

    @classmethod
    def make(cls, argument: str | None, around: DrafterContext) -> PromptLookup:
        """A drafter that looks for matches of up to so many tokens."""
        return cls(argument or MOST)

    def add_reader(self, text: int, context: Context) -> None:
        """See ``TextDrafter.add_reader``."""
        self.kernels.sk_read_lookup(text, self.most, doubles(_priors(self.most)))

    def reader(self, context: Context) -> LookupReader:
        """See ``TextDrafter.reader``."""
        return LookupReader(self.most)
