"""``sakiyomi chat``: a conversation with a model, whose cache is kept from one reply to the next."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import typer

from sakiyomi.cli.commands import obey
from sakiyomi.cli.common import JsonOption, load
from sakiyomi.cli.lines import Lines
from sakiyomi.cli.output import legend, note, stdout
from sakiyomi.cli.talk import Chat, check
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.preflight import check_target
from sakiyomi.engine.config import LLMConfig

__all__ = ["MAX_NEW_TOKENS", "chat"]

MAX_NEW_TOKENS = 512  # a reply ends by itself, or by Ctrl-C: sooner than in generate it should not


@dataclass(frozen=True)
class ChatOptions:
    """With whom, and how.

    Attributes:
        name: the target: embedded name, folder or hub id, as --target.
        system: system prompt.
        template: auto (the tokenizer's chat template, or plain text if it has none), none (plain text: messages and
            replies form one continuing text), or a Jinja file.
        trace: colour each token by its source (accepted, recovered, bonus, plain).
    """

    name: str | None = field(default=None, metadata={"argument": "TARGET"})
    system: str = ""
    template: str = "auto"
    trace: bool = False


def chat(options: ChatOptions, model: LLMConfig, params: SamplingParams, output: JsonOption) -> None:
    """Talk with a model.

    Only the new tokens of each message are computed. Type /help for commands; Ctrl-C stops a reply, Ctrl-D leaves.
    From a pipe each line is a message.

    Example: sakiyomi chat FOLDER --temperature 0.7
    """
    if options.name is not None:
        if model.target not in (LLMConfig.target, options.name):
            raise InputError(f"the target is given twice, {options.name!r} and --target {model.target!r}; give one")
        model = dataclasses.replace(model, target=options.name)
        check_target(model.target, allow_pickle=model.allow_pickle, trust_remote_code=model.trust_remote_code)
    check(params)
    from sakiyomi.engine.chat_template import Dialogue, read_template

    template = read_template(options.template)
    llm = load(model)
    dialogue = Dialogue(llm.tokenizer, template, options.system, llm.processor)
    lines = Lines()
    if dialogue.plain:
        note(f"{model.target} runs without a chat template: your messages and its replies form one continuing text")
    if model.exact:
        note(f"exact: earlier prompts are reused in whole chunks of {llm.engine.chunk_size} tokens (--chunk-size)")
    if lines.interactive:
        note(
            '/help lists commands, """ begins and ends a message of several lines, Ctrl-C stops a reply, Ctrl-D leaves'
        )
        if options.trace:
            legend(stdout())
    talk = Chat(llm, dialogue, lines, params, options.trace, obey)
    talk.run()
    output.emit({"target": model.target, "draft": model.draft, **talk.to_dict()})
    llm.record()
    if talk.failed and not lines.interactive:
        raise typer.Exit(1)
