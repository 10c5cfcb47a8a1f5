"""The chat: what is said, what is taken back, what is typed wrong, how it is left; on pipes and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from sakiyomi import LLM, InputError, LoadError, SamplingParams
from sakiyomi.cli import app
from sakiyomi.cli.chat import obey
from sakiyomi.cli.talk import Chat, Lines
from sakiyomi.engine.chat_template import Dialogue, Exchange
from toys import save_model, tiny_llama, tiny_tokenizer
from warm import warm

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DEAF = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
NEW = 8
FREE = ("--draft", "none", "--compile", "false", "--max-new-tokens", str(NEW), "--ignore-eos")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders plain and templated (the same model without and with a chat template), and draft."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    save_model(folder / "plain", tiny_llama(), tokenizer)
    save_model(folder / "draft", tiny_llama(), tokenizer)
    tokenizer.chat_template = TEMPLATE
    save_model(folder / "templated", tiny_llama(), tokenizer)
    return folder


@pytest.fixture
def say(models: Path) -> Callable[..., Result]:
    """Lines in, what the command made of them out."""

    def run(lines: str, *more: str, model: str = "templated") -> Result:
        arguments = ["chat", str(models / model), "--draft", f"model:{models / 'draft'}", "--compile", "false"]
        arguments += ["--max-new-tokens", str(NEW), "--ignore-eos", *more]
        return CliRunner().invoke(app, arguments, input=lines)

    return run


def found(result: Result) -> dict[str, Any]:
    """The JSON of the last line."""
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return value


def contents(value: dict[str, Any]) -> list[str]:
    return [message["content"] for message in value["messages"]]


# ---------------------------------------------------------------- replies


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["plain", "templated"])
def test_replies_are_those_of_generate(models: Path, say: Callable[..., Result], model: str) -> None:
    """To the prompt that the dialogue makes, with everything before the new message from the cache."""
    result = say("Once upon a time\n\n  \nThe fox\nOne day\n", "--json", model=model)
    value = found(result)
    roles = [message["role"] for message in value["messages"]]
    assert roles == ["user", "assistant"] * 3
    llm = LLM(str(models / model), "none", compile=False)
    dialogue = Dialogue(llm.tokenizer)
    for message, reply in zip(contents(value)[::2], contents(value)[1::2], strict=True):
        prompt = dialogue.read(dialogue.messages_with(message, dialogue.exchanges))
        (wanted,) = llm.generate([prompt], SamplingParams(max_new_tokens=NEW, ignore_eos=True))
        assert reply == wanted.text
        dialogue.exchanges.append(Exchange(message, reply))
    assert result.stdout.startswith("".join(reply + "\n" for reply in contents(value)[1::2]))
    assert value["replies"][0]["stats"]["reused"] == 0
    assert all(reply["stats"]["reused"] > 8 for reply in value["replies"][1:])
    assert value["stats"]["tokens"] == 3 * NEW
    assert value["stats"]["accepted"] > 0
    assert ("without a chat template" in result.stderr) == (model == "plain")


@pytest.mark.thorough
def test_stdout_has_replies_only(say: Callable[..., Result]) -> None:
    """No prompts, no answers of commands."""
    result = say("Once\n/help\n/stats\n/set temperature\n/undo\n/nix\n")
    assert result.exit_code == 0
    assert result.stdout == contents(found(say("Once\n", "--json")))[1] + "\n"
    assert "prompt tokens were in the cache" in result.stderr
    assert found(say("", "--json"))["messages"] == []


def test_several_lines(say: Callable[..., Result]) -> None:
    """A backslash goes on, quotes hold a block together, a slash within it or behind a space is text."""
    text = 'one\\\ntwo\\\nthree\n"""\n/four\n\nfive"""\n /six\n"""seven\neight'
    result = say(text, "--json", "--max-new-tokens", "1")
    assert contents(found(result))[::2] == ["one\ntwo\nthree", "/four\n\nfive", " /six", "seven\neight"]


def test_lines_that_are_no_text(say: Callable[..., Result]) -> None:
    result = say(b"\xff\xfe\nOnce\n", "--json")  # type: ignore[arg-type]
    assert result.exit_code == 1, "a message had no reply"
    assert "not UTF-8" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["messages"][0]["content"] == "Once"


