"""Engines on a Ray cluster: whoever dies, every line is answered once. Needs the extra scale; skipped without."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters import Sleeper, cluster, raises_load_error
from sakiyomi import InputError
from sakiyomi.core.errors import LoadError
from sakiyomi.scale.cluster import Count, check_version, connected
from sakiyomi.scale.workers import WorkerOptions, WorkerPool

ray = pytest.importorskip("ray", reason="needs the extra scale")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

DRIVER = """
import asyncio, functools, sys
from pathlib import Path
from clusters import Sleeper
from sakiyomi.scale.batch import BatchFile, answer_missing
from sakiyomi.scale.cluster import Count, connected
from sakiyomi.scale.workers import WorkerOptions, WorkerPool

batch = BatchFile(Path(sys.argv[1]), Path(sys.argv[2]), {}, 4)

async def main():
    async with WorkerPool(functools.partial(Sleeper, 0.05), Count(2, 2), WorkerOptions(lines=8)) as pool:
        await answer_missing(batch, pool, batch.begin(), lambda _: print(flush=True), 4)

with batch.lock(), connected(sys.argv[3]):
    asyncio.run(main())
    batch.join()
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with cluster(nodes=2) as made:
        yield made


async def ask(pool: WorkerPool, prompts: list[str]) -> list[tuple[int, Any]]:
    async with pool:
        return await asyncio.gather(*(pool.post("/v1/completions", {"prompt": text}, "") for text in prompts))


def test_a_guilty_line_costs_itself_alone(nodes: Any) -> None:
    """Its workers die with what they had beside it, which others answer."""
    prompts = [f"{i}" for i in range(60)]
    prompts[20] = "die"
    pool = WorkerPool(Sleeper, Count(2, 2), WorkerOptions(lines=8))
    replies = asyncio.run(ask(pool, prompts))
    guilty = replies.pop(20)
    assert guilty[0] == 500 and guilty[1]["error"]["code"] == "worker_died"
    assert [reply["text"] for _, reply in replies] == prompts[:20] + prompts[21:]
    assert all(status == 200 for status, _ in replies) and pool.deaths == 4


def test_the_pool_grows_where_there_is_room(nodes: Any) -> None:
    replies = asyncio.run(
        ask(WorkerPool(functools.partial(Sleeper, 0.3), Count(1, 3), WorkerOptions(lines=1)), ["x"] * 30)
    )
    assert len({reply["pid"] for _, reply in replies}) == 2  # for a third one there is no processor


def test_a_model_that_cannot_be_loaded_is_one_error(nodes: Any) -> None:
    with pytest.raises(LoadError, match="there is no such model"):
        asyncio.run(ask(WorkerPool(raises_load_error, Count(1, 1)), ["x"]))


def test_kills_of_driver_and_worker(nodes: Any, tmp_path: Path) -> None:
    """The driver is killed, and in the run that goes on a worker; every line is there once, in order."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"temperature": 0}
    source.write_text("".join(
        json.dumps({"custom_id": f"{i}", "url": "/v1/completions", "body": {"prompt": f"{i}", **body}}) + "\n"
        for i in range(160)
    ))  # fmt: skip
    draws = random.Random(1)
    for victim in ("driver", "worker"):
        command = [sys.executable, "-c", DRIVER, str(source), str(out), nodes.address]
        driver = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert driver.stdout is not None
        for _ in range(draws.randrange(2, 10)):
            driver.stdout.readline()
        time.sleep(draws.random() * 0.1)
        os.kill(driver.pid if victim == "driver" else workers(nodes)[0], signal.SIGKILL)
        driver.stdout.read()
        driver.wait()
    replies = [json.loads(line) for line in out.read_text().splitlines()]
    assert [reply["custom_id"] for reply in replies] == [f"{i}" for i in range(160)]
    assert all(reply["response"]["body"]["text"] == reply["custom_id"] for reply in replies)


def workers(nodes: Any) -> list[int]:
    """Processes of workers."""
    import psutil

    found = [process.pid for process in psutil.process_iter(["cmdline"]) if "_Actor" in str(process.info["cmdline"])]
    assert found
    return found


def test_datasets(nodes: Any) -> None:
    """Rows come back with their replies; texts are those of the request alone."""
    from sakiyomi.scale import processor

    process = processor(Sleeper, lambda row: {"prompt": row["word"], "temperature": 0}, url="/v1/completions", rows=4)
    rows = process(ray.data.from_items([{"word": f"w{i}"} for i in range(12)])).take_all()
    assert sorted((row["word"], row["text"], row["status"]) for row in rows) == sorted(
        (f"w{i}", f"w{i}", 200) for i in range(12)
    )


def test_clear_errors(nodes: Any) -> None:
    with pytest.raises(LoadError, match=r"has sakiyomi 0\.0\.1, and this is"):
        check_version("0.0.1")
    for wrong in ("0", "x", "3:2", "-1", ""):
        with pytest.raises(InputError, match="expected a number from 1 on, or MIN:MAX"):
            Count.parse("workers", wrong)
    ray.shutdown()
    try:
        with pytest.raises(LoadError, match=r"there is no Ray cluster at '127\.0\.0\.1:1'"), connected("127.0.0.1:1"):
            pass
    finally:
        ray.init(address=nodes.address, log_to_driver=False, _node_ip_address="127.0.0.1")
