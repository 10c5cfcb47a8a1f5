"""Engines on a Ray cluster: whoever dies, every line is answered once. Needs the extra scale; skipped without."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusters import Sleeper, cluster, raises_load_error
from sakiyomi import InputError
from sakiyomi.core.errors import LoadError
from sakiyomi.evaluation.audit.audit import AuditConfig, audit
from sakiyomi.evaluation.bench.spec.config import SpecConfig
from sakiyomi.evaluation.bench.spec.results import Results, chosen, own_questions
from sakiyomi.evaluation.bench.spec.run import run as run_spec
from sakiyomi.scale import audits
from sakiyomi.scale.cluster import Count, WorkersOption, check_room, check_version, connected
from sakiyomi.scale.questions import share
from sakiyomi.scale.samples import _worker, train_distill_data
from sakiyomi.scale.spread import spread
from sakiyomi.scale.workers import WorkerPool
from sakiyomi.train.commands import TrainDistillData
from train_toys import story_file, tiny_target

ray = pytest.importorskip("ray", reason="needs the extra scale")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

DRIVER = """
import asyncio, functools, sys
from pathlib import Path
from clusters import Sleeper
from sakiyomi.scale.batch import BatchFile, answer_missing
from sakiyomi.scale.cluster import Count, connected
from sakiyomi.scale.workers import WorkerPool

batch = BatchFile(Path(sys.argv[1]), Path(sys.argv[2]), {}, 4)

async def main():
    async with WorkerPool(functools.partial(Sleeper, 0.05), Count(2, 2), lines=8) as pool:
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
    pool = WorkerPool(Sleeper, Count(2, 2), lines=8)
    replies = asyncio.run(ask(pool, prompts))
    guilty = replies.pop(20)
    assert guilty[0] == 500 and guilty[1]["error"]["code"] == "worker_died"
    assert [reply["text"] for _, reply in replies] == prompts[:20] + prompts[21:]
    assert all(status == 200 for status, _ in replies) and pool.deaths == 4


def test_the_pool_grows_where_there_is_room(nodes: Any) -> None:
    """For a third one there is no processor. How long a second one takes to begin is the machine's affair."""

    async def pids() -> set[int]:
        found: set[int] = set()
        async with WorkerPool(functools.partial(Sleeper, 0.3), Count(1, 3), lines=1) as pool:
            until = time.monotonic() + 120
            while len(found) < 2 and time.monotonic() < until:
                replies = await asyncio.gather(*(pool.post("/v1/completions", {"prompt": "x"}, "") for _ in range(6)))
                found |= {reply["pid"] for _, reply in replies}
            assert pool.ready == 2
        return found

    assert len(asyncio.run(pids())) == 2


def test_a_model_that_cannot_be_loaded_is_one_error(nodes: Any) -> None:
    with pytest.raises(LoadError, match="there is no such model"):
        asyncio.run(ask(WorkerPool(raises_load_error, Count(1, 1), lines=8), ["x"]))


def test_kills_of_driver_and_worker(nodes: Any, tmp_path: Path) -> None:
    """The driver is killed, and in the run that goes on a worker; every line is there once, in order."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"temperature": 0}
    source.write_text("".join(
        json.dumps({"custom_id": f"{i}", "url": "/v1/completions", "body": {"prompt": f"{i}", **body}}) + "\n"
        for i in range(160)
    ), encoding="utf-8")  # fmt: skip
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
    replies = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [reply["custom_id"] for reply in replies] == [f"{i}" for i in range(160)]
    assert all(reply["response"]["body"]["text"] == reply["custom_id"] for reply in replies)


def workers(nodes: Any) -> list[int]:
    """Processes of workers."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):  # others on this machine may test, too
        with contextlib.suppress(psutil.Error):
            if "_Actor" in str(process.cmdline()):
                found.append(process.pid)
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


@pytest.mark.parametrize(
    ("values", "said"),
    [({"workers": "x"}, "workers is 'x'"), ({"workers": 2.0}, r"workers is '2\.0'"), ({"workers": (3, 2)}, "is '3:2'"),
     ({"rows": "x"}, "rows is 'x'"), ({"cpus": -1}, "cpus is -1")],
)  # fmt: skip
def test_datasets_refuse_what_makes_no_sense(values: dict[str, Any], said: str) -> None:
    from sakiyomi.scale import processor

    with pytest.raises(InputError, match=said):
        processor(Sleeper, dict, **values)