# ---------------------------------------------------------------- commands


@pytest.mark.thorough
def test_undo_again_reset(say: Callable[..., Result]) -> None:
    first = contents(found(say("Once\nThe fox\n", "--json")))
    assert contents(found(say("Once\nA bear\n/undo\nThe fox\n", "--json"))) == first
    assert contents(found(say("Once\nThe fox\n/again\n", "--json"))) == first, "greedy replies are always the same"
    assert contents(found(say("A bear\n/reset\nOnce\nThe fox\n", "--json"))) == first
    value = found(say("A bear\n/reset\nOnce\n", "--json"))
    assert [reply["stats"]["reused"] for reply in value["replies"]] == [0, 0]
    result = say("/undo\n/again\n/stats\nOnce\n/undo 2\n", "--json")
    assert result.stderr.count("error: ") == 4
    assert contents(found(result)) == first[:2]


@pytest.mark.thorough
def test_seeds_make_the_whole_conversation_reproducible(say: Callable[..., Result]) -> None:
    """Another reply has other randomness; the same lines have the same replies."""
    base = ("--temperature", "2", "--json", "--seed")
    one, other = (contents(found(say("Once\n/again\nThe fox\n", *base, "5"))) for _ in range(2))
    assert one == other
    assert contents(found(say("Once\nThe fox\n", *base, "5"))) != one
    assert contents(found(say("Once\n/again\n/again\n", *base, "5")))[1] != one[1]
    assert contents(found(say("Once\n/again\nThe fox\n", *base, "6"))) != one


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature hot", "expected a number"),
        ("/set temperature -1", "temperature is -1.0"),
        ("/set top_k 1.5", "expected a whole number"),
        ("/set gamma often", "gamma is 'often'"),
        ("/set warmth 3", "there is no parameter 'warmth'; there are max_new_tokens"),
        ("/set ignore_eos maybe", "expected on or off"),
        ("/set stop 'a", "in quotes"),
        ("/set n 2", "n cannot be set here; a message has one reply"),
        ("/set logprobs 3", "logprobs cannot be set here"),
        ("/set acceptance always", "available are"),
        ("/save", "name is missing"),
        ("/load /nowhere/chat.json", "/nowhere/chat.json"),
        ("/save /nowhere/chat.json", "/nowhere/chat.json"),
        ("/color green", "on or off"),
        ("/exit now", "takes no argument"),
        ("/nonesuch", "no command /nonesuch; /help"),
        ("/ help", "no command /"),
        ("/", "no command /"),
    ],
)
def test_what_is_typed_wrong_is_said_and_the_chat_goes_on(line: str, message: str, talk: Chat, capsys: Any) -> None:
    talk.lines.lines = [line, "Once"]  # type: ignore[attr-defined]
    before = talk.params
    talk.run()
    (error,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert message in error
    assert talk.params == before
    assert len(talk.dialogue.exchanges) == 1
    assert not talk.failed


def test_parameters(talk: Chat, capsys: Any) -> None:
    values = {
        "temperature 0.5": 0.5,
        "top-p 0.9": 0.9,
        "seed 3": 3,
        "seed none": None,
        "gamma 2": 2,
        "gamma heuristic": "heuristic",
        "stop END 'the end'": ("END", "the end"),
        "stop none": (),
        "stop_token_ids 3 4": (3, 4),
        "logit_bias 17=-2.5 3=1": {17: -2.5, 3: 1.0},
        "ignore_eos off": False,
    }
    for line, value in values.items():
        talk.lines.lines = [f"/set {line}"]  # type: ignore[attr-defined]
        talk.run()
        assert getattr(talk.params, line.split()[0].replace("-", "_")) == value
    talk.lines.lines = ["/set", "/set top_p", "/help"]  # type: ignore[attr-defined]
    capsys.readouterr()
    talk.run()
    shown = capsys.readouterr().err
    assert "top_p is 0.9" in shown
    assert "temperature         0.5" in shown
    names = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert "top_p" in names and not {"n", "logprobs"} & set(names), "it would refuse them"
    assert "/save FILE" in shown
    helps = [line[20:] for line in shown.splitlines() if line.startswith("/")]
    assert len(helps) == 12 and all(text[0].islower() for text in helps), helps


@pytest.mark.thorough
def test_save_and_load(say: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    value = found(say(f"/system be brief\nOnce\nThe fox\n/save {file}\nOne day\n", "--json"))
    assert json.loads(file.read_text(encoding="utf-8")) == {"messages": value["messages"][:5]}
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]
    loaded = found(say(f"A bear\n/load {file}\nOne day\n/save {file}\n", "--json"))
    assert loaded["messages"] == json.loads(file.read_text(encoding="utf-8"))["messages"] == value["messages"]
    other = tmp_path / "other.txt"
    other.write_text("mine", encoding="utf-8")
    assert "holds no messages" in say(f"Once\n/save {other}\n").stderr
    assert other.read_text(encoding="utf-8") == "mine"


# ---------------------------------------------------------------- limits


def test_a_full_context(say: Callable[..., Result]) -> None:
    """One line with the remedies; what was said stays, and the chat goes on."""
    long = "Once upon a time there was a little fox. " * 3
    result = say(f"Once\n{long}\n{long}\n/undo\nOne day\n", "--max-context", "60", "--json")
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert errors and all("the context holds 60: /undo" in error and "/reset" in error for error in errors)
    value = json.loads(result.stdout.splitlines()[-1])
    assert contents(value)[0::2] == ["One day"]
    full = say("Once\n", "--max-context", "24", "--max-new-tokens", "100")
    assert full.exit_code == 0
    assert "the context of 24 tokens is full" in full.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--n", "2"], 2, "one reply"),
        (["--logprobs", "2"], 2, "generate --json"),
        (["--temperature", "-1"], 2, "temperature is -1.0"),
        (["--target", "tales-draft"], 2, "given twice"),
        (["--template", "none", "--system", "be nice"], 2, "without a chat template"),
        (["--system", "be \udcff"], 2, "no Unicode text"),
        (["--template", "/nowhere/template"], 1, "/nowhere/template"),
        (["--template", "BROKEN"], 2, "TemplateSyntaxError"),
        (["--template", "DEAF", "--system", "be nice"], 2, "leaves system prompts out"),
    ],
)
def test_options_that_cannot_be_met(
    arguments: list[str], code: int, message: str, say: Callable[..., Result], tmp_path: Path
) -> None:
    for name, text in (("BROKEN", "{% for %}"), ("DEAF", DEAF)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        arguments = [str(tmp_path / name) if argument == name else argument for argument in arguments]
    result = say("Once\n", *arguments)
    assert result.exit_code == code, result.output
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert result.stdout == ""


# ---------------------------------------------------------------- asked once


def test_messages_are_answered_and_the_chat_ends(models: Path, say: Callable[..., Result]) -> None:
    typed = found(say("Once upon\nWho\n", "--json"))
    once = say("is not read\n", "Once upon", "Who", "--json")
    assert found(once)["messages"] == typed["messages"]
    assert "--max-new-tokens N" in once.stderr  # a person is told that the reply was cut
    by_flag = CliRunner().invoke(app, ["chat", "Once upon", "--target", str(models / "templated"), *FREE, "--json"])
    assert found(by_flag)["messages"] == typed["messages"][:2]
    piped = say("Once\nupon\n", "-", "--json")
    assert contents(found(piped))[0] == "Once\nupon"


def test_an_argument_is_a_message_also_with_a_slash(say: Callable[..., Result]) -> None:
    assert contents(found(say("", "/help me", "--json")))[0] == "/help me"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["chat", "no-such-model"], "no-such-model"), (["chat", "tales", " "], "a message is empty")],
)
def test_arguments_that_are_no_question(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (1, 2) and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_generate_with_the_template(models: Path, say: Callable[..., Result], tmp_path: Path) -> None:
    def texts(*arguments: str, model: str = "templated") -> Result:
        return CliRunner().invoke(app, ["generate", *arguments, "--target", str(models / model), *FREE, "--json"])

    chats = tmp_path / "chats.jsonl"
    said = [{"from": "human", "value": "Once upon"}, {"from": "gpt", "value": "left out: it is to be written"}]
    lines = [{"conversations": said}, {"turns": ["Who", "?"]}, {"text": "Who"}]
    chats.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    value = found(texts("Once upon", "--chat", "--file", str(chats)))
    replies = [one["text"] for one in value["generations"]]
    assert replies[0] == contents(found(say("Once upon\n", "--json")))[1]
    assert replies[1] == replies[0] and value["prompts"][1] == value["prompts"][0]
    assert replies[2] == replies[3] == contents(found(say("Who\n", "--json")))[1]
    alone = found(texts("--file", str(chats)))["generations"]
    assert [one["text"] for one in alone[:2]] == [replies[0], replies[2]]  # chats need no flag, texts do
    assert alone[2]["token_ids"] != value["generations"][3]["token_ids"]
    refused = texts("Once", "--chat", model="plain")
    assert refused.exit_code == 2 and "has no chat template" in refused.stderr


def test_a_text_that_ends_at_once_is_explained(models: Path) -> None:
    def run(model: str, *more: str) -> Result:
        return CliRunner().invoke(app, ["generate", "Once upon", "--target", str(models / model), *FREE, *more])

    first = found(run("templated", "--json"))["generations"][0]["token_ids"][0]
    for model, told in (("templated", True), ("plain", False)):
        ended = run(model, "--stop-token-ids", str(first))
        assert ended.exit_code == 0 and ("sakiyomi chat --model" in ended.stderr) == told
        assert ("--chat" in ended.stderr) == told


# ---------------------------------------------------------------- dialogues


def test_one_text_that_goes_on() -> None:
    """A message begins a new word, unless it brings its own space or sign; replies are as the model wrote them."""
    tokenizer = tiny_tokenizer()
    dialogue = Dialogue(tokenizer)
    said = [("Once", " upon a time"), ("the fox", "'s tail."), ("\nIt", " was"), (", red", " and"), ("むかし", "、")]
    before = [Exchange(*pair) for pair in said]
    text = "Once upon a time the fox's tail.\nIt was, red andむかし、a"
    assert dialogue.read(dialogue.messages_with("a", before)) == tokenizer(text)["input_ids"]


def test_templates() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    dialogue = Dialogue(tokenizer, system="be nice")
    text = "<system>be nice\n<user>a\n<assistant>b\n<user>c\n<assistant>"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert dialogue.read(dialogue.messages_with("c", [Exchange("a", "b")])) == tokens
    tokenizer.chat_template = "{{ raise_exception('no such thing') }}"
    with pytest.raises(InputError, match="no such thing"):
        Dialogue(tokenizer)
    assert Dialogue(tokenizer, "none").plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("3", "holds no messages"),
        ('{"messages": [3]}', "message 1"),
        ('[{"role": "user"}]', "message 1"),
        (r'[{"role": "user", "content": "a\ud83d"}]', r"message 1.*ud83d"),
        ('[{"role": "user", "content": "a"}]', "alternately"),
        ('[{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]', "alternately"),
    ],
)
def test_files_that_hold_something_else(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text, encoding="utf-8")
    dialogue = Dialogue(tiny_tokenizer())
    dialogue.exchanges = [Exchange("a", "b")]
    with pytest.raises(LoadError, match=message):
        dialogue.load(tmp_path / "file")
    assert dialogue.exchanges == [Exchange("a", "b")]


