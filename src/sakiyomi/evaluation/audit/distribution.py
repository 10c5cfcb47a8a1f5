"""Tests of the audit: sampled tokens have the target's distribution under every rule and with every draft.

Each rule gets two tests. *Whole*: the pair itself writes texts, and the reference's logits judge them. This covers
everything (passes, caches, the drafter), but its tokens are expensive. *Played*: rows of the pair's distributions are
recorded and played through the real engine, a draft model's own code and the rule (see ``replay``). Such tokens cost
almost nothing, so that small faults of a rule are found. The passes take no part in it: the equality of greedy
and coupled texts covers them. Requests that run side by side are tested too: a token must not depend on the token of
another request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import DraftKind
from sakiyomi.drafters import Drafter
from sakiyomi.drafters.adapter import as_drafter
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.engine.engine import Engine
from sakiyomi.engine.plain import EngineView
from sakiyomi.engine.request import Request
from sakiyomi.evaluation.audit.chi_square import Frequencies, rank
from sakiyomi.evaluation.audit.config import AuditConfig, shape_name
from sakiyomi.evaluation.audit.reference import HFReference
from sakiyomi.evaluation.audit.replay import STATES, WIDTH, Listener, Narrow, Recording, TableModel, narrow
from sakiyomi.evaluation.audit.report import AWAY, ODDS, POWER, SampledCheck, Texts
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers import VERIFIERS

WHOLE = (1, 4, 16)
"""Ranks at which parts of a whole vocabulary end: the most probable token, the next three, the next twelve, the others.
"""
PLAYED = tuple(range(1, WIDTH))
PLAYED_TOKENS, SIDE_BY_SIDE = 125, 32
RECORDED = 8
"""Texts during which rows are recorded."""
LOOKS = (1 / 16, 1 / 4, 1.0)
"""Shares of the tokens at which a played test is looked at: a crude fault ends it early."""
TAILS = 4
"""Tails are somewhat heavier than chi-square's where cells are rare (``frequencies.LEAST``)."""
SEED = 20_240
GAMMA = 2
SHAPES: dict[DraftKind, dict[str, Any]] = {
    "chain": {"gamma": GAMMA, "tree": "chain"},
    "without_replacement": {"tree": (1, 2, 1)},
    "point_mass": {"gamma": GAMMA, "tree": "best-first", "nodes": 3},
    "merged": {"gamma": GAMMA, "tree": "chain"},
}
"""What is drafted where rows are played, by kind: every kind that a drafter makes."""


Test = tuple[Drafter | None, str, dict[str, Any], DraftKind | None]
"""Drafter, rule, shape, and the kind of draft where rows are played."""


