"""What most tests of the server share: a server with a tiny pair, OpenAI's client of it, the library beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from sakiyomi import LLM
from sakiyomi.server.app import Server
from server_toys import client, running, toy_llm


@pytest.fixture(scope="module")
def own() -> LLM:
    """The library, to compare with."""
    return toy_llm("none")


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Server, str]]:
    """A server of the test file's own, and its address."""
    with running(toy_llm(max_batch=6)) as found:
        yield found


@pytest.fixture
def api(site: tuple[Server, str]) -> OpenAI:
    """The real client of it."""
    return client(site[1])
