"""Scripted drafters: they know the target's own text and are right about it always, sometimes or never.

None of them runs a model, so that a failure with one of these is the engine's. They follow the Drafter protocol of
``sakiyomi.drafters`` with the three members that it asks for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from sakiyomi.core.tree import Draft, DraftKind, Draw, TokenTree
from sakiyomi.drafters import Context

Skill = Literal["always", "sometimes", "never"]


def _number(*parts: int) -> int:
    """A fixed pseudo-random number of these."""
    return int.from_bytes(hashlib.blake2s(repr(parts).encode(), digest_size=4).digest())


class Scripted:
    """Proposes a chain out of known texts.

    Args:
        texts: the target's continuation by prompt; where it is over, or the prompt is unknown, tokens are made up.
        skill: whether a proposed token is the text's own.
        vocab_size: made-up and wrong tokens are below it.
    """

    kind: DraftKind = "point_mass"

    def __init__(self, texts: Mapping[Sequence[int], Sequence[int]], skill: Skill, vocab_size: int) -> None:
        self.texts = {tuple(prompt): list(text) for prompt, text in texts.items()}
        self.skill, self.vocab_size = skill, vocab_size
        self.name = f"{skill}-right"
        self.asked: list[list[int]] = []
        self.ended: list[int] = []

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        self.asked.append(list(gammas))
        return [self.draft(self._ahead(context.tokens, gamma)) for context, gamma in zip(contexts, gammas, strict=True)]

    def end(self, context: Context) -> None:
        self.ended.append(context.id)

    def draft(self, ahead: Sequence[int]) -> Draft:
        return Draft.chain(ahead, self.name)

    def _ahead(self, tokens: Sequence[int], gamma: int) -> list[int]:
        """The next tokens as this drafter sees them."""
        known = self._text(tokens)
        return [self._guess(known, len(tokens) + i) for i in range(gamma)]

    def _text(self, tokens: Sequence[int]) -> dict[int, int]:
        """What is known to come, by position. The output so far must be the text's beginning."""
        for prompt, text in self.texts.items():
            done = list(tokens[len(prompt) :])
            if tuple(tokens[: len(prompt)]) == prompt and done == text[: len(done)]:
                return {len(prompt) + i: token for i, token in enumerate(text)}
        return {}

    def _guess(self, known: Mapping[int, int], position: int) -> int:
        token = known.get(position, _number(position) % self.vocab_size)
        right = self.skill == "always" or (self.skill == "sometimes" and _number(position, 7) % 3 > 0)
        return token if right else (token + 1 + _number(position, 8) % (self.vocab_size - 1)) % self.vocab_size


class Branching(Scripted):
    """The same in a tree: at every depth wrong siblings stand around the guess, some with children of their own."""

    kind: DraftKind = "merged"

    def draft(self, ahead: Sequence[int]) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        place = -1
        for depth, token in enumerate(ahead):
            junk = [(token + 1 + _number(token, depth, i) % (self.vocab_size - 1)) % self.vocab_size for i in range(2)]
            siblings = list(dict.fromkeys([junk[0], token, junk[1]] if depth % 2 else [token, *junk]))
            first = len(tokens)
            tokens += siblings
            parents += [place] * len(siblings)
            place = first + siblings.index(token)
            # A child of the wrong sibling, with the token that would be right one level up.
            tokens.append(token)
            parents.append(first + siblings.index(junk[0]))
        draws = tuple(Draw(node, self.name) for node in range(len(tokens)))
        return Draft(TokenTree(tuple(tokens), tuple(parents)), self.kind, draws)


class Noisy(Scripted):
    """Draws a chain from distributions of its own that have nothing to do with the target, and tells them."""

    kind: DraftKind = "chain"

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        return [self._drawn(context, gamma) for context, gamma in zip(contexts, gammas, strict=True)]

    def _drawn(self, context: Context, gamma: int) -> Draft:
        tokens: list[int] = []
        rows = []
        for i in range(gamma):
            generator = torch.Generator().manual_seed(_number(*context.tokens[-1:], *tokens, i))
            row = torch.rand(self.vocab_size, generator=generator).pow(2)
            row /= row.sum()
            u = context.noise.fork(self.name).uniform()
            tokens.append(min(int((row.cumsum(0) <= u).sum()), self.vocab_size - 1))
            rows.append(row)
        return Draft.chain(tokens, self.name, torch.stack(rows))


class Fading(Scripted):
    """Gives nothing in every third round and fewer tokens than asked for in the others."""

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        drafts = super().propose(contexts, [max(1, gamma - 1) for gamma in gammas])
        return [
            Draft.empty() if len(context.tokens) % 3 == 0 else draft
            for context, draft in zip(contexts, drafts, strict=True)
        ]


class Failing(Scripted):
    """Breaks in the second round."""

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        if self.asked:
            raise RuntimeError("the draft fell off the table")
        return super().propose(contexts, gammas)


def texts_of(prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> dict[Any, list[int]]:
    """What ``Scripted`` takes."""
    return {tuple(prompt): list(text) for prompt, text in zip(prompts, continuations, strict=True)}
