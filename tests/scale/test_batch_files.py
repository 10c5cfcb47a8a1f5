"""Files of requests: every line answered once, in order, whatever ends a run."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sakiyomi import InputError, SamplingParams
from sakiyomi.cli import app
from sakiyomi.core.errors import LoadError
from sakiyomi.scale.batch import BatchFile, answer_missing, seeded
from sakiyomi.scale.cluster import import_ray
from sakiyomi.scale.in_process import InProcessServer, unlimited
from server_toys import toy_llm

BODY = {"prompt": "Once upon", "max_tokens": 3, "temperature": 0}


class Echo:
    """Answers with the prompt, and says how often it was asked."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.asked: list[str] = []
        self._fails_at = fails_at

    async def post(self, path: str, body: Any, client: str) -> tuple[int, Any]:
        if len(self.asked) == self._fails_at:
            raise KeyboardInterrupt
        self.asked.append(body["prompt"])
        await asyncio.sleep(random.random() * 1e-3)
        return 200, {"text": body["prompt"], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}


def line(name: Any, **changed: Any) -> str:
    return json.dumps(
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": BODY | {"prompt": f"{name}"}} | changed
    )


def written(folder: Path, lines: Sequence[str]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run(batch: BatchFile, endpoint: Echo) -> None:
    with batch.lock():
        progress = batch.begin()
        asyncio.run(answer_missing(batch, endpoint, progress, lambda _: None))
        assert progress.answered == progress.lines
        batch.join()


def replies(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_every_line_is_answered_in_its_order(size: int, tmp_path: Path) -> None:
    source = written(tmp_path, [line(f"request {i}") for i in range(20)] + ["", "  "])
    batch = BatchFile(source, tmp_path / "out.jsonl", {}, size)
    run(batch, Echo())
    found = replies(batch.out)
    assert [reply["custom_id"] for reply in found] == [f"request {i}" for i in range(20)]
    assert [reply["response"]["body"]["text"] for reply in found] == [f"request {i}" for i in range(20)]
    assert not batch.folder.exists()


def test_a_run_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    source = written(tmp_path, [line(f"{i}") for i in range(40)])
    asked: list[str] = []
    for fails_at in (11, 4, 9, None):
        endpoint = Echo(fails_at)
        batch = BatchFile(source, tmp_path / "out.jsonl", {}, 4)
        try:
            run(batch, endpoint)
        except KeyboardInterrupt:
            assert not batch.out.exists()
        there = 40 - sum(piece.lines for piece in batch.missing())
        asked += endpoint.asked
    assert there == 40 or batch.out.exists()
    assert [reply["custom_id"] for reply in replies(batch.out)] == [f"{i}" for i in range(40)]
    assert len(asked) < 40 + 3 * 2 * 4  # at most the pieces in flight were answered again


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 2: it is no JSON"),
        ("[]", "it is no JSON object"),
        (line(3), "the field 'custom_id' is 3: Input should be a valid string"),
        (json.dumps({"custom_id": "x", "body": {}}), "the field 'url' is missing"),
        (line("x", body="text"), "the field 'body' is \"text\": Input should be a valid dictionary"),
        (line("x", url="/v1/embeddings"), "Input should be '/v1/chat/completions' or '/v1/completions'"),
        (line("x", method="GET"), "the field 'method' is \"GET\": Input should be 'POST'"),
        (line("x", body=BODY | {"stream": True}), "stream is on"),
        (line("first"), "custom_id is 'first', as in line 1"),
        ("[" * 100_000, "it is no JSON"),
        ("\ud800", "it is no JSON"),
        (line("\ud800"), "the field 'custom_id' is \"\\ud800\": Input should be a valid string"),
    ],
)
def test_a_wrong_line_costs_itself_alone(text: str, said: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [line("first"), text, line("last")]
    source.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    batch = BatchFile(source, tmp_path / "out.jsonl", {})
    endpoint = Echo()
    run(batch, endpoint)
    found = replies(batch.out)
    assert sorted(endpoint.asked) == ["first", "last"]
    assert found[1]["response"] is None and said in found[1]["error"]["message"]
    assert found[1]["error"]["code"] == "invalid_line"


def test_a_full_disk_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = BatchFile(written(tmp_path, [line(f"{i}") for i in range(9)]), tmp_path / "out.jsonl", {}, 2)

    def full(*_: Any) -> None:
        raise LoadError("cannot write: No space left on device")

    monkeypatch.setattr(BatchFile, "keep", full)
    with pytest.raises(LoadError, match="No space left"):
        run(batch, Echo())
    monkeypatch.undo()
    run(BatchFile(batch.source, batch.out, {}, 2), Echo())
    assert len(replies(batch.out)) == 9


def test_wrong_files(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(LoadError, match="No such file"):
        BatchFile(tmp_path / "missing.jsonl", out, {})
    with pytest.raises(InputError, match="is a folder; name a file in it"):
        BatchFile(written(tmp_path, [line("a")]), tmp_path, {})
    with pytest.raises(InputError, match="has no requests"):
        BatchFile(written(tmp_path, [""]), out, {})
    source = written(tmp_path, [line("a"), line("b")])
    nobody = BatchFile(source, out, {"target": "nobody"}, 1)
    nobody.begin()  # and no piece was answered: the model could not be loaded, say
    first = BatchFile(source, out, {"target": "tales"}, 1)
    with first.lock():
        first.begin()
        first.keep(first.pieces[0].number, [])
        with (
            pytest.raises(InputError, match="another run writes"),
            BatchFile(source, out, {"target": "tales"}, 1).lock(),
        ):
            pass
    with pytest.raises(InputError, match="target was 'tales' and is 'other'"):
        BatchFile(source, out, {"target": "other"}, 1)
    with pytest.raises(InputError, match="piece_lines was 1 and is 2"):
        BatchFile(source, out, {"target": "tales"}, 2)
    source.write_text(line("c"), encoding="utf-8")
    with pytest.raises(InputError, match="the input has changed since"):
        BatchFile(source, out, {"target": "tales"}, 1)
    (first.folder / "about.json").write_text("{", encoding="utf-8")
    with pytest.raises(LoadError, match="to begin anew"):
        BatchFile(source, out, {"target": "tales"}, 1)
    with pytest.raises(LoadError, match="choose another output"), BatchFile(source, source / "below", {}).lock():
        pass
    other = tmp_path / "there.jsonl"
    other.write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="is there already"):
        BatchFile(source, other, {})
    assert other.read_text(encoding="utf-8") == "mine"


def test_a_folder_of_its_name_is_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray leaves /tmp/ray behind: python in /tmp imports that without it."""
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    with pytest.raises(LoadError, match=r"pip install 'sakiyomi\[scale\]'"):
        import_ray()


def test_texts_are_those_of_the_engine(tmp_path: Path) -> None:
    """Greedy and sampled, with a draft; the lines' company changes nothing."""
    llm = toy_llm(dtype="float32")
    prompts = [f"Number {i} of" for i in range(10)]
    lines = [
        line(f"{i}", body={"prompt": prompt, "max_tokens": 12, "temperature": i % 2, "ignore_eos": True})
        for i, prompt in enumerate(prompts)
    ]
    batch = BatchFile(written(tmp_path, lines), tmp_path / "out.jsonl", {}, 4)

    async def answer() -> None:
        async with InProcessServer(llm, unlimited()) as server:
            await answer_missing(batch, server, batch.begin(), lambda _: None)

    asyncio.run(answer())
    batch.join()
    for i, (prompt, reply) in enumerate(zip(prompts, replies(batch.out), strict=True)):
        assert reply["response"]["status_code"] == 200, reply
        seed = seeded(f"{i}", {"temperature": i % 2}).get("seed")
        params = SamplingParams(max_new_tokens=12, temperature=float(i % 2), ignore_eos=True, seed=seed)
        assert reply["response"]["body"]["choices"][0]["text"] == llm.generate(prompt, params).text


def test_the_command(tmp_path: Path) -> None:
    """Errors of the API are those of the server, and make the exit code 1."""
    lines = [line("good"), line("bad", body=BODY | {"max_tokens": -1})]
    lines.append(line("chat", url="/v1/chat/completions", body={"messages": [], "model": "nobody"}))
    source, out = written(tmp_path, lines), tmp_path / "out.jsonl"
    found = CliRunner().invoke(app, ["run-batch", "-i", str(source), "-o", str(out), "--model", "tales", "--json"])
    assert found.exit_code == 1, found.output
    told = json.loads(found.stdout.splitlines()[-1])
    assert (told["lines"], told["answered"], told["failed"], told["completion_tokens"]) == (3, 3, 2, 3)
    assert "POST" not in found.stderr
    good, bad, chat = replies(out)
    assert good["response"]["body"]["usage"]["completion_tokens"] == 3 and good["error"] is None
    assert bad["response"]["status_code"] == 400 and "max_tokens" in bad["response"]["body"]["error"]["message"]
    assert chat["response"]["status_code"] in (400, 404)
    again = CliRunner().invoke(app, ["batch", str(source), str(out)])
    assert again.exit_code == 2 and "is there already" in again.output


SLOW = """
import asyncio, sys, time
from pathlib import Path
from sakiyomi.scale.batch import BatchFile, answer_missing

class Slow:
    async def post(self, path, body, client):
        await asyncio.sleep(.004)
        return 200, {"text": body["prompt"]}

batch = BatchFile(Path(sys.argv[1]), Path(sys.argv[2]), {}, 2)
with batch.lock():
    asyncio.run(answer_missing(batch, Slow(), batch.begin(), lambda _: print(flush=True)))
    batch.join()
"""


@pytest.fixture
def killed_at_random(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A run that is killed by SIGKILL again and again until it ends."""
    source, out = written(tmp_path, [line(f"{i}") for i in range(200)]), tmp_path / "out.jsonl"
    draws = random.Random(4)
    kills = 0
    while not out.exists() or (tmp_path / "out.jsonl.parts").exists():
        with subprocess.Popen([sys.executable, "-c", SLOW, str(source), str(out)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(draws.randrange(1, 12)):  # pieces that it has told of
                process.stdout.readline()
            time.sleep(draws.random() * 0.01)
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
        assert kills < 100, "it does not end"
    assert kills > 5
    yield source, out


def test_a_run_that_is_killed_while_it_removes_its_pieces_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is there: its requests are not answered once more, and nothing is left beside it."""
    batch = BatchFile(written(tmp_path, [line(f"{i}") for i in range(9)]), tmp_path / "out.jsonl", {}, 2)

    def killed(folder: Path, **_: Any) -> None:
        for path in [folder / "about.json", *sorted(folder.glob("*.jsonl"))[:3]]:
            path.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        batch.begin()
        patch.setattr("sakiyomi.core.pieces.shutil.rmtree", lambda path, **_: path.is_dir() and killed(path))
        with pytest.raises(KeyboardInterrupt):
            run(batch, Echo())
    with pytest.raises(InputError, match="is there already"):
        BatchFile(batch.source, batch.out, {}, 2)
    assert len(replies(batch.out)) == 9
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_a_run_that_has_ended_meanwhile_is_not_done_again(tmp_path: Path) -> None:
    source = written(tmp_path, [line(f"{i}") for i in range(9)])
    second = BatchFile(source, tmp_path / "out.jsonl", {}, 2)
    run(BatchFile(source, second.out, {}, 2), Echo())
    with pytest.raises(InputError, match="is there already"):
        run(second, Echo())


@pytest.mark.thorough
def test_nothing_is_lost_or_doubled_by_kills(killed_at_random: tuple[Path, Path]) -> None:
    _, out = killed_at_random
    assert [reply["custom_id"] for reply in replies(out)] == [f"{i}" for i in range(200)]
    assert not list(out.parent.glob("*.parts"))
    assert not list(out.parent.glob(".*partial"))
