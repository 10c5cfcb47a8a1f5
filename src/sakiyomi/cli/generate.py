"""``sakiyomi generate``: text for prompts from the command line, a file or stdin."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sakiyomi.cli.common import JsonOption, draft_spec, load, note_lossy, samples_of
from sakiyomi.cli.output import note, printed, progress, say
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.outputs import Generation, Stats, Step
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.preflight import check_prompts
from sakiyomi.engine.config import LLMConfig

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM


@dataclass(frozen=True)
class GenerateOptions:
    """What to continue.

    Attributes:
        prompts: texts to continue; - reads one from stdin.
        file: read prompts from this file: one a line, or .jsonl with text, prompt or turns.
        stream: print the text while it is generated; the default for a single prompt.
        trace: colour each token by its source (accepted, recovered, bonus, plain).
        rounds_trace: with --json: each round's draft tree, and which of its tokens were accepted.
        prefix: prompt cache file, written by `sakiyomi cache build`; every prompt continues from it.
    """

    prompts: tuple[str, ...] = field(default=(), metadata={"argument": "PROMPT"})
    file: str | None = None
    stream: bool | None = None
    trace: bool = False
    rounds_trace: bool = False
    prefix: str | None = None


def generate(options: GenerateOptions, model: LLMConfig, params: SamplingParams, output: JsonOption) -> None:
    """Continue prompts.

    The output is the target's own; a draft makes it faster.

    Example: sakiyomi generate "Once upon a time" --model FOLDER --draft suffix --trace
    """
    prompts = _prompts(options)
    if options.stream and params.n > 1:
        raise InputError(f"stream is on and n is {params.n}; several samples cannot be streamed: drop --stream, or --n")
    shown = {name: getattr(params, name) is not None for name in ("logprobs", "prompt_logprobs")}
    for name, value in {"rounds_trace": options.rounds_trace, **shown}.items():
        if value and not output.json:
            raise InputError(f"{name} is shown by --json only; add --json")
    if options.rounds_trace and options.stream:
        raise InputError("rounds_trace needs the whole text; drop --stream")
    stream = options.stream if options.stream is not None else len(prompts) == 1 and params.n == 1
    if options.prefix is not None and options.stream:
        raise InputError("prefix needs whole texts; drop --stream")
    if (output.json or options.prefix is not None) and options.stream is None:
        stream = False
    llm = load(model)
    note_lossy(params)
    rounding = llm.target.weights.quantization
    prefix = llm.load_prefix(options.prefix) if options.prefix is not None else None
    began = time.perf_counter()
    if stream:
        results = [_streamed(llm, prompt, i, params, options.trace) for i, prompt in enumerate(prompts)]
    else:
        with progress(f"generating {len(prompts)} texts"):
            found = llm.generate(prompts, params, rounds_trace=options.rounds_trace, prefix=prefix)
        results = [sample for result in found for sample in samples_of(result)]
        if not output.json:
            _show(llm, results, params, options.trace)
    _figures(llm, model.draft, Stats.total(result.stats for result in results), time.perf_counter() - began)
    generations = [result.to_dict() for result in results]
    rounded = {"rounding": dataclasses.asdict(rounding)} if rounding is not None else {}
    output.emit(
        {"target": model.target, "draft": model.draft, **rounded, "prompts": prompts, "generations": generations}
    )
    llm.record()


def _figures(llm: LLM, draft: str, stats: Stats, seconds: float) -> None:
    """One line on stderr: how fast it was, and why; ``draft``: what was asked for."""
    speed = f"{stats.tokens} tokens, {stats.tokens / seconds:.0f} tokens/s"
    if llm.draft is None:
        note(f"{speed}, without a draft")
    else:
        note(f"{speed}, {stats.tau:.2f} tokens a pass of {llm.name}; draft {draft_spec(llm, draft)}")


def _prompts(options: GenerateOptions) -> list[str]:
    """Prompts from all places, in the order arguments, file."""
    found = [_from_stdin() if text == "-" else text for text in options.prompts]
    if options.file is not None:
        from sakiyomi.core.prompts import read_prompts

        found += read_prompts(options.file)
    if not found:
        raise InputError(
            'no prompt was given; expected one or more, for instance: sakiyomi generate "Once upon a time"'
        )
    check_prompts(found)
    return found


def _from_stdin() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise LoadError(f"the prompt on stdin is not UTF-8 text ({error.reason} at byte {error.start})") from None
    # The newline that echo adds is no part of the prompt.
    return text.removesuffix("\n")


def _streamed(llm: LLM, prompt: str, index: int, params: SamplingParams, coloured: bool) -> Generation:
    steps = list(printed(llm.stream(prompt, params, index=index), llm.tokenizer, params.stop, coloured))
    return Generation(
        text="".join(step.text for step in steps),
        token_ids=[token for step in steps for token in step.token_ids],
        prompt_tokens=len(llm.tokenizer(prompt).input_ids),
        finish_reason=steps[-1].finish_reason or "length",
        trace=[entry for step in steps for entry in step.trace],
        stats=steps[-1].stats or Stats(),
    )


def _show(llm: LLM, results: Sequence[Generation], params: SamplingParams, coloured: bool) -> None:
    for index, result in enumerate(results):
        if index:
            say("")
        whole = Step(result.text, tuple(result.token_ids), tuple(result.trace))
        list(printed([whole], llm.tokenizer, params.stop, coloured))
