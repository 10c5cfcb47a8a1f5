"""Runs jobs in a process of their own, so that its peak memory is theirs, and a killed system ends no other one.

Jobs are a file, and so are the records, one a line: of a process that was killed what it had done is there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["apart"]

_JOBS, _RECORDS, _LOG = "jobs.json", "records.jsonl", "log.txt"
_SHOWN = 300  # characters of what a process that failed said last


def apart(jobs: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The records of jobs, which run one after the other in one process.

    Args:
        jobs: see ``work``.
        options: of ``loader.Loader``.

    Yields:
        Records with ``job``, the place of the job in the list. A process that ends before its time gives a last one
        that says so, of the job that it was at.
    """
    with tempfile.TemporaryDirectory(prefix="sakiyomi-long-") as name:
        folder = Path(name)
        (folder / _JOBS).write_text(json.dumps({"jobs": jobs, "options": options}), encoding="utf-8")
        # The modules that are seen here, wherever this process was started and how.
        seen = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with (folder / _LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "sakiyomi.evaluation.bench.long.process", name], stdout=log, stderr=log, env=seen
            )
            try:
                code = process.wait()
            finally:  # Ctrl-C here
                process.kill()
                process.wait()
        records = folder / _RECORDS
        place = 0
        for line in records.read_text(encoding="utf-8").splitlines() if records.is_file() else ():
            record = json.loads(line)
            if "begins" in record:
                place = record["begins"]
            else:
                yield record
        if code:
            said = (folder / _LOG).read_text(errors="replace", encoding="utf-8").strip()[-_SHOWN:]
            killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL) if hasattr(signal, "SIGKILL") else False
            text = "the system ended the process, as it does when memory is short" if killed else said
            said = " ".join(text.split()) or f"exit code {code}"
            yield {"job": place, "length": None, "error": said, "over": killed}


def _main(folder: Path) -> None:
    from sakiyomi.evaluation.bench.long.loader import Loader
    from sakiyomi.evaluation.bench.long.work import work

    given = json.loads((folder / _JOBS).read_text(encoding="utf-8"))
    make = Loader(given["options"], shared=False)
    with (folder / _RECORDS).open("w", encoding="utf-8") as out:
        for place, job in enumerate(given["jobs"]):
            for record in ({"begins": place}, *({"job": place, **record} for record in work(job, make))):
                out.write(json.dumps(record) + "\n")
                out.flush()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # graphs may still be compiling in a thread, and nobody waits for what it would give
