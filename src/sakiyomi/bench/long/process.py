"""A job in a process of its own, so that the peak of its memory is its own, and a system that is killed kills nobody.

The job is a file, and so are the records, one a line: of a process that was killed what it had done is there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["apart"]

_JOB, _RECORDS, _LOG = "job.json", "records.jsonl", "log.txt"
_SHOWN = 300  # characters of what a process that failed said last


def apart(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The records of a job; a process that ends before its time gives a last one that says so."""
    with tempfile.TemporaryDirectory(prefix="sakiyomi-long-") as name:
        folder = Path(name)
        (folder / _JOB).write_text(json.dumps(job))
        # The modules that are seen here, wherever this process was started and how.
        seen = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with (folder / _LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "sakiyomi.bench.long.process", name], stdout=log, stderr=log, env=seen
            )
            try:
                code = process.wait()
            finally:  # Ctrl-C here
                process.kill()
                process.wait()
        records = folder / _RECORDS
        if records.is_file():
            yield from (json.loads(line) for line in records.read_text().splitlines())
        if code:
            said = (folder / _LOG).read_text(errors="replace").strip()[-_SHOWN:]
            killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL) if hasattr(signal, "SIGKILL") else False
            text = "the system ended the process, as it does when memory is short" if killed else said
            yield {"length": None, "error": " ".join(text.split()) or f"exit code {code}", "over": killed}


def _main(folder: Path) -> None:
    from sakiyomi.bench.long.work import Loader, Options, work

    job = json.loads((folder / _JOB).read_text())
    with (folder / _RECORDS).open("w") as out:
        for record in work(job, Loader(Options(**job["options"]), shared=False)):
            out.write(json.dumps(record) + "\n")
            out.flush()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # graphs may still be compiling in a thread, and nobody waits for what it would give
