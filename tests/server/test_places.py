"""Where a text goes on and where it stops, on every path: first spaces, places of tokens, special tokens as stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from fastapi.testclient import TestClient

from sakiyomi import LLM, SamplingParams
from sakiyomi.server.app import Server
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.jobs import Job
from sakiyomi.server.paths import make_app
from sakiyomi.server.relay import Replay, Sent
from spaced import WHOLE, spaced_toy


@cache
def toy() -> LLM:
    """With a draft that copies, so that rounds bring several tokens."""
    return LLM(spaced_toy(), "suffix", compile=False)


@pytest.fixture(scope="module")
def web() -> Iterator[TestClient]:
    with TestClient(make_app(Server(toy(), ServerConfig(served_name="toy")))) as client:
        yield client


PATHS: dict[str, tuple[dict[str, Any], str]] = {
    "completions": ({"prompt": "the the", "max_tokens": 20}, "stop"),
    "chat/completions": ({"messages": [{"role": "user", "content": "the"}], "max_tokens": 20}, "stop"),
    "responses": ({"input": "the", "max_output_tokens": 20}, "stop"),
    "messages": ({"messages": [{"role": "user", "content": "the"}], "max_tokens": 20}, "stop_sequences"),
}


def reply(web: TestClient, path: str, *, stream: bool, stop: list[str] | None = None) -> tuple[str, dict[str, Any]]:
    """The text, and the last object."""
    body, name = PATHS[path]
    body = {"model": "toy", "temperature": 0, "stream": stream} | body | ({name: stop} if stop else {})
    answer = web.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        found = answer.json()
        if "choices" in found:
            choice = found["choices"][0]
            return choice["text"] if path == "completions" else choice["message"]["content"], choice
        return (found["content"] if path == "messages" else found["output"][0]["content"])[0]["text"], found
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    if path.endswith("completions"):
        choices = [event["choices"][0] for event in events]
        texts = [choice["text"] if path == "completions" else choice["delta"].get("content", "") for choice in choices]
        return "".join(texts), choices[-1]
    if path == "responses":
        return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta"), events[-1]["response"]
    deltas = [event["delta"] for event in events if "delta" in event]
    return "".join(delta.get("text", "") for delta in deltas), deltas[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_text_begins_with_its_space(web: TestClient, path: str, stream: bool) -> None:
    assert reply(web, path, stream=stream)[0] == WHOLE


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("<|im_end|>", " fox ran😀 home"),
        ("<|im_end|>\n", " fox ran😀 home"),
        ("home<|im_end|>", " fox ran😀 "),
        (" ran", " fox"),
    ],
)
def test_a_stop_string_may_be_a_special_token(web: TestClient, path: str, stream: bool, stop: str, text: str) -> None:
    found, last = reply(web, path, stream=stream, stop=["never", stop])
    assert found == text
    if path == "messages":
        assert (last["stop_reason"], last["stop_sequence"]) == ("stop_sequence", stop)
    elif path != "responses":
        assert last["finish_reason"] == "stop"


@pytest.mark.parametrize("params", [{}, {"stop": [" home<|im_end|>"]}])
def test_the_library_gives_the_same(params: dict[str, Any]) -> None:
    expected = " fox ran😀" if params else WHOLE
    asked = SamplingParams(max_new_tokens=20, gamma=3, **params)
    for prompt in ("the the", "the the the"):
        assert toy().generate(prompt, asked).text == expected
        assert "".join(step.text for step in toy().stream(prompt, asked)) == expected
    (both,) = toy().generate(["the"], SamplingParams(max_new_tokens=20, n=2, **params))
    assert [one.text for one in both] == [expected] * 2


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_tokens_offset_is_its_place_in_the_text(web: TestClient, echo: bool, as_ids: bool) -> None:
    tokenizer = toy().tokenizer
    prompts: list[Any] = ["the<|user|>the", "the the"]
    shown = ["the<|user|> the", "the the"] if as_ids else prompts
    prompts = [tokenizer(prompt).input_ids for prompt in prompts] if as_ids else prompts
    body = {"model": "toy", "prompt": prompts, "n": 2, "max_tokens": 20, "temperature": 0, "logprobs": 0, "echo": echo}
    choices = web.post("/v1/completions", json=body).json()["choices"]
    starts = [[0, 3, 11], [0, 3]]
    new = [0, 4, 8, 8, 8, 8, 9, 14, 14, 15]
    for number, choice in enumerate(choices):
        before = shown[number // 2] if echo else ""
        own = starts[number // 2] if echo else []
        assert choice["text"] == before + WHOLE
        assert choice["logprobs"]["text_offset"] == own + [len(before) + place for place in new]
        assert len(choice["logprobs"]["tokens"]) == len(own + new)
    answer = web.post("/v1/completions", json=body | {"stream": True})
    streamed: dict[int, list[int]] = {}
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            streamed.setdefault(choice["index"], []).extend(choice["logprobs"]["text_offset"])
    assert [streamed[choice["index"]] for choice in choices] == [
        choice["logprobs"]["text_offset"] for choice in choices
    ]


def test_offsets_do_not_point_behind_a_stop_string(web: TestClient) -> None:
    body = {
        "model": "toy",
        "prompt": "the",
        "max_tokens": 20,
        "temperature": 0,
        "logprobs": 0,
        "stop": "home<|im_end|>",
    }
    choice = web.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == " fox ran😀 " and choice["logprobs"]["text_offset"] == [0, 4, 8, 8, 8, 8, 9, 10]


def test_a_trace_has_the_text(web: TestClient) -> None:
    body = {"model": "toy", "prompt": "the", "max_tokens": 20, "temperature": 0, "trace": True}
    choice = web.post("/v1/completions", json=body).json()["choices"][0]
    assert "".join(token["text"] for part in choice["trace"] for token in part["tokens"]) == WHOLE == choice["text"]


def test_prompt_tokens_that_end_within_a_character(web: TestClient) -> None:
    tokenizer = toy().tokenizer
    prompt = tokenizer.convert_tokens_to_ids(["▁the", "▁ran", "<0xF0>", "<0x9F>"])
    body = {"model": "toy", "prompt": prompt, "max_tokens": 3, "temperature": 0}
    assert web.post("/v1/completions", json=body).json()["choices"][0]["text"] == "😀 home"
    echoed = web.post("/v1/completions", json=body | {"echo": True}).json()["choices"][0]["text"]
    assert echoed == "the ran😀 home"


def test_a_stream_that_goes_on_elsewhere_begins_with_its_space() -> None:
    tokenizer = toy().tokenizer
    the, fox, ran = tokenizer.convert_tokens_to_ids(["▁the", "▁fox", "▁ran"])
    jobs = [Job([the], SamplingParams(stop=["zz"]), given=[fox, ran])]
    sent = [Sent(0, (fox,), False), Sent(0, (ran,), False)]
    assert [event.step.text for event in Replay(jobs, sent, tokenizer).events()] == [" fox", " ran"]
