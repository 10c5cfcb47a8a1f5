"""``sakiyomi demo``: the embedded model writes a story, each token in the colour of its origin; then a small table.

Of another model: a table and bars, see ``own_model``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sakiyomi.cli import own_model
from sakiyomi.cli.common import JsonOption
from sakiyomi.cli.output import legend, printed, progress, say, stdout, table, write
from sakiyomi.cli.rows import PlotOption
from sakiyomi.core.embedded import DEFAULT, DRAFTS
from sakiyomi.core.errors import InputError
from sakiyomi.core.memory import loading
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.config import LLMConfig
from sakiyomi.evaluation.bench.config import BenchConfig

if TYPE_CHECKING:
    from sakiyomi.core.outputs import Step
    from sakiyomi.engine.llm import LLM
    from sakiyomi.evaluation.bench.report import Row

TARGET, DRAFT = DEFAULT, f"model:{DRAFTS[DEFAULT]}"
PROMPT = "Once upon a time, there was a little fox who lived in a forest. One day, the fox"
STORY_UNTIL, KERNELS_UNTIL, TABLE_UNTIL = 20.0, 24.0, 46.0
"""Seconds after the start at which the story is cut, waiting for kernels ends, and the table gets no further runs."""
STORY_LEAST = 6.0
"""Seconds that the story has in any case, once it has begun."""
TABLE_COST = 34.0
"""Cost of a warm-up and a run of all four ways, per token of text, in tokens of the story; a rough guess."""
SHORTEST, LONGEST = 8, 64


@dataclass(frozen=True)
class DemoOptions:
    """The story and the table after it, or which model is measured.

    Attributes:
        target: embedded name, folder, GGUF file or hub id. Of any but tales there is no story: plain decoding is
            measured against what draft auto takes, on chats, code and summaries.
        draft: of the story model:FOLDER, by default tales-draft; of another model as for `sakiyomi generate`.
        dtype: float32, bfloat16, float16, or auto: float32 for the story, where rounding hardly ever changes a token;
            as stored for another model.
        quantize: int8 or int4: quantize the target's weights.
        prompt: beginning of the story; of another model the only prompt, in place of chats, code and summaries.
        max_new_tokens: length of the story, by default 160; of another model most new tokens of each text, by default
            as many as there is time for.
        gamma: draft tokens per round, or auto; by default 4 in the story, in the table too, and auto for another model.
        temperature: of the story; 0 is greedy.
        seed: of a sampled story.
        table: after the story, measure plain and speculative generation, ours and transformers'.
    """

    target: str = TARGET
    draft: str = "auto"
    dtype: str = "auto"
    quantize: str | None = None
    prompt: str | None = None
    max_new_tokens: int | None = None
    gamma: int | str | None = None
    temperature: float = 0.0
    seed: int = 0
    table: bool = True


def demo(options: DemoOptions, picture: PlotOption, output: JsonOption) -> None:
    """Show what drafts bring, in a minute or two.

    Without a model: streams a story of the embedded model, then compares speeds. With one: the same texts with and
    without drafts, on chats, code and summaries.

    Example: sakiyomi demo --model FOLDER --quantize int8
    """
    picture.check()
    if options.target == TARGET:
        _of_story(options, picture, output)
        return
    for name, value in (("temperature", options.temperature > 0), ("table", not options.table)):
        if value:
            raise InputError(f"{name} is for the story of {TARGET}; with another model all texts are greedy: drop it")
    model = LLMConfig(options.target, options.draft, dtype=options.dtype, quantize=options.quantize)
    params = SamplingParams(gamma=options.gamma or "auto", max_new_tokens=options.max_new_tokens or LONGEST)
    own_model.figures(model, params, options.prompt, options.max_new_tokens is not None, picture, output)


def _of_story(options: DemoOptions, picture: PlotOption, output: JsonOption) -> None:
    """The story and its table."""
    if picture.plot is not None and not options.table:
        raise InputError("plot draws the table, and table is off; drop --plot, or --no-table")
    params = SamplingParams(
        max_new_tokens=160 if options.max_new_tokens is None else options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed if options.temperature else None,
        gamma=4 if options.gamma is None else options.gamma,
    )
    if not isinstance(params.gamma, int):
        raise InputError(f"gamma is {params.gamma!r}; the story's table needs a number, as transformers does")
    config = BenchConfig(
        target=options.target,
        draft=DRAFT if options.draft == "auto" else options.draft,
        dtype="float32" if options.dtype == "auto" else options.dtype,
        quantize=options.quantize,
        gamma=params.gamma,
        repeats=3,
        max_new_tokens=64,
        count=2,
    )
    config.draft_model  # noqa: B018  refuses a draft that is no model, before any work

    began = time.time()  # not the process's own start: a shell that ends in this command has lived before it
    with progress(f"loading {options.target}"), loading():
        from sakiyomi.engine.llm import LLM

        llm = LLM(config.target, draft=config.draft, dtype=config.dtype, quantize=config.quantize)
    prompt = PROMPT if options.prompt is None else options.prompt
    story, first = _story(llm, prompt, params, began)
    tokens = sum(len(step.token_ids) for step in story)
    speed, stats = tokens / max(time.time() - first, 1e-9), story[-1].stats
    cut = "" if stats is not None else "; cut short, as this machine is busy"
    say(
        f"{tokens} tokens, {tokens / len(story):.2f} per target pass, {speed:.0f} tokens/s; first token "
        f"{first - began:.1f} s after the start{cut}"
    )
    found: dict[str, Any] = {
        "target": config.target,
        "draft": config.draft,
        "prompt": prompt,
        "text": "".join(step.text for step in story),
        "token_ids": [token for step in story for token in step.token_ids],
        "trace": [entry.to_dict() for step in story for entry in step.trace],
        "stats": None if stats is None else stats.to_dict(),
        "first_token_seconds": first - began,
    }
    if options.table:
        row = _table(llm, config, began, speed)
        found["table"] = None if row is None else row.to_dict()
        if row is not None and picture.plot is not None:
            own_model.draw([row], picture.plot)
    output.emit(found | {"seconds": time.time() - began})


def _story(llm: LLM, prompt: str, params: SamplingParams, began: float) -> tuple[list[Step], float]:
    """Stream the story; its steps, and when its first token came. It is cut where the machine is busy."""
    legend(stdout())
    stream = llm.stream(prompt, params)
    with progress("preparing the first tokens"):
        steps = [next(stream)]
    first = time.time()

    def whole() -> Iterator[Step]:
        yield steps[0]
        for step in stream:
            steps.append(step)
            yield step
            if time.time() > max(began + STORY_UNTIL, first + STORY_LEAST):
                return

    write(stdout(), prompt)
    for _ in printed(whole(), llm.tokenizer, params.stop, llm.tokenizer(prompt)["input_ids"], coloured=True):
        pass
    return steps, first


def _table(llm: LLM, config: BenchConfig, began: float, speed: float) -> Row | None:
    """Measure, print and give the table, as long as its texts can be at this speed (tokens/s); None: there is no time.

    On stderr what is waited for.
    """
    with progress("recording passes") as status:
        llm.wait(max(0.0, KERNELS_UNTIL - (time.time() - began)))
        tokens = int((TABLE_UNTIL - (time.time() - began)) * speed / TABLE_COST)
        if tokens < SHORTEST:
            say("", "the table is left out: this machine is busy. sakiyomi bench measures it, however long it takes")
            return None
        count = 2 if tokens >= 2 * LONGEST else 1
        config = replace(config, count=count, max_new_tokens=min(tokens // count, LONGEST))
        row = _measure(llm, config, began, status.update)
    from sakiyomi.evaluation.bench.report import condition_line

    say("")
    table(row.lines, title=row.title)
    say(*(f"  {line}" for line in (*row.notes, condition_line(row.conditions))))
    return row


def _measure(llm: LLM, config: BenchConfig, began: float, note: Callable[[str], None]) -> Row:
    from sakiyomi.evaluation.bench.frame import PairRow
    from sakiyomi.evaluation.bench.models import WAYS
    from sakiyomi.evaluation.bench.report import of_race
    from sakiyomi.evaluation.bench.speed import everybody

    note("table: loading the pair with transformers")
    row = PairRow("demo", config, note)
    left = TABLE_UNTIL - (time.time() - began)
    standings = row.race(everybody(row, llm, peers=WAYS[:2]), until=time.perf_counter() + left)
    return of_race("demo", "greedy, one prompt at a time, tokens/s", standings, **row.conditions(llm))
