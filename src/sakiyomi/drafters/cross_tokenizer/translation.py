"""Translates a draft, a path or a tree, from its own tokens into tokens of the target.

Each path from the root to a leaf is a text that is tokenised. Texts with the same beginning share nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sakiyomi.core.tree import Draft
from sakiyomi.drafters.cross_tokenizer.alignment import Lexicon, continuation
from sakiyomi.drafters.draft_length import TokenValue
from sakiyomi.drafters.guessed_tree import GuessedTree


@dataclass(slots=True)
class Translation(GuessedTree):
    """A draft in tokens of the target.

    Attributes:
        natural: see ``Continuation.natural``; of a tree, whether some path of it is.
    """

    natural: bool = True


@dataclass(slots=True)
class _Path:
    """A path through the draft's tree as a text.

    Attributes:
        text: without the bytes that are committed already.
        nodes: of the draft's tree.
        begins: byte of the text at which each of them begins.
        ended: whether the draft model ends its text here.
    """

    text: bytes
    nodes: list[int]
    begins: list[int]
    ended: bool


class Translator:
    """Translates drafts of one tokenizer into tokens of another.

    Args:
        own: of the draft's tokenizer.
        target: of the target's.
        stop_ids: tokens with which the draft model ends a text.
        end: token with which the target does.
    """

    def __init__(self, own: Lexicon, target: Lexicon, stop_ids: frozenset[int], end: int | None) -> None:
        self._own, self._target, self._stop_ids, self._end = own, target, stop_ids, end

    def translate(
        self,
        before: bytes,
        owed: bytes,
        draft: Draft,
        depth: int,
        nodes: int,
        *,
        ends: bool,
        worth: TokenValue | None = None,
    ) -> Translation:
        """The likeliest nodes of all paths; paths with the same beginning share nodes.

        A node is accepted if the text contains one of the draft tokens that complete its bytes. The chances of
        different draft tokens are added, since their paths exclude each other; one that several paths share counts
        once. A draft of one path is always translated; of several paths only natural ones (see ``Continuation``).

        Args:
            before: the last committed bytes.
            owed: those of them with which the draft's text has to begin.
            draft: the draft's tree.
            depth: most levels.
            nodes: most nodes.
            ends: whether the target's end token ends the text of this request.
            worth: if given, no more nodes than are worth their time.
        """
        values = draft.tree.products([draw.claim(1.0) for draw in draft.draws])
        leaves = [node for node in range(len(draft)) if not draft.tree.children(node)]
        found, natural = Translation(), False
        places: dict[tuple[int, int], int] = {}
        through: list[dict[int, float]] = []  # for each node the draft tokens that complete it, and their chances
        for leaf in leaves:
            path = self._path(draft, draft.tree.path(leaf), owed)
            if path is None or not path.nodes:
                natural |= len(leaves) == 1
                continue
            ahead = continuation(self._target, before, path.text)
            natural |= ahead.natural
            if not ahead.natural and len(leaves) > 1:
                continue
            tokens, stops = self._ended(path, ahead.tokens, ahead.ends, ends=ends)
            above, last = -1, 0
            for token, end in zip(tokens[:depth], stops[:depth], strict=True):
                node = places.setdefault((above, token), len(found.tokens))
                if node == len(found.tokens):
                    found.tokens.append(token)
                    found.parents.append(above)
                    through.append({})
                while last + 1 < len(path.begins) and path.begins[last + 1] < end:
                    last += 1
                through[node][path.nodes[last]] = values[path.nodes[last]]
                above = node
        # How the target splits a text can depend on what follows it. Then one draft token completes several sibling
        # nodes; their chances are scaled so that together they do not exceed their parent's.
        raw = [sum(known.values()) for known in through]
        total: dict[int, float] = {}
        for parent, value in zip(found.parents, raw, strict=True):
            total[parent] = total.get(parent, 0.0) + value
        reached: list[float] = []
        for parent, value in zip(found.parents, raw, strict=True):
            most = 1.0 if parent < 0 else reached[parent]
            chance = value / max(most, total[parent]) if value else 0.0
            reached.append(most * chance)
            found.chances.append(chance)
        found.natural = natural or not leaves
        return found.best(nodes, worth)

    def _path(self, draft: Draft, nodes: Sequence[int], owed: bytes) -> _Path | None:
        """The text of a path; None if it does not begin with the bytes that it has to begin with."""
        pending = len(owed)
        said = bytearray()
        begins: list[int] = []
        ended = False
        for node in nodes:
            token = draft.tree.tokens[node]
            piece = self._own.piece(token)
            ended = token in self._stop_ids
            if ended or not piece:
                break
            begins.append(len(said) - pending)
            said += piece
        if not said.startswith(owed):
            return None
        taken = len(begins) + ended
        return _Path(bytes(said[pending:]), list(nodes[:taken]), begins + [len(said) - pending] * ended, ended)

    def _ended(self, path: _Path, tokens: list[int], places: list[int], *, ends: bool) -> tuple[list[int], list[int]]:
        """The tokens and their ends, with the target's end token where the draft model ends the text."""
        size = len(path.text)
        if path.ended and ends and self._end is not None and (places[-1] if places else 0) == size:
            return [*tokens, self._end], [*places, size + 1]
        return tokens, places
