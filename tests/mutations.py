"""How sharp the tests are: wrong versions of the rules that matter, each of which the quick tests have to find.

    python tests/mutations.py [NAME ...] [--all-tests] [--json] [-j N]

Each mutation is made in a copy of the checkout, where the test files that ought to find it run up to the first failure.
Exit code: 0 all are found, 1 one survives, 2 nothing can be said: the table is out of date, tests fail without a
mutation, or the kernels are not compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src", "sakiyomi")
SOURCES = (".h", ".cpp")


class Mutation(NamedTuple):
    """A mistake that somebody could make."""

    name: str
    rule: str  # that it breaks
    file: str  # below src/sakiyomi
    tests: str  # files below tests/ that ought to find it, the first one soonest
    old: str  # text that the file has once
    new: str  # what stands in its place


# fmt: off
MUTATIONS = [Mutation(*row) for row in (
    ("ratio-accepts-by-p", "accept", "sampling/verifiers/ratio.py", "sampling/test_verifiers.py",
     "noise.uniform() * chance <", "noise.uniform() <"),
    ("ratio-judges-by-first-row", "accept", "kernels/verify.h", "sampling/test_native_verdicts.py",
     "uniform(stream) * chance < left[token]", "uniform(stream) * chance < target[token]"),
    ("block-forgets-level", "accept", "sampling/verifiers/traversal.py", "sampling/test_verifiers.py",
     "min(1.0, level * float(target[token]) / chance)", "min(1.0, float(target[token]) / chance)"),
    ("traversal-keeps-level", "accept", "sampling/verifiers/traversal.py", "sampling/test_verifiers.py",
     "place.target, place.level = after_refusal(", "place.target, _ = after_refusal("),
    ("draws-with-replacement", "accept", "kernels/growth.h", "drafters/test_native_trees.py",
     "    probs[token] = 0;\n", ""),
    ("residual-is-p", "residual", "sampling/verifiers/ratio.py", "sampling/test_verifiers.py",
     "left, mass = positive_part(target, drawn_from, LEAST_MASS)", "left, mass = target, 1.0"),
    ("residual-not-normalised", "residual", "kernels/row.h", "sampling/test_rows.py",
     "if (mass < least) return mass;\n  const float scale = 1 / mass;",
     "if (mass < least) return mass;\n  const float scale = 1;"),
    ("residual-of-last-sibling", "residual", "kernels/verify.h", "sampling/test_native_verdicts.py",
     "left = after(left, q, token,", "left = after(target, q, token,"),
    ("siblings-keep-q", "residual", "sampling/verifiers/ratio.py", "sampling/test_verifiers.py",
     "if distinct and row is not None:", "if distinct and untried is not None:"),
    ("bonus-of-first-row", "bonus", "sampling/verifiers/traversal.py", "sampling/test_verifiers.py",
     "target = rows.row(row) if", "target = rows.row(0) if"),
    ("bonus-within-first-support", "bonus", "kernels/verify.h", "engine/test_native_rounds.py",
     "end_by(left, target, kept);", "end_by(left, target);"),
    ("path-of-first-nodes", "tree path", "engine/request.py", "engine/test_request.py",
     "tokens = [draft.tree.tokens[node] for node in verdict.path] + [verdict.token]",
     "tokens = [*draft.tree.tokens[: len(verdict.path)], verdict.token]"),
    ("path-over-other-branches", "tree path", "kernels/verify.h", "sampling/test_native_verdicts.py",
     "if (parents[node] == place) {", "if (parents[node] >= place) {"),
    ("nodes-see-the-row-before", "mask", "kernels/batch.py", "kernels/test_kernels.py",
     "([] if parent < 0 else paths[parent])", "([] if parent < 0 else paths[i - 1])"),
    ("nodes-see-siblings", "mask", "kernels/cpu.cpp", "kernels/test_kernels.py",
     "row = block ? row - 1 : parent[row]) pass.path", "row = row - 1) pass.path"),
    ("features-of-the-row-before", "mask", "kernels/growth.h", "golden/test_eagle.py",
     "above < 0 ? 0 : 1 + (std::find(", "above < 0 ? 0 : (std::find("),
    ("siblings-at-other-positions", "mask", "kernels/cpu.cpp", "drafters/test_native_trees.py",
     "*position++ = s[2] - done + depths[i];", "*position++ = s[2] - done + i;"),
    ("window-one-wider", "sliding window", "kernels/attention.h", "kernels/test_kernels.py",
     "std::max<int64_t>(0, end - window)", "std::max<int64_t>(0, end - window - 1)"),
    ("window-one-wider-in-torch", "sliding window", "kernels/batch.py", "kernels/test_kernels.py",
     "seen &= columns > rows - window if", "seen &= columns >= rows - window if"),
    ("refused-rows-stay", "commit", "cache/kv_store.py", "property/test_cache.py",
     "if not rows or rows[-1] == len(rows) - 1:", "if not rows or rows[0] == 0:"),
    ("rows-one-too-early", "commit", "kernels/round.h", "engine/test_native_rounds.py",
     "rows.push_back(node + 1);", "rows.push_back(node);"),
    ("draft-keeps-a-row", "roll back", "kernels/round.h", "engine/test_native_rounds.py",
     "own.ask.held = own.ask.first + read.size();", "own.ask.held = own.ask.first + read.size() + 1;"),
    ("state-keeps-a-token", "roll back", "cache/recurrent_store.py", "cache/test_recurrent_store.py",
     "if length < record.at:", "if length + 1 < record.at:"),
    ("worst-pairs-stay", "eviction order", "cache/policies/base.py", "cache/test_policies.py",
     "argsort(dim=1, descending=True, stable=True)", "argsort(dim=1, descending=False, stable=True)"),
    ("last-tokens-not-pinned", "eviction order", "cache/policies/base.py", "cache/test_policies.py",
     "return first | last", "return first"),
    ("pairs-out-of-order", "eviction order", "cache/eviction.py", "cache/test_policies.py",
     "best.sort(1).values", "best"),
    ("rounds-cross-boundaries", "eviction order", "engine/speculation.py", "golden/test_policies.py",
     "return min(request.last - length - 1, request.boundary - length)", "return request.last - length - 1"),
    ("packed-one-row-early", "quantized border", "cache/quantized.py", "cache/test_quantized.py",
     "max(0, count - self.residual) // GROUP", "max(0, count - self.residual + 1) // GROUP"),
    ("end-token-one-late", "stop", "engine/request.py", "engine/test_request.py",
     'return used, "stop"', 'return used + 1, "stop"'),
    ("end-token-inside-a-run", "stop", "kernels/round.h", "engine/test_native_rounds.py",
     "while (used < most && !stopped) stopped =", "used = most - 1, stopped ="),
    ("stop-string-one-late", "stop", "core/text.py", "core/test_text.py",
     "for used, token in enumerate(token_ids, start=1):", "for used, token in enumerate(token_ids, start=2):"),
    ("length-one-more", "stop", "engine/request.py", "engine/test_request.py",
     "room = self.last - len(self.tokens)\n", "room = self.last - len(self.tokens) + 1\n"),
    ("penalty-sees-the-draft", "penalties", "sampling/verifiers/base.py", "sampling/test_verifiers.py",
     "paths = (self._tree.path_tokens(index - 1),)", "paths = (self._tree.tokens,)"),
    ("penalty-forgets-the-path", "penalties", "sampling/sampler.py", "sampling/test_sampler.py",
     "[None] if len(path) else common[None]", "[None] if not len(path) else common[None]"),
    ("penalty-of-the-prompt-alone", "penalties", "engine/engine.py", "golden/test_sampled.py",
     "draft.tree, request.tokens, here)", "draft.tree, request.tokens[: request.prompt_tokens], here)"),
    ("top-p-before-temperature", "temperature", "sampling/probs.py", "sampling/test_sampler.py",
     "probs, order = scores.softmax(-1)", "probs, order = (scores * params.temperature).softmax(-1)"),
    ("top-k-without-temperature", "temperature", "kernels/row.h", "sampling/test_sampler.py",
     "std::exp((c.weight - whole.top) * sharpness)", "std::exp(c.weight - whole.top)"),
    ("noise-without-depth", "noise", "sampling/verifiers/coupled.py", "property/test_trees.py",
     "noise.top(rows.position + depth,", "noise.top(rows.position,"),
    ("noise-without-depth-in-kernels", "noise", "kernels/verify.h", "sampling/test_native_verdicts.py",
     "NoiseKey(ask.noise, ask.position + depth)", "NoiseKey(ask.noise, ask.position)"),
    ("samples-share-a-seed", "noise", "engine/request_factory.py", "golden/test_sampled.py",
     "RequestNoise(seed, *key)", "RequestNoise(seed)"),
    ("bytes-given-too-early", "text", "core/text.py", "core/test_text.py",
     "while start > self._closed and", "while start > self._closed + 1 and"),
    ("prefix-one-block-more", "prefix", "engine/slots.py", "golden/test_conversation.py",
     "return base + (count - base) // self._chunk_size", "return base + -(-(count - base) // self._chunk_size)"),
    ("prefix-beyond-the-end", "prefix", "cache/prefix.py", "golden/test_sharing.py",
     "return min(count, most)", "return count"),
    ("scale-of-another-row", "blocks", "kernels/blocks.h", "kernels/test_blocks.py",
     "(scale * by[r * (x.in / group_length)])", "(scale * by[0])"),
    ("factors-in-another-order", "blocks", "model_executor/gguf/blocks.py", "model_executor/test_gguf_blocks.py",
     "_planes(upper, 2, 4) << 4", "_planes(upper, 2, 1) << 4"),
    ("timestamps-repeat", "timestamps", "engine/transcription_rules.py", "engine/test_transcription.py",
     "scores[zero : last + (not after_time or paired)]", "scores[zero:last]"),
    ("timestamps-not-preferred", "timestamps", "engine/transcription_rules.py", "engine/test_transcription.py",
     "np.log(np.exp(times - largest).sum()) + largest > scores", "largest > scores"),
    ("open-text-is-lost", "timestamps", "engine/transcription_windows.py", "engine/test_transcription.py",
     "frames if closed else parts[-1].end * FRAMES", "frames"),
    ("try-continues-the-poor-text", "timestamps", "engine/transcription.py", "engine/test_transcription.py",
     "TokenizedPrompt([*asked.tokens], params", "TokenizedPrompt(asked.tokens, params"),
)]
# fmt: on


class Broken(Exception):
    """Why nothing can be said."""


def mutated(root: Path, mutation: Mutation) -> str:
    """The mutation's file with it."""
    name, _, file, tests, old, new = mutation
    text = (root / PACKAGE / file).read_text(encoding="utf-8")
    if (count := text.count(old)) != 1:
        raise Broken(f"{name}: {file} has the text {old!r} {count} times, and once is expected; correct the table")
    if missing := [each for each in tests.split() if not (root / "tests" / each).is_file()]:
        raise Broken(f"{name}: there is no file tests/{missing[0]}; correct the table")
    return text.replace(old, new)


