"""Tools of ``sakiyomi chat --tools``: commands of the user's own, which a file describes and the model may call.

No shell runs them. A command gets the arguments of a call in place of {name}. Without such places they are JSON on
its stdin.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sakiyomi.core.errors import InputError, LoadError

MOST_OUTPUT = 8000
"""Characters of a command's output that the model is given."""
_PLACE = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
_EXAMPLE = 'name = "weather", command = ["curl", "-s", "https://wttr.in/{city}?format=3"]'


@dataclass(frozen=True)
class Command:
    """A tool that is a command.

    Attributes:
        name: by which the model calls it.
        command: the program and its arguments; {name} stands for an argument of the call, {{name}} for the text {name}.
        description: for the model.
        parameters: JSON schema of the arguments.
        ask: ask before each run.
        timeout: seconds after which it is ended.
    """

    name: str
    command: list[str]
    description: str = ""
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ask: bool = True
    timeout: float = 60.0

    @property
    def tool(self) -> dict[str, Any]:
        """OpenAI's description of it."""
        told = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **told, "parameters": dict(self.parameters)}}

    @property
    def places(self) -> set[str]:
        """Arguments that stand in the command."""
        return {name for word in self.command for _, name in _PLACE.findall(word) if name}

    def words(self, arguments: Mapping[str, Any]) -> list[str]:
        """The command of a call. A text stands there as it is, any other value as JSON."""
        known = {name: each["default"] for name, each in _properties(self.parameters).items() if "default" in each}
        values = {
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in {**known, **arguments}.items()
        }

        def put(place: re.Match[str]) -> str:
            return f"{{{place[1]}}}" if place[1] else values.get(place[2], "")

        return [_PLACE.sub(put, word) for word in self.command]

    def run(self, arguments: Mapping[str, Any]) -> Outcome:
        """Run the command, and end it with all that it started.

        Returns:
            Its output; for a command that fails also its stderr and exit code.
        """
        given = b"" if self.places else json.dumps(arguments, ensure_ascii=False).encode()
        try:
            words, pipe = self.words(arguments), subprocess.PIPE
            process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except (OSError, ValueError) as error:
            return Outcome(f"error: the command cannot be started ({error})", "it cannot be started")
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        late = False
        with process, ThreadPoolExecutor(3) as threads:
            threads.submit(_give, process.stdin, given)
            out, problems = (threads.submit(_head, stream) for stream in (process.stdout, process.stderr))
            try:
                process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                with suppress(OSError):  # they have ended
                    os.killpg(process.pid, signal.SIGKILL)
        why = f"ended after {self.timeout:g} s" if late else f"exit code {process.returncode}"
        failed = late or process.returncode != 0
        parts = [out.result(), problems.result() if failed else "", why if failed else ""]
        return Outcome("\n".join(part.rstrip("\n") for part in parts if part) or why, why if failed else "")


@dataclass(frozen=True)
class Outcome:
    """Of a call.

    Attributes:
        text: what the model is given.
        problem: why the command failed; "" if it did not.
    """

    text: str
    problem: str = ""


def read_commands(path: str) -> list[Command]:
    """The tools of a file: JSON, or TOML if its name ends so; an object with a list ``tools``, or, in JSON, the list.

    Raises:
        LoadError: the file cannot be read.
        InputError: a tool is wrong; the message says what to change.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        value = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise LoadError(f"the tools in {path!r} cannot be read ({error}); expected a file of JSON or TOML") from None
    listed = value.get("tools") if isinstance(value, dict) else value
    if not isinstance(listed, list) or not listed:
        raise InputError(f"{path!r} has no list of tools; expected tools, each with {_EXAMPLE}")
    found = [_command(each, f"tool {number} of {path!r}") for number, each in enumerate(listed, start=1)]
    names = [each.name for each in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{path!r} has several tools {twice[0]!r}; give each a name of its own")
    return found


_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "name": (str, "a text"),
    "command": (list, "a list of texts"),
    "description": (str, "a text"),
    "parameters": (dict, "a JSON schema"),
    "ask": (bool, "true or false"),
    "timeout": ((int, float), "a number of seconds"),
}


def _command(value: Any, place: str) -> Command:
    """A tool of a file; ``place`` for errors."""
    if not isinstance(value, dict) or not {"name", "command"} <= value.keys():
        raise InputError(f"{place} is {value!r:.80}; expected a name and a command, for instance {_EXAMPLE}")
    if unknown := value.keys() - _KINDS.keys():
        raise InputError(f"{place} has the field {min(unknown)!r}; a tool has {', '.join(_KINDS)}")
    for name, given in value.items():
        kind, words = _KINDS[name]
        if not isinstance(given, kind) or (name == "timeout" and (given is True or not value[name] > 0)):
            raise InputError(f"{name} of {place} is {given!r:.80}; expected {words}")
    words = value["command"]
    if not words or not all(isinstance(word, str) and "\0" not in word for word in words):
        raise InputError(f"command of {place} is {words!r:.80}; expected a list of texts, for instance {_EXAMPLE}")
    command = Command(**value)
    if _PLACE.search(words[0]):
        raise InputError(f"{place} lets the model choose the program, {words[0]!r}; name one")
    if shutil.which(words[0]) is None:
        raise InputError(f"{place} runs {words[0]!r}, which is no program here; install it, or give its path")
    _check_places(command, place)
    return command


def _check_places(command: Command, place: str) -> None:
    known = _properties(command.parameters)
    required = command.parameters.get("required")
    sure = {
        name for name, each in known.items() if "default" in each or (isinstance(required, list) and name in required)
    }
    for name in sorted(command.places):
        if name not in known:
            raise InputError(
                f"{place} has {{{name}}} in its command, which is none of its parameters "
                f"({', '.join(known) or 'there are none'}); add it to parameters.properties, or write "
                f"{{{{{name}}}}} for these characters"
            )
        if name not in sure:
            raise InputError(
                f"{place} has {{{name}}} in its command, which a call may leave out; name it in parameters.required, "
                "or give it a default"
            )


def _properties(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found = schema.get("properties")
    if not isinstance(found, dict):
        return {}
    return {name: each if isinstance(each, dict) else {} for name, each in found.items()}


def _give(stream: IO[bytes], data: bytes) -> None:
    with suppress(OSError), stream:  # a command need not read it
        stream.write(data)


def _head(stream: IO[bytes]) -> str:
    """The text of a stream, which is read to its end, up to ``MOST_OUTPUT`` characters."""
    kept = b""
    while data := stream.read(1 << 16):
        kept = kept if len(kept) > 4 * MOST_OUTPUT else kept + data
    text = kept.decode(errors="replace")
    return text if len(text) <= MOST_OUTPUT else f"{text[:MOST_OUTPUT]}\n(cut after {MOST_OUTPUT} characters)"
