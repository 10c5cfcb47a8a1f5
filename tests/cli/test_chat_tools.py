"""Tools in the chat: commands of a file, whom is asked before they run, and what the model is told of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from sakiyomi.cli import app
from sakiyomi.cli.commands import MOST_OUTPUT, read_commands
from sakiyomi.cli.tool_use import MOST_ROUNDS, REFUSED
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.server.schema import ChatRequest
from scripted import script
from server_toys import CHATML
from toys import save_model, tiny_llama, tiny_tokenizer

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SAY = [sys.executable, "-c", "import sys; print(*sys.argv[1:], sep='|')"]
READ = [sys.executable, "-c", "import json, sys; print(json.load(sys.stdin)['city'].upper())"]
FAIL = [sys.executable, "-c", "import sys; print('half'); sys.exit('no such city')"]


def tools(folder: Path, command: list[str], **more: Any) -> str:
    """A file with one tool."""
    file = folder / "tools.json"
    one = {"name": "weather", "description": "Of a city.", "parameters": CITY, "command": command, **more}
    file.write_text(json.dumps({"tools": [one]}), encoding="utf-8")
    return str(file)


# ---------------------------------------------------------------- commands


def test_arguments_stand_in_the_command_or_come_as_json(tmp_path: Path) -> None:
    (command,) = read_commands(tools(tmp_path, [*SAY, "in {city}!", "{{city}}", "{a}"[:1]]))
    assert command.run({"city": "Paris; rm 'x'"}).text == "in Paris; rm 'x'!|{city}|{"
    (command,) = read_commands(tools(tmp_path, READ))
    assert command.run({"city": "Köln"}).text == "KÖLN"


def test_values_that_are_no_text_stand_as_json_and_defaults_are_used(tmp_path: Path) -> None:
    schema = {"properties": {"days": {"type": "integer", "default": 3}, "at": {"type": "array"}}, "required": ["at"]}
    (command,) = read_commands(tools(tmp_path, [*SAY, "{days}", "{at}"], parameters=schema))
    assert command.run({"at": ["a", 1, None]}).text == '3|["a", 1, null]'


def test_the_model_is_told_how_a_command_failed(tmp_path: Path) -> None:
    (command,) = read_commands(tools(tmp_path, FAIL))
    assert command.run({"city": "x"}).text == "half\nno such city\nexit code 1"
    (command,) = read_commands(tools(tmp_path, [sys.executable, "-c", ""]))
    assert command.run({"city": "x"}).text == "exit code 0"
    (command,) = read_commands(tools(tmp_path, [*SAY, "{city}"]))
    assert "cannot be started" in command.run({"city": "a\0b"}).text


def test_a_command_has_a_limit_of_time_and_of_output(tmp_path: Path) -> None:
    """What it started ends with it."""
    wait = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    (command,) = read_commands(tools(tmp_path, [sys.executable, "-c", wait], timeout=0.3))
    began = time.monotonic()
    assert command.run({"city": "x"}).text == "ended after 0.3 s"
    assert time.monotonic() - began < 10
    (command,) = read_commands(tools(tmp_path, [sys.executable, "-c", "print('é' * 3_000_000)"]))
    text = command.run({"city": "x"}).text
    assert text == "é" * MOST_OUTPUT + f"\n(cut after {MOST_OUTPUT} characters)"


def test_a_file_of_toml(tmp_path: Path) -> None:
    file = tmp_path / "tools.toml"
    file.write_text(
        f'[[tools]]\nname = "weather"\ncommand = {json.dumps([*SAY, "{city}"])}\nask = false\n'
        '[tools.parameters]\nrequired = ["city"]\nproperties.city = {type = "string"}\n',
        encoding="utf-8",
    )
    (command,) = read_commands(str(file))
    assert (command.name, command.ask, command.run({"city": "Rome"}).text) == ("weather", False, "Rome")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("{}", "has no list of tools"),
        ("[3]", "tool 1 of .* is 3; expected a name and a command"),
        ('[{"name": "a"}]', "expected a name and a command"),
        ('[{"name": "a", "command": "ls"}]', "command of tool 1 .* expected a list of texts"),
        ('[{"name": "a", "command": []}]', "expected a list of texts"),
        ('[{"name": "a", "command": ["ls"], "shell": true}]', "has the field 'shell'; a tool has name, command"),
        ('[{"name": "a", "command": ["ls"], "timeout": true}]', "expected a number of seconds"),
        ('[{"name": "a", "command": ["ls"], "timeout": 0}]', "expected a number of seconds"),
        ('[{"name": "a", "command": ["no-such-program"]}]', "'no-such-program', which is no program here; install it"),
        ('[{"name": "a", "command": ["{a}"]}]', "lets the model choose the program"),
        ('[{"name": "a", "command": ["ls", "{b}"]}]', "none of its parameters .there are none.; add it"),
        (
            '[{"name": "a", "command": ["ls", "{b}"], "parameters": {"properties": {"b": {}}}}]',
            "a call may leave out; name it in parameters.required",
        ),
        ('[{"name": "a", "command": ["ls"]}, {"name": "a", "command": ["ls"]}]', "several tools 'a'"),
    ],
)
def test_files_that_cannot_be_used(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(text, encoding="utf-8")
    with pytest.raises((InputError, LoadError), match=message):
        read_commands(str(tmp_path / "tools.json"))


# ---------------------------------------------------------------- chats


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders learnt, general and thinking: a template with calls, one without, and one with calls and thoughts."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    for name, template in (("learnt", CHATML), ("general", PLAIN), ("thinking", CHATML + "{# </think> #}")):
        tokenizer.chat_template = template
        save_model(folder / name, tiny_llama(max_position_embeddings=4096), tokenizer)
    return folder


CALL = {
    "learnt": '<tool_call>\n{"name": "weather", "arguments": {"city": "CITY"}}\n</tool_call>',
    "general": '{"name": "weather", "arguments": {"city": "CITY"}}',
}
CALL["thinking"] = f"<think>\nHm.\n</think>\n\n{CALL['learnt']}"


@pytest.fixture
def ask(models: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Ask a model that calls for these cities, one after the other, and then says what the last result was."""

    def run(*arguments: str, model: str = "learnt", cities: tuple[str, ...] = ("Paris",), lines: str = "") -> Result:
        def said(body: ChatRequest) -> str:
            last = len(body.messages) - [message.role for message in body.messages][::-1].index("user")
            results = [message.content for message in body.messages[last:] if message.role == "tool"]
            if len(results) < len(cities):
                return ("Let me see. " if model == "learnt" else "") + CALL[model].replace("CITY", cities[len(results)])
            return f"It is {results[-1]}." if results else "Hello."

        script(monkeypatch, said, tiny_tokenizer().eos_token_id)
        line = ["chat", str(models / model), "--draft", "none", "--compile", "false", "--max-new-tokens", "400"]
        return CliRunner().invoke(app, [*line, *arguments], input=lines)

    return run


