"""The server's web page: when a browser paints it first, and what it loads in all. Needs a Chromium.

    python benchmarks/page.py                               # starts a server with the embedded pair
    python benchmarks/page.py --picture docs/page.png       # a screenshot of a reply
    python benchmarks/page.py --url http://127.0.0.1:8000/  # measures one that runs already

Each lap is a browser that was just started, with an empty profile: nothing is in a cache, no connection is open. Times
are milliseconds after the navigation began; sizes are bytes on the wire, headers included. Medians, and all laps.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from browser import chromium, tab

PAINTS = "Object.fromEntries(performance.getEntriesByType('paint').map((entry) => [entry.name, entry.startTime]))"
LOADED = (
    "Object.fromEntries([...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
    ".map((entry) => [new URL(entry.name).pathname, entry.transferSize]))"
)


@contextmanager
def served() -> Iterator[str]:
    """A server of the embedded pair on a free port; its address."""
    command = [sys.executable, "-m", "sakiyomi", "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"at (http://\S+)", line):
                yield found[1] + "/"
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait()


def lap(program: str, url: str, size: tuple[int, int]) -> tuple[dict[str, float], dict[str, int]]:
    """Times of the paints, and bytes of what was loaded."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, tab(program, Path(profile)) as page:
        page.size(*size, phone=size[0] < 600)
        page.open(url)
        page.until("card !== null")
        page.until("performance.getEntriesByType('paint').length === 2")
        return page.run(PAINTS), page.run(LOADED)


def picture(program: str, url: str, path: Path) -> None:
    """The page after a reply, as it is shown in README.md."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, tab(program, Path(profile)) as page:
        page.size(1280, 800)
        page.open(url)
        page.until("card !== null")
        page.run("$('max').value = 60; $('temperature').value = 0; $('prompt').focus()")
        page.type("Once upon a time")
        page.press("Enter")
        page.until("current !== null && under === null && current.tokens > 20", 120)
        page.picture(path)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a page that is served already")
    parser.add_argument("--laps", type=int, default=10)
    parser.add_argument("--phone", action="store_true", help="390 x 844 instead of 1280 x 800")
    parser.add_argument("--picture", type=Path, help="only write a screenshot of a reply here")
    options = parser.parse_args()
    program = chromium()
    if program is None:
        raise SystemExit("no Chromium here; apt-get install chromium-headless-shell")
    size = (390, 844) if options.phone else (1280, 800)
    if options.picture:
        with nullcontext(options.url) if options.url else served() as url:
            picture(program, url, options.picture)
        return
    if options.url:
        laps = [lap(program, options.url, size) for _ in range(options.laps)]
    else:
        with served() as url:
            laps = [lap(program, url, size) for _ in range(options.laps)]
    version = subprocess.run([program, "--version"], capture_output=True, encoding="utf-8").stdout.strip()
    found: dict[str, object] = {"browser": version, "size": list(size), "laps": len(laps)}
    for name in ("first-paint", "first-contentful-paint"):
        times = [round(paints[name]) for paints, _ in laps]
        print(f"{name}: median {statistics.median(times):g} ms of {times}")
        found[name] = statistics.median(times)
    loaded = laps[-1][1]
    print(f"loaded: {sum(loaded.values())} bytes in all: {loaded}")
    print(json.dumps(found | {"bytes": sum(loaded.values()), "requests": len(loaded)}))


if __name__ == "__main__":
    main()
