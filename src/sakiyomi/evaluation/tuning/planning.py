"""The best gamma, its speed-up, operations and memory traffic from numbers alone: no model, no measurement.

Whatever is not given is derived from what is (``theory``): c from bytes that passes read, the cost of passes over many
rows from the roofline. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sakiyomi import theory
from sakiyomi.core.checks import at_least
from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.tuning.lines import between
from sakiyomi.theory.checks import cost

FLOOR = 1e-9
LONGEST = 1024


@dataclass(frozen=True)
class PlanConfig:
    """Numbers of a pair and a machine.

    Attributes:
        alpha: acceptance rate of the first draft token (again for the second, and so on); the last one holds for all
            further tokens.
        c: time of a draft step in plain target steps; from the sizes if not given.
        c_hat: operations of a draft step in those of a target step; from the sizes if not given.
        v: time of a pass over so many rows in passes over one, ROWS=RATIO, for instance 5=1.33 (again for each;
            straight lines between): sakiyomi info --target shows a machine's own. If not given, from bandwidth and
            operations per second; else a pass is taken to cost the same for all rows.
        overhead: other time of a round, in plain target steps.
        batch: requests that share the passes.
        max_gamma: longest draft that is considered.
        target_size: weights of the target: 7B, 134M.
        draft_size: weights of the draft.
        bits: of a weight of the target.
        draft_bits: of a weight of the draft.
        kv_per_token: bytes of the target's keys and values of one token: 512KiB.
        draft_kv_per_token: bytes of the draft's keys and values of one token.
        context: tokens in the cache.
        bandwidth: bytes that the machine reads in a second: 40GB.
        operations: operations that the machine computes in a second: 2T.
        plot: write the curves to this .png or .svg file.
    """

    alpha: tuple[float, ...] = ()
    c: float | None = None
    c_hat: float | None = None
    v: tuple[str, ...] = ()
    overhead: float = 0.0
    batch: int = 1
    max_gamma: int = 16
    target_size: str | None = None
    draft_size: str | None = None
    bits: float = 16.0
    draft_bits: float = 16.0
    kv_per_token: str = "0"
    draft_kv_per_token: str = "0"
    context: int = 0
    bandwidth: str | None = None
    operations: str | None = None
    plot: str | None = None

    def __post_init__(self) -> None:
        if not self.alpha:
            raise InputError("alpha is not given; give the share of draft tokens that are accepted: --alpha 0.8")
        for value in self.alpha:
            if not 0.0 <= value <= 1.0:
                raise InputError(f"alpha is {value:g}; it is a probability, between 0 and 1")
        at_least(self, batch=1, max_gamma=1, context=0)
        if self.max_gamma > LONGEST:
            raise InputError(f"max_gamma is {self.max_gamma}; expected at most {LONGEST}: every gamma is a line")
        if self.c_hat is not None:
            cost("c_hat", self.c_hat)
        for name in ("bits", "draft_bits"):
            if not 0.0 < getattr(self, name) <= 64.0:
                raise InputError(f"{name} is {getattr(self, name):g}; expected a number above 0, for instance 16 or 4")
        if self.operations is not None and (self.bandwidth is None or self.target_size is None):
            raise InputError("operations is given without bandwidth and target_size; a pass needs all three")
        if self.bandwidth is not None and self.target_size is None:
            raise InputError("bandwidth is given without target_size; give both, or leave it out")
        if self.draft_size is not None and self.target_size is None:
            raise InputError("draft_size is given without target_size; give both, or --c")
        for name in ("target_size", "draft_size", "bandwidth", "operations"):
            if (given := getattr(self, name)) is not None and _number(name, given) <= 0.0:
                raise InputError(f"{name} is {given!r}; expected more than 0, or leave it out")
        held = max(_number(name, getattr(self, name)) for name in ("kv_per_token", "draft_kv_per_token"))
        if (self.context > 0) != (held > 0.0) or (self.context and self.target_size is None):
            raise InputError(
                f"context is {self.context}, kv_per_token {self.kv_per_token!r} and target_size {self.target_size!r}; "
                "keys and values are read beside the weights: give all three, or leave context and kv_per_token out"
            )


def plan(config: PlanConfig) -> dict[str, Any]:
    """Compute the plan as JSON values.

    Returns:
        ``gamma`` and ``speedup`` of the best one (0 and 1: plain decoding), ``lines`` by gamma from 0 on, ``c``,
        ``c_hat`` and where they come from.

    Raises:
        InputError: a value that cannot be meant, or too few of them.
    """
    pair = _Pair(config)
    best, fastest = theory.marginal_gamma(config.alpha, pair.c, pair.verify, config.overhead, config.max_gamma)
    lines = [pair.line(gamma) for gamma in range(config.max_gamma + 1)]
    plain = pair.seconds(config.batch) if config.bandwidth is not None else None
    return {
        "gamma": best,
        "speedup": fastest,
        "tokens": lines[best]["tokens"],
        "c": pair.c,
        "c_hat": pair.c_hat,
        "plain_ms": None if plain is None else 1000 * plain,
        "tokens_per_second": None if plain is None else fastest / plain,
        "lines": lines,
        "given": asdict(config),
    }


class _Pair:
    """The numbers as floats.

    Attributes:
        config: where they come from.
        read: bytes of a pass over one request's row: weights and kv, draft_weights and draft_kv.
        c, c_hat: a draft step in time and in operations; c_hat None: not known.
        verify: time of a pass over so many rows of each request, in passes over one of each.
    """

    def __init__(self, config: PlanConfig) -> None:
        self.config = config
        names = ("target_size", "draft_size", "kv_per_token", "draft_kv_per_token", "bandwidth", "operations")
        given = {name: getattr(config, name) for name in names}
        known = {name: None if text is None else _number(name, text) for name, text in given.items()}
        self.read = {
            "weights": (known["target_size"] or 0.0) * config.bits / 8,
            "draft_weights": (known["draft_size"] or 0.0) * config.draft_bits / 8,
            "kv": (known["kv_per_token"] or 0.0) * config.context,
            "draft_kv": (known["draft_kv_per_token"] or 0.0) * config.context,
        }
        # Of 1 byte a second where it is not known: ratios are the same.
        self._bandwidth, self._rate = known["bandwidth"] or 1.0, known["operations"]
        self.c_hat = config.c_hat
        c = config.c
        if known["draft_size"] and known["target_size"]:
            if c is None:
                c = self.seconds(config.batch, "draft_") / self.seconds(config.batch)
            if self.c_hat is None:
                self.c_hat = known["draft_size"] / known["target_size"]
        if c is None:
            raise InputError(
                "c is not given; give the time of a draft step in target steps (--c 0.05; 0 for a draft from the "
                "text), or --target-size and --draft-size"
            )
        self.c, self.verify = c, self._verify()

    def seconds(self, rows: int, model: str = "") -> float:
        """Of a pass over rows of all requests together; ``model``: "" is the target, "draft_" the draft."""
        bits = self.config.draft_bits if model else self.config.bits
        weights = self.read[f"{model}weights"]
        read, operations = weights + self.config.batch * self.read[f"{model}kv"], 2 * weights * 8 / bits
        return theory.pass_seconds(rows, read=read, operations=operations, bandwidth=self._bandwidth, rate=self._rate)

    def _verify(self) -> Callable[[int], float]:
        batch = self.config.batch
        if self.config.v:
            curve = _curve(self.config.v)
            return lambda rows: curve(batch * rows) / curve(batch)
        if self._rate is None:
            return lambda rows: 1.0
        return lambda rows: self.seconds(batch * rows) / self.seconds(batch)

    def line(self, gamma: int) -> dict[str, Any]:
        """What is to be expected of one draft length."""
        config, v = self.config, self.verify(gamma + 1)
        tokens = theory.expected_chain_tokens(config.alpha, gamma)
        line: dict[str, Any] = {
            "gamma": gamma,
            "tokens": tokens,
            "speedup": theory.round_speedup(tokens, gamma * self.c, v, config.overhead if gamma else 0.0),
            "flat": theory.round_speedup(tokens, gamma * self.c, 1.0),
            "v": v,
            "operations": None if self.c_hat is None else (gamma * self.c_hat + gamma + 1.0) / tokens,
        }
        if config.target_size is not None:
            steps = gamma if self.read["draft_weights"] else 0
            line["traffic_bytes"] = theory.traffic(tokens, steps, **self.read, batch=config.batch).total
        return line


def _curve(entries: tuple[str, ...]) -> Callable[[int], float]:
    """Straight lines between what was measured, and on with the last one's slope."""
    points = {1: 1.0}
    for entry in entries:
        found = re.fullmatch(r"(\d+)=(\d*\.?\d+)", entry.strip())
        if found is None or int(found[1]) < 1 or float(found[2]) <= 0:
            raise InputError(f"v is {entry!r}; expected ROWS=RATIO, for instance 5=1.33")
        if int(found[1]) == 1 and float(found[2]) != 1:
            raise InputError(f"v is {entry!r}; v counts in passes over one row, so that 1=1 by definition")
        points[int(found[1])] = float(found[2])
    measured = sorted(points.items())
    return lambda count: max(between(measured, count), FLOOR)


