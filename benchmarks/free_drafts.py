"""What drafts without training bring on chats, by kind of question: tau, and processor time against plain decoding.

    python benchmarks/free_drafts.py --target FOLDER --quantize int8 --prompts questions.jsonl --count 8

Each line of a prompts file has `turns` (with `category`, its kind, as in Spec-Bench), or `prompt` or `text`. Questions
are asked through the target's template, greedily, plain and with each draft, interleaved. The processor's time of this
process behind the first token counts, which a busy machine changes little; give OMP_NUM_THREADS=1. A draft keeps what
it learns from question to question, unless --forget is given. *bound* is tau of a look-up that always copies from the
best earlier place, whose last token is the text's. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sakiyomi import LLM, SamplingParams
from sakiyomi.engine.chat_template import Dialogue, Exchange
from sakiyomi.engine.plain import EngineView

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def questions(paths: Sequence[str], count: int) -> dict[str, list[list[str]]]:
    """By kind the turns of some questions, spread over the file."""
    found: dict[str, list[list[str]]] = defaultdict(list)
    for path in map(Path, paths):
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            for row in map(json.loads, file):
                kind = row.get("category", path.name.partition(".")[0])
                turns = row["turns"] if "turns" in row else [row.get("prompt", row.get("text"))]
                found["mt-bench" if kind in MT_BENCH else kind].append(turns)
    return {kind: some[:: max(1, len(some) // count)][:count] for kind, some in found.items()}


def bound(prompt: Sequence[int], text: Sequence[int]) -> int:
    """Rounds of a look-up that always finds the best place to copy from."""
    tokens, end, rounds = [*prompt, *text], len(prompt) + 1, 0
    after: dict[int, list[int]] = defaultdict(list)
    for place, token in enumerate(tokens[: end - 1], start=1):
        after[token].append(place)
    while end < len(tokens):
        best = 0
        for place in after[tokens[end - 1]]:
            length = 0
            while (
                end + length < len(tokens) and place + length < end and tokens[place + length] == tokens[end + length]
            ):
                length += 1
            best = max(best, length)
        for place in range(end, min(len(tokens), end + best + 1)):
            after[tokens[place - 1]].append(place)
        end, rounds = end + best + 1, rounds + 1
    return rounds


class Table:
    """Tokens, rounds and milliseconds by kind and draft."""

    def __init__(self, llm: LLM, drafts: Sequence[str], params: SamplingParams, forget: bool) -> None:
        self._llm, self._params, self._forget = llm, params, forget
        self._views = {name: EngineView(llm, llm.drafter(name)) for name in ("none", *drafts)}
        self._dialogue = Dialogue(llm.tokenizer, "auto", "")
        self.rows: dict[tuple[str, str], list[tuple[int, int, float]]] = defaultdict(list)
        self.differing = 0
        for view in self._views.values():
            self._timed(view, self._dialogue.read(self._dialogue.messages_with("Say hello.", [])))

    def ask(self, kind: str, turns: Sequence[str]) -> None:
        """Have one question answered in every way."""
        before: list[Exchange] = []
        for said in turns:
            prompt = self._dialogue.read(self._dialogue.messages_with(said, before))
            if len(prompt) + self._params.max_new_tokens > self._llm.max_context:
                return
            texts = {}
            for name in self._views:
                if self._forget:
                    self._views[name] = EngineView(self._llm, self._llm.drafter(name))
                texts[name], milliseconds = self._timed(self._views[name], prompt)
                stats = texts[name].stats
                self.rows[kind, name].append((stats.tokens, stats.rounds, milliseconds))
            plain = texts["none"]
            self.differing += sum(text.token_ids != plain.token_ids for text in texts.values())
            self.rows[kind, "bound"].append((plain.stats.tokens, bound(prompt, plain.token_ids), 0.0))
            before.append(Exchange(said, plain.text))

    def _timed(self, view: EngineView, prompt: list[int]) -> tuple[Any, float]:
        """A text, and the milliseconds behind its first token."""
        request = view.submit([prompt], self._params)[0]
        while not request.output and not request.over:
            view.engine.step()
        began = time.process_time()
        text = view.engine.complete([request])[0]
        return text, 1000 * (time.process_time() - began)

    def figures(self, *some: str) -> list[dict[str, Any]]:
        """A row for each draft, of these kinds, or of each kind and of all together."""
        kinds = list(dict.fromkeys(kind for kind, _ in self.rows))
        found = []
        for kind in some or (*kinds, "all"):
            for name in dict.fromkeys(name for _, name in self.rows):
                own = [row for each in (kinds if kind == "all" else [kind]) for row in self.rows[each, name]]
                plain = [row for each in (kinds if kind == "all" else [kind]) for row in self.rows[each, "none"]]
                tokens, rounds, spent = (sum(column) for column in zip(*own, strict=True))
                ratios = [base[2] / row[2] for row, base in zip(own, plain, strict=True) if row[2]]
                figures = {"kind": kind, "draft": name, "texts": len(own), "tau": tokens / max(1, rounds)}
                if spent:
                    figures |= {"ms": spent / tokens, "speed": sum(row[2] for row in plain) / spent}
                    figures |= {"median": statistics.median(ratios)}
                found.append(figures)
        return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print some figures, and the load."""
    for row in rows:
        speed = f"{row['ms']:6.2f} ms  {row['speed']:.2f}x, median {row['median']:.2f}x" if "ms" in row else ""
        print(f"{row['kind']:16} {row['draft']:32} tau {row['tau']:.2f}  {speed}")
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--quantize")
    parser.add_argument("--prompts", action="append", required=True, help="questions; repeat for more files")
    parser.add_argument("--draft", action="append", help="a draft; repeat for more")
    parser.add_argument("--count", type=int, default=8, help="questions of each kind")
    parser.add_argument("--kinds", help="only these kinds, joined by commas")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, help="a fixed number of nodes; else what pays is drafted")
    parser.add_argument("--forget", action="store_true", help="drafters are made anew for every text")
    options = parser.parse_args()
    fixed = {"nodes": options.nodes, "gamma": min(8, options.nodes)} if options.nodes else {}
    params = SamplingParams(max_new_tokens=options.max_new_tokens, **fixed)
    llm = LLM(options.target, "none", quantize=options.quantize)
    table = Table(llm, options.draft or ["auto"], params, options.forget)
    for kind, some in questions(options.prompts, options.count).items():
        if options.kinds and kind not in options.kinds.split(","):
            continue
        for turns in some:
            table.ask(kind, turns)
        show(table.figures(kind))
    show(table.figures("all"))
    figures = table.figures()
    print(json.dumps({"figures": figures, "differing": table.differing, "load": os.getloadavg()}))


if __name__ == "__main__":
    main()