def value(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("model", ["learnt", "general"])
def test_a_call_runs_and_the_reply_goes_on(ask: Callable[..., Result], tmp_path: Path, model: str) -> None:
    file = tools(tmp_path, [*SAY, "sunny in {city}"])
    result = ask("How is it?", "--tools", file, "--yes-tools", "--json", model=model)
    messages = value(result)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    (call,) = messages[1]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert messages[2] == {"role": "tool", "tool_call_id": call["id"], "content": "sunny in Paris"}
    assert messages[3]["content"] == "It is sunny in Paris."
    before = "Let me see. \n" if model == "learnt" else ""
    assert result.stdout.startswith(f"{before}It is sunny in Paris.\n{{")
    assert "'sunny in Paris'\n" in result.stderr and "weather returns sunny in Paris" in result.stderr
    assert len(value(result)["replies"]) == 2


def test_thoughts_stay_beside_the_reply_and_the_call(ask: Callable[..., Result], tmp_path: Path) -> None:
    """The model gets its thoughts back with the result of its call."""
    result = ask("How?", "--tools", tools(tmp_path, READ, ask=False), "--json", "--trace", model="thinking")
    messages = value(result)["messages"]
    assert messages[1]["reasoning_content"] == "Hm." and messages[1]["content"] is None
    assert result.stdout.startswith("It is PARIS.\n{") and "Hm." in result.stderr


def test_two_calls_in_turn_and_the_next_message(ask: Callable[..., Result], tmp_path: Path) -> None:
    """Earlier calls stay in the conversation; it is saved with them, and continued from the file."""
    file, kept = tools(tmp_path, READ, ask=False), tmp_path / "chat.json"
    lines = f"Where?\nAnd now?\n/save {kept}\n"
    messages = value(ask("--tools", file, "--json", cities=("Paris", "Rome"), lines=lines))["messages"]
    turn = ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in messages] == turn * 2
    assert messages[-1]["content"] == "It is ROME."
    assert json.loads(kept.read_text(encoding="utf-8"))["messages"] == messages
    again = value(ask("--tools", file, "--json", lines=f"/load {kept}\nAnd?\n"))["messages"]
    assert again[:12] == messages and [message["role"] for message in again[12:]] == turn[:2] + turn[4:]
    refused = ask(lines=f"/load {kept}\n")
    assert "have calls of tools; start the chat with --tools" in refused.stderr


