"""The work for one system: answers and conversations, and what they cost; here, or in a process of its own.

Jobs and records are JSON values. In a process of its own the peak memory is the system's, and one that is killed ends
no other: its jobs are a file, and so are the records, one a line, so that what it had done is there. Knows no score:
prompts come in as token ids, texts go out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sakiyomi.core.errors import MemoryLimitError
from sakiyomi.core.memory import peak_bytes, readable, reset_peak, resident_bytes
from sakiyomi.core.params import SamplingParams
from sakiyomi.evaluation.bench.long.books import books
from sakiyomi.evaluation.bench.long.systems import Loader, System, caught

Job = Mapping[str, Any]
Record = dict[str, Any]
WARM = 64  # tokens of a first prompt, which no figure counts: kernels load, buffers are made


class Watch:
    """Memory of this process, or of the GPU, beside what there was when the first system was ready.

    Args:
        device: "cpu" or a GPU.
        limit: most bytes that may be held at once; None: no limit.
    """

    def __init__(self, device: str, limit: int | None) -> None:
        self._gpu = torch.device(device) if device.startswith("cuda") else None
        self._limit = limit
        self.ready: int | None = None

    def begin(self, more: int) -> None:
        """Before the questions of one length.

        Args:
            more: bytes that they are known to take beyond those held now.

        Raises:
            MemoryLimitError: that is over the limit.
        """
        now = resident_bytes() if self._gpu is None else int(torch.cuda.memory_allocated(self._gpu))
        self.ready = now if self.ready is None else self.ready
        if self._limit is not None and now + more > self._limit:
            raise MemoryLimitError(
                f"{readable(now)} are held and {readable(more)} more are needed; the limit is {readable(self._limit)}"
            )
        if self._gpu is None:
            reset_peak()
        else:
            torch.cuda.reset_peak_memory_stats(self._gpu)

    def peak(self) -> int:
        """Most bytes held since ``begin``.

        Raises:
            MemoryLimitError: they are over the limit.
        """
        most = peak_bytes() if self._gpu is None else int(torch.cuda.max_memory_allocated(self._gpu))
        if self._limit is not None and most > self._limit:
            raise MemoryLimitError(f"{readable(most)} were held at once; the limit is {readable(self._limit)}")
        return most


def answers(job: Job, make: Loader) -> Iterator[Record]:
    """Answers to the questions of each length, shortest first; one length that is over the memory ends it."""
    system = System(**job["system"])
    watch = Watch(job["place"], job["limit"])
    for batch in job["batches"]:
        length, questions = batch["length"], batch["questions"]
        with caught(length) as failed:
            running = make(system, length)
            running.answer(questions[0]["tokens"][:WARM], 2)
            watch.begin(running.predicted_bytes(max(len(q["tokens"]) + q["answer_tokens"] for q in questions)))
            found, peak = [], 0
            for place, question in enumerate(questions):
                wanted = place == 0 and job.get("kept", False)
                found.append(running.answer(question["tokens"], question["answer_tokens"], kept=wanted))
                peak = watch.peak()
            assert watch.ready is not None
            yield {
                "length": length,
                "texts": [answer.text for answer in found],
                "prefill": [len(q["tokens"]) / a.prefill_seconds for q, a in zip(questions, found, strict=True)],
                "decode": [(a.tokens - 1) / a.decode_seconds for a in found if a.tokens > 1],
                "kept": found[0].kept,
                "kv_bytes": running.kv_bytes,
                "far_bytes": running.far_bytes,
                "peak_bytes": peak,
                "grown_bytes": peak - watch.ready,
            }
        if failed:
            yield failed
            if failed["over"]:
                return


def turns(job: Mapping[str, Any], make: Loader) -> Iterator[dict[str, Any]]:
    """Texts, tokens and bytes after each turn of one conversation a batch, as far as it goes.

    Every turn is a whole question of a made task, so that right answers are known; the model's own replies stay in the
    conversation.
    """
    system = System(**job["system"])
    for batch in job["batches"]:
        record: dict[str, Any] = {"length": batch["length"], "texts": [], "tokens": [], "kv": [], "resident": []}
        with caught(batch["length"]) as failed:
            make.release()  # what the conversation before had allocated would be there from the first turn on
            running: Any = make(system, batch["length"])  # never one-shot, which keeps nothing between two prompts
            llm = running.llm
            held: list[int] = []
            with llm.conversation() as conversation:
                for turn in batch["turns"]:
                    held += turn["tokens"]
                    done = conversation.generate(held, SamplingParams(max_new_tokens=turn["answer_tokens"]))
                    held += done.token_ids
                    record["texts"].append(done.text)
                    record["tokens"].append(len(held))
                    record["kv"].append(llm.target.cache.bytes)
                    record["resident"].append(resident_bytes())
        yield record | failed


KINDS: dict[str, Callable[[Job, Loader], Iterator[Record]]] = {"answers": answers, "books": books, "turns": turns}


def work(job: Job, make: Loader) -> Iterator[Record]:
    """Do a job; records come as they are ready."""
    make.release()  # what an earlier job had allocated would count as this one's
    yield from KINDS[job["kind"]](job, make)


_JOBS, _RECORDS, _LOG = "jobs.json", "records.jsonl", "log.txt"
_SHOWN = 300  # characters of what a process that failed said last


def apart(jobs: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The records of jobs, which run one after the other in one process.

    Args:
        jobs: see ``work``.
        options: of ``Loader``.

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
                [sys.executable, "-m", "sakiyomi.evaluation.bench.long.jobs", name], stdout=log, stderr=log, env=seen
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
    os._exit(0)  # kernels may still be compiling in a thread, and nobody waits for them