def test_distillation_data_is_that_of_one_engine(nodes: Any, tmp_path: Path) -> None:
    """A worker is killed meanwhile; another model on a worker is refused."""
    story = story_file(tmp_path / "stories.jsonl")
    config = TrainDistillData.of(
        out=str(tmp_path / "one.jsonl"), target=str(tiny_target(tmp_path)), data=(str(story),),
        samples=96, batch=4, tokens=24, device="cpu",
    )  # fmt: skip
    train_distill_data(config)
    shared = replace(config, out=str(tmp_path / "two.jsonl"), workers="2", address=nodes.address)
    parts, killed = Path(shared.out + ".parts"), threading.Event()

    def kill() -> None:
        out = Path(shared.out)  # looked at alone: whole_lines cuts what it finds
        while not (list(parts.glob("*.jsonl")) or (out.exists() and out.stat().st_size)):
            time.sleep(0.01)
        os.kill(workers(nodes)[0], signal.SIGKILL)
        killed.set()

    threading.Thread(target=kill, daemon=True).start()
    assert train_distill_data(shared)["samples"] == 96
    assert killed.is_set() and Path(shared.out).read_bytes() == Path(config.out).read_bytes()
    with pytest.raises(LoadError, match="another model on a worker"):
        list(spread(functools.partial(_worker, config, "x"), WorkersOption("1"), "cpu", [(0, None)]))


def test_questions_are_shared(nodes: Any, tmp_path: Path) -> None:
    """Every question and drafter once, though the first run ends early; what is known is not measured again."""
    out = tmp_path / "spec.jsonl"
    config = SpecConfig(
        draft=("prompt-lookup",), count=1, max_new_tokens=4, repeats=1, compile=False, out=str(out), dtype="float32"
    )
    questions = [question.id for question in chosen(own_questions(), (), 1)]
    asked = share(WorkersOption("2", address=nodes.address))
    told: list[str] = []

    def ends_early(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_spec(config, ends_early, asked)
    assert len(Results.read(out).records) == 4
    whole = run_spec(config, told.append, asked)
    found = out.read_text(encoding="utf-8")
    assert set(Results.read(out).records) == {(one, way) for one in questions for way in ("none", "prompt-lookup")}
    assert len(found.splitlines()) == 1 + 2 * len(questions)
    assert run_spec(config, told.append, asked)[0].lines == whole[0].lines and out.read_text(encoding="utf-8") == found
    assert run_spec(replace(config, out=None))[0].lines[0].keys() == whole[0].lines[0].keys()


def test_an_audit_is_shared(nodes: Any, tmp_path: Path) -> None:
    """Six prompts are two pieces; what makes no sense is an error of the same kind as without workers."""
    target, config = str(tiny_target(tmp_path)), AuditConfig(max_new_tokens=8, gammas=(2,), seeds=(0,))
    prompts = [f"Once upon a time, {word}" for word in ["a", "b", "c", "d", "e", "f"]]
    values: dict[str, Any] = {"prompts": prompts, "config": config, "options": {"compile": False}}
    told: list[str] = []
    shared = functools.partial(
        audits.audit, WorkersOption("2", address=nodes.address), target, "prompt-lookup", drafts=()
    )
    found, alone = shared(note=told.append, **values), audit(target, "prompt-lookup", **values)
    assert found.ok and [replace(c, batch=0) for c in found.checks] == [replace(c, batch=0) for c in alone.checks]
    assert {check.batch for check in found.checks} == {1, 4} and told[-1] == "compare: 2 of 2 pieces"
    with pytest.raises(InputError, match="ask for fewer"):
        shared(note=told.append, **values | {"config": replace(config, max_new_tokens=100_000)})


def test_clear_errors(nodes: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match="worker_cpus is 64; this machine has 1"):
        check_room(64, None)
    check_room(64, nodes.address)  # to which a larger machine may come
    assert "no machine of the cluster has more than 1" in caplog.text
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
