"""Several models by name: loaded when they are named, given up within a bound on memory, never while they write."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_toys import SIZE, Shop, Toy
from sakiyomi import LLM
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.engine.config import LLMConfig
from sakiyomi.scale import model_process
from sakiyomi.scale.in_process import Asked
from sakiyomi.scale.model_options import BARE, ModelOptions, read_models, room_of
from sakiyomi.scale.model_process import ModelProcess
from sakiyomi.scale.models import ModelTable, make_models_app
from sakiyomi.server.config import ServerConfig
from server_toys import toy_llm
from toys import tiny_llama, tiny_tokenizer


@asynccontextmanager
async def shop(
    names: str, room: float, monkeypatch: pytest.MonkeyPatch, **config: Any
) -> AsyncIterator[tuple[Shop, ModelTable, httpx.AsyncClient]]:
    """Toys behind a front: one for each letter; so many have room."""
    monkeypatch.setattr("sakiyomi.scale.models.likely_bytes", lambda model: SIZE)
    found, settings = Shop(), ServerConfig(**{"max_body": 1 << 20, **config})
    models = {name: LLMConfig(target=name) for name in names}
    table = ModelTable(models, settings, int(room * SIZE), found.start)
    app = make_models_app(table, settings)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            yield found, table, client


def ask(model: str | None, **body: Any) -> dict[str, Any]:
    return {"prompt": "Number one of", "max_tokens": 8, "temperature": 0, **({"model": model} if model else {}), **body}


async def said(client: httpx.AsyncClient, model: str | None, **body: Any) -> str:
    reply = await client.post("/v1/completions", json=ask(model, **body), timeout=60)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def run(work: Awaitable[None]) -> None:
    asyncio.run(work)  # type: ignore[arg-type]


def test_models_are_loaded_by_name_and_the_oldest_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three fit. A name that is not known is a 404 with those that are; none at all means the first."""

    async def work() -> None:
        async with shop("abc", 2.5, monkeypatch) as (found, _, client):
            right = toy_llm("none").generate("Number one of", params := _greedy())
            for name in ("a", "b", None, "c", "a", "b"):
                assert await said(client, name) == right.text, params
            # None is a: so c takes the place of b, and b later that of c.
            assert found.events == ["a", "b", "c", "b"]
            assert "/models/load" in (await client.get("/docs")).text
            cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
            assert {name: card["loaded"] for name, card in cards.items()} == {"a": True, "b": True, "c": False}
            assert cards["c"]["max_model_len"] == cards["a"]["max_model_len"]  # known from when it was loaded
            wrong = await client.post(
                "/v1/chat/completions", json={"model": "d", "messages": [{"role": "user", "content": "Say"}]}
            )
            assert wrong.status_code == 404
            assert wrong.json()["error"]["message"] == "there is no model 'd'; this server has 'a', 'b', 'c'"
            assert (await client.get("/v1/models/d")).status_code == 404
            assert (await client.get("/v1/models/c")).json()["id"] == "c"
            metrics = (await client.get("/metrics")).text
            assert 'sakiyomi:model_loaded{replica="c",model_name="c"} 0' in metrics
            assert 'sakiyomi:model_loads_total{replica="b",model_name="b"} 2' in metrics
            assert 'vllm:generation_tokens_total{replica="a",model_name="a"} 24.0' in metrics
            assert (await client.get("/health")).json() == {"status": "ok", "replicas": 3}

    run(work())


def _greedy() -> Any:
    from sakiyomi import SamplingParams

    return SamplingParams(max_new_tokens=8, temperature=0)


