"""Measures what rounds and prompts cost on this machine, and runs real replicas to compare a simulation with.

A replica is an engine on one core. Its clock is the processor time of its rounds, so that several replicas in one
process are each as fast as on a core of their own, and other work on the machine matters little.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from cluster_simulation import Costs, Load, Request
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.prompts import judging_text
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.request import RetainedSlot

RUNS = 3  # of each measurement; the first one warms up
PROMPTS = (8, 16, 32, 33, 48, 64, 65, 96, 128, 192, 256, 384, 512)  # tokens; passes are padded to some of these
READ_NEW = 8  # new tokens after each prompt


def one_core() -> None:
    """Limit this process to one thread."""
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


class Texts:
    """Token ids of conversations: the system prompts of groups, and the messages of users.

    Args:
        llm: of the model.
        load: with the lengths.
    """

    def __init__(self, llm: LLM, load: Load) -> None:
        self._ids, self._load = list(judging_text(llm.target.module, llm.tokenizer)), load
        self._replies: dict[int, list[int]] = {}

    def _piece(self, at: int, count: int) -> list[int]:
        return [self._ids[(at + i) % len(self._ids)] for i in range(count)]

    def prompt(self, request: Request) -> list[int]:
        """The prompt of a request; later ones begin with the whole conversation."""
        before = self._replies.pop(request.session, None)
        user = self._piece(31 * request.session + 17 * request.turn, self._load.user)
        return [*(self._piece(97 * request.group, self._load.system) if before is None else before), *user]

    def converse(self, request: Request, tokens: int) -> None:
        """Let a conversation have so many tokens already."""
        self._replies[request.session] = self._piece(97 * request.group, tokens)

    def replied(self, request: Request, ids: Sequence[int]) -> None:
        """Note the tokens of a conversation."""
        self._replies[request.session] = list(ids)


class EngineReplica:
    """A real replica, see ``simulation.Replica``.

    Args:
        llm: has the engine, which uses one core.
        texts: of the conversations, shared by all replicas.
    """

    def __init__(self, llm: LLM, texts: Texts) -> None:
        self._llm, self._texts = llm, texts
        self.requests: list[Request] = []
        self._given: dict[int, tuple[Request, Any]] = {}

    def close(self) -> None:
        """Remove unfinished requests."""
        for number in list(self._given):
            self._llm.engine.remove(number)

    def add(self, request: Request) -> None:
        """See ``cluster.Replica``."""
        ids = self._texts.prompt(request)
        params = SamplingParams(max_new_tokens=request.new, ignore_eos=True)
        given = self._llm.engine.submit(ids, params, place=RetainedSlot(shareable=True), live=False)
        self.requests.append(request)
        self._given[given.id] = request, given

    def round(self) -> tuple[float, list[Request]]:
        """See ``cluster.Replica``."""
        began = time.process_time()
        steps = self._llm.engine.step()
        seconds = time.process_time() - began
        ended = []
        for step in steps:
            if step.error is not None:
                raise step.error
            request, given = self._given[step.request]
            request.done += len(step.token_ids)
            if given.over:
                request.reused = given.stats.reused
                ended.append(request)
                self.requests.remove(request)
                del self._given[step.request]
                self._texts.replied(request, given.tokens)
        return seconds, ended


def measure(llm: LLM, plain: LLM, load: Load) -> Costs:
    """Measure what the rounds and prompts of a load cost.

    Args:
        llm: as replicas run.
        plain: the same without a draft; may be the same.
        load: has the lengths of prompts and replies.

    Raises:
        InputError: the model's context is too short for the load's conversations.
    """
    longest = load.system + load.turns * (load.user + load.new)
    if longest > llm.max_context:
        raise InputError(
            f"conversations have up to {longest} tokens, and the model has a context of {llm.max_context}; lower "
            "--turns, --system, --user or --new"
        )
    slots = llm.target.cache.max_slots
    batches = tuple(sorted({min(2**i, slots) for i in range(slots.bit_length() + 1)}))
    llm.wait()
    found = {
        which: [_rounds(of, load, batch) for batch in batches] for which, of in (("drafted", llm), ("plain", plain))
    }
    drafts = llm is not plain
    return Costs(
        batches,
        tuple(seconds for seconds, _ in found["plain"]),
        tuple(seconds for seconds, _ in found["drafted"]) if drafts else (),
        tuple(tokens for _, tokens in found["drafted"]) if drafts else (),
        *_prompts(llm, load),
        slots,
    )


def _rounds(llm: LLM, load: Load, batch: int) -> tuple[float, float]:
    """Mean seconds of a round of so many requests, and its mean tokens per request."""
    seconds, tokens = [], []
    for run in range(RUNS):
        texts = Texts(llm, load)
        replica = EngineReplica(llm, texts)
        first = 10**6 + run * batch  # conversations that no other run has
        for i in range(batch):
            request = Request(first + i, i % load.groups, load.system + load.user, load.new, 0.0)
            texts.converse(request, load.system + (load.turns - 1) * (load.user + load.new) // 2)
            replica.add(request)
        while replica.requests:
            own = list(replica.requests)
            # In a request's first round its draft prefills the prompt, which is measured elsewhere.
            before, all_read = sum(r.done for r in own), all(r.done > 1 for r in own)
            spent, _ = replica.round()
            if run and all_read and 4 * len(own) >= 3 * batch:
                seconds.append(spent)
                tokens.append((sum(r.done for r in own) - before) / len(own))
    if not seconds:
        raise InputError(
            f"replies of {load.new} tokens end before {batch} prompts are read: there is no round of so many requests "
            "to be measured; lower --max-batch, or raise --new"
        )
    return statistics.mean(seconds), statistics.mean(tokens)


def _prompts(llm: LLM, load: Load) -> tuple[tuple[int, ...], tuple[float, ...], float]:
    """Numbers of prompt tokens, seconds of a pass over each, and seconds per prompt token for the draft.

    Prompts are prefilled in the middle of a conversation; the slot is rolled back to it each time.
    """
    params = SamplingParams(max_new_tokens=READ_NEW, gamma=1, ignore_eos=True)
    before = min(load.system + (load.turns - 1) * (load.user + load.new) // 2, llm.max_context - READ_NEW - 1)
    sizes = tuple(sorted({min(size, llm.max_context - READ_NEW - before) for size in PROMPTS}))
    place, context = RetainedSlot(), [3 * i % llm.vocab_size for i in range(before)]
    llm.engine.complete([llm.engine.submit(context, SamplingParams(max_new_tokens=1), place=place)])
    took, drafts = [], []
    for size in sizes:
        measured = []
        for run in range(RUNS):
            ids = [*context, *((7 * i + 11 * run + size) % llm.vocab_size for i in range(size))]
            request, rounds = llm.engine.submit(ids, params, place=place), []
            while not request.over:
                began = time.process_time()
                llm.engine.step()
                rounds.append(time.process_time() - began)
            measured.append(rounds)
        took.append(statistics.median(rounds[0] for rounds in measured))
        drafts.append(statistics.median(rounds[1] - min(rounds[2:]) for rounds in measured))
    llm.engine.release(place)
    # In the first round the draft prefills the prompt too; the slope of a line through these points is its cost.
    slope = statistics.linear_regression(sizes, drafts).slope if llm.draft is not None and len(sizes) > 1 else 0.0
    return sizes, tuple(took), max(slope, 0.0)
