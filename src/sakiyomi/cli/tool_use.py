"""Tools in ``sakiyomi chat``: the model calls, commands run, and the reply continues with their results.

Prompts, grammars and the format of calls are those of the server, see ``server/chat_form.py``.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sakiyomi.cli.commands import Command, read_commands
from sakiyomi.cli.common import server_packages
from sakiyomi.cli.output import note, shortened, stderr, stdout, write
from sakiyomi.core.errors import InputError
from sakiyomi.core.outputs import Step
from sakiyomi.core.params import SamplingParams

if TYPE_CHECKING:
    from sakiyomi.cli.talk import Chat
    from sakiyomi.engine.llm import LLM
    from sakiyomi.server.jobs import Job
    from sakiyomi.server.replies import Piece

MOST_ROUNDS = 8
"""Rounds of calls in one reply."""
REFUSED = "The user did not allow this call."


def commands_of(path: str | None, *, yes: bool) -> list[Command]:
    """The tools of a file; none without one.

    Args:
        path: of the file.
        yes: run all of them without asking.

    Raises:
        SakiyomiError: the file cannot be used, or nobody could be asked.
    """
    if path is None:
        if yes:
            raise InputError("yes_tools needs tools; name their file with --tools")
        return []
    commands = read_commands(path)
    if yes:
        return [dataclasses.replace(command, ask=False) for command in commands]
    asking = [command.name for command in commands if command.ask]
    if asking and not sys.stdin.isatty():
        raise InputError(
            f"nobody can be asked before {asking[0]} runs, as stdin is no terminal; give --yes-tools, or write "
            f"ask = false beside it in {path!r}"
        )
    return commands


class ToolUse:
    """Answers messages with the help of tools.

    Args:
        llm: the engine.
        template: the chat template, as ``--template``.
        commands: the tools.
        path: of their file.

    Raises:
        SakiyomiError: the model, or the server's packages, cannot do it; or a schema cannot be enforced.
    """

    def __init__(self, llm: LLM, template: str, commands: Sequence[Command], path: str) -> None:
        with server_packages():
            from sakiyomi.server.bodies import BodyReader
            from sakiyomi.server.config import ServerConfig
        from sakiyomi.core.tokens import TokenNames

        self._llm, self._commands = llm, {command.name: command for command in commands}
        self._path = path
        self._bodies, self._names = BodyReader(llm, ServerConfig(chat_template=template)), TokenNames(llm.tokenizer)
        self._job([{"role": "user", "content": "Hello"}], SamplingParams())

    def answer(
        self, chat: Chat, messages: Sequence[Mapping[str, Any]], attempt: int
    ) -> tuple[str, list[dict[str, Any]]]:
        """Print the reply to messages, and run the commands of its calls.

        Args:
            chat: streams and counts.
            messages: up to the user's.
            attempt: number of earlier replies to the last one.

        Returns:
            The text of the reply, and messages before it: calls and their results.

        Raises:
            SakiyomiError: there is no reply.
        """
        between: list[dict[str, Any]] = []
        for left in range(MOST_ROUNDS, -1, -1):
            if not left:
                note(f"{MOST_ROUNDS} rounds of calls are the most in one reply; the model answers without another")
            job = self._job([*messages, *between], chat.params, choice="auto" if left else "none")
            job.traced = chat.trace
            reader = _Reader(job, self._llm, self._names, coloured=chat.trace)
            chat.stream(job.prompt, job.prompt, job.params, attempt, reader.show)
            said = reader.piece
            if chat.replies[-1].finish_reason == "interrupted" or not said.calls:
                break
            between += [_assistant(said), *map(self._result, said.calls)]
        return said.text, between

    def _job(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, *, choice: str = "auto") -> Job:
        """The request of the model as the server makes it, with these parameters of sampling."""
        from sakiyomi.server.errors import ApiError
        from sakiyomi.server.schema import ChatRequest, read_as

        tools = [command.tool for command in self._commands.values()]
        values = {"messages": [*messages], "tools": tools, "tool_choice": choice, "ignore_eos": params.ignore_eos}
        try:
            (job,) = self._bodies.chat(read_as(ChatRequest, values))
        except ApiError as error:
            raise InputError(f"with the tools of {self._path!r}: {error.said}") from None
        job.params = dataclasses.replace(
            params,
            logits_processors=[*params.logits_processors, *job.params.logits_processors],
            stop_token_ids=[*params.stop_token_ids, *job.params.stop_token_ids],
        )
        return job

    def _result(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The message with the result of a call, after asking."""
        function = call["function"]
        command = self._commands[function["name"]]
        arguments = json.loads(function["arguments"])
        return {"role": "tool", "tool_call_id": call["id"], "content": self._run(command, arguments)}

    def _run(self, command: Command, arguments: Any) -> str:
        if not isinstance(arguments, dict):
            return f"error: the arguments are {arguments!r:.80}; expected an object"
        words = shlex.join(command.words(arguments))
        given = "" if command.places else f" with {json.dumps(arguments, ensure_ascii=False)} on stdin"
        note(f"{command.name} calls {words}{given}")
        if command.ask and not _allowed():
            return REFUSED
        outcome = command.run(arguments)
        if outcome.problem:
            note(f"{command.name} failed: {outcome.problem}; the model is told. See whether the command runs by itself")
        note(f"{command.name} returns {shortened(outcome.text)}")
        return outcome.text


class _Reader:
    """Prints the steps of a reply: its text on stdout, thoughts on stderr.

    Attributes:
        piece: the whole reply.
    """

    def __init__(self, job: Job, llm: LLM, names: Any, *, coloured: bool) -> None:
        from sakiyomi.server.replies import Piece, Sample

        self._job, self._coloured = job, coloured
        self._sample = Sample(job, names, llm.tokenizer, secrets.token_hex)
        self.piece = Piece(0)

    def show(self, steps: Iterable[Step]) -> Iterator[Step]:
        """The same steps."""
        from sakiyomi.server.jobs import Event

        for step in steps:
            piece = self._sample.read(Event(self._job, step))
            if piece.thoughts:
                write(stderr(), piece.thoughts)
            elif piece.text and self.piece.thoughts and not self.piece.text:
                write(stderr(), "", end="\n")
            self._write(piece)
            self.piece.add(piece)
            yield step
        if self.piece.text or not self.piece.calls:
            write(stdout(), "", end="\n")

    def _write(self, piece: Piece) -> None:
        tokens = [token for entry in piece.trace for token in entry["tokens"]]
        if self._coloured and "".join(token["text"] for token in tokens) == piece.text:
            for token in tokens:
                write(stdout(), token["text"], token["status"])
        else:
            write(stdout(), piece.text)


def _assistant(said: Piece) -> dict[str, Any]:
    """A reply with calls as a message."""
    calls = [{name: value for name, value in call.items() if name != "index"} for call in said.calls]
    thoughts = {"reasoning_content": said.thoughts} if said.thoughts else {}
    return {"role": "assistant", "content": said.text or None, **thoughts, "tool_calls": calls}


def _allowed() -> bool:
    """Ask for a yes; everything else, the end of the input too, is a no."""
    sys.stderr.write("run it? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
