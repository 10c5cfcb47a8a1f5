"""The file of a draft model that learns from its user's texts: changes of rows of its head.

Its line of JSON (see ``core.sealed``) has the draft's digest, the width of a row, and the numbers of tokens and texts
that were learnt from. Its content is the tokens whose rows have changed (4 bytes each), the sums of the states' second
moments (float32) and the changes (float16, a row for each token). The file reveals what the user's texts were about, so
only its owner may read it. Several processes may share one: each adds its own changes to those in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sakiyomi.core.errors import LoadError
from sakiyomi.core.sealed import SealedFile, SealedKind

KIND = SealedKind(b"SAKILRN\n", 1, "file of a draft that learns")
_INTEGERS, _CHANGES, _MOMENTS = "<u4", "<f2", "<f4"


@dataclass
class Learned:
    """Changes of a head's rows.

    Attributes:
        draft: digest of the head as it was trained.
        tokens: whose rows have changed, (rows,), ascending.
        changes: of them, (rows, width) float32.
        moments: sums of products of the states that the head has read, (width, width) float32.
        texts, seen: texts and tokens that were learnt from.
    """

    draft: str
    tokens: NDArray[np.int64]
    changes: NDArray[np.float32]
    moments: NDArray[np.float32]
    texts: int = 0
    seen: int = 0

    @classmethod
    def nothing(cls, draft: str, width: int) -> Learned:
        """No changes yet."""
        return cls(draft, np.zeros(0, np.int64), np.zeros((0, width), np.float32), np.zeros((width, width), np.float32))

    def plus(self, mine: Learned, before: Learned) -> Learned:
        """These changes and what is new in another's, compared to an earlier state."""
        tokens = np.union1d(self.tokens, mine.tokens)
        changes = np.zeros((len(tokens), mine.changes.shape[1]), np.float32)
        for part, sign in ((self, 1.0), (mine, 1.0), (before, -1.0)):
            changes[np.searchsorted(tokens, part.tokens)] += np.float32(sign) * part.changes
        moments = self.moments + mine.moments - before.moments
        texts, seen = self.texts + mine.texts - before.texts, self.seen + mine.seen - before.seen
        return Learned(mine.draft, tokens, changes, moments, texts, seen)


def read_learned(path: Path) -> Learned:
    """Read and check a file.

    Raises:
        LoadError: it cannot be read, is none, is of another format version, or is damaged.
    """
    header, body = KIND.read(path)
    count, width = int(header["rows"]), int(header["width"])
    tokens = np.frombuffer(body, _INTEGERS, count).astype(np.int64)
    place = 4 * (count + width * width)
    moments = np.frombuffer(body, _MOMENTS, width * width, 4 * count).astype(np.float32).reshape(width, width)
    changes = np.frombuffer(body, _CHANGES, count * width, place).astype(np.float32).reshape(count, width)
    return Learned(header["draft"], tokens, changes, moments, int(header["texts"]), int(header["seen"]))


class LearnedFile(SealedFile):
    """A file that a draft reads, and adds to.

    Args:
        path: of the file, which is made when there is something to write.
        draft: digest of the draft's head.
        width: of its rows.
        vocab_size: their number.

    Attributes:
        known: what the file held when it was last read or written.

    Raises:
        LoadError: see ``read_learned``; or it is another draft's, or its folder is not there.
    """

    def __init__(self, path: str | Path, draft: str, width: int, vocab_size: int) -> None:
        super().__init__(path, whose=" of a draft that learns")
        self._draft, self._width, self._vocab_size = draft, width, vocab_size
        self.known = self._read()

    def save(self, mine: Learned) -> Learned:
        """Write what was learnt since ``known``, on top of what is in the file now; returns both together.

        Raises:
            LoadError: the file was damaged meanwhile, or cannot be written.
        """
        with self._writing():
            there = self._read()
            alike = (there.texts, there.seen) == (self.known.texts, self.known.seen)  # unchanged by others
            both = mine if alike else there.plus(mine, self.known)
            header = {
                "draft": both.draft, "width": self._width, "rows": len(both.tokens), "texts": both.texts,
                "seen": both.seen,
            }  # fmt: skip
            parts = both.tokens.astype(_INTEGERS), both.moments.astype(_MOMENTS), both.changes.astype(_CHANGES)
            KIND.write(self.path, header, b"".join(part.tobytes() for part in parts))
        self.known = both
        return both

    def _read(self) -> Learned:
        if not self.path.exists():
            return Learned.nothing(self._draft, self._width)
        found = read_learned(self.path)
        if (found.draft, found.changes.shape[1]) != (self._draft, self._width):
            raise LoadError(
                f"the file {self.path} was learnt by another draft ({found.draft[:12]}, this one is "
                f"{self._draft[:12]}); give each draft a file of its own"
            )
        if len(found.tokens) and int(found.tokens[-1]) >= self._vocab_size:
            raise LoadError(
                f"the file {self.path} changes rows up to {found.tokens[-1]}, and the draft's head has "
                f"{self._vocab_size}; give it a file of its own"
            )
        return found
