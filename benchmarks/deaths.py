"""Deaths at random moments, with the embedded pair: what of a batch or of streams is lost, or another text.

python benchmarks/deaths.py batch [--runs 20] [--first 0]
python benchmarks/deaths.py streams [--runs 20]

`batch`: two Ray nodes of one processor answer a file of requests, half of which sample; driver, worker or node, by
turns, is killed by SIGKILL, and a driver is started again. The replies are compared with those of one process without
Ray. `streams`: ten streams of two replicas at once, half of them sampled, while one replica is killed; texts are
compared with those of a lap without a death. Needs the extra scale.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

VICTIMS = ("driver", "worker", "node")
LINES, TOKENS = 96, 48
STREAMS, STREAMED = 10, 700
NOTICED = {  # a dead node is noticed after 2 s in place of 15
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "health_check_initial_delay_ms": 2000,
}


def command(*words: str) -> list[str]:
    """Of this library."""
    return [sys.executable, "-m", "sakiyomi", *words]


def until(there: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Wait for something, and give it."""
    end = time.monotonic() + seconds
    while not (found := there()):
        if time.monotonic() > end:
            raise SystemExit(f"waited {seconds:g} s in vain")
        time.sleep(0.02)
    return found


# ---------------------------------------------------------------- a batch


def requests(path: Path) -> None:
    """A file of them."""
    words = ("fox", "boat", "tree", "king", "cat", "river")
    with path.open("w", encoding="utf-8") as file:
        for i in range(LINES):
            body = {"prompt": f"The {words[i % 6]} and the {words[i // 6 % 6]}", "max_tokens": TOKENS}
            body |= {"temperature": i % 2}
            file.write(json.dumps({"custom_id": f"{i}", "url": "/v1/completions", "body": body}) + "\n")


def texts(path: Path) -> list[tuple[str, Any]]:
    """Name and choices of each reply, in their order."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(one["custom_id"], one["response"] and one["response"]["body"].get("choices")) for one in found]


@contextlib.contextmanager
def nodes() -> Iterator[Any]:
    """A head without processors, and two nodes of one."""
    from ray.cluster_utils import Cluster

    each = {"object_store_memory": 100 << 20, "node_ip_address": "127.0.0.1"}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": NOTICED, **each}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        made.added = [made.add_node(num_cpus=1, wait=False, **each) for _ in range(2)]
        made.wait_for_nodes()
        yield made
    finally:
        made.shutdown()


def batch(runs: int, first: int) -> None:
    """So many runs, each with a death."""
    with tempfile.TemporaryDirectory() as folder:
        source, right = Path(folder) / "in.jsonl", Path(folder) / "right.jsonl"
        requests(source)
        model = ["--target", "tales", "--dtype", "float32", "--piece", "4"]
        subprocess.run(command("batch", str(source), str(right), *model), check=True, capture_output=True)
        wrong = 0
        for number in range(first, first + runs):
            draws, victim, out = random.Random(number), VICTIMS[number % 3], Path(folder) / f"{number}.jsonl"
            began, drivers = time.monotonic(), 1
            with nodes() as cluster:
                asked = command("batch", str(source), str(out), *model, "--workers", "2", "--address", cluster.address)
                start = lambda: subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # noqa: B023, E731
                driver = start()
                parts = out.with_name(out.name + ".parts")
                until(lambda: driver.poll() is not None or any(parts.glob("*.jsonl")))  # noqa: B023
                time.sleep(draws.uniform(0.1, 4.0))
                early = driver.poll() is None
                kill(victim, driver, cluster)
                _, said = driver.communicate()
                while not out.exists() or driver.returncode:
                    if drivers == 4:
                        raise SystemExit(said.decode()[-2000:])
                    driver, drivers = start(), drivers + 1
                    _, said = driver.communicate()
            same = texts(out) == texts(right)
            wrong += not same
            print(
                f"run {number}: {victim}{'' if early else ' (too late)'}, {'equal' if same else 'DIFFERENT'}, "
                f"{drivers} drivers, {time.monotonic() - began:.0f} s",
                flush=True,
            )
        print(json.dumps({"runs": runs, "different": wrong}))


def kill(victim: str, driver: subprocess.Popen[bytes], cluster: Any) -> None:
    """By SIGKILL."""
    if victim == "driver":
        driver.kill()
    elif victim == "node":
        cluster.remove_node(cluster.added[0], allow_graceful=False)
    else:
        head = psutil.Process()
        for process in head.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "_Actor" in " ".join(process.cmdline()):
                    process.kill()
                    return
        raise SystemExit("no worker was there to be killed; the run counts for nothing")


# ---------------------------------------------------------------- streams


def stream(port: int, number: int) -> tuple[str, float, bool]:
    """Text of a stream, its longest pause behind the first event, and whether it came to its end."""
    body = {"prompt": f"Once upon a time {number}", "max_tokens": STREAMED, "ignore_eos": True, "stream": True}
    body |= {"temperature": number % 2, "seed": number}
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    reply, text, last, longest, done = connection.getresponse(), "", 0.0, 0.0, False
    for line in reply:
        if not line.startswith(b"data: "):
            continue
        now = time.monotonic()
        longest, last = max(longest, now - last if last else 0.0), now
        if line.startswith(b"data: [DONE]"):
            done = True
        elif choices := json.loads(line[6:]).get("choices"):
            text += choices[0]["text"]
    return text, longest, done


def replicas(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Those that run."""
    found = []
    for one in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if ":Replica" in " ".join(one.cmdline()) or "#Replica#" in " ".join(one.cmdline()):
                found.append(one)
    return found


def streams(runs: int) -> None:
    """So many laps of ten streams, each with a death."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = command("serve", "--target", "tales", "--port", str(port), "--replicas", "2")
    process = subprocess.Popen(asked, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)

    def healthy() -> bool:
        with contextlib.suppress(OSError):
            urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
            return True
        return False

    def ready() -> bool:
        with contextlib.suppress(OSError):
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
                shown = set(re.findall(r'replica="([^"]+)"', page.read().decode()))
            return len(shown) == 2 and len(replicas(process)) == 2
        return False

    def lap() -> list[tuple[str, float, bool]]:
        with ThreadPoolExecutor(STREAMS) as pool:
            return list(pool.map(lambda i: stream(port, i), range(STREAMS)))

    lost = different = 0
    longest = 0.0
    try:
        until(healthy, 600)
        right = lap()
        for number in range(runs):
            until(ready, 120)
            draws = random.Random(number)
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(lap)
                time.sleep(draws.uniform(0.2, 1.6))
                draws.choice(replicas(process)).kill()
                got = found.result()
            lost += sum(not done for *_, done in got)
            different += sum(one[0] != other[0] for one, other in zip(got, right, strict=True))
            longest = max(longest, *(pause for _, pause, _ in got))
            print(f"lap {number}: lost {lost}, different {different}, longest pause {longest:.2f} s", flush=True)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)
    pause = max(pause for _, pause, _ in right)
    print(json.dumps({
        "streams": runs * STREAMS, "deaths": runs, "lost": lost, "different": different, "longest_pause": longest,
        "longest_pause_without": pause,
    }))  # fmt: skip


def main() -> None:
    """Kill, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["batch", "streams"])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first run, which seeds it")
    asked = parser.parse_args()
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else 127.0.0.1 is replaced by the outer address
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if asked.what == "batch":
        batch(asked.runs, asked.first)
    else:
        streams(asked.runs)


if __name__ == "__main__":
    main()