def run(tree: Path, code: str, *arguments: str) -> tuple[int, str]:
    """Python code in a copy, where it imports the package from: its exit code, and what it printed."""
    folders = {"PYTHONPATH": "src", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}
    env = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "SAKIYOMI_CACHE_DIR")}
    for name, folder in folders.items():
        (tree / folder).mkdir(exist_ok=True)
        env[name] = str(tree / folder)
    own = "import pathlib, sys, sakiyomi; assert pathlib.Path(sakiyomi.__file__).is_relative_to(pathlib.Path.cwd()); "
    done = subprocess.run(
        [sys.executable, "-c", own + code, *arguments],
        cwd=tree, env=env, encoding="utf-8", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def build(tree: Path) -> None:
    """Compile the kernels of a copy."""
    code, said = run(tree, "from sakiyomi.kernels.build import native, origin; native(); sys.exit(origin())")
    if "compiled here" not in said:
        raise Broken(f"the kernels are not compiled: {said or code}")


def first_failure(tree: Path, files: Sequence[str], options: Sequence[str]) -> tuple[str, float]:
    """The first test of these files that fails in a copy, "" if none does; and the seconds of processor time."""
    code = "import os, pytest; code = pytest.main(sys.argv[1:]); print('SECONDS', sum(os.times()[:4])); sys.exit(code)"
    paths = [f"tests/{file}" for file in files]
    ended, said = run(tree, code, "-xq", "-p", "no:cacheprovider", *options, *paths)
    found = {kind: rest.partition(" - ")[0] for kind, _, rest in (line.partition(" ") for line in said.splitlines())}
    failed = found.get("FAILED", found.get("ERROR", ""))
    if ended not in (0, 1) or ended != bool(failed):
        raise Broken(f"pytest ends with {ended}:\n{said[-3000:]}")
    return failed, float(found["SECONDS"])


def checked_out(folder: Path, chosen: Sequence[Mutation], options: Sequence[str]) -> Path:
    """A copy without a mutation, in which the tests pass and the kernels, if they are mutated, are compiled."""
    for mutation in chosen:
        mutated(ROOT, mutation)
    listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, encoding="utf-8")
    for name in filter(lambda name: (ROOT / name).is_file(), listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    if any(mutation.file.endswith(SOURCES) for mutation in chosen):
        build(folder)
    files = list(dict.fromkeys(file for mutation in chosen for file in mutation.tests.split()))
    failed, seconds = first_failure(folder, files, options)
    if failed:
        raise Broken(f"without a mutation {failed} fails")
    print(f"without a mutation {len(files)} files pass, {seconds:.0f} s", file=sys.stderr)
    return folder


def tried(base: Path, mutation: Mutation, options: Sequence[str]) -> dict[str, Any]:
    """Which test finds a mutation ("": it survives), and after how many seconds of processor time."""
    tree = base.with_name(mutation.name)
    shutil.copytree(base, tree, copy_function=os.link, ignore=shutil.ignore_patterns("tmp"))
    path = tree / PACKAGE / mutation.file
    text = mutated(tree, mutation)
    path.unlink()  # it is a link
    path.write_text(text, encoding="utf-8")
    if path.suffix in SOURCES:
        build(tree)
    found, seconds = first_failure(tree, mutation.tests.split(), options)
    shutil.rmtree(tree)
    return {"name": mutation.name, "rule": mutation.rule, "test": found, "seconds": round(seconds, 1)}


def main() -> int:
    """See the top of this file."""
    known = {mutation.name: mutation for mutation in MUTATIONS}
    parser = argparse.ArgumentParser(description="Break the rules that matter, one by one: do the tests find it?")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"mutations to try (default: all): {', '.join(known)}")
    parser.add_argument("--all-tests", action="store_true", help="run thorough tests, too")
    parser.add_argument("--json", action="store_true", help="print the results as the last line")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="mutations at a time")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in known]:
        parser.error(f"there is no mutation {unknown[0]}; --help names all of them")
    chosen = [known[name] for name in dict.fromkeys(asked.names or known)]
    options = ("--thorough",) if asked.all_tests else ()
    jobs: list[Future[Any]] = []
    done: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, ThreadPoolExecutor(asked.j) as pool:
        try:
            jobs.append(pool.submit(checked_out, Path(folder).resolve() / "none", chosen, options))
            base = jobs[0].result()
            jobs += [pool.submit(tried, base, mutation, options) for mutation in chosen]
            for job in as_completed(jobs[1:]):
                done.append(one := job.result())
                result = f"found by {one['test']}" if one["test"] else "SURVIVED"
                print(f"[{len(done)}/{len(chosen)}] {one['name']}: {result}, {one['seconds']} s", file=sys.stderr)
        except (Broken, KeyboardInterrupt) as error:
            print(f"error: {str(error) or 'interrupted'}", file=sys.stderr)
            return 2
        finally:
            for job in jobs:
                job.cancel()
            while not all(job.done() for job in jobs):
                for child in psutil.Process().children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
                time.sleep(0.1)
    survived = [one["name"] for one in done if not one["test"]]
    print(f"{len(done) - len(survived)} of {len(done)} found", *survived, file=sys.stderr)
    if asked.json:
        print(json.dumps({"mutations": len(done), "survived": survived, "results": done}))
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