def test_a_command_that_fails_is_told_to_both(ask: Callable[..., Result], tmp_path: Path) -> None:
    result = ask("Where?", "--tools", tools(tmp_path, FAIL, ask=False), "--json")
    assert value(result)["messages"][2]["content"] == "half\nno such city\nexit code 1"
    assert "weather failed: exit code 1; the model is told. See whether the command runs by itself" in result.stderr


def test_rounds_of_calls_have_an_end(ask: Callable[..., Result], tmp_path: Path) -> None:
    """The last request offers no call: what looks like one is text."""
    file = tools(tmp_path, READ, ask=False)
    result = ask("Where?", "--tools", file, "--json", cities=("Oslo",) * (MOST_ROUNDS + 1))
    messages = value(result)["messages"]
    assert [message["role"] for message in messages].count("tool") == MOST_ROUNDS
    assert "<tool_call>" in messages[-1]["content"]
    assert f"{MOST_ROUNDS} rounds of calls are the most in one reply" in result.stderr


@pytest.mark.parametrize(("answer", "result"), [("y\n", "PARIS"), ("n\n", REFUSED), ("", REFUSED)])
def test_somebody_at_a_terminal_is_asked(
    ask: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, result: str
) -> None:
    monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    found = ask("Where?", "--tools", tools(tmp_path, READ), "--json", lines=answer)
    assert value(found)["messages"][2]["content"] == result
    assert 'with {"city": "Paris"} on stdin\nrun it? [y/N] ' in found.stderr


def test_what_is_wrong_is_said_before_the_model_is_loaded(ask: Callable[..., Result], tmp_path: Path) -> None:
    for arguments, code, message in (
        (["--yes-tools"], 2, "yes_tools needs tools"),
        (["--tools", "/nowhere.json", "--yes-tools"], 1, "/nowhere.json"),
        (["--tools", tools(tmp_path, READ)], 2, "nobody can be asked before weather runs"),
    ):
        result = ask("Where?", *arguments)
        assert result.exit_code == code and message in result.stderr, result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_schemas_and_names_that_cannot_be_kept_to(ask: Callable[..., Result], tmp_path: Path) -> None:
    for more, message in (
        ({"parameters": {"type": "object", "properties": {"city": {"type": "text"}}}}, "cannot be enforced"),
        ({"name": "the weather"}, "tools[0].function.name"),
    ):
        result = ask("Where?", "--tools", tools(tmp_path, READ, ask=False, **more))
        assert result.exit_code == 2 and message in result.stderr.splitlines()[-1], result.stderr


def test_images_do_not_go_with_tools(ask: Callable[..., Result], tmp_path: Path) -> None:
    result = ask("--tools", tools(tmp_path, READ, ask=False), lines="/image cat.png\n")
    assert "images and --tools cannot be combined" in result.stderr
