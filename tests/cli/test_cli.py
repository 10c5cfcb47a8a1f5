"""The command line: flags from the dataclasses, one line for every error, exit codes, JSON last, colours by origin."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import json
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from architectures import REFUSED, make
from processes import own_environment
from sakiyomi import LLM, SamplingParams, __version__
from sakiyomi.cli import app, demo, output
from sakiyomi.cli.common import flag_help, parsed
from sakiyomi.core.draft_specs import FORMS
from sakiyomi.core.outputs import Step, TokenTrace
from sakiyomi.drafters import DRAFTERS
from sakiyomi.engine.config import LLMConfig
from sakiyomi.engine.llm import LLM as Engine
from sakiyomi.kernels.build import native
from toys import character_tokenizer, save_model, tiny_llama, tiny_tokenizer
from warm import warm

ROOT = Path(__file__).resolve().parents[2]
runner = CliRunner()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders target, draft (which is always right) and wrong."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    save_model(folder / "target", tiny_llama(max_position_embeddings=100_000), tokenizer)
    save_model(folder / "draft", tiny_llama(max_position_embeddings=100_000), tokenizer)
    save_model(folder / "wrong", tiny_llama(seed=1, max_position_embeddings=100_000), tokenizer)
    return folder


@pytest.fixture(scope="module")
def pair(models: Path) -> list[str]:
    return ["--target", str(models / "target"), "--draft", f"model:{models / 'draft'}", "--compile", "false"]


def flags_of(*command: str) -> str:
    return runner.invoke(app, [*command, "--help"], terminal_width=200).stdout


# ---------------------------------------------------------------- flags


@pytest.mark.few(1)
@pytest.mark.parametrize(("command", "most"), [("generate", 128), ("chat", 512)])
def test_each_field_is_a_flag_with_its_default(command: str, most: int) -> None:
    text = " ".join(flags_of(command).split())
    for group in (LLMConfig, SamplingParams):
        for field in dataclasses.fields(group):
            if field.name == "logits_processors":  # Python objects: no flag can say them
                continue
            flag = "--" + field.name.replace("_", "-")
            assert re.search(rf"{flag}[ /,]", text), flag
            assert flag_help(group)[field.name].split(";")[0][:40] in text, flag
    assert f"--max-new-tokens <int> most tokens to generate. [default: {most}]" in text


def test_the_signature_of_llm_agrees_with_its_config() -> None:
    parameters = list(inspect.signature(LLM.__init__).parameters.values())[1:]
    fields = {field.name: field.default for field in dataclasses.fields(LLMConfig)}
    assert list(fields) == [parameter.name for parameter in parameters]
    for parameter in parameters:
        if parameter.name != "target":  # a default on the command line only
            assert fields[parameter.name] == parameter.default, parameter.name


@pytest.mark.parametrize(("given", "value"), [("auto", "auto"), ("true", True), ("False", False)])
def test_compile_is_a_word(given: str, value: object) -> None:
    assert parsed(LLMConfig, "compile", given) == value


def test_help_is_quick_and_light() -> None:
    code = "import sys, sakiyomi.cli\nprint([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=own_environment(), capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.strip() == "[]"


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"sakiyomi {__version__}\n")


@pytest.mark.thorough
def test_the_page_of_commands_has_every_command() -> None:
    """The site's build makes it (``hooks`` in mkdocs.yml): each command has a heading, and its help below."""
    made = runpy.run_path(str(ROOT / "docs" / "make_cli.py"))
    page, names = made["page"](), list(made["commands"](get_command(app)))
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == [f"sakiyomi {name}".rstrip() for name in names]
    assert page.count("Usage: sakiyomi") == len(names) > 40


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate"], 2, "no prompt was given"),
        (["generate", "x", "--temperature", "-1"], 2, "temperature is -1.0"),
        (["generate", "x", "--temperature", "nan"], 2, "temperature is nan"),
        (["generate", "x", "--temperature", "warm"], 2, "--temperature"),
        (["generate", "x", "--top-p", "0"], 2, "top_p is 0.0"),
        (["generate", "x", "--max-new-tokens", "0"], 2, "max_new_tokens is 0"),
        (["generate", "x", "--gamma", "0"], 2, "gamma is 0"),
        (["generate", "x", "--gamma", "often"], 2, "gamma is 'often'"),
        (["generate", "x", "--acceptance", "always"], 2, "acceptance is 'always'"),
        (["generate", "x", "--tree", "1,x"], 2, "tree is '1,x'"),
        (["generate", "x", "--tree", "2,3"], 2, "counts begin with 1"),
        (["generate", "x", "--logit-bias", "17"], 2, "TOKEN_ID=BIAS"),
        (["generate", "x", "--compile", "maybe"], 2, "compile is 'maybe'"),
        (["generate", "x", "--dtype", "int3"], 2, "dtype is 'int3'"),
        (["generate", "x", "--quantize", "int3"], 2, "quantize"),
        (["generate", "x", "--cache", "h2o", "--kv-memory", "much"], 2, "kv_memory='much' is no number of bytes"),
        (["generate", "x", "--cache", "h2o", "--kv-memory", "1GiB", "--kv-budget", "90"], 2, "give one of them"),
        (["generate", "x", "--cache", "h2o", "--kv-memory", "900000GiB"], 1, "pairs of a head fit"),
        (["generate", "x", "--draft", "crystal-ball"], 2, "crystal-ball"),
        (["generate", "x", "--stream", "--n", "2"], 2, "n is 2"),
        (["generate", "x", "--rounds-trace"], 2, "--json"),
        (["generate", "x", "--logprobs", "2"], 2, "--json"),
        (["generate", "x", "--rounds-trace", "--stream", "--json"], 2, "--stream"),
        (["generate", "x", "--epsilon", "0.2"], 2, "epsilon is 0.2"),
        (["generate", "x", "--no-such-flag"], 2, "No such option"),
        (["generate", "x", "--target", "/nowhere/at/all"], 1, "/nowhere/at/all"),
        (["generate", "--file", "/nowhere/prompts.txt"], 1, "/nowhere/prompts.txt"),
        (["bench", "--rows", "nonesuch"], 2, "there is no row 'nonesuch'"),
        (["bench", "--repeats", "0"], 2, "repeats is 0"),
        (["bench", "--target", "/nowhere/at/all"], 1, "/nowhere/at/all"),
        (["bench", "--dtype", "int3"], 2, "dtype is 'int3'"),
        (["bench", "--prompts", "/nowhere/prompts.txt"], 1, "/nowhere/prompts.txt"),
        (["generate", "x", "--compile", "true"], 2, "use compile='auto'"),
        (["bench", "--rows", "peers", "--no-peers"], 2, "peers is off"),
        (["bench", "--rows", "passes"], 2, "python benchmarks/rows.py --help"),
        (["audit", "--count", "0"], 2, "count is 0"),
        (["demo", "--gamma", "0"], 2, "gamma is 0"),
        (["demo", "--draft", "none"], 2, "draft model"),
        (["demo", "--gamma", "auto"], 2, "gamma is 'auto'; the story's table needs a number"),
        (["demo", "--plot", "x.svg", "--no-table"], 2, "plot draws the table"),
        (["demo", "--plot", "x.pdf"], 2, "expected a name that ends in .png or .svg"),
        (["demo", "--model", "retriever", "--draft", "none"], 2, "draft is none"),
        (["demo", "--model", "retriever", "--temperature", "0.8"], 2, "temperature is for the story of tales"),
        (["demo", "--model", "retriever", "--no-table"], 2, "table is for the story of tales"),
        (["demo", "--model", "/nowhere/at/all"], 1, "/nowhere/at/all"),
        (["bench", "--task", "chat=x.jsonl"], 2, "add --rows kinds"),
        (["bench", "--rows", "kinds", "--task", "chat"], 2, "expected NAME=FILE"),
        (["bench", "--rows", "kinds", "--gguf", "/nowhere/x.gguf"], 1, "gguf is '/nowhere/x.gguf'"),
        (["info", "--target", "/nowhere/at/all"], 1, "/nowhere/at/all"),
        (["info", "--target", "tales", "--repeats", "0"], 2, "repeats is 0"),
        (["plan", "cluster", "--rate", "3"], 2, "python benchmarks/cluster.py"),
        (["bench", "--dtype", "inflate"], 2, "dtype is 'inflate'"),
        (["models", "lama", "--markdown"], 2, "python tests/causal_models.py"),
        (["export", "medusa", "tales-medusa", "nowhere"], 2, "give the target with --target"),
        (["train", "retriever", "--out", "x"], 2, "python recipes/retriever.py --out OUT"),
        (["bench", "inflate", "large", "--params", "1M"], 2, "python benchmarks/inflate.py OUT_FOLDER"),
        (["export", "medusa", "tales-medusa", "nowhere"], 2, "give the target with --target"),
        (["train", "retriever", "--out", "x"], 2, "python recipes/retriever.py --out OUT"),
        (["bench", "report", "inflate", "--sections", "nonesuch"], 2, "there is no section 'nonesuch'"),
        (["train", "draft", "--target", "retriever"], 2, "--out (a folder for the model)"),
        (["nonesuch"], 2, "No such command"),
    ],
)
def test_errors_are_one_clear_line(models: Path, arguments: list[str], code: int, message: str) -> None:
    if arguments[0] == "generate" and "--target" not in arguments:
        arguments = [*arguments, "--target", str(models / "target")]
        if "--compile" not in arguments:
            arguments += ["--compile", "false"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    if not result.stderr.startswith("Usage"):
        assert result.stderr.startswith("error: ")
        assert len(result.stderr.splitlines()) == 1


def leaves(group: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """The words of every command."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, *path, name)
        else:
            yield (*path, name)


@pytest.mark.parametrize("words", list(leaves(get_command(app))), ids=" ".join)
def test_every_command_says_what_it_takes_and_refuses_the_rest(words: tuple[str, ...]) -> None:
    helped = runner.invoke(app, [*words, "--help"])
    assert helped.exit_code == 0 and f"sakiyomi {' '.join(words)}" in " ".join(helped.stdout.split())
    refused = runner.invoke(app, [*words, "--no-such-flag"])
    assert refused.exit_code == 2 and "No such option" in refused.stderr and "--no-such-flag" in refused.stderr


WRONG = [
    (["generate", "x", "--target", "./nofolder"], "there is no folder './nofolder'"),
    (["generate", "x", "--target", "missing.gguf"], "there is no file 'missing.gguf'"),
    (["generate", "x", "--target", "EMPTY"], "no config.json in"),
    (["generate", "x", "--draft", "foo"], "unknown draft 'foo'"),
    (["generate", "x", "--draft", "model:./nofolder"], "there is no folder './nofolder'"),
    (["generate", "x", "--draft", "early-exit:some"], "write early-exit:4"),
    (["generate", "x", "--dtype", "int3"], "dtype is 'int3'"),
    (["generate", "x", "--device", "tpu"], "device is 'tpu'"),
    (["generate", ""], "the prompt '' is empty; give at least one word"),
    (["tree", ""], "the prompt '' is empty"),
    (["serve", "--target", "./nofolder"], "there is no folder './nofolder'"),
    (["bench", "--draft", "model:./nofolder"], "there is no folder './nofolder'"),
    (["bench", "report", "out", "--sizes", "./nofolder"], "there is no folder './nofolder'"),
    (["bench", "report", "out", "--sizes", "134M"], "size '134M' is a number of parameters"),
    (["bench", "report", "out", "--memory-target", "./nofolder"], "there is no folder './nofolder'"),
    (["tune", "medusa", "./nofolder"], "there is no folder './nofolder' with heads"),
    (["train", "draft", "--target", "./nofolder", "--text", "x.txt", "--out", "out"], "no folder './nofolder'"),
    (
        ["train", "draft", "--target", "tales", "--text", "missing.txt", "--out", "out"],
        "no file 'missing.txt'",
    ),
]


@pytest.mark.thorough
def test_what_is_wrong_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """All in one process, which would keep torch from then on: so none of them has imported it."""
    (tmp_path / "empty").mkdir()
    cases = [[str(tmp_path / "empty") if word == "EMPTY" else word for word in words] for words, _ in WRONG]
    code = f"""
import sys, json, time
from typer.main import get_command
from typer.testing import CliRunner
from sakiyomi.cli import app
runner, found = CliRunner(), []
for words in {cases!r}:
    done = runner.invoke(app, words)
    found.append([done.exit_code, done.stderr, "torch" in sys.modules])
print(json.dumps([found, time.process_time()]))
"""
    environment = own_environment() | {"HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, encoding="utf-8", check=True
    )
    found, seconds = json.loads(run.stdout.splitlines()[-1])
    for (words, message), (code, said, torch) in zip(WRONG, found, strict=True):
        assert code in (1, 2) and message in said and not torch, (words, code, said)
        assert said.startswith("error: ") and len(said.splitlines()) == 1, said
    assert seconds < 6.0  # of the processor, for all of them; torch alone would take as long for three


def test_drafters_have_their_forms() -> None:
    assert list(DRAFTERS) == list(FORMS)


# ---------------------------------------------------------------- generate


@pytest.mark.thorough
def test_tree_draws_a_round(pair: list[str]) -> None:
    arguments = ["tree", "Once upon a time", *pair, "--gamma", "3", "--nodes", "6", "--max-new-tokens", "12"]
    drawn = runner.invoke(app, [*arguments, "--rounds", "2"])
    assert drawn.exit_code == 0, drawn.output
    assert "round 1: 6 nodes" in drawn.stdout
    assert "round 2:" in drawn.stdout and "round 3:" not in drawn.stdout
    assert drawn.stdout.count(" accepted\n") >= 2 and drawn.stdout.count("the target's own") == 2
    assert "(next)" in drawn.stdout
    deep = runner.invoke(app, ["tree", "Once", *pair, "--gamma", "30", "--nodes", "30", "--max-new-tokens", "40"])
    assert "(bonus)" in deep.stdout or "(recovered)" in deep.stdout, "a line wider than a terminal was cut"
    unasked = runner.invoke(app, ["tree", "Once upon a time", *pair, "--max-new-tokens", "12"])
    assert "round 1: 12 nodes" in unasked.stdout, "whether or not it pays here"
    result = runner.invoke(app, [*arguments, "--json", "--top", "2"])
    shown = json.loads(result.stdout.splitlines()[-1])
    assert [place["text"] for place in shown["places"]][-1] is None
    assert all(len(place["top"]) == 2 for place in shown["places"][1:])
    assert "".join(place["text"] for place in shown["places"][:-1]) == "Once upon a time"
    (first,) = shown["rounds"]
    assert len(first["texts"]) == len(first["parents"]) == 6
    assert first["path"], "the draft is the target: its first choice is right"


@pytest.mark.thorough
def test_tree_as_a_picture(pair: list[str], tmp_path: Path) -> None:
    """Every token of the tree stands in it; without a draft there are the predictions alone."""
    pytest.importorskip("matplotlib")
    arguments = ["tree", "Once upon a time", *pair, "--max-new-tokens", "8", "--json"]
    whole, alone = tmp_path / "tree.svg", tmp_path / "places.svg"
    result = runner.invoke(app, [*arguments, "--plot", str(whole)])
    assert result.exit_code == 0, result.output
    (drawn,) = json.loads(result.stdout.splitlines()[-1])["rounds"]
    assert len(drawn["texts"]) == 12, "it drafts, whatever that costs"
    shown = whole.read_text(encoding="utf-8")
    assert shown.count("last token") == 2 and "probability of the next token" in shown
    without = runner.invoke(app, [*arguments, "--draft", "none", "--plot", str(alone)])
    assert without.exit_code == 0, without.output
    assert json.loads(without.stdout.splitlines()[-1])["rounds"] == []
    assert "last token" not in alone.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--draft", "none", "--top", "0"], "without a draft there is no tree"),
        (["--plot", "tree.txt"], "ends in .png or .svg"),
        (["--rounds", "0"], "rounds is 0"),
        (["--top", "-1"], "top is -1"),
        (["--n", "2"], "n is 2"),
        (["--nodes", "0"], "nodes is 0"),
        (["--tree", "bush"], "tree is 'bush'"),
        (["--tree", "chain", "--nodes", "3"], "leave one out"),
    ],
)
def test_tree_refuses(pair: list[str], more: list[str], message: str) -> None:
    result = runner.invoke(app, ["tree", "Once", *pair, *more])
    assert result.exit_code == 2
    assert message in result.output


def test_generate_gives_the_text_of_the_engine(models: Path, pair: list[str]) -> None:
    llm = Engine(str(models / "target"), draft="none", compile=False)
    text = llm.generate("Once upon a time", SamplingParams(max_new_tokens=12)).text
    base = ["generate", "Once upon a time", *pair, "--max-new-tokens", "12"]
    for more in ([], ["--no-stream"], ["--trace"], ["--gamma", "2"], ["--trace", "--no-stream"]):
        result = runner.invoke(app, base + more)
        assert result.exit_code == 0, result.output
        assert result.stdout == text + "\n", more


def test_json_is_the_last_line(pair: list[str]) -> None:
    base = ["generate", "Once", "The fox", *pair, "--max-new-tokens", "6", "--json"]
    for more in ([], ["--stream"], ["--rounds-trace"]):
        result = runner.invoke(app, base + more)
        assert result.exit_code == 0, result.output
        value = json.loads(result.stdout.splitlines()[-1])
        assert value["prompts"] == ["Once", "The fox"]
        assert [len(done["token_ids"]) for done in value["generations"]] == [6, 6]
        assert all(done["prompt_tokens"] > 0 and done["stats"]["tokens"] == 6 for done in value["generations"])
        assert ("rounds_trace" in value["generations"][0]) == (more == ["--rounds-trace"])


def test_samples_and_seeds(pair: list[str]) -> None:
    base = ["generate", "Once", *pair, "--max-new-tokens", "8", "--temperature", "1", "--n", "3", "--json"]
    texts = []
    for seed in ("5", "5", "6"):
        result = runner.invoke(app, [*base, "--seed", seed])
        texts.append([done["text"] for done in json.loads(result.stdout)["generations"]])
    assert len(set(texts[0])) == 3
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.thorough
def test_streamed_or_not_each_prompt_has_its_own_seed(pair: list[str]) -> None:
    base = ["generate", "Once", "Once", *pair, "--max-new-tokens", "8", "--temperature", "1", "--seed", "1", "--json"]
    texts = []
    for how in ("--stream", "--no-stream"):
        result = runner.invoke(app, [*base, how])
        texts.append([done["text"] for done in json.loads(result.stdout.splitlines()[-1])["generations"]])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_a_model_without_a_known_draft_gets_a_hint(models: Path) -> None:
    base = ["generate", "Once", "--target", str(models / "target"), "--compile", "false", "--max-new-tokens", "4"]
    said = runner.invoke(app, base).stderr
    assert "recycle+suffix+prompt-lookup drafts" in said and "sakiyomi tune" in said and "train draft" in said
    assert re.search(r"4 tokens, \d+ tokens/s, .* draft recycle\+suffix\+prompt-lookup\n$", said)
    spec = f"model:{models / 'draft'}"
    assert runner.invoke(app, [*base, "--draft", spec]).stderr.endswith(f"; draft {spec}\n")
    said = runner.invoke(app, [*base, "--draft", "none"]).stderr
    assert re.fullmatch(r"4 tokens, \d+ tokens/s, without a draft\n", said)


def test_prompts_from_stdin_and_file(tmp_path: Path, pair: list[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "A\u2028fox"}\r\n\n{"turns": ["A bear", "more"]}\n"A duck"\n', encoding="utf-8")
    base = ["generate", *pair, "--max-new-tokens", "3", "--json"]
    result = runner.invoke(app, [*base, "first", "-", "--file", str(file)], input="a line\nand another\n")
    assert result.exit_code == 0, result.output
    turn = [{"role": "user", "content": "A bear"}]
    assert json.loads(result.stdout)["prompts"] == ["first", "a line\nand another", "A\u2028fox", turn, "A duck"]


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe", "cannot be read"), (b'{"a": 1}\n', "line 1"), (b"\n", "there is no prompt")]
)
def test_bad_prompt_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    result = runner.invoke(app, ["generate", "--file", str(file)])
    assert result.exit_code in (1, 2)
    assert message in result.stderr


def test_logit_bias_reaches_the_engine(pair: list[str]) -> None:
    base = ["generate", "Once", *pair, "--max-new-tokens", "4", "--json"]
    result = runner.invoke(app, [*base, "--logit-bias", "70=1000"])
    assert json.loads(result.stdout)["generations"][0]["token_ids"] == [70] * 4


# ---------------------------------------------------------------- colours


def trace_of(text: str) -> list[TokenTrace]:
    ids = tiny_tokenizer()(text).input_ids
    statuses = ("plain", "accepted", "recovered", "bonus")
    return [TokenTrace(token, status=statuses[i % 4]) for i, token in enumerate(ids)]


def painted(text: str, console: Console, stop: tuple[str, ...] = ()) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "stdout", lambda: console)
        list(output.printed([Step(text, trace=tuple(trace_of(text)))], tiny_tokenizer(), stop, (), coloured=True))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["The fox ran.\tIt was 12 o'clock.\n\nThe end", "むかし、😀 a \x07 b", ""])
def test_without_colours_there_is_only_text(text: str) -> None:
    console = Console(file=io.StringIO(), width=20)
    assert painted(text, console) == text + "\n"


def test_colours_say_the_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    shown = painted("abc xyz", console)
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == "abc xyz\n"
    assert set(re.findall(r"\x1b\[([0-9]+)m", shown)) == {"32", "31", "36", "0"}
    output.legend(console)
    assert "accepted" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_terminal_is_spared_control_characters() -> None:
    """A model may write an escape sequence; a file gets it, a screen does not obey it."""
    console = Console(file=io.StringIO(), force_terminal=True, no_color=True)
    assert painted("a \x1b[2J\x07b\tc", console) == "a [2Jb\tc\n"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), force_terminal=True)
    assert painted("abc xyz", console) == "abc xyz\n"
    output.legend(console)
    assert console.file.getvalue() == "abc xyz\n"  # type: ignore[attr-defined]


def test_stop_strings_are_not_shown() -> None:
    assert painted("The fox ran away", Console(file=io.StringIO()), stop=("ran",)) == "The fox \n"


# ---------------------------------------------------------------- demo and info


def test_demo(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TARGET", str(models / "target"))
    arguments = ["demo", "--target", str(models / "target"), "--draft", f"model:{models / 'draft'}", "--json"]
    result = runner.invoke(app, [*arguments, "--max-new-tokens", "20"])
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert len(value["trace"]) == len(value["token_ids"]) == value["stats"]["tokens"] == 20
    assert result.stdout.startswith(value["prompt"] + value["text"])
    assert "\x1b" not in result.stdout
    lines = value["table"]["lines"]
    assert [line["name"] for line in lines] == [
        "transformers plain",
        "transformers assisted",
        "sakiyomi plain",
        "sakiyomi speculative",
    ]
    assert all(line["equal"] and line["tokens_per_second"] > 0 for line in lines)
    assert {"dtype", "draft_dtype", "gamma"} <= set(value["table"]["conditions"])
    assert value["table"]["conditions"]["graphs"] == "recorded"


def test_demo_without_the_table(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TARGET", str(models / "target"))
    arguments = ["demo", "--target", str(models / "target"), "--draft", f"model:{models / 'wrong'}", "--no-table"]
    result = runner.invoke(app, [*arguments, "--max-new-tokens", "8", "--temperature", "0.8", "--prompt", "A fox"])
    assert result.exit_code == 0, result.output
    assert "first token" in result.stdout
    assert "transformers" not in result.stdout


def test_info(models: Path) -> None:
    result = runner.invoke(app, ["info", "--json"])
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert value["bandwidth_bytes_per_second"] > 1e8
    assert value["sakiyomi"] == __version__
    names = ["--target", str(models / "target"), "--draft", f"model:{models / 'draft'}", "--repeats", "3"]
    result = runner.invoke(app, ["info", *names, "--json"])
    assert result.exit_code == 0, result.output
    costs = json.loads(result.stdout.splitlines()[-1])["pair"]
    assert set(costs["target_ms"]) == set(costs["v"]) == {"1", "4", "8", "16"}
    assert costs["v"]["1"] == 1.0
    assert costs["c"] == pytest.approx(costs["draft_ms"] / costs["target_ms"]["1"])
    assert costs["runs"] == ("plain torch" if native() is None else "the compiled kernels")


def test_info_says_why_a_model_runs_through_its_own_forward(tmp_path: Path) -> None:
    save_model(tmp_path, make(REFUSED["gpt_neo"]()), character_tokenizer("abc"))
    result = runner.invoke(app, ["info", "--target", str(tmp_path), "--draft", "none", "--repeats", "1"])
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "runs each text by itself through its class's own forward, new tokens at once: GPTNeoForCausalLM" in words
    assert "keeps its own attention" in words and words.count("own forward") == 1 and "leave quantize" not in words


# ---------------------------------------------------------------- the process


def test_interrupt_ends_with_130_and_one_line(models: Path) -> None:
    arguments = ["generate", "Once", "--target", str(models / "target"), "--draft", "none", "--compile", "false"]
    process = subprocess.Popen(
        [*warm(), "-m", "sakiyomi", *arguments, "--max-new-tokens", "90000", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Whoever runs the tests in the background may have had it ignored.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.decode().strip().splitlines()[-1] == "interrupted"
    assert b"Traceback" not in errors


def test_a_reader_that_goes_away(models: Path) -> None:
    arguments = ["generate", "Once", "--target", str(models / "target"), "--draft", "none", "--compile", "false"]
    process = subprocess.Popen(
        [*warm(), "-m", "sakiyomi", *arguments, "--max-new-tokens", "90000", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.stdout.close()
        process.wait(timeout=60)
        assert process.stderr is not None
        errors = process.stderr.read()
        process.stderr.close()
    finally:
        process.kill()
    assert process.returncode == 1
    assert b"Traceback" not in errors
    assert b"Exception" not in errors


@pytest.mark.thorough
def test_what_target_and_draft_both_lack_is_said_once(models: Path, tmp_path: Path) -> None:
    """A compiler that fails: one line for the kernels, and the text."""
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'error: one' >&2\necho 'two' >&2\nexit 1\n", encoding="utf-8")
    compiler.chmod(0o755)
    environment = own_environment() | {"CXX": str(compiler), "SAKIYOMI_CACHE_DIR": str(tmp_path / "cache")}
    arguments = ["generate", "Once", "--target", str(models / "target"), "--draft", f"model:{models / 'draft'}"]
    arguments += ["--max-new-tokens", "4"]
    code = "from sakiyomi.cli import main; from sakiyomi.kernels.build import builder\n"
    code += "try: main()\nfinally: builder().join()"  # the text may be faster than the compiler
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    lines = [line for line in done.stderr.splitlines() if "plain torch" in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].endswith(f"{compiler} failed: error: one two")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")])
def test_a_limit_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """As `ulimit -v` and containers set it: an allocation fails anywhere."""

    def full(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("sakiyomi.engine.llm.ModelPool", full)
    result = runner.invoke(app, ["generate", "Once"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the command ran out of memory; ") and len(result.stderr.splitlines()) == 1


# ---------------------------------------------------------------- help, completion, settings


def commands(command: Any, name: str = "sakiyomi") -> Iterator[tuple[str, Any]]:
    yield name, command
    for own, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {own}")


def test_each_command_ends_with_an_example_that_it_takes() -> None:
    whole = get_command(app)
    for name, command in commands(whole):
        if name.split()[1:] in (["memory"], ["cache"], ["export"], ["import"]):
            continue  # they hold others and do nothing themselves
        example = (command.epilog or "").removeprefix("Example: ")
        assert example.startswith(name if name != "sakiyomi train" else "sakiyomi"), name
        if name == "sakiyomi":
            continue
        words = shlex.split(example)[1:]
        at, context = whole, None
        while words and words[0] in getattr(at, "commands", {}):
            at, word = at.commands[words[0]], words.pop(0)
            context = typer.Context(at, info_name=word, parent=context)
        at.make_context(name, words, parent=context)


def test_basics_come_first_and_every_section_has_a_name() -> None:
    text = flags_of("generate")
    assert text.index("Basics:") < text.index("Model and machine:") < text.index("Sampling and speculation:")
    assert text.index("--max-new-tokens") < text.index("--kv-budget")
    assert "--target, --model" in flags_of("train", "draft")


@pytest.mark.thorough
def test_a_file_and_the_environment_set_what_flags_set(
    tmp_path: Path, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file serves several commands: what only another one has is left alone, what none has is refused."""
    file = tmp_path / "sakiyomi.toml"
    file.write_text('max_new_tokens = 3\nport = 9000\nlogit_bias = ["17=-2.5"]\n', encoding="utf-8")
    run = ["generate", "Once", *pair, "--json", "--config", str(file)]
    tokens = [json.loads(runner.invoke(app, run).stdout.splitlines()[-1])["generations"][0]["token_ids"]]
    monkeypatch.setenv("SAKIYOMI_MAX_NEW_TOKENS", "5")
    tokens.append(json.loads(runner.invoke(app, run).stdout.splitlines()[-1])["generations"][0]["token_ids"])
    run += ["--max-new-tokens", "2"]
    tokens.append(json.loads(runner.invoke(app, run).stdout.splitlines()[-1])["generations"][0]["token_ids"])
    assert [len(text) for text in tokens] == [3, 5, 2]
    file.write_text("max_new_token = 3\n", encoding="utf-8")
    assert "did you mean 'max_new_tokens'?" in runner.invoke(app, run).stderr
    monkeypatch.setenv("SAKIYOMI_TOKENS", "some")
    assert "SAKIYOMI_TOKENS is 'some'" in runner.invoke(app, ["train", "draft"]).stderr


def test_the_environment_names_several_models_or_one_with_a_blank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for names in (("a", "b"), ("a b", "tales")):
        monkeypatch.setenv("SAKIYOMI_TARGET", shlex.join(str(tmp_path / name) for name in names))
        assert f"there is no folder '{tmp_path / names[0]}'" in runner.invoke(app, ["serve"]).stderr
    (tmp_path / "a b").mkdir()
    monkeypatch.setenv("SAKIYOMI_TARGET", f"{tmp_path}/a b")
    assert f"no config.json in {tmp_path}/a b" in runner.invoke(app, ["serve"]).stderr


def test_shells_complete_commands() -> None:
    environment = own_environment() | {
        "_SAKIYOMI_COMPLETE": "complete_bash",
        "COMP_WORDS": "sakiyomi ge",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "sakiyomi"], env=environment, capture_output=True, encoding="utf-8", check=False
    )
    assert done.stdout.split() == ["generate"]


@pytest.mark.thorough
def test_no_line_of_other_libraries() -> None:
    """Importing torchao, as transformers does, writes four lines where nobody asks for silence."""
    code = "from sakiyomi.cli.output import quiet\nquiet()\nimport torchao.quantization, transformers.quantizers"
    done = subprocess.run(
        [sys.executable, "-c", code], env=own_environment(), capture_output=True, encoding="utf-8", check=True
    )
    assert done.stderr == ""


@pytest.mark.thorough
def test_a_card_is_a_page_and_a_file(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "here"
    arguments = ["bench", "card", str(models / "target"), "--out", str(out), "--count", "2", "--max-new-tokens", "24"]
    result = runner.invoke(app, [*arguments, "--repeats", "1", "--draft", f"model:{models / 'draft'}", "--json"])
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    lines = {line["name"]: line for line in value["row"]["lines"]}
    assert list(lines) == [
        "transformers plain",
        "transformers assisted",
        "sakiyomi plain",
        "sakiyomi, draft model",
    ]
    assert all(line["equal"] and line["tokens_per_second"] > 0 for line in lines.values())
    assert lines["sakiyomi, draft model"]["tau"] >= 1  # the draft is as large as the target: it may not pay
    assert any("llama.cpp is left out" in note for note in value["row"]["notes"])
    page = out.with_suffix(".md").read_text(encoding="utf-8")
    assert "instruction sets" in page and "| sakiyomi plain |" in page and page in result.stdout
    written = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert written["row"] == value["row"] and written["model"]["parameters"] > 0
    draft = written["draft"]
    assert draft["spec"] == f"model:{models / 'draft'}" and draft["drafters"] == ["model"] and draft["parameters"] > 0
    assert f"- draft: model:{models / 'draft'}, " in page
    refused = runner.invoke(app, [*arguments, "--target", "x"])
    assert refused.exit_code == 2, "the target is named by its place"


def test_bench_without_rows_is_one_table(models: Path) -> None:
    """Also for a target that no draft model belongs to."""
    arguments = ["bench", "--target", str(models / "target"), "--count", "1", "--repeats", "1", "--no-compile"]
    result = runner.invoke(app, [*arguments, "--max-new-tokens", "24", "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert row["row"] == "minute"
    assert [line["name"] for line in row["lines"]][:2] == ["transformers plain", "sakiyomi plain"]
    assert row["lines"][-1]["equal"] and row["lines"][-1]["name"].startswith("sakiyomi, draft")