def test_a_system_prompt_without_a_place_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('[{"role": "system", "content": "be nice"}]', encoding="utf-8")
    dialogue = Dialogue(tiny_tokenizer())
    dialogue.exchanges = [Exchange("a", "b")]
    with pytest.raises(InputError, match="no place"):
        dialogue.load(tmp_path / "file")
    assert dialogue.messages == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


# ---------------------------------------------------------------- Ctrl-C and Ctrl-D


class Typed(Lines):
    """Somebody at a terminal, who presses Ctrl-C where the line is ``^C``."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines, self.interactive = lines, True

    def read(self) -> tuple[bool, str]:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if line == "^C":
            raise KeyboardInterrupt
        return line.startswith("/"), line


@pytest.fixture
def talk(engine: LLM) -> Chat:
    dialogue = Dialogue(engine.tokenizer)
    letter = engine.tokenizer("a")["input_ids"][0]  # a text of which each token can be seen
    return Chat(engine, dialogue, Typed([]), SamplingParams(max_new_tokens=NEW, logit_bias={letter: 1000}), False, obey)


@pytest.fixture(scope="module")
def engine(models: Path) -> LLM:
    return LLM(str(models / "templated"), "none", compile=False)


def test_ctrl_c_at_the_prompt_warns_once(talk: Chat, capsys: Any) -> None:
    talk.lines.lines = ["^C", "Once", "^C", "^C", "The fox"]  # type: ignore[attr-defined]
    talk.run()
    assert len(talk.dialogue.exchanges) == 1
    assert capsys.readouterr().err.count("Ctrl-C again") == 2
    talk.lines.interactive = False
    talk.lines.lines = ["^C"]  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        talk.run()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_ctrl_c_stops_a_reply_and_keeps_what_was_said(
    talk: Chat, steps: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Before the first word nothing is kept; then the chat goes on from the cache as it is."""
    engine, work, calls = talk.llm.engine, talk.llm.engine.step, [0]

    def interrupted() -> Any:
        calls[0] += 1
        if calls[0] == steps + 1:
            raise KeyboardInterrupt
        return work()

    monkeypatch.setattr(engine, "step", interrupted)
    talk.lines.lines = ["Once", "The fox"]  # type: ignore[attr-defined]
    talk.run()
    assert not engine.busy
    assert talk.llm.target.cache.free == talk.llm.target.cache.max_slots
    first, second = talk.replies
    assert (first.finish_reason, first.stats.tokens) == ("interrupted", steps)
    assert second.finish_reason == "length"
    if steps:
        assert second.stats.reused >= first.prompt_tokens
        assert capsys.readouterr().out == "".join(reply + "\n" for _, reply, _ in talk.dialogue.exchanges)
    else:
        assert [message for message, _, _ in talk.dialogue.exchanges] == ["The fox"]
        assert "this exchange was not kept" in capsys.readouterr().err


