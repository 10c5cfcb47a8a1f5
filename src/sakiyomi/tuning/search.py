"""Every drafter that a target could have, at every length: predicted by rounds on some texts, the best ones tried.

Every other prompt calibrates (``calibrate``); from what is learnt there follow tau and tokens a second of every chain
length and of "auto", which weighs each round anew (``predict``). The other prompts say whether that was right.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sakiyomi import machine
from sakiyomi.errors import InputError, SakiyomiError
from sakiyomi.params import SamplingParams
from sakiyomi.prompts import read_prompts
from sakiyomi.tuning.beginnings import beginnings
from sakiyomi.tuning.calibrate import BATCH, Calibration, Candidate, Note, Prompts
from sakiyomi.tuning.candidates import available, named
from sakiyomi.tuning.config import PairConfig
from sakiyomi.tuning.predict import Expected, ratio_error
from sakiyomi.tuning.profile import Profile, lasting, profile_path, write_profile

if TYPE_CHECKING:
    from sakiyomi.bench.undrafted import Undrafted

__all__ = ["tune"]

WORTH = 1.02  # a measured gain below is none
TIMED, COUNTED = 0.45, 0.75  # of the time: when texts have been written alone, and when in batches
APART = 8  # configurations from one plain text to the next
PLAIN = "none"


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
    texts = beginnings(config.count) if config.prompts is None else read_prompts(config.prompts, config.count)
    if len(texts) < 2:
        raise InputError("there is one prompt; give two or more: half of them are kept for the comparison")
    params = SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature)
    note(f"loading {config.target}")
    llm = LLM(
        config.target,
        PLAIN,
        dtype=config.dtype,
        device=config.device,
        quantize=config.quantize,
        compile=True,
        max_batch=BATCH,
        strict=True,
    )
    prompts = [llm.tokenizer(text).input_ids[: config.prompt_tokens] for text in texts]
    if max(map(len, prompts)) + config.max_new_tokens > llm.max_context:
        raise InputError(
            f"a prompt of {max(map(len, prompts))} tokens and {config.max_new_tokens} new ones do not fit into "
            f"{llm.max_context}; lower --prompt-tokens or --max-new-tokens"
        )
    candidates: list[Candidate] = []
    refused: list[dict[str, str]] = []
    for spec in dict.fromkeys([*specs, *available(llm, config)]):
        note(f"making {spec} ready")
        try:
            candidate = Candidate.on(llm, spec)
        except SakiyomiError as error:
            if spec in config.draft:
                raise
            refused.append({"draft": spec, "refused": error.message})
            continue
        if candidate is not None:
            candidates.append(candidate)
    note("compiling")
    llm.wait()
    calibration = Calibration(llm, params, candidates, refused)
    calibration.run(prompts[0::2], (began + TIMED * config.seconds, began + COUNTED * config.seconds), note)
    comparison = Comparison(calibration, params)
    if config.all:
        comparison.run(prompts[1::2], len(comparison.rows), None, note)
    else:
        comparison.run(prompts[1::2], config.finalists, began + config.seconds, note)
    found = _result(calibration, comparison, config.finalists)
    best = found["best"]
    found["conditions"] = machine.conditions(
        target=llm.name,
        dtype=str(llm.target.dtype).removeprefix("torch."),
        quantize=config.quantize,
        graphs="compiled" if llm.compiled() else "eager",
        prompts=config.prompts or "beginnings of stories",
        calibrated_on=calibration.texts,
        compared_on=comparison.texts,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seconds=time.monotonic() - began,
    )
    found["file"] = None
    if config.save:
        path = profile_path(llm.target, llm.tokenizer)
        profile = Profile(
            lasting(best["draft"]), best["gamma"], best["measured_speedup"], found["conditions"], found["table"]
        )
        write_profile(path, profile)
        found["file"] = str(path)
    return found


@dataclass
class _Runs:
    """Texts that a configuration has written for the comparison.

    Attributes:
        row: of the table.
        engine: with its drafter.
        texts: (tokens, passes, seconds) of each, behind the prompt's pass.
    """

    row: dict[str, Any]
    engine: Undrafted
    texts: list[tuple[int, int, float]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(tokens for tokens, _, _ in self.texts) / sum(seconds for _, _, seconds in self.texts)


class Comparison:
    """Configurations by turns on prompts that nothing was learnt from.

    Args:
        calibration: what was learnt.
        params: of all texts.

    Attributes:
        rows: every configuration, the fastest by prediction first; plain decoding is one.
        texts: prompts that were used.
        spread: of plain decoding against itself.
        equal, written: texts that are equal to the plain ones, of how many.
    """

    def __init__(self, calibration: Calibration, params: SamplingParams) -> None:
        self.calibration, self.params = calibration, params
        plain = calibration.plain_seconds
        self.rows = [_row(PLAIN, "auto", Expected(1.0, plain, 1.0, 0.0), plain)]
        for spec, candidate in calibration.candidates.items():
            self.rows += [_row(spec, gamma, found, plain) for gamma, found in calibration.predict(candidate).items()]
        self.rows.sort(key=lambda row: row["predicted_speedup"], reverse=True)
        self.texts = self.equal = self.written = 0
        self.spread = (1.0, 1.0)

    @property
    def own(self) -> dict[str, Any]:
        """The row of plain decoding."""
        return next(row for row in self.rows if row["draft"] == PLAIN)

    def run(self, prompts: Prompts, finalists: int, end: float | None, note: Note) -> None:
        """Run the best of them, with plain decoding before, between and behind; fills the rows in.

        Each prompt is run by everyone before the next one is.

        Args:
            prompts: at least one.
            finalists: how many.
            end: when to stop, by the monotonic clock; one prompt is run anyhow. None: after the last one.
            note: told what is being done.
        """
        candidates, undrafted = self.calibration.candidates, self.calibration.undrafted
        chosen = [row for row in self.rows if row["draft"] != PLAIN][:finalists]
        runs = [_Runs(row, candidates[row["draft"]].engine(row["gamma"])) for row in chosen]
        plain = [_Runs(self.own, undrafted) for _ in range(2)]  # by turns: they differ by what the machine's noise is
        order: list[_Runs] = [plain[0]]
        for number, run in enumerate(runs, start=1):
            order.append(run)
            if number % APART == 0 or number == len(runs):
                order.append(plain[(len(order) - number) % 2])
        for prompt in prompts:
            self.texts += 1
            note(f"comparing {len(runs)} configurations, text {self.texts}")
            texts = [self._write(run, prompt) for run in order]
            self.equal += sum(text == texts[0] for text in texts)
            self.written += len(texts)
            if end is not None and time.monotonic() > end:
                break
        base = _Runs(self.own, undrafted, [text for run in plain for text in run.texts])
        ratio = plain[1].rate / plain[0].rate
        self.spread = (min(ratio, 1 / ratio), max(ratio, 1 / ratio))
        for run in (base, *runs):
            self._fill(run, base.rate)

    def _write(self, run: _Runs, prompt: list[int]) -> list[int]:
        (done,) = run.engine.generate([prompt], replace(self.params, gamma=run.row["gamma"]))
        stats = done.stats
        run.texts.append((stats.committed, stats.rounds, stats.seconds - stats.prefill_seconds))
        return done.token_ids

    def _fill(self, run: _Runs, base: float) -> None:
        row, tokens = run.row, [(tokens, rounds) for tokens, rounds, _ in run.texts]
        row["measured_tau"] = sum(count for count, _ in tokens) / sum(rounds for _, rounds in tokens)
        row["measured_tokens_per_second"] = run.rate
        row["measured_speedup"] = run.rate / base
        row["error"] = row["predicted_speedup"] / row["measured_speedup"] - 1.0
        row["sampling"] = (row["sampling"] ** 2 + ratio_error(tokens) ** 2) ** 0.5


def _row(draft: str, gamma: int | str, expected: Expected, plain: float) -> dict[str, Any]:
    return {
        "draft": draft,
        "gamma": gamma,
        "predicted_tau": expected.tau,
        "predicted_tokens_per_second": expected.speedup / plain,
        "predicted_speedup": expected.speedup,
        "sampling": expected.sampling,
    }


def _result(calibration: Calibration, comparison: Comparison, finalists: int) -> dict[str, Any]:
    """Everything as JSON values.

    Args:
        calibration, comparison: done.
        finalists: how many are run where not all are.
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
