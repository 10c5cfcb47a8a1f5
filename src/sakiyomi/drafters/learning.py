"""A draft model learns from the texts that the target generates, by changing rows of its head over the vocabulary.

In online speculative decoding (Liu et al. 2023, arXiv 2310.07177) a draft learns from the target's corrections while it
serves. Here only the head learns, by steps on -log q(token of the target) with the gradient of the right token and of
the likeliest ones. A step follows the whitened state, C^-1 h with the states' second moments C, as in edits of single
facts (Meng et al. 2022, arXiv 2202.05262, section 3.1): it changes the logits behind this text and few others. Changes
are written into the head's rows, so drafting is as fast as before. The draft learns from a text when it is over: it
runs over the generated tokens, followed by a few operations on rows.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sakiyomi.core.errors import LoadError
from sakiyomi.core.files import cache_folder
from sakiyomi.drafters.learned_file import Learned, LearnedFile
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.head_rows import HeadRows
from sakiyomi.model_executor.runner import ModelRunner

logger = logging.getLogger("sakiyomi")
RATE = 0.25  # nats by which an unexpected token gets likelier behind the same text
RIDGE = 0.02  # of the mean second moment, added to each
TOPS = 16  # likeliest tokens of a place whose rows are changed
MOST = 512  # tokens of a text that are learnt from, the last ones
ROWS = 16  # of a pass: the next one sees what was learnt from them
SAVE_SECONDS = 5.0
SHARE = 0.05  # of the time that writing the file may take
_SAMPLED = 1024  # rows that the digest is made of


class HeadLearner:
    """Changes rows of a draft model's head.

    Args:
        model: the draft.
        place: of the file; "": in the cache folder, by the draft's digest.

    Raises:
        UnsupportedError: the head's rows cannot be changed.
        LoadError: the file cannot be read, or is another draft's.
    """

    def __init__(self, model: ModelRunner, place: str = "") -> None:
        self._model, self._rows = model, HeadRows(model)
        count = model.vocab_size
        sampled = self._rows.read(torch.arange(0, count, max(1, count // _SAMPLED)))
        digest = hashlib.sha256(sampled.numpy().tobytes() + f"{count}".encode()).hexdigest()
        if not place:
            folder = cache_folder() / "learned"
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            place = str(folder / f"{digest[:16]}.bin")
        self._file = LearnedFile(place, digest, self._rows.width, count)
        self._place = np.full(count, -1, np.int64)  # of each token among the changed ones
        self._tokens = torch.zeros(0, dtype=torch.int64)
        self._original, self._changes = torch.zeros(0, self._rows.width), torch.zeros(0, self._rows.width)
        self._moments = torch.zeros(self._rows.width, self._rows.width)  # sums over the states seen
        self._texts = self._seen = 0
        self._next = 0.0, 0.0  # when it may be written: if nothing else runs, and if something does
        self._take(self._file.known)

    def learn(self, slot: int, tokens: Sequence[int], first: int, held: int) -> None:
        """Learn from a text. Afterwards the slot holds all its tokens but the last.

        Args:
            slot: of the draft's cache, with room for the text.
            tokens: of the text, all of which the draft knows.
            first: place of the first one that the target has written.
            held: tokens that the slot holds, not all of the text.
        """
        if self._rows.moved():
            self._rows.write(self._tokens, self._original + self._changes)
        for begin in range(held, len(tokens) - 1, ROWS):
            end = min(begin + ROWS, len(tokens) - 1)
            plan = BatchPlan([SequenceRows(slot, begin, tokens[begin:end])])
            found = self._model.run(plan, self._model.padded(end - begin))
            skipped = max(0, first - 1 - begin)  # of the prompt
            right = torch.tensor(tokens[begin + skipped + 1 : end + 1])
            if len(right):
                self._step(found.logits[skipped:], found.features[HEAD][skipped:], right)
            self._model.cache.commit(slot, begin, range(end - begin))
        self._texts += 1
        self._seen += len(tokens) - max(first, held + 1)

    @torch.no_grad()
    def _step(self, logits: Tensor, states: Tensor, right: Tensor) -> None:
        """One step from rows of a pass: logits (rows, V), what the head read (rows, width), and what followed."""
        logits, states = logits.cpu().float(), states.cpu().float()
        total = logits.logsumexp(-1, keepdim=True)
        top, listed = logits.topk(min(TOPS, logits.shape[1]))
        chances = (top - total).exp().masked_fill_(listed == right[:, None], 0.0)
        wrong = (logits.gather(1, right[:, None]) - total).exp() - 1.0
        tokens, places = torch.cat([right[:, None], listed], 1).flatten().unique(return_inverse=True)
        count, width = len(right), 1 + listed.shape[1]
        weights = torch.zeros(len(tokens), count)
        owner = torch.arange(count).repeat_interleave(width)
        weights.index_put_((places, owner), torch.cat([wrong, chances], 1).flatten(), accumulate=True)
        changed = self._changed(tokens)
        self._changes[changed] -= RATE * (weights @ self._directions(states))
        self._rows.write(tokens, self._original[changed] + self._changes[changed])

    def _directions(self, states: Tensor) -> Tensor:
        """For each state, (rows, width), the whitened one, scaled so that their product is 1."""
        self._moments += states.T @ states
        ridge = RIDGE * self._moments.diagonal().mean().clamp_min(1e-12)
        factor = torch.linalg.cholesky(self._moments + ridge * torch.eye(len(self._moments)))
        white = torch.cholesky_solve(states.T, factor).T
        return white / (white * states).sum(1, keepdim=True).clamp_min(1e-12)

    def _changed(self, tokens: Tensor) -> Tensor:
        """Places of these tokens' rows among the changed ones; the others join them."""
        fresh = tokens[torch.from_numpy(self._place[tokens.numpy()]) < 0]
        if len(fresh):
            self._place[fresh.numpy()] = np.arange(len(self._tokens), len(self._tokens) + len(fresh))
            original = self._rows.read(fresh)
            self._tokens = torch.cat([self._tokens, fresh])
            self._original = torch.cat([self._original, original])
            self._changes = torch.cat([self._changes, torch.zeros_like(original)])
        return torch.from_numpy(self._place[tokens.numpy()])

    def _take(self, learned: Learned) -> None:
        """Apply these changes to the head."""
        tokens = torch.from_numpy(learned.tokens)
        if len(tokens):
            changed = self._changed(tokens)
            self._changes[changed] = torch.from_numpy(learned.changes)
            self._rows.write(tokens, self._original[changed] + self._changes[changed])
        self._moments = torch.from_numpy(learned.moments.copy())
        self._texts, self._seen = learned.texts, learned.seen

    def save(self, *, idle: bool) -> None:
        """Write the file if no request runs or if it was not written for long, in at most ``SHARE`` of the time.

        What was learnt since the last write is lost when the process ends.
        """
        now = time.monotonic()
        if now < self._next[not idle]:
            return
        tokens, order = self._tokens.sort()
        mine = Learned(
            self._file.known.draft, tokens.numpy(), self._changes[order].numpy(), self._moments.numpy().copy(),
            self._texts, self._seen,
        )  # fmt: skip
        try:
            both = self._file.save(mine)
            if both is not mine:  # another process has learnt, too
                self._take(both)
        except LoadError as error:
            logger.warning("what the draft has learnt is not kept: %s", error)
        end = time.monotonic()
        self._next = end + (end - now) / SHARE, end + SAVE_SECONDS
