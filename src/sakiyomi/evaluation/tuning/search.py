"""Finds the fastest drafter and draft length of a target: predicts all of them, then measures the best ones.

Every second prompt calibrates (``calibrate``). From these rounds ``predict`` computes tau and tokens/s of every chain
length, and of gamma "auto", which chooses a length every round. The best ones are measured on the other prompts.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sakiyomi.core.drops import Tau
from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine import machine
from sakiyomi.engine.chat_template import has_template
from sakiyomi.engine.plain import EngineView
from sakiyomi.engine.tuned_profile import Profile, lasting, profile_path, write_profile
from sakiyomi.evaluation.loading import load
from sakiyomi.evaluation.tuning.beginnings import prompts_of
from sakiyomi.evaluation.tuning.calibrate import ALONE, BATCH, OVER, Calibration, Candidate, Gamma, Note, Prompts
from sakiyomi.evaluation.tuning.candidates import available, made, named
from sakiyomi.evaluation.tuning.config import PairConfig
from sakiyomi.evaluation.tuning.predict import Expected

WORTH = 1.02  # a smaller measured speed-up counts as none
TIMED, COUNTED = 0.45, 0.75  # of the time: when texts have been written alone, and when in batches
APART = 8  # configurations from one plain text to the next
PLAIN = "none"


def tune(config: PairConfig, note: Note = lambda text: None, *, faster: bool = False) -> dict[str, Any]:
    """Find the fastest drafter and gamma for a target, and keep them as its profile.

    Args:
        config: the settings.
        note: told what is being done.
        faster: keep only what is faster than plain decoding.

    Returns:
        ``best``, ``table``, ``drafters``, ``v``, ``errors``, ``A/A``, ``conditions``, ``file``, as JSON values.

    Raises:
        InputError, LoadError, UnsupportedError: before any work is done, where that is possible.
    """
    began = time.monotonic()
    specs = named(config)
    texts = config.texts()
    if texts is not None and len(texts) < 2:
        raise InputError("there is one prompt; give two or more: half of them are kept for the comparison")
    params = SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature)
    note(f"loading {config.target}")
    llm = load(config, PLAIN, max_batch=BATCH, strict=True)
    prompts = prompts_of(config, llm.tokenizer, texts)
    if max(map(len, prompts)) + config.max_new_tokens > llm.max_context:
        raise InputError(
            f"a prompt of {max(map(len, prompts))} tokens and {config.max_new_tokens} new ones do not fit into "
            f"{llm.max_context}; lower --prompt-tokens or --max-new-tokens"
        )
    found, why = made([*specs, *available(llm, config.target)], partial(Candidate.on, llm), config.draft, note)
    candidates = [candidate for candidate in found.values() if candidate is not None]
    refused = [{"draft": spec, "refused": message} for spec, message in why.items()]
    note("recording passes")
    llm.wait()
    calibration = Calibration(llm, params, candidates, refused)
    comparison = Comparison(calibration, params)
    _learn_and_compare(config, calibration, comparison, prompts, began, note)
    result = _result(calibration, comparison, config.finalists if config.all else None)
    best = result["best"]
    result["conditions"] = machine.conditions(
        target=llm.name,
        dtype=dtype_name(llm.target.dtype),
        quantize=config.quantize,
        graphs=llm.target.mode if llm.compiled() else "eager",
        prompts=config.prompts or ("instructions" if has_template(llm.tokenizer) else "beginnings of stories"),
        calibrated_on=calibration.texts,
        compared_on=comparison.texts,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seconds=time.monotonic() - began,
    )
    if not config.save or (faster and best["draft"] == PLAIN):
        return result | {"file": None}
    path, known = profile_path(llm.target, llm.tokenizer), (result["conditions"], result["table"])
    measured = (best["measured_tau"], best["tau_error"])
    write_profile(path, Profile(lasting(best["draft"]), best["gamma"], best["measured_speedup"], *known, *measured))
    return result | {"file": str(path)}


def _learn_and_compare(
    config: PairConfig, calibration: Calibration, comparison: Comparison, prompts: Prompts, began: float, note: Note
) -> None:
    """Write all texts: timed, counted and compared ones, in an order that limits the effect of a drifting machine.

    With ``all``, timed and compared texts alternate.
    """

    def late(share: float) -> bool:
        return time.monotonic() > began + share * config.seconds

    def timed(number: int, prompt: list[int]) -> None:
        note(f"timing, text {number}")
        calibration.time(prompt)

    known, kept = prompts[0::2], prompts[1::2]
    note("warming up")
    calibration.warm(known[0])
    for number, prompt in enumerate(known[: 1 if config.all else ALONE], start=1):
        timed(number, prompt)
        if late(TIMED):
            break
    for first in range(0, len(known), BATCH):
        note(f"counting what is right, texts from {first + 1} on")
        calibration.count(known[first : first + BATCH])
        if late(COUNTED):
            break
    comparison.choose(None if config.all else config.finalists, config.draft)
    for number, prompt in enumerate(kept, start=1):
        note(f"comparing, text {number}")
        comparison.run(prompt)
        if not config.all and late(1.0):
            break
        if config.all and number % (len(kept) // ALONE + 1) == 0:
            timed(number, known[number % len(known)])
    comparison.finish()


@dataclass
class _Runs:
    """Texts that a configuration has written for the comparison.

    Attributes:
        draft, gamma: what it is.
        engine: with the drafter.
        texts: (tokens, passes, seconds) of each, after the prompt's pass.
    """

    draft: str
    gamma: Gamma
    engine: EngineView
    texts: list[tuple[int, int, float]] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Passes; 0: all texts were over at once."""
        return sum(rounds for _, rounds, _ in self.texts)

    @property
    def rate(self) -> float:
        """Tokens a second, if there are rounds."""
        return sum(tokens for tokens, _, _ in self.texts) / sum(seconds for _, _, seconds in self.texts)


