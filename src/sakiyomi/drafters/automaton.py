"""A suffix automaton: a graph of all substrings of a text that grows token by token and counts occurrences.

Construction: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"; for drafts, SAM-Decoding
(Hu et al. 2024, arXiv 2411.10666). A state stands for the substrings that end at the same places. Its link leads to
their longest suffix that also ends elsewhere. A text of n tokens has at most 2n states, and appending a token takes
amortized constant time.
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0
COUNTED = 16


class SuffixAutomaton:
    """The automaton of several texts, one behind the other.

    Args:
        counted: number of states that are counted for each new token, the longest first. A repetitive text can have as
            many as it has tokens; the counts of short substrings are then too low.

    Attributes:
        text: all tokens; -1 where another text begins.
        following: for each state the states that one more token leads to.
        links: for each state the state of its longest suffix that ends elsewhere too; -1 for the root.
        lengths: length of the longest substring of each state.
        counts: how often a state's substrings occur.
        latest, earlier: positions where they ended last, and the time before; -1 where there is none.
        last: the state of the whole text so far.
    """

    def __init__(self, counted: int = COUNTED) -> None:
        self.text: list[int] = []
        self.following: list[dict[int, int]] = [{}]
        self.links, self.lengths, self.counts = [-1], [0], [0]
        self.latest, self.earlier = [-1], [-1]
        self.last = ROOT
        self._counted = counted
        self._path = [ROOT]  # states of the beginnings of this text
        self._places: list[int] = []  # where its tokens stand in ``text``
        self._onward: dict[int, int] = {}  # the place that follows a place, where it is not the next one

    def __len__(self) -> int:
        """States."""
        return len(self.links)

    @property
    def place(self) -> int:
        """Where in ``text`` the last token of this text stands; -1 before the first."""
        return self._places[-1] if self._places else -1

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            known = self.following[self.last].get(token)
            if known is None:
                last = self._append(token)
            elif self.lengths[known] == self.lengths[self.last] + 1:
                last = known
            else:
                last = self._split(self.last, token, known)
            self.last = last
            self._path.append(last)
            self._places.append(len(self.text))
            self._count(last, len(self.text))
            self.text.append(token)

    @property
    def size(self) -> int:
        """Tokens of all texts."""
        return len(self.text)

    def add(self, tokens: Iterable[int]) -> None:
        """Append another text."""
        self.begin()
        self.extend(tokens)

    def begin(self) -> None:
        """Begin another text; the earlier ones stay in the graph."""
        self.branch(0)

    def branch(self, length: int) -> None:
        """Continue after the first ``length`` tokens of this text; what followed them stays in the graph."""
        del self._path[length + 1 :], self._places[length:]
        self.last = self._path[-1]
        if self.text:
            self.text.append(-1)
        if length:
            self._onward[self._places[-1]] = len(self.text)

    def match(self) -> tuple[int, int]:
        """State and length of the longest suffix of the text that occurs before its end; (ROOT, 0) if none does."""
        state = self.last
        if self.counts[state] < 2 and state != ROOT:
            state = self.links[state]
        return state, self.lengths[state]

    def newest(self, state: int) -> int:
        """The token that followed a state's substrings last; -1 if they were only at the end of a text."""
        for place in (self.latest[state], self.earlier[state]):
            after = self._onward.get(place, place + 1)
            if 0 < after < len(self.text):
                return self.text[after]
        return -1

    def _append(self, token: int) -> int:
        following, links, lengths = self.following, self.links, self.lengths
        state, fresh = self.last, self._new(lengths[self.last] + 1)
        while state >= 0 and token not in following[state]:
            following[state][token] = fresh
            state = links[state]
        if state < 0:
            links[fresh] = ROOT
        else:
            known = following[state][token]
            links[fresh] = known if lengths[known] == lengths[state] + 1 else self._split(state, token, known)
        return fresh

    def _split(self, state: int, token: int, known: int) -> int:
        """Make a separate state of the shorter substrings of ``known``, to which ``state`` and its suffixes lead."""
        following, links = self.following, self.links
        fresh = self._new(self.lengths[state] + 1)
        following[fresh] = following[known].copy()
        links[fresh] = links[known]
        self.counts[fresh] = self.counts[known]
        self.latest[fresh], self.earlier[fresh] = self.latest[known], self.earlier[known]
        links[known] = fresh
        while state >= 0 and following[state].get(token) == known:
            following[state][token] = fresh
            state = links[state]
        return fresh

    def _new(self, length: int) -> int:
        self.following.append({})
        self.links.append(ROOT)
        self.lengths.append(length)
        self.counts.append(0)
        self.latest.append(-1)
        self.earlier.append(-1)
        return len(self.links) - 1

    def _count(self, state: int, place: int) -> None:
        links, counts, latest, earlier = self.links, self.counts, self.latest, self.earlier
        for _ in range(self._counted):
            if state <= ROOT:
                break
            counts[state] += 1
            earlier[state] = latest[state]
            latest[state] = place
            state = links[state]


class Cursor:
    """The longest suffix of another text that occurs in an automaton, kept while both grow.

    Args:
        automaton: of other texts.
    """

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self._automaton = automaton
        self.state, self.length = ROOT, 0

    def read(self, tokens: Iterable[int]) -> None:
        """Follow the next tokens of the text; constant time a token in the mean."""
        following, links, lengths = self._automaton.following, self._automaton.links, self._automaton.lengths
        self.refresh()
        state, length = self.state, self.length
        for token in tokens:
            while state != ROOT and token not in following[state]:
                state = links[state]
                length = lengths[state]
            if token in following[state]:
                state = following[state][token]
                length += 1
        self.state, self.length = state, length

    def refresh(self) -> None:
        """Move to the state of the match where the automaton has split the one it was in."""
        automaton = self._automaton
        while self.state != ROOT and self.length <= automaton.lengths[automaton.links[self.state]]:
            self.state = automaton.links[self.state]
