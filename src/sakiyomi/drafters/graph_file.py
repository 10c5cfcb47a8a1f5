"""The file of a draft that recycles: what the target's rows ranked first, after which tokens.

Its line of JSON (see ``core.sealed``) has the tokenizer's digest and the number of contexts of each length. Its content
is, for each length, the contexts (hashes of 8 bytes), those seen last at the end, then of each the tokens (4 bytes
each) and their log probabilities (float16). Who has the tokenizer can read pairs of tokens of the user's texts from it,
so only its owner may read it. Several processes may share a file: each adds what it has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sakiyomi.core.sealed import SealedFile, SealedKind

KIND = SealedKind(b"SAKIREC\n", 1, "file of a draft that recycles")
_KEYS, _TOKENS, _LOGS = "<i8", "<i4", "<f2"

LENGTHS = 3
"""Contexts are the last one to so many tokens."""
Entries = dict[int, tuple[Sequence[int], Sequence[float]]]
"""By context the tokens that may follow, and their log probabilities."""


@dataclass
class Graph:
    """What a file holds.

    Attributes:
        tokenizer: digest of the tokenizer that the tokens are of.
        after: entries of the longest contexts, then of shorter ones.
    """

    tokenizer: str
    after: tuple[Entries, ...]


def read_graph(path: Path) -> Graph:
    """Read and check a file.

    Raises:
        LoadError: it cannot be read, is none, is of another format version, or is damaged.
    """
    header, body = KIND.read(path)
    kept, place, found = int(header["kept"]), 0, list[Entries]()
    for count in header["contexts"]:
        keys, place = np.frombuffer(body, _KEYS, count, place), place + 8 * count
        tokens, place = np.frombuffer(body, _TOKENS, count * kept, place), place + 4 * kept * count
        logs, place = np.frombuffer(body, _LOGS, count * kept, place), place + 2 * kept * count
        rows = zip(tokens.reshape(count, kept).tolist(), logs.reshape(count, kept).tolist(), strict=True)
        found.append(dict(zip(keys.tolist(), rows, strict=True)))
    return Graph(header["tokenizer"], tuple(found))


class GraphFile(SealedFile):
    """A file that a drafter reads, and adds to.

    Args:
        path: of the file, which is made when there is something to write.
        tokenizer: digest of the target's.
        vocab_size: of the target.
        most: contexts of each length that it may hold; those not seen for longest go.
        kept: tokens of each context.

    Raises:
        LoadError: see ``read_graph``; or it is another tokenizer's, or its folder is not there.
    """

    def __init__(self, path: str | Path, tokenizer: str, vocab_size: int, most: int, kept: int) -> None:
        super().__init__(path, whose=" of a draft that recycles")
        self._tokenizer, self._vocab_size, self._most, self._kept = tokenizer, vocab_size, most, kept

    def read(self) -> tuple[Entries, ...]:
        """What the file holds; nothing where there is none.

        Raises:
            LoadError: see the class.
        """
        if not self.path.exists():
            return tuple({} for _ in range(LENGTHS))
        found = read_graph(self.path)
        most = max((max(tokens) for after in found.after for tokens, _ in after.values()), default=0)
        self._check_tokens(found.tokenizer, self._tokenizer, most, self._vocab_size)
        return found.after

    def save(self, fresh: Sequence[Entries]) -> None:
        """Write what was seen since the last time, on top of what is in the file now.

        Raises:
            LoadError: the file was damaged meanwhile, or cannot be written.
        """
        with self._writing():
            parts, counts = list[bytes](), list[int]()
            for after, mine in zip(self.read(), fresh, strict=True):
                for key, ranked in mine.items():
                    if len(ranked[0]) == self._kept:  # a row may rank fewer
                        after.pop(key, None)
                        after[key] = ranked
                rows = list(after.items())[-self._most :]
                counts.append(len(rows))
                parts.append(np.array([key for key, _ in rows], _KEYS).tobytes())
                parts.append(np.array([ranked[0] for _, ranked in rows], _TOKENS).tobytes())
                parts.append(np.array([ranked[1] for _, ranked in rows], _LOGS).tobytes())
            header = {"tokenizer": self._tokenizer, "contexts": counts, "kept": self._kept}
            KIND.write(self.path, header, b"".join(parts))