class Comparison:
    """Configurations, interleaved, on prompts that did not calibrate.

    Args:
        calibration: what is learnt.
        params: of all texts.

    Attributes:
        rows: every configuration, the fastest by prediction first; plain decoding is one.
        texts: prompts that were used.
        spread: of plain decoding against itself.
        equal, written: texts that are equal to the plain ones, of how many.
    """

    def __init__(self, calibration: Calibration, params: SamplingParams) -> None:
        self.calibration, self.params = calibration, params
        self.rows: list[dict[str, Any]] = []
        self.texts = self.equal = self.written = 0
        self.spread = (1.0, 1.0)
        undrafted = calibration.undrafted
        self._plain = [
            _Runs(PLAIN, "auto", undrafted) for _ in range(2)
        ]  # their difference is the noise of the machine
        self._runs: list[_Runs] = []

    @property
    def own(self) -> dict[str, Any]:
        """The row of plain decoding."""
        return next(row for row in self.rows if row["draft"] == PLAIN)

    def choose(self, finalists: int | None, given: Sequence[str] = ()) -> None:
        """Choose the configurations that are compared.

        Args:
            finalists: how many, the best by what is known now; None: all.
            given: drafters that the user gave; the best configuration of each is compared in any case.
        """
        candidates = self.calibration.candidates
        rows = [row for row in self._predicted() if row["draft"] != PLAIN]
        chosen = rows[:finalists]
        left = [spec for spec in dict.fromkeys(given) if all(row["draft"] != spec for row in chosen)]
        chosen += [next(row for row in rows if row["draft"] == spec) for spec in left if spec in candidates]
        self._runs = [
            _Runs(row["draft"], row["gamma"], candidates[row["draft"]].engine(row["gamma"])) for row in chosen
        ]

    def run(self, prompt: list[int]) -> None:
        """Run a prompt with every configuration; plain decoding runs before, between and after them."""
        texts = [self._write(run, prompt) for run in self._order()]
        self.equal += sum(text == texts[0] for text in texts)
        self.written += len(texts)
        self.texts += 1

    def _order(self) -> list[_Runs]:
        """All configurations in a random order for every prompt: a run depends on the caches that the last one left."""
        order = [self._plain[0]]
        for number, run in enumerate(random.Random(self.texts).sample(self._runs, len(self._runs)), start=1):
            order.append(run)
            if number % APART == 0 or number == len(self._runs):
                order.append(self._plain[(len(order) - number) % 2])
        return order

    def finish(self) -> None:
        """Add the measured figures to the predictions."""
        self.rows = self._predicted()
        first, second = self._plain
        both = _Runs(PLAIN, "auto", first.engine, first.texts + second.texts)
        if first.rounds and second.rounds:
            ratio = second.rate / first.rate
            self.spread = (min(ratio, 1 / ratio), max(ratio, 1 / ratio))
        if not both.rounds:
            raise InputError(OVER)
        runs = {(run.draft, run.gamma): run for run in (both, *self._runs)}
        for row in self.rows:
            run = runs.get((row["draft"], row["gamma"]))
            if run is not None and run.rounds:
                _fill(row, run, both.rate)

    def _predicted(self) -> list[dict[str, Any]]:
        found = {spec: self.calibration.predict(one) for spec, one in self.calibration.candidates.items()}
        plain = self.calibration.plain_seconds
        rows = [_row(PLAIN, "auto", Expected(1.0, plain, 1.0, 0.0), plain)]
        rows += [_row(spec, gamma, one, plain) for spec, known in found.items() for gamma, one in known.items()]
        return sorted(rows, key=lambda row: float(row["predicted_speedup"]), reverse=True)

    def _write(self, run: _Runs, prompt: list[int]) -> list[int]:
        drafter = run.engine.engine.drafter
        if drafter is not None:
            drafter.forget()  # other configurations have written this text with it
        (done,) = run.engine.generate([prompt], replace(self.params, gamma=run.gamma))
        stats = done.stats
        run.texts.append((stats.committed, stats.rounds, stats.seconds - stats.prefill_seconds))
        return done.token_ids


