"""docs/race.svg: the same story written by transformers, by sakiyomi, and by sakiyomi with a draft, as it came.

    python recipes/race.py docs/race.svg

Each part of the text appears when it did in a run on this machine, slowed down (``--slower``). Accepted draft tokens
are green. The picture moves by itself (SMIL), also where scripts are not run.
"""

from __future__ import annotations

import argparse
import html
import re
import threading
import time
from pathlib import Path
from typing import Any

from sakiyomi import LLM, SamplingParams

PROMPT = "Once upon a time"
WIDTH, COLUMNS, LINE, CHARACTER = 820, 96, 20, 8.2
GREEN, PLAIN = "#1a7f37", "#57606a"
Part = tuple[float, str, str]
"""Seconds since the beginning, text, colour."""


def by_transformers(target: str, tokens: int) -> list[Part]:
    """Plain greedy decoding by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

    from sakiyomi import embedded

    folder = embedded(target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    found: list[Part] = []
    for _ in range(2):  # the first one warms up
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "streamer": streamer}
        began = time.perf_counter()
        thread = threading.Thread(target=model.generate, kwargs={**inputs, **options})
        thread.start()
        found = [(time.perf_counter() - began, text, PLAIN) for text in streamer if text]
        thread.join()
    return found


def by_sakiyomi(target: str, draft: str, tokens: int) -> list[Part]:
    """Ours; the parts are rounds."""
    llm = LLM(target, draft)
    params = SamplingParams(max_new_tokens=tokens)
    for _ in range(3):
        llm.generate(PROMPT, params)
    began, found = time.perf_counter(), []
    for step in llm.stream(PROMPT, params):
        accepted = any(entry.status == "accepted" for entry in step.trace)
        if step.text:
            found.append((time.perf_counter() - began, step.text, GREEN if accepted else PLAIN))
    return found


def lane(name: str, parts: list[Part], top: float, slower: float) -> tuple[str, float]:
    """One contender's text in lines, and where it ends."""
    pieces, column, line = [], 0, 0
    for seconds, text, colour in [(0.0, PROMPT, PLAIN), *parts]:
        rows = [(column, line, "")]  # where each line of this part begins, and its text
        for word in re.findall(r"\s*\S+|\s+", text):
            if column + len(word) > COLUMNS:
                line, column, word = line + 1, 0, word.lstrip()
                rows.append((0, line, ""))
            column += len(word)
            rows[-1] = (*rows[-1][:2], rows[-1][2] + word)
        drawn = [
            f'<text x="{20 + (start + len(words) - len(words.lstrip())) * CHARACTER:.1f}" '
            f'y="{top + 46 + row * LINE:.0f}" textLength="{len(words.strip()) * CHARACTER:.1f}">'
            f"{html.escape(words.strip())}</text>"
            for start, row, words in rows
            if words.strip()
        ]
        begin = f"clock.begin+{seconds * slower:.2f}s"
        shown = f'<set attributeName="visibility" to="visible" begin="{begin}" end="clock.end"/>'
        pieces.append(f'<g fill="{colour}" visibility="hidden">{shown}{"".join(drawn)}</g>')
    last = parts[-1][0]
    head = (
        f'<text x="20" y="{top + 20:.0f}" font-weight="bold" fill="#24292f">{name}</text>'
        f'<text x="{WIDTH - 20}" y="{top + 20:.0f}" text-anchor="end" fill="{PLAIN}" visibility="hidden">'
        f'<set attributeName="visibility" to="visible" begin="clock.begin+{last * slower:.2f}s" end="clock.end"/>'
        f"{last:.2f} s</text>"
    )
    return head + "".join(pieces), top + 60 + (line + 1) * LINE


def picture(lanes: dict[str, list[Part]], slower: float) -> str:
    """The whole picture."""
    longest = max(parts[-1][0] for parts in lanes.values()) * slower + 3
    bodies, top = [], 10.0
    for name, parts in lanes.items():
        body, top = lane(name, parts, top, slower)
        bodies.append(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" width="{WIDTH}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13.5">'
        f'<rect width="{WIDTH}" height="{top:.0f}" rx="8" fill="#f6f8fa"><animate id="clock" attributeName="x" '
        f'from="0" to="0" begin="0s;clock.end" dur="{longest:.2f}s"/></rect>{"".join(bodies)}</svg>\n'
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="tales")
    parser.add_argument("--tokens", type=int, default=72)
    parser.add_argument("--slower", type=float, default=10.0)
    asked = parser.parse_args()
    found = {
        "transformers": by_transformers(asked.target, asked.tokens),
        "sakiyomi, plain": by_sakiyomi(asked.target, "none", asked.tokens),
        "sakiyomi, with a draft": by_sakiyomi(asked.target, "auto", asked.tokens),
    }
    texts = {"".join(text for _, text, _ in parts) for parts in found.values()}
    if len(texts) > 1:
        print("the texts differ:", *texts, sep="\n")  # noqa: T201
    asked.out.write_text(picture(found, asked.slower), encoding="utf-8")
    print({name: round(parts[-1][0], 3) for name, parts in found.items()})  # noqa: T201
