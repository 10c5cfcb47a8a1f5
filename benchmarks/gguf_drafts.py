"""Draft models, EAGLE-3 heads and block drafters that sakiyomi wrote as GGUF, run by llama.cpp's server beside ours.

    python benchmarks/gguf_drafts.py PYTHON                          # drafts of tales that are part of the package
    python benchmarks/gguf_drafts.py PYTHON --target FOLDER --draft HEAD --draft SMALL_MODEL --type Q8_0

PYTHON is an interpreter with xllamacpp. Target and drafts are written with `sakiyomi export gguf`; llama.cpp generates
greedily from the same prompts without and with each draft, in a new process each time, and sakiyomi from the folders
with the same draft length. Compared are the texts with and without the draft, the accepted share of the draft tokens in
both programs, and the processor's time of a token in llama.cpp, prompt included, which a busy machine changes little.
The last line is one JSON object; the exit status is 1 where a text differs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sakiyomi import LLM, SamplingParams
from sakiyomi.core.prompts import STORIES

SERVER = """
import json, os, sys, time, urllib.request
import xllamacpp
task = json.load(sys.stdin)
params, types = xllamacpp.CommonParams(), xllamacpp.common_speculative_type
params.model.path, params.n_ctx, params.verbosity, params.n_parallel = task["target"], 1024, task["verbosity"], 1
params.cache_prompt, params.cache_ram_mib = False, 0
draft = params.speculative.draft
if task["draft"]:
    draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = task["draft"], task["gamma"], 0, 0.0
    params.speculative.types = [getattr(types, "COMMON_SPECULATIVE_TYPE_" + task["kind"].upper().replace("-", "_"))]
if task["wide"]:
    for one in (params, draft):
        one.cache_type_k = one.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
for one in (params, draft):
    one.cpuparams.n_threads = one.cpuparams_batch.n_threads = task["threads"]
server, found = xllamacpp.Server(params), []
for prompt in task["prompts"]:
    asked = {"prompt": prompt, "n_predict": task["tokens"], "temperature": 0.0, "samplers": ["temperature"],
             "ignore_eos": True, "return_tokens": True, "cache_prompt": False}
    request = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(asked).encode(),
                                     {"Content-Type": "application/json"})
    began = time.process_time()
    with urllib.request.urlopen(request) as reply:
        answer = json.load(reply)
    found.append({"tokens": answer["tokens"], "cpu_ms": 1000 * (time.process_time() - began), **answer["timings"]})
print(json.dumps({"version": xllamacpp.__version__, "found": found}), flush=True)
os._exit(0)
"""


def exported(model: str, place: Path, kind: str, target: str) -> tuple[str, str]:
    """The GGUF file of a model or head, and what llama.cpp calls it."""
    out = place / f"{Path(model).name}.gguf"
    command = [sys.executable, "-m", "sakiyomi", "export", "gguf", model, str(out), "--type", kind, "--json"]
    for more in (["--target", target], []):  # heads have a target, models have none
        done = subprocess.run([*command, *more], capture_output=True, encoding="utf-8", check=False)
        if done.returncode == 0:
            called = json.loads(done.stdout.strip().splitlines()[-1])["kind"]
            return str(out), "draft-simple" if called == "model" else called
    raise SystemExit(done.stderr)


def by_llama(python: str, task: dict[str, Any]) -> dict[str, Any]:
    """Texts and counts of llama.cpp's server in a process of its own."""
    done = subprocess.run(
        [python, "-I", "-c", SERVER], input=json.dumps(task), capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode:
        raise SystemExit(f"llama.cpp ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def ours(target: str, draft: str, gamma: int, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Texts, accepted share and tokens a round of sakiyomi, by the folders and in float32."""
    llm = LLM(target, draft, dtype="float32")
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, gamma=gamma, tree="chain")
    done = [llm.generate([prompt], params)[0] for prompt in prompts]
    drafted, accepted = (sum(getattr(one.stats, name) for one in done) for name in ("drafted", "accepted"))
    return {"texts": [one.token_ids for one in done], "accepted": accepted / max(drafted, 1)}


def summed(found: dict[str, Any], name: str) -> float:
    """A count or clock over all prompts."""
    return float(sum(one.get(name, 0) for one in found["found"]))


def compared(args: argparse.Namespace, draft: str, place: Path, base: dict[str, Any]) -> dict[str, Any]:
    """One draft in both programs."""
    file, kind = exported(draft, place, args.type, args.target)
    task = base | {"draft": file, "kind": kind}
    plain, with_draft = [], []
    for _ in range(args.laps):
        plain.append(by_llama(args.python, base | {"draft": None}))
        with_draft.append(by_llama(args.python, task))
    own = ours(args.target, draft, args.gamma, base["prompts"], args.tokens)
    texts = [[one["tokens"] for one in run["found"]] for run in (*plain, *with_draft)]
    first = with_draft[0]
    theirs = summed(first, "draft_n_accepted") / max(summed(first, "draft_n"), 1)
    ms = [statistics.median(summed(run, "cpu_ms") for run in runs) for runs in (plain, with_draft)]
    count = args.tokens * len(base["prompts"])
    return {
        "draft": draft, "kind": kind, "type": args.type, "xllamacpp": first["version"],
        "texts equal with and without": all(each == texts[0] for each in texts),
        "texts equal to ours": sum(a == b for a, b in zip(own["texts"], texts[0], strict=True)) / len(texts[0]),
        "accepted there": round(theirs, 4), "accepted here": round(own["accepted"], 4),
        "ms a token without": round(ms[0] / count, 3), "with": round(ms[1] / count, 3),
        "speed-up there": round(ms[0] / ms[1], 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="an interpreter with xllamacpp")
    parser.add_argument("--target", default="tales")
    parser.add_argument("--draft", action="append", help="folder or embedded name; repeatable")
    parser.add_argument("--type", default="F32")
    parser.add_argument("--gamma", type=int, default=5, help="draft tokens a round")
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--prompts", type=int, default=8, help="how many")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--verbosity", type=int, default=-1, help="of llama.cpp")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    from sakiyomi.core.embedded import folder_of

    tokenizer = AutoTokenizer.from_pretrained(folder_of(args.target))
    prompts = [tokenizer(text)["input_ids"] for text in STORIES[: args.prompts]]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        base = {
            "target": exported(args.target, place, args.type, args.target)[0], "draft": None, "gamma": args.gamma,
            "prompts": prompts, "tokens": args.tokens, "threads": args.threads, "verbosity": args.verbosity,
            "wide": args.type == "F32",
        }  # fmt: skip
        found = []
        for draft in args.draft or ["tales-draft", "tales-eagle"]:
            found.append(compared(args, draft, place, base))
            print(json.dumps(found[-1], indent=1), file=sys.stderr)
    print(json.dumps({"load": round(os.getloadavg()[0], 1), "drafts": found}))
    sys.exit(0 if all(each["texts equal with and without"] for each in found) else 1)


if __name__ == "__main__":
    main()