def _fill(row: dict[str, Any], run: _Runs, base: float) -> None:
    tau = Tau.of([(tokens, rounds) for tokens, rounds, _ in run.texts])
    row["measured_tau"], row["tau_error"] = tau.value, tau.error
    row["measured_tokens_per_second"] = run.rate
    row["measured_speedup"] = run.rate / base
    row["error"] = row["predicted_speedup"] / row["measured_speedup"] - 1.0
    row["sampling"] = math.hypot(row["sampling"], tau.error)


def _row(draft: str, gamma: int | str, expected: Expected, plain: float) -> dict[str, Any]:
    return {
        "draft": draft,
        "gamma": gamma,
        "predicted_tau": expected.tau,
        "predicted_tokens_per_second": expected.speedup / plain,
        "predicted_speedup": expected.speedup,
        "sampling": expected.sampling,
    }


def _result(calibration: Calibration, comparison: Comparison, finalists: int | None) -> dict[str, Any]:
    """Everything as JSON values.

    Args:
        calibration, comparison: done.
        finalists: how many of what was run may be chosen, the best by prediction; None: all.
    """
    rows = comparison.rows
    run = [row for row in rows if "measured_speedup" in row]
    drafted = [row for row in run if row["draft"] != PLAIN]
    best = max([comparison.own, *drafted[:finalists]], key=lambda row: row["measured_speedup"])
    if best["measured_speedup"] < WORTH:
        best = comparison.own
    fastest = max(row["measured_speedup"] for row in run)
    errors = sorted(abs(row["error"]) for row in drafted)
    passes = calibration.passes()
    one = passes[min(passes)]
    return {
        "best": best,
        "of_fastest": best["measured_speedup"] / fastest,
        "table": rows,
        "drafters": [*map(calibration.described, calibration.candidates.values()), *calibration.refused],
        "plain_ms": 1000 * calibration.plain_seconds,
        "v": {size: seconds / one for size, seconds in passes.items()},
        "A/A": list(comparison.spread),
        "errors": {
            "median": statistics.median(errors),
            "worst": errors[-1],
            "of": len(errors),
            "sampling": statistics.median(row["sampling"] for row in drafted),
        }
        if errors
        else None,
        "equal": comparison.equal,
        "texts": comparison.written,
    }