def test_who_writes_keeps_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fits. A stream of a goes on to its end while b waits; a request for a that comes behind b comes after it."""

    async def work() -> None:
        async with shop("ab", 1.5, monkeypatch) as (found, _, client):
            whole = await said(client, "a", max_tokens=40)
            monkeypatch.setattr(Toy, "slow", 0.02)
            order: list[str] = []

            async def one(name: str, **body: Any) -> str:
                text = await said(client, name, **body)
                order.append(name + str(body.get("max_tokens", 8)))
                return text

            first = asyncio.ensure_future(one("a", max_tokens=40))
            await asyncio.sleep(0.01)
            second = asyncio.ensure_future(one("b"))
            await asyncio.sleep(0.01)
            third = asyncio.ensure_future(one("a"))
            assert await first == whole and whole.startswith(await third)
            await second
            assert found.events == ["a", "b", "a"] and order == ["a40", "b8", "a8"]

    run(work())


def test_streams_and_forms_find_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with shop("ab", 2.5, monkeypatch) as (_, _, client):
            right = await said(client, "b")
            async with client.stream("POST", "/v1/completions", json=ask("b", stream=True)) as reply:
                lines = [line[6:] async for line in reply.aiter_lines() if line.startswith("data: {")]
            events = [json.loads(line) for line in lines]
            assert "".join(event["choices"][0]["text"] for event in events) == right
            assert {event["model"] for event in events} == {"b"}
            form = {"file": ("talk.wav", b"RIFF")}
            sound = await client.post("/v1/audio/transcriptions", files=form, data={"model": "b"})
            assert sound.status_code == 400 and "'b' is no speech model" in sound.text
            assert (await client.post("/v1/audio/transcriptions", files=form, data={"model": "x"})).status_code == 404
            assert (await client.post("/tokenize", json={"prompt": "Number", "model": "b"})).json()["count"] > 0

    run(work())


def test_models_are_loaded_and_given_up_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with shop("ab", 2.5, monkeypatch, api_key="secret") as (found, _, client):
            assert (await client.post("/models/load", json={"model": "b"})).status_code == 401
            client.headers["authorization"] = "Bearer secret"
            card = (await client.post("/models/load", json={"model": "b"})).json()
            assert card["id"] == "b" and card["loaded"] and card["max_model_len"]
            card = (await client.post("/models/unload", json={"model": "b"})).json()
            assert not card["loaded"] and not found.toys["b"].alive
            assert (await client.post("/models/load", json={"model": "x"})).status_code == 404

    run(work())


def test_what_cannot_be_loaded_is_an_error_of_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on. What takes more than was guessed, and than there may be, is given up again and refused."""

    async def work() -> None:
        async with shop("ab", 1.5, monkeypatch) as (found, _, client):
            found.broken = {"b"}
            reply = await client.post("/v1/completions", json=ask("b"))
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "model_not_loaded"
            assert "its file is damaged" in reply.json()["error"]["message"]
            assert await said(client, "a")
            found.broken, found.size = set(), 2 * SIZE
            for _ in range(2):
                reply = await client.post("/v1/completions", json=ask("b"))
                assert reply.status_code == 503 and reply.json()["error"]["code"] == "out_of_memory"
                assert found.events.count("b") == 1 and not found.toys["b"].alive

    run(work())


