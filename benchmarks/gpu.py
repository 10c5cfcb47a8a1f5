"""What a GPU gives: the tests for it, and tokens a second of models of 1B and 7B parameters, every text compared.

    python benchmarks/gpu.py --out gpu.json
    python benchmarks/gpu.py --out gpu.json --rows device tests single
    python benchmarks/gpu.py --out gpu.json --device cpu --small    # all of it in a small form, without a GPU

Processes of their own inflate the targets from `tales` while the first rows run; `tales-draft` drafts, all is in
bfloat16 and greedy. A row begins when its target is there. One that raises or takes too long says so, and the next one
begins; after an error that leaves the device unusable a new process goes on. The file has every line as soon as it is
measured; the tables come last. Texts may part at near-ties, which their `note` then says, but for those of `exact`. The
exit code is 1 if a text was another one than it has to be, or if a test failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import gpu_rows as rows
from gpu_rows import Bench, Lines, Models, shown
from sakiyomi.cli.output import quiet, table
from sakiyomi.core.errors import SakiyomiError
from sakiyomi.engine.machine import describe
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.model_executor.loading.options import parse_device


@dataclass(frozen=True)
class Step:
    """A row, and when it can run.

    Attributes:
        name: as in ``--rows``.
        title: of its table, with the sizes to be filled in.
        run: gives its lines.
        target: one of ``SIZES``; None: it needs none.
        least: seconds without which it does not begin.
        most: seconds after which it is stopped.
    """

    name: str
    title: str
    run: Callable[[Bench], Lines]
    target: str | None
    least: float
    most: float


SIZES = {"medium": "1B", "large": "7B"}
SMALL = {"medium": "21M", "large": "24M"}
STEPS = (
    Step("device", "the device, and what it reads and writes", rows.device, None, 5, 40),
    Step("tests", "tests marked gpu", rows.tests, None, 15, 120),
    Step("single", "{medium}, one text at a time", rows.single, "medium", 15, 120),
    Step("peers", "{medium}, one text at a time beside transformers", rows.peers, "medium", 30, 120),
    Step("exact", "{medium}, exact=True: the very text of a request alone", rows.exact, "medium", 15, 90),
    Step("batches", "{medium}, requests at once, gamma auto, total tokens/s", rows.batches, "medium", 20, 120),
    Step("large", "{large}, one text at a time", rows.single, "large", 30, 120),
    Step("caches", "{medium}, caches: room for all pairs, and for {tight} of a head", rows.caches, "medium", 20, 150),
    Step("large-peers", "{large}, one text at a time beside transformers", rows.peers, "large", 40, 120),
    Step("compiled", "{medium}, beside transformers with compiled passes", rows.compiled, "medium", 60, 150),
)
HIDDEN = {"low", "high", "note", "error"}
"""What the tables leave out."""


class OutOfTime(BaseException):
    """A row's time is over. Not an ``Exception``, which an engine would take for the fault of a drafter."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise ``OutOfTime`` when so many seconds are over, and again where somebody has caught it."""

    def stop(*_: Any) -> None:
        raise OutOfTime(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Report:
    """What was found, in its file as soon as it is there.

    Args:
        path: of the file.
        head: what has to be known of all rows.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self._path, self._head = path, head
        self.rows: list[Row] = []

    def read(self) -> None:
        """Take the rows of another process, which began it."""
        found = json.loads(self._path.read_text(encoding="utf-8"))["rows"]
        self.rows = [Row(**{"name": row.pop("row"), **row}) for row in found]

    def write(self) -> None:
        fresh = self._path.with_name(f".{self._path.name}.tmp")
        found = {**self._head, "rows": [row.to_dict() for row in self.rows]}
        fresh.write_text(json.dumps(found, indent=1), encoding="utf-8")
        fresh.replace(self._path)

    def measure(self, step: Step, bench: Bench, left: float) -> None:
        """One row, of which those lines stay that were there before an error.

        Args:
            step: the row.
            bench: what it is measured with.
            left: seconds.
        """
        began, error = time.monotonic(), None
        lines: list[dict[str, Any]] = []
        self.rows.append(Row(step.name, step.title.format(tight=rows.TIGHT, **bench.sizes), lines))
        try:
            if left < step.least:
                raise OutOfTime(f"skipped: {max(left, 0):.0f} s are left, and it needs about {step.least:.0f}")
            with limited(min(step.most, left)):
                for line in step.run(bench):
                    lines.append(line)
                    self.write()
        except (Exception, OutOfTime) as raised:
            error = shown(raised)
        seconds = time.monotonic() - began
        self.rows[-1] = replace(self.rows[-1], conditions={"seconds": seconds}, error=error)
        self.write()
        print(f"{step.name}: {len(lines)} lines in {seconds:.0f} s{f'; {error}' if error else ''}", file=sys.stderr)

    def show(self) -> None:
        for row in self.rows:
            visible = [{name: value for name, value in line.items() if name not in HIDDEN} for line in row.lines]
            table(replace(row, lines=visible).table(), title=f"\n{row.name}: {row.title}")
            said = [(line["name"], line.get(kind)) for line in row.lines for kind in ("note", "error")]
            for name, text in [*said, ("the row ended", row.error)]:
                if text:
                    print(f"  {name}: {text}")

    @property
    def right(self) -> bool:
        return all(line.get("ok", True) for row in self.rows for line in row.lines)


def next_step(steps: list[Step], bench: Bench, until: float) -> Step:
    """Take out the first one whose target is there; waits for one, as long as there is time."""
    while time.time() < until:
        for step in steps:
            if step.target is None or bench.models.ready(bench.sizes[step.target]):
                steps.remove(step)
                return step
        time.sleep(0.2)
    return steps.pop(0)


def usable(device: str) -> bool:
    """Whether the device still computes: after some errors nothing does there in this process any more."""
    try:
        return int(torch.ones(2, device=device).sum()) == 2
    except RuntimeError:
        return False


def go_on(args: argparse.Namespace, steps: Sequence[Step], seconds: float) -> int:
    """These rows in a new process."""
    command = [
        sys.executable,
        __file__,
        "--resume",
        "--out",
        args.out,
        "--device",
        args.device,
        "--models",
        args.models,
    ]
    command += ["--seconds", str(seconds), *["--small"] * args.small, "--rows", *(step.name for step in steps)]
    return subprocess.call(command)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="file of the results")
    parser.add_argument("--rows", nargs="+", choices=[step.name for step in STEPS], help="all if none is given")
    parser.add_argument("--seconds", type=float, default=520, help="for all of it, from the start of the process")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--small", action="store_true", help="tiny targets, few and short texts")
    folder = Path(tempfile.gettempdir(), "sakiyomi-gpu")
    parser.add_argument("--models", type=Path, default=folder, help="where the targets stay for the next time (16 GB)")
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    until = psutil.Process().create_time() + args.seconds
    try:
        device = str(parse_device(args.device))
    except SakiyomiError as error:
        parser.error(error.message)
    quiet()
    steps = [step for step in STEPS if args.rows is None or step.name in args.rows]
    sizes = SMALL if args.small else SIZES
    made = [] if args.resume else dict.fromkeys(sizes[step.target] for step in steps if step.target is not None)
    bench = Bench(device, args.small, sizes, Models(args.models, list(made)), {})
    report = Report(args.out, {"device": device, "small": args.small, "targets": sizes, **describe()})
    if args.resume:
        report.read()
    try:
        while steps:
            step = next_step(steps, bench, until)
            report.measure(step, replace(bench, size=sizes.get(step.target or "", "")), until - time.time())
            gc.collect()
            if steps and not usable(device):
                return go_on(args, steps, until - time.time())
    finally:
        bench.models.close()
    report.show()
    return int(not report.right)


if __name__ == "__main__":
    sys.exit(main())
