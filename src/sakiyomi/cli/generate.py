"""``sakiyomi generate``: text for prompts from the command line, a file or stdin."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sakiyomi.cli import images
from sakiyomi.cli.common import JsonOption, draft_spec, from_stdin, load, note_lossy, samples_of
from sakiyomi.cli.output import note, printed, progress, say
from sakiyomi.core.chats import Chat, is_chat, question
from sakiyomi.core.errors import InputError
from sakiyomi.core.images import read_images
from sakiyomi.core.outputs import Generation, Stats, Step
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.preflight import check_prompts
from sakiyomi.core.prompts import read_prompts, text_of
from sakiyomi.engine.config import LLMConfig

if TYPE_CHECKING:
    from sakiyomi.engine.inputs import TokenizedPrompt
    from sakiyomi.engine.llm import LLM


@dataclass(frozen=True)
class GenerateOptions:
    """What to continue.

    Attributes:
        prompts: texts to continue; - reads one from stdin.
        file: read prompts from this file: one a line, or .jsonl with text, prompt, turns or a chat (messages).
        chat: put each prompt into the chat template of the model, as a message of the user. Chats always are.
        stream: print the text while it is generated; the default for a single prompt.
        trace: colour each token by its source (accepted, recovered, bonus, plain).
        rounds_trace: with --json: each round's draft tree, and which of its tokens were accepted.
        prefix: prompt cache file, written by `sakiyomi cache build`; every prompt continues from it.
        image: show the model this image file (repeat it for several): each prompt is then a message behind them, in the
            chat template of the model, which has to be one that reads images.
    """

    prompts: tuple[str, ...] = field(default=(), metadata={"argument": "PROMPT"})
    file: str | None = None
    chat: bool = False
    stream: bool | None = None
    trace: bool = False
    rounds_trace: bool = False
    prefix: str | None = None
    image: tuple[str, ...] = ()


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
    if options.image:
        _check_images(options, model)
    if options.prefix is not None and any(is_chat(prompt) for prompt in prompts):
        raise InputError("a prefix is text, and a chat begins anew; drop --prefix, or --chat")
    llm = load(model)
    note_lossy(params)
    rounding = llm.target.weights.quantization
    prefix = llm.load_prefix(options.prefix) if options.prefix is not None else None
    asked = _asked(llm, prompts, options, params)
    began = time.perf_counter()
    if stream:
        results = [_streamed(llm, prompt, i, params, options.trace) for i, prompt in enumerate(asked)]
    else:
        with progress(f"generating {len(prompts)} texts"):
            found = llm.generate(asked, params, rounds_trace=options.rounds_trace, prefix=prefix)
        results = [sample for result in found for sample in samples_of(result)]
        if not output.json:
            _show(llm, results, asked, params, options.trace, [] if prefix is None else prefix.tokens)
    _hint(llm, model, prompts, results, params)
    _figures(llm, model.draft, Stats.total(result.stats for result in results), time.perf_counter() - began)
    generations = [result.to_dict() for result in results]
    told: dict[str, Any] = {"rounding": dataclasses.asdict(rounding)} if rounding is not None else {}
    told |= {"images": options.image} if options.image else {}
    output.emit({"target": model.target, "draft": model.draft, **told, "prompts": prompts, "generations": generations})
    llm.record()


def _figures(llm: LLM, draft: str, stats: Stats, seconds: float) -> None:
    """Print speed and draft on stderr; ``draft``: the given value of ``--draft``."""
    speed = f"{stats.tokens} tokens, {stats.tokens / seconds:.0f} tokens/s"
    if llm.draft is None:
        note(f"{speed}, without a draft")
    else:
        note(f"{speed}, {stats.tau:.2f} tokens a pass of {llm.name}; draft {draft_spec(llm, draft)}")


def _hint(
    llm: LLM, model: LLMConfig, prompts: Sequence[str | Chat], results: Sequence[Generation], params: SamplingParams
) -> None:
    """Say what to type where a text ends at once, because the model expects its chat template."""
    from sakiyomi.engine.chat_template import has_template

    ended = [i for i, one in enumerate(results) if one.finish_reason == "stop" and len(one.token_ids) <= 1]
    if any(isinstance(prompts[i // params.n], str) for i in ended) and has_template(llm.tokenizer, llm.processor):
        note(
            f"a text ended at its first token, and {llm.name} has a chat template: ask it with --chat, or with "
            f'sakiyomi chat --model {shlex.quote(model.target)} "..."'
        )


def _prompts(options: GenerateOptions) -> list[str | Chat]:
    """Prompts of the arguments, then of the file."""
    found: list[str | Chat] = [from_stdin() if text == "-" else text for text in options.prompts]
    if options.file is not None:
        found += read_prompts(options.file)
    if options.chat:
        found = [question(text) if isinstance(text, str) else text for text in found]
    if not found:
        raise InputError(
            'no prompt was given; expected one or more, for instance: sakiyomi generate "Once upon a time"'
        )
    check_prompts([text_of(prompt) for prompt in found])
    return found


def _check_images(options: GenerateOptions, model: LLMConfig) -> None:
    """Refuse unreadable images, or a model that reads no images, before its weights are loaded."""
    from sakiyomi.model_executor.loading import check_sees

    if options.prefix is not None:
        raise InputError("a prefix is text, and images begin a message of their own; drop --prefix, or --image")
    read_images(options.image)
    check_sees(model.target, trust_remote_code=model.trust_remote_code, allow_pickle=model.allow_pickle)


def _asked(llm: LLM, prompts: Sequence[str | Chat], options: GenerateOptions, params: SamplingParams) -> list[Any]:
    """The prompts as the engine takes them: chats as tokens, images behind the message that they belong to."""
    from sakiyomi.engine.chat_template import has_template

    if options.image:
        images.check_sees(llm)
        prompts = [_with_images(prompt, options.image) for prompt in prompts]
    if options.chat and not has_template(llm.tokenizer, llm.processor):
        raise InputError(f"{llm.name} has no chat template, so that chat means nothing to it; drop --chat")
    return [llm.engine.process(prompt, params) if is_chat(prompt) else prompt for prompt in prompts]


def _with_images(prompt: str | Chat, files: Sequence[str]) -> Chat:
    """A chat whose last message begins with these images."""
    *before, last = question(prompt) if isinstance(prompt, str) else prompt
    return [*before, {**last, "content": images.content(last["content"], files)}]


def _streamed(llm: LLM, prompt: Any, index: int, params: SamplingParams, coloured: bool) -> Generation:
    asked = _processed(llm, prompt, params)
    with llm.conversation() as alone:
        stream = alone.stream(asked, params, index=index)
        for _ in printed(stream, llm.tokenizer, params.stop, asked.tokens, coloured=coloured):
            pass
        return alone.generation()


def _processed(llm: LLM, prompt: Any, params: SamplingParams) -> TokenizedPrompt:
    return llm.engine.process(prompt, params) if isinstance(prompt, str) else prompt


def _show(
    llm: LLM,
    results: Sequence[Generation],
    prompts: Sequence[Any],
    params: SamplingParams,
    coloured: bool,
    ahead: Sequence[int],
) -> None:
    """Print the samples of prompts; ``ahead``: tokens of the prefix in front of each."""
    for index, result in enumerate(results):
        if index:
            say("")
        before = [*ahead, *_processed(llm, prompts[index // params.n], params).tokens] if coloured else []
        whole = Step(result.text, tuple(result.token_ids), tuple(result.trace))
        list(printed([whole], llm.tokenizer, params.stop, before, coloured=coloured))