def test_a_server_that_stops_loads_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a model counts as under way; cut, it is told why at once, and so is who waits behind it."""

    async def work() -> None:
        async with shop("ab", 1.5, monkeypatch) as (found, table, client):
            await said(client, "a")
            found.patience = 3600.0
            waiting = [asyncio.ensure_future(client.post("/v1/completions", json=ask("b"))) for _ in range(2)]
            await asyncio.sleep(0.05)
            assert table.load == 2
            table.drain()
            assert (await client.post("/v1/completions", json=ask("a"))).status_code == 503
            table.stop()
            for reply in await asyncio.gather(*waiting):
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "stopping")
            assert table.load == 0 and found.events == ["a"]

    run(work())


def test_what_cannot_fit_is_refused_before_anything_is_loaded() -> None:
    models = {"a": LLMConfig("tales")}
    with pytest.raises(InputError, match=r"'a' takes about .* may take 105 MB together"):
        room_of(ModelOptions(model_memory="100MiB"), models)
    assert room_of(ModelOptions(model_memory="1GiB"), models) == 1 << 30
    assert room_of(ModelOptions(), models) > BARE


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("", "names no model"),
        ("a = 1", "'a' is no model; expected a table for each model: [name]"),
        ("[a]\ndraft = 'none'", "'a' is no model"),
        ("[a]\ntarget = 'tales'\nport = 1", "sets 'port' of model 'a'; known settings: target, draft"),
        ("[a]\ntarget = 'tales'\nmax_batch = '8'", "max_batch = '8' of model 'a'; expected int"),
        ("[a]\ntarget = 'tales'\ndraft = 'foo'", "model 'a': unknown draft 'foo'"),
        ("[a]\ntarget = './nofolder'", "model 'a': there is no folder"),
        ("[a", "expected a TOML file"),
    ],
)
def test_tables_of_models_are_read_strictly(lines: str, problem: str, tmp_path: Path) -> None:
    (file := tmp_path / "models.toml").write_text(lines, encoding="utf-8")
    with pytest.raises((InputError, LoadError), match=problem.replace("[", r"\[")):
        read_models(ModelOptions(models=str(file)), LLMConfig())


def test_models_of_flags_and_tables(tmp_path: Path) -> None:
    (file := tmp_path / "models.toml").write_text(
        "[a]\ntarget = 'tales'\n[b]\ntarget = 'tales'\nmax_batch = 2\n", encoding="utf-8"
    )
    flags = LLMConfig(max_batch=32)
    found = read_models(ModelOptions(models=str(file)), flags)
    assert {name: model.max_batch for name, model in found.items()} == {"a": 32, "b": 2}
    assert read_models(ModelOptions(), flags) == {"tales": flags}
    assert [*read_models(ModelOptions(("tales", "tales-draft")), flags)] == ["tales", "tales-draft"]
    with pytest.raises(InputError, match="two models are called 'tales'"):
        read_models(ModelOptions(("tales", "tales")), flags)
    with pytest.raises(InputError, match="leave target out"):
        read_models(ModelOptions(("tales-draft",), str(file)), flags)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("models") / "toy"
    tiny_llama(max_position_embeddings=4096).save_pretrained(path)
    tiny_tokenizer(320).save_pretrained(path)
    yield path


@pytest.mark.thorough
def test_a_process_that_dies_is_replaced_within_a_stream(folder: Path) -> None:
    """A real process, killed after the first event: the stream goes on with the same text. Nothing is left at the end.

    The text is long: on a busy machine the process would have written a short one before it is killed.
    """
    config, tokens = ServerConfig(max_body=1 << 20, warm_up="none"), 400
    right = LLM(str(folder), "none", compile=False).generate("Number one of", replace(_greedy(), max_new_tokens=tokens))

    async def work() -> None:
        models = {"toy": LLMConfig(str(folder), draft="none", compile=False)}
        table = ModelTable(models, config, 2 * BARE)
        app = make_models_app(table, config)
        pids = []
        async with app.router.lifespan_context(app):
            asked = Asked("/v1/completions", ask("toy", stream=True, max_tokens=tokens), "", "", _relay())
            texts = []
            from sakiyomi.scale.front import follow

            async for part in follow(table, asked):
                for line in part.data.decode().splitlines():
                    if line.startswith("data: {"):
                        texts.append(json.loads(line[6:])["choices"][0]["text"])
                if not pids:
                    process = table._models["toy"].process
                    assert isinstance(process, ModelProcess) and process.bytes > 1 << 20
                    assert (await process.figures())["running"] <= 1
                    pids.append(process.pid)
                    os.kill(process.pid, signal.SIGKILL)
            assert "".join(texts) == right.text
            process = table._models["toy"].process
            assert process is not None and process.pid not in pids
            pids.append(process.pid)
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(work())


def _relay() -> Any:
    from sakiyomi.server.relay import Relay

    return Relay()


def test_a_process_ends_its_engine_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an engine sends the events of its cache that still wait."""
    told: list[str] = []

    class Server:
        async def __aenter__(self) -> Server:
            return self

        async def __aexit__(self, *error: object) -> None:
            told.append("ended")

    log = logging.getLogger("sakiyomi.server")
    level = log.level
    monkeypatch.setattr(model_process, "load_server", lambda *asked: Server())
    monkeypatch.setattr(model_process, "set_up", lambda form: None)
    read, write = os.pipe()
    monkeypatch.setattr("sys.stdin", os.fdopen(read, "rb"))

    async def work() -> None:
        out = io.BytesIO()
        task = asyncio.ensure_future(model_process._serve(out))
        os.write(write, model_process._frame(0, (LLMConfig("toy"), ServerConfig())))
        while not out.getvalue():
            await asyncio.sleep(0.01)
        assert not told
        os.close(write)
        await task

    try:
        run(work())
    finally:
        log.setLevel(level)
    assert told == ["ended"]


@pytest.mark.thorough
def test_a_process_says_why_it_cannot_load(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        start: Callable[..., Any] = ModelProcess.start
        with pytest.raises(LoadError, match="there is no folder"):
            await start(LLMConfig(str(tmp_path / "x" / "y" / "z")), ServerConfig())

    run(work())