_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}


def _number(name: str, text: str | None) -> float:
    """7B, 512KiB, 40GB, 2T: thousands, or with an i powers of 1024."""
    found = re.fullmatch(r"(\d*\.?\d+)\s*([kmgt]?)(i?)(b?)(?:/s)?", (text or "").strip().lower())
    if found is None or (found[3] and not found[2]):
        raise InputError(f"{name} is {text!r}; expected a number such as 7B, 134M, 512KiB or 40GB")
    # A B alone is a thousand million weights; after another letter it stands for bytes.
    unit = found[2] or (found[4] if name.endswith("size") else "")
    value = float(found[1]) * (1024.0 if found[3] else 1000.0) ** _UNITS[unit]
    if not math.isfinite(value):
        raise InputError(f"{name} is {text!r}, which is too large")
    return value


def draw(found: dict[str, Any], path: str) -> None:
    """The curves by gamma: tokens a pass, speed-up, operations and traffic; the best gamma is marked.

    Raises:
        LoadError: the file cannot be written.
    """
    from sakiyomi.evaluation.bench.pictures import curves, drawing
    from sakiyomi.evaluation.bench.report import Row

    alpha = ", ".join(f"{value:g}" for value in found["given"]["alpha"])
    title = f"alpha {alpha}, c {found['c']:.3g}; best gamma {found['gamma']}"
    look: dict[str, Any] = {"x": "gamma", "mark": found["gamma"], "xlabel": "gamma", "ylim": (0, None)}
    ways = {"flat": ("all passes alike", "--"), "speedup": "with what passes cost"}
    panels = [
        curves(ys={"tokens": ""}, title=title, ylabel="tokens a pass", **look),
        curves(ys=ways, legend="best", ylabel="speed-up over plain", **look),
    ]
    if found["c_hat"] is not None:
        panels.append(curves(ys={"operations": ""}, ylabel="operations a token, plain is 1", **look))
    if "traffic_bytes" in found["lines"][0]:
        panels.append(curves(ys={"traffic_bytes": ""}, ylabel="bytes read a token", **look))
    row = Row("plan", "", found["lines"])
    drawing(path, [(panel, row, 3.2) for panel in panels], width=5.6)
