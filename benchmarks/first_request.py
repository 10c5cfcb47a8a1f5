"""How much of its final speed an LLM has at its first request.

    python benchmarks/first_request.py                                     # tales with tales-draft, four processes
    python benchmarks/first_request.py FOLDER --draft model:tales-draft --laps 8

A process of its own for each lap: it loads the model, writes one text of 200 tokens, then the same again a few times.
The share is the median of the later ones' seconds by those of the first one, which loads nothing any more but finds out
what passes cost. A recording of the passes is kept before the first lap, as the commands keep one. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

LAP = """
import json, sys, time
from sakiyomi import LLM, SamplingParams
target, draft, prompt, tokens, texts, *record = sys.argv[1:]
llm = LLM(target, draft)
llm.wait()
params = SamplingParams(max_new_tokens=int(tokens), ignore_eos=True)
seconds = []
for _ in range(int(texts)):
    began = time.perf_counter()
    llm.generate([prompt], params)
    seconds.append(time.perf_counter() - began)
if record:
    llm.record()
print(json.dumps(seconds))
"""


def lap(options: argparse.Namespace, texts: int, record: bool = False) -> list[float]:
    """Seconds of the texts of one process."""
    told = [options.target, options.draft, options.prompt, str(options.tokens), str(texts), *["record"] * record]
    made = subprocess.run([sys.executable, "-c", LAP, *told], capture_output=True, encoding="utf-8", check=False)
    if made.returncode:
        raise SystemExit(f"a lap failed:\n{made.stderr[-2000:]}")
    found: list[float] = json.loads(made.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="tales", help="embedded name or folder")
    parser.add_argument("--draft", default="model:tales-draft")
    parser.add_argument("--laps", type=int, default=4, help="processes")
    parser.add_argument("--texts", type=int, default=4, help="of each process, the first one among them")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt", default="Once upon a time")
    options = parser.parse_args()
    if options.laps < 1 or options.texts < 2:
        parser.error("at least one lap of two texts")
    lap(options, 1, record=True)
    shares = []
    for number in range(options.laps):
        first, *later = lap(options, options.texts)
        usual = statistics.median(later)
        shares.append(usual / first)
        print(f"lap {number + 1}: first {first:.3f} s, then {usual:.3f} s: {shares[-1]:.0%}", flush=True)
    print(json.dumps({"target": options.target, "shares": shares, "median": statistics.median(shares)}))


if __name__ == "__main__":
    main()
