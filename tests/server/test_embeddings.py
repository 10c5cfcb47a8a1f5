"""Embeddings are the mean of transformers' own hidden states, in chunks, in company and beside shared prompts."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI

from sakiyomi.server.app import Server
from server_toys import client, running, toy_llm, web
from toys import tiny_llama

TEXTS = ["The fox said that it was cold.", "The fox said that it was late, " * 4, "x"]


def expected(server: Server, text: str) -> np.ndarray[Any, Any]:
    ids = server.llm.tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        states = tiny_llama(max_position_embeddings=4096).model(ids).last_hidden_state[0]
    return states.mean(0).numpy()


def test_they_are_the_mean_of_transformers_hidden_states(api: OpenAI, site: tuple[Server, str]) -> None:
    api.completions.create(model="toy", prompt=TEXTS[1], max_tokens=2)  # a beginning that others might go on from
    plain = api.embeddings.create(model="toy", input=TEXTS, encoding_format="float")
    packed = api.embeddings.create(model="toy", input=TEXTS)  # the client asks for base64, and reads it
    counts = [len(site[0].llm.tokenizer(text)["input_ids"]) for text in TEXTS]
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == sum(counts)
    assert [each.index for each in plain.data] == [0, 1, 2]
    for text, one, other in zip(TEXTS, plain.data, packed.data, strict=True):
        np.testing.assert_allclose(one.embedding, expected(site[0], text), atol=2e-6)
        np.testing.assert_allclose(other.embedding, one.embedding, atol=1e-6)
    ids = site[0].llm.tokenizer(TEXTS[0])["input_ids"]
    for given in (ids, [ids]):
        (found,) = api.embeddings.create(model="toy", input=given, dimensions=len(one.embedding)).data
        np.testing.assert_allclose(found.embedding, plain.data[0].embedding, atol=2e-6)


@pytest.mark.parametrize("count", [200, pytest.param(2048, marks=pytest.mark.thorough)])
def test_as_many_texts_as_openai_takes(api: OpenAI, site: tuple[Server, str], count: int) -> None:
    """More than there are slots, places in the queue and samples of a request; they take turns."""
    assert count > site[0].worker.slots + site[0].config.max_queue
    texts = [f"{TEXTS[i % 2][: 3 + i % 7]}{i}" for i in range(count)]
    found = api.embeddings.create(model="toy", input=texts).data
    assert [each.index for each in found] == [*range(count)]
    for i in (0, 1, count // 2, count - 1):
        np.testing.assert_allclose(found[i].embedding, expected(site[0], texts[i]), atol=2e-6)


def test_long_texts_are_read_in_chunks() -> None:
    with running(toy_llm("close", chunk_size=16, exact=True, max_batch=2)) as (server, url):
        found = client(url).embeddings.create(model="toy", input=TEXTS, encoding_format="float").data
        for text, one in zip(TEXTS, found, strict=True):
            np.testing.assert_allclose(one.embedding, expected(server, text), atol=2e-6)


def test_base64_is_float32_with_its_little_end_first(site: tuple[Server, str]) -> None:
    body = {"input": TEXTS[0], "encoding_format": "base64"}
    text = web.post(f"{site[1]}/v1/embeddings", json=body).json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(text), "<f4"), expected(site[0], TEXTS[0]), atol=2e-6)


@pytest.mark.parametrize(
    ("values", "words", "param"),
    [
        ({"input": ""}, "empty", "input"),
        ({"input": []}, "", "input"),
        ({"input": [99999]}, "99999", "input"),
        ({"input": ["a"] * 2049}, "at most 2048", "input"),
        ({"input": "a" * 10**6}, "fits into the context", "input"),
        ({"dimensions": 3}, "not made to be cut", "dimensions"),
        ({"encoding_format": "int8"}, "int8", "encoding_format"),
        ({"stream": True}, "stream", "stream"),
    ],
)
def test_what_cannot_be_embedded(site: tuple[Server, str], values: dict[str, Any], words: str, param: str) -> None:
    reply = web.post(f"{site[1]}/v1/embeddings", json={"input": "a"} | values)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"] and reply.json()["error"]["param"] == param


def test_a_cache_that_evicts_gives_none() -> None:
    with running(toy_llm("none", cache="recency", kv_budget=64)) as (_, url):
        reply = web.post(f"{url}/v1/embeddings", json={"input": "a"})
    assert reply.status_code == 400 and "--cache full" in reply.json()["error"]["message"]
