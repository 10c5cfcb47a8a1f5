"""``sakiyomi batch``: a file of requests, answered."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sakiyomi.cli.common import JsonOption, load, server_packages
from sakiyomi.cli.output import note, say
from sakiyomi.core.checks import at_least
from sakiyomi.core.progress import progress
from sakiyomi.engine.config import LLMConfig
from sakiyomi.scale.cluster import WorkersOption, import_ray

if TYPE_CHECKING:
    from sakiyomi.scale.batch import BatchFile, BatchProgress


@dataclass(frozen=True)
class BatchOptions:
    """Input and output.

    Attributes:
        input: requests in OpenAI's batch format, a JSON object a line with custom_id, url (/v1/chat/completions or
            /v1/completions) and body.
        output: where the replies go, in the order of the requests.
        piece: requests whose replies are written together; after an interruption unwritten ones are answered again.
        served_name: model name in the requests; by default the target's name.
    """

    input: str = field(metadata={"argument": "IN.jsonl"})
    output: str = field(metadata={"argument": "OUT.jsonl"})
    piece: int = 32
    served_name: str | None = None

    def __post_init__(self) -> None:
        at_least(self, piece=1)


@dataclass(frozen=True)
class RunBatchOptions:
    """The same, as vLLM has it.

    Attributes:
        input_file: see `sakiyomi batch`.
        output_file: see `sakiyomi batch`.
    """

    input_file: str = field(metadata={"short": "-i"})
    output_file: str = field(metadata={"short": "-o"})


def batch(options: BatchOptions, shared: WorkersOption, model: LLMConfig, output: JsonOption) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Replies have the order of the requests, each exactly once. The same command continues a run that was interrupted
    or killed. Exit code 1 if a request failed: its line says why. Requests that sample get a
    seed from their custom_id, unless they bring one, so that a text does not depend on when it is written.

    Example: sakiyomi batch requests.jsonl replies.jsonl --model FOLDER
    """
    with server_packages():
        from sakiyomi.scale.batch import BatchFile
    if shared.count is not None:
        import_ray()  # or refuse before anything is written
    settings = {**dataclasses.asdict(model), "served_name": options.served_name}
    work = BatchFile(Path(options.input), Path(options.output), settings, options.piece)
    with work.lock():
        found = work.begin()
        began = time.perf_counter()
        if found.answered:
            note(f"{found.answered} of {found.lines} requests were answered before")
        if work.missing():
            _run(work, model, found, options, shared)
        work.join()
    seconds = time.perf_counter() - began
    speed = f", {found.completion_tokens / seconds:.0f} tokens/s" if found.completion_tokens else ""
    say(f"{work.out}: {found.lines} replies, {found.failed} of them errors{speed}")
    output.emit({"output": str(work.out), **dataclasses.asdict(found), "seconds": seconds})
    if found.failed:
        raise typer.Exit(1)


def run_batch(options: RunBatchOptions, model: LLMConfig, output: JsonOption) -> None:
    """Answer a file of requests; `sakiyomi batch` with the flags of vLLM's run-batch.

    Example: sakiyomi run-batch -i requests.jsonl -o replies.jsonl --model FOLDER
    """
    batch(BatchOptions(options.input_file, options.output_file), WorkersOption(), model, output)


def _run(work: BatchFile, model: LLMConfig, found: BatchProgress, options: BatchOptions, shared: WorkersOption) -> None:
    """Answer the missing requests, and show progress."""
    from sakiyomi.scale.batch import IN_FLIGHT, answer_missing
    from sakiyomi.scale.in_process import InProcessServer, load_server, unlimited
    from sakiyomi.scale.workers import pool_of

    settings, count = unlimited(options.served_name), shared.count
    with ExitStack() as stack:
        if count is None:
            llm = load(model)
            server: Any = InProcessServer(llm, settings)
        else:
            make = functools.partial(load_server, model, settings)
            server = stack.enter_context(pool_of(make, shared, model.device, IN_FLIGHT * options.piece))
        began = time.perf_counter()
        shown = stack.enter_context(progress(f"answering {found.lines} requests"))
        log = logging.getLogger("sakiyomi.server")
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.WARNING)  # no line for each request

        def tell(now: BatchProgress) -> None:
            speed = now.completion_tokens / (time.perf_counter() - began)
            workers = "" if count is None else f"{server.ready} workers, "
            shown.update(f"{now.answered} of {now.lines} requests, {now.failed} errors, {workers}{speed:.0f} tokens/s")

        async def answer() -> None:
            async with server:
                await answer_missing(work, server, found, tell, IN_FLIGHT * (1 if count is None else count.most))

        try:
            asyncio.run(answer())
        except KeyboardInterrupt:
            note(f"{found.answered} of {found.lines} requests are answered; the same command continues")
            raise
        if count is None:
            llm.record()