@pytest.fixture
def terminal(models: Path) -> Iterator[Callable[[str, str], str]]:
    """A chat on a pseudo terminal: wait for a text, then type; gives what was shown by then."""
    start = warm()
    process, screen = pty.fork()
    if process == 0:
        os.environ |= {"TERM": "xterm", "NO_COLOR": "1"}
        letter = tiny_tokenizer()("a")["input_ids"][0]
        arguments = ["chat", str(models / "plain"), "--draft", "none", "--compile", "false", "--json"]
        arguments += ["--max-new-tokens", "480", "--logit-bias", f"{letter}=1000"]
        os.execv(start[0], [*start, "-W", "ignore", "-m", "sakiyomi", *arguments])
    shown, place = "", 0

    def until(text: str, then: str) -> str:
        nonlocal shown, place
        end = time.monotonic() + 60
        while (found := shown.find(text, place)) < 0:
            assert time.monotonic() < end, f"{text!r} was not shown: {shown[place:]}"
            if select.select([screen], [], [], 1)[0]:
                shown += os.read(screen, 65536).decode(errors="replace")
        seen, place = shown[place : found + len(text)], found + len(text)
        os.write(screen, then.encode())
        return seen

    try:
        yield until
    finally:
        os.close(screen)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def test_on_a_terminal(terminal: Callable[[str, str], str]) -> None:
    """Prompts, the earlier lines at hand, Ctrl-C in a reply and at the prompt, Ctrl-D."""
    terminal("Ctrl-D leaves\r\n", "")
    terminal("> ", "Once upon a time\r")
    terminal("\r\naa", "\x03")
    terminal("\r\n> ", "/stats\r")
    assert "prompt tokens were in the cache" in terminal("context: ", "")
    terminal("> ", "\x1b[A\r")  # the line before
    terminal("context: ", "")
    terminal("> ", "")
    time.sleep(0.5)  # a signal between the prompt and readline's waiting is seen with the next key only
    terminal("", "\x03")
    terminal("Ctrl-C again", "")
    terminal("> ", "/undo\r")
    terminal("0 exchanges left", "")
    terminal("> ", "\x04")
    assert '{"target": ' in terminal('"messages": []', "")