class SampledTests:
    """Makes the tests of sampled text.

    Args:
        make: an engine of the target with a drafter; None: without one.
        drafters: to be tested; none: plain text is.
        rules: names of those whose text depends on the draft.
        prompts: token ids.
        reference: gives the target's logits.
        config: how much is tested.
        note: receives progress messages.
    """

    def __init__(
        self,
        make: Callable[[Drafter | None], EngineView],
        drafters: Sequence[Drafter],
        rules: Sequence[str],
        prompts: Texts,
        reference: HFReference,
        config: AuditConfig,
        note: Callable[[str], None],
    ) -> None:
        self._make = make
        self._drafters: list[Drafter | None] = [*drafters] or [None]
        self._prompts, self._reference = prompts, reference
        self._config, self._note = config, note
        self._tokenizer = make(None).engine.tokenizer
        counts = [1 if kind is None else 2 for *_, kind in self._planned(rules)]
        self._level = ODDS / TAILS / max(sum(counts), 1)
        self._recordings: dict[str, Recording] = {}

    def _planned(self, rules: Sequence[str]) -> Iterator[Test]:
        """The tests of some rules."""
        shapes = self._config.shapes()[-2:] if self._config.texts else []
        for drafter, rule in itertools.product(self._drafters, rules):
            takes = VERIFIERS[rule].takes
            for shape in shapes:
                if drafter is None or drafter.kind_for(self._config.seeded(SEED, shape, rule)) in takes:
                    yield drafter, rule, shape, None
            for kind, shape in SHAPES.items():
                if drafter is not None and kind in takes and (kind == "point_mass" or _draws(drafter)):
                    yield drafter, rule, shape, kind

    def run(self, rules: Sequence[str]) -> list[SampledCheck]:
        """Make those of some rules; the odds of a false alarm are those of all together."""
        found: list[SampledCheck] = []
        for drafter, rule, shape, kind in self._planned(rules):
            if kind is None or drafter is None:
                found.append(self._run_whole(drafter, rule, shape))
                continue
            if drafter.name not in self._recordings:
                self._recordings[drafter.name] = self._record(drafter)
            found += self._run_played(drafter, rule, shape, kind)
        return found

    # ------------------------------------------------------------ the pair itself

    def _run_whole(self, drafter: Drafter | None, rule: str, drawn: dict[str, Any]) -> SampledCheck:
        llm, name, shape = self._make(drafter), None if drafter is None else drafter.name, shape_name(drawn)
        what = f"{rule}, {name or 'no draft'}, {shape}"
        counted, params = Frequencies(len(WHOLE) + 1, len(WHOLE) + 1), self._config.seeded(SEED, drawn, rule)
        sampler = Sampler(params, llm.engine.target.vocab_size)
        drafted = accepted = 0
        for first in range(0, self._config.texts, SIDE_BY_SIDE):
            self._note(f"sampling {what}: {first} of {self._config.texts} texts")
            some = self._write(llm, replace(params, seed=SEED + first), self._config.texts - first)
            for request in some:
                ranked = rank(self._probs(request, sampler), request.output, WHOLE)
                counted.add(ranked, [0, *ranked.part[:-1]])
                drafted, accepted = drafted + request.stats.drafted, accepted + request.stats.accepted
        fit = counted.fit(self._level, AWAY, POWER)
        return SampledCheck("whole", rule, name, shape, self._config.texts, drafted, accepted, fit)

    def _write(self, llm: EngineView, params: SamplingParams, most: int) -> list[Request]:
        """Some texts that are written side by side."""
        some = itertools.islice(itertools.cycle(self._prompts), min(SIDE_BY_SIDE, most))
        requests = llm.submit(some, params)
        llm.engine.complete(requests)
        return requests

    def _probs(self, request: Request, sampler: Sampler) -> Tensor:
        """(n, V) what the reference's model gives at each place of a text."""
        prompt = request.tokens[: request.prompt_tokens]
        return sampler.probs(self._reference.logits(prompt, request.output))

    # ------------------------------------------------------------ rows that are played

    def _record(self, drafter: Drafter) -> Recording:
        """Rows of the pair. If a drafter draws nothing, the target's rows at the next places stand for its own."""
        self._note(f"recording rows of {drafter.name}")
        listener = Listener(drafter)
        params = self._config.seeded(SEED, {"gamma": 1, "tree": "chain"}, "ratio")
        llm = self._make(as_drafter(listener))
        sampler = Sampler(params, llm.engine.target.vocab_size)
        every: list[Narrow] = []
        target: list[Narrow] = []
        draft: list[Narrow] = []
        for request in self._write(llm, params, RECORDED):
            rows = [narrow(row) for row in self._probs(request, sampler)]
            every += rows
            drawn = {place: row for place, row in listener.rows[request.id].items() if place < len(request.tokens)}
            target += [rows[place - request.prompt_tokens] for place in drawn]
            draft += drawn.values()
        return Recording.of(target, draft) if draft else Recording.of(every, every[1:] + every[:1])

    def _run_played(self, drafter: Drafter, rule: str, shape: dict[str, Any], kind: DraftKind) -> list[SampledCheck]:
        what, recording = f"{rule}, rows of {drafter.name}, {kind}", self._recordings[drafter.name]
        level, most = self._level / len(LOOKS), self._config.samples
        engine = _engine(recording, kind, self._tokenizer)
        single, beside = Frequencies(STATES, WIDTH), Frequencies(WIDTH, WIDTH)
        usual = self._config.seeded(SEED, shape, rule)
        params = replace(usual, max_new_tokens=PLAYED_TOKENS, temperature=1.0, top_k=WIDTH)
        looks = [share * most for share in LOOKS[:-1]]
        texts = drafted = accepted = 0
        while True:
            done = engine.complete(
                engine.submit([0], replace(params, seed=SEED + texts), key=(i,), live=False)
                for i in range(SIDE_BY_SIDE)
            )
            ranked = []
            for text in done:
                states = recording.states(text.token_ids)
                ranked.append(rank(recording.target[states], text.token_ids, PLAYED))
                single.add(ranked[-1], states)
                drafted, accepted = drafted + text.stats.drafted, accepted + text.stats.accepted
            for one, other in itertools.pairwise(ranked):
                beside.add(one, other.part)
            texts += len(done)
            fits = [counted.fit(level, AWAY, POWER) for counted in (single, beside)]
            self._note(f"playing {what}: {single.tokens} tokens, power {fits[0].power:.3f} of {POWER}")
            enough = single.tokens >= most or min(fit.power for fit in fits) >= POWER
            early = bool(looks) and single.tokens >= looks[0]
            if enough or (early and not all(fit.ok for fit in fits)):
                break
            looks = looks[early:]
        return [
            SampledCheck(how, rule, drafter.name, kind, texts, drafted, accepted, fit)
            for how, fit in zip(("played", "neighbours"), fits, strict=True)
        ]


def _draws(drafter: Drafter) -> bool:
    """Whether a drafter draws its tokens where the rule is one that reads probabilities."""
    return drafter.kind_for(SamplingParams(temperature=1.0, acceptance="ratio", tree="chain")) != "point_mass"


def _engine(recording: Recording, kind: DraftKind, tokenizer: Any) -> Engine:
    """The real loop on recorded rows."""
    size = recording.target.shape[1]

    def model(rows: Tensor) -> Any:
        return TableModel(rows, recording.step, SIDE_BY_SIDE)

    drafter: Drafter = ModelDrafter(model(recording.draft), size, "played")
    if kind == "merged":
        drafter = MergedDrafter([drafter, ModelDrafter(model(recording.draft), size, "other")], strict=True)
    return Engine(model(recording.target), drafter, tokenizer, max_context=1 << 20, strict=True)
