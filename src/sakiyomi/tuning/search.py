"""Every drafter that a target could have, at every length: predicted by a few rounds of each, the best ones tried.

Half of the prompts calibrate: rounds of each drafter say how often it is right at each place and what each part of a
round takes; from these follow tau and tokens a second of every chain length (``predict``), and those of "auto", which
weighs each round anew, as they were. The other half says whether that was right.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sakiyomi import machine
from sakiyomi.bench.undrafted import Undrafted
from sakiyomi.errors import DraftError, InputError, SakiyomiError
from sakiyomi.params import SamplingParams
from sakiyomi.prompts import STORIES, read_prompts
from sakiyomi.theory import round_speedup
from sakiyomi.tuning.candidates import available, named
from sakiyomi.tuning.config import PairConfig
from sakiyomi.tuning.predict import Expected, RoundCosts, by_chance, by_place, by_rank, places, replay
from sakiyomi.tuning.profile import Profile, lasting, profile_path, write_profile
from sakiyomi.tuning.watch import Heard, Round, watched

if TYPE_CHECKING:
    from sakiyomi.llm import LLM

__all__ = ["tune"]

DEEP = 8  # chains that show how often each place is right
TIMED = (2, 4)  # others, whose rounds are only timed
GAMMAS = (1, 2, 3, 4, 6, 8)
WORTH = 1.02  # a measured gain below is none
Prompts = Sequence[list[int]]
Note = Callable[[str], None]


@dataclass
class _Candidate:
    """A drafter on the target, with what is known of it.

    Attributes:
        spec: how a user asks for it.
        heard: itself.
        fixed, weighing: engines for chains of a given length and for "auto": each learns from its own rounds alone.
        deep, timed, auto: rounds of calibration, of each text.
        plain: rounds without a draft, run between those: what this drafter's times are compared with.
    """

    spec: str
    heard: Heard
    fixed: Undrafted
    weighing: Undrafted
    deep: list[list[Round]] = field(default_factory=list)
    timed: list[Round] = field(default_factory=list)
    auto: list[Round] = field(default_factory=list)
    plain: list[Round] = field(default_factory=list)

    def engine(self, gamma: int | str) -> Undrafted:
        """The one for this gamma."""
        return self.weighing if gamma == "auto" else self.fixed


def tune(config: PairConfig, note: Note = lambda text: None) -> dict[str, Any]:
    """Find the fastest drafter and gamma for a target, and keep them as its profile.

    Args:
        config: the settings.
        note: told what is being done.

    Returns:
        ``best``, ``table``, ``drafters``, ``v``, ``errors``, ``A/A``, ``conditions``, ``file``, as JSON values.

    Raises:
        InputError, LoadError, UnsupportedError: before any work is done, where that is possible.
    """
    from sakiyomi.llm import LLM

    began = time.monotonic()
    specs = named(config)
    texts = list(STORIES[: config.count]) if config.prompts is None else read_prompts(config.prompts, config.count)
    if len(texts) < 2:
        raise InputError("there is one prompt; give two or more: half of them are kept for the comparison")
    note(f"loading {config.target}")
    llm = LLM(
        config.target,
        "none",
        dtype=config.dtype,
        device=config.device,
        quantize=config.quantize,
        compile=True,
        max_batch=2,
        strict=True,
    )
    prompts = [llm.tokenizer(text).input_ids[: config.prompt_tokens] for text in texts]
    params = SamplingParams(max_new_tokens=config.max_new_tokens)
    if max(map(len, prompts)) + config.max_new_tokens > llm.max_context:
        raise InputError(
            f"a prompt of {max(map(len, prompts))} tokens and {config.max_new_tokens} new ones do not fit into "
            f"{llm.max_context}; lower --prompt-tokens or --max-new-tokens"
        )
    known = set(config.draft)
    candidates: list[_Candidate] = []
    refused: list[dict[str, str]] = []
    for spec in dict.fromkeys([*specs, *available(llm, config)]):
        note(f"making {spec} ready")
        try:
            drafter = llm.drafter(spec)
        except SakiyomiError as error:
            if spec in known:
                raise
            refused.append({"draft": spec, "refused": error.message})
            continue
        if drafter is not None:
            heard = Heard(drafter)
            fixed, weighing = (Undrafted(llm, heard, strict=True) for _ in range(2))
            candidates.append(_Candidate(spec, heard, fixed, weighing))
    note("compiling")
    llm.wait()
    search = _Search(llm, params, prompts[0::2], prompts[1::2], candidates, refused)
    search.calibrate(note)
    rows = search.predict()
    search.measure(rows, len(rows) if config.all else config.finalists, config.laps, note)
    return search.result(rows, config, len(texts), time.monotonic() - began)


class _Search:
    """One run of it.

    Args:
        llm: the target, without a drafter.
        params: of all texts.
        calibration, kept: prompts to learn from, and to compare on.
        candidates: drafters.
        refused: what cannot be used beside this target, and why; more may come.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        calibration: Prompts,
        kept: Prompts,
        candidates: list[_Candidate],
        refused: list[dict[str, str]],
    ) -> None:
        self.llm, self.params = llm, params
        self.calibration, self.kept = calibration, kept
        self.candidates = {candidate.spec: candidate for candidate in candidates}
        self.refused = refused
        self.undrafted = Undrafted(llm)
        self.plain: list[Round] = []
        self.spread = (1.0, 1.0)
        self.equal = self.texts = 0

    # ------------------------------------------------------------ calibration

    def calibrate(self, note: Note) -> None:
        """Rounds of every drafter on the first half of the prompts; plain ones between, since machines drift."""
        prompts = self.calibration
        self._plain(prompts[0])  # warms up
        self.plain.clear()
        for spec, candidate in list(self.candidates.items()):
            note(f"calibrating {spec}")
            try:
                self._learn(candidate)
            except DraftError as error:
                del self.candidates[spec]
                self.refused.append({"draft": spec, "refused": error.message})
        if not self.candidates:
            self._plain(prompts[0])

    def _learn(self, candidate: _Candidate) -> None:
        prompts = self.calibration
        self._run(candidate, prompts[0], DEEP)
        self._run(candidate, prompts[0], "auto")
        for at, prompt in enumerate(prompts):
            candidate.plain += self._plain(prompt)
            candidate.deep.append(self._run(candidate, prompt, DEEP))
            candidate.timed += self._run(candidate, prompt, TIMED[at % len(TIMED)])
            candidate.auto += self._run(candidate, prompt, "auto")
        if len(prompts) < len(TIMED):
            candidate.timed += self._run(candidate, prompts[0], TIMED[-1])

    def _plain(self, prompt: list[int]) -> list[Round]:
        rounds = watched(self.undrafted.engine, None, prompt, self.params)[1]
        self.plain += rounds
        return rounds

    def _run(self, candidate: _Candidate, prompt: list[int], gamma: int | str) -> list[Round]:
        engine = candidate.engine(gamma).engine
        return watched(engine, candidate.heard, prompt, self._asking(gamma))[1]

    def _asking(self, gamma: int | str) -> SamplingParams:
        return replace(self.params, gamma=gamma)

    # ------------------------------------------------------------ prediction

    def rows(self, tokens: int) -> int:
        """Rows that a pass over so many tokens has."""
        return self.llm.target.padded(tokens)

    def shared(self) -> dict[int, float]:
        """Median seconds of a target pass by its rows, of all that were run."""
        found: dict[int, list[float]] = {}
        for part in self._all():
            found.setdefault(self.rows(part.nodes + 1), []).append(part.score)
        return {rows: statistics.median(seconds) for rows, seconds in sorted(found.items())}

    def _all(self) -> list[Round]:
        rounds = [*self.plain]
        for candidate in self.candidates.values():
            rounds += [part for text in candidate.deep for part in text] + candidate.timed + candidate.auto
        return rounds

    def costs(self, candidate: _Candidate) -> RoundCosts:
        """Of rounds of chains with this drafter; passes that it has not made cost what others say, on its own scale."""
        chains = [part for text in candidate.deep for part in text] + candidate.timed
        scale = statistics.median(part.score for part in candidate.plain) / statistics.median(
            part.score for part in self.plain
        )
        shared = {rows: scale * seconds for rows, seconds in self.shared().items()}
        return RoundCosts.of(chains, self.rows, shared)

    @property
    def plain_seconds(self) -> float:
        """Of a plain round."""
        return statistics.median(part.seconds for part in self.plain)

    def predict(self) -> list[dict[str, Any]]:
        """Every configuration, the fastest first; plain decoding is one.

        A drafter is compared with the plain rounds that were run between its own: a machine may be half as fast a
        minute later, and that is no merit of the next one.
        """
        table = [_row("none", "auto", Expected(1.0, self.plain_seconds, 1.0), self.plain_seconds)]
        for spec, candidate in self.candidates.items():
            plain = statistics.median(part.seconds for part in candidate.plain)
            costs = self.costs(candidate)
            texts = [places(rounds, DEEP) for rounds in candidate.deep]
            found = {gamma: replay(texts, gamma, costs, self.rows, plain) for gamma in GAMMAS}
            table += [_row(spec, gamma, expected, self.plain_seconds) for gamma, expected in found.items()]
            table.append(_row(spec, "auto", _as_it_was(candidate.auto, plain), self.plain_seconds))
        return sorted(table, key=lambda row: row["predicted_speedup"], reverse=True)

    # ------------------------------------------------------------ comparison

    def measure(self, rows: list[dict[str, Any]], finalists: int, laps: int, note: Note) -> None:
        """Run the best of them, and plain decoding twice, on the other half of the prompts; fills the rows in.

        Each prompt is run by everyone before the next one is. Its time is the median over laps; the two plain ones
        differ by what the machine's own noise is.
        """
        chosen = [row for row in rows if row["draft"] != "none"][:finalists]
        ways: list[tuple[dict[str, Any], Undrafted]] = [
            (row, self.candidates[row["draft"]].engine(row["gamma"])) for row in chosen
        ]
        own = next(row for row in rows if row["draft"] == "none")
        again: dict[str, Any] = dict(own)
        ways = [(own, self.undrafted), *ways, (again, self.undrafted)]
        found: list[list[list[tuple[int, float]]]] = [[[] for _ in self.kept] for _ in ways]
        first: dict[int, list[int]] = {}
        for lap in range(laps):
            note(f"comparing {len(ways) - 1} configurations, lap {lap + 1} of {laps}")
            for at, prompt in enumerate(self.kept):
                for number, (row, engine) in enumerate(ways):
                    (done,) = engine.generate([prompt], self._asking(row["gamma"]))
                    stats = done.stats
                    found[number][at].append((stats.committed, stats.seconds - stats.prefill_seconds))
                    self.texts += 1
                    self.equal += first.setdefault(at, done.token_ids) == done.token_ids
                    row["measured_tau"] = row.get("measured_tau", 0.0) + stats.tau / (laps * len(self.kept))
        for (row, _), texts in zip(ways, found, strict=True):
            tokens = sum(lap[0][0] for lap in texts)
            row["measured_tokens_per_second"] = tokens / sum(
                statistics.median(seconds for _, seconds in text) for text in texts
            )
        ratio = again["measured_tokens_per_second"] / own["measured_tokens_per_second"]
        # Both runs are plain decoding: their mean is what the others are compared with.
        base = own["measured_tokens_per_second"] = statistics.harmonic_mean(
            [row["measured_tokens_per_second"] for row in (own, again)]
        )
        for row, _ in ways[:-1]:
            row["measured_speedup"] = row["measured_tokens_per_second"] / base
            row["error"] = row["predicted_speedup"] / row["measured_speedup"] - 1.0
        self.spread = (min(ratio, 1 / ratio), max(ratio, 1 / ratio))

    # ------------------------------------------------------------ result

    def result(self, rows: list[dict[str, Any]], config: PairConfig, count: int, seconds: float) -> dict[str, Any]:
        """Everything as JSON values, and the profile on disk if it is wanted."""
        run = [row for row in rows if "measured_speedup" in row]
        best = max(run, key=lambda row: row["measured_speedup"])
        if best["measured_speedup"] < WORTH:
            best = next(row for row in rows if row["draft"] == "none")
        errors = sorted(abs(row["error"]) for row in run if row["draft"] != "none")
        shared = self.shared()
        one = shared[min(shared)]
        conditions = machine.conditions(
            target=self.llm.name,
            dtype=str(self.llm.target.dtype).removeprefix("torch."),
            quantize=config.quantize,
            graphs="compiled" if self.llm.compiled() else "eager",
            prompts=config.prompts or "stories",
            texts=count,
            max_new_tokens=config.max_new_tokens,
            laps=config.laps,
            seconds=seconds,
        )
        found: dict[str, Any] = {
            "best": best,
            "table": rows,
            "drafters": [*map(self._described, self.candidates.values()), *self.refused],
            "plain_ms": 1000 * self.plain_seconds,
            "v": {size: seconds / one for size, seconds in shared.items()},
            "A/A": list(self.spread),
            "errors": {"median": statistics.median(errors), "worst": errors[-1], "of": len(errors)} if errors else None,
            "equal": self.equal,
            "texts": self.texts,
            "conditions": conditions,
            "file": None,
        }
        if config.save:
            path = profile_path(self.llm.target, self.llm.tokenizer)
            gamma = best["gamma"]
            write_profile(path, Profile(lasting(best["draft"]), gamma, best["measured_speedup"], conditions, rows))
            found["file"] = str(path)
        return found

    def _described(self, candidate: _Candidate) -> dict[str, Any]:
        """What was found out about a drafter: acceptance by place, rank and confidence, and its times."""
        deep = [part for text in candidate.deep for part in text]
        alphas, costs = by_place(deep), self.costs(candidate)
        judged = sum(min(part.tokens, part.depth) for part in deep)
        step = costs.draft(DEEP) / DEEP
        return {
            "draft": candidate.spec,
            "alpha": sum(min(part.tokens - 1, part.depth) for part in deep) / judged if judged else 0.0,
            "hit": sum(part.depth > 0 for part in deep) / max(len(deep), 1),
            "alphas": alphas,
            "by_rank": by_rank(candidate.auto),
            "by_confidence": by_chance(deep),
            "draft_ms": 1000 * step,
            "c": step / statistics.median(part.seconds for part in candidate.plain),
            "overhead_ms": 1000 * costs.other(4),
        }


def _row(draft: str, gamma: int | str, expected: Expected, plain: float) -> dict[str, Any]:
    return {
        "draft": draft,
        "gamma": gamma,
        "predicted_tau": expected.tau,
        "predicted_tokens_per_second": expected.speedup / plain,
        "predicted_speedup": expected.speedup,
    }


def _as_it_was(rounds: Sequence[Round], plain: float) -> Expected:
    """Of rounds that weighed for themselves: their tokens and their time, without what other work added to some."""
    usual: dict[int, list[float]] = {}
    for part in rounds:
        usual.setdefault(part.depth, []).append(part.seconds)
    most = {depth: 2 * statistics.median(seconds) for depth, seconds in usual.items()}
    seconds = statistics.fmean(min(part.seconds, most[part.depth]) for part in rounds)
    tau = statistics.fmean(part.tokens for part in rounds)
    return Expected(tau, seconds, round_speedup(tau, 0.0, seconds / plain))
