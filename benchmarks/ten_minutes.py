"""Does ten minutes of ``sakiyomi train draft`` on some text pay for a model of one's own?

    python benchmarks/ten_minutes.py --target FOLDER --text stories.txt [--minutes 10] [--valid NAME=FILE]

It runs the command as a user would, with seven tenths of the time for training, the rest for what the target writes to
learn from, and nothing else set; then it writes held-out prompts plain and with the draft, by turns, and prints one
line: the speed-up, tokens a pass, minutes by the clock and of the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

GOAL = 1.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--valid", default=None, help="NAME=FILE; without it some of the text is held back")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", default=None)
    given = parser.parse_args()
    out = given.out or tempfile.mkdtemp(prefix="ten-minutes-")
    command = [
        *(sys.executable, "-m", "sakiyomi", "train", "draft", "--json"),
        *("--target", given.target, "--text", given.text, "--out", out),
        *("--minutes", f"{0.7 * given.minutes:g}", "--sample-minutes", f"{0.3 * given.minutes:g}"),
        *(["--valid", given.valid] if given.valid else []),
    ]
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    used = os.times()
    measured = summary["measured"]
    print(summary["verdict"])
    print(
        f"{measured['speedup']:.2f} times plain ({measured['tau']:.2f} tokens a pass), "
        f"{summary['parameters'] / 1e6:.2f}M parameters, {summary['tokens']} tokens read, "
        f"{(time.monotonic() - began) / 60:.1f} minutes by the clock, "
        f"{(used.children_user + used.children_system) / 60:.1f} of the processor: "
        + ("the goal is reached" if measured["speedup"] >= GOAL else f"below {GOAL}")
    )


if __name__ == "__main__":
    main()
