"""Models of a table that live in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from sakiyomi.core.errors import LoadError
from sakiyomi.engine.config import LLMConfig
from sakiyomi.scale.in_process import Asked, InProcessServer, Part
from sakiyomi.server.config import ServerConfig
from server_toys import toy_llm

SIZE = 1000  # of each toy, where the bound is in such numbers


class Toy:
    """A model in this process that says how much it takes. ``slow``: seconds before each part of a reply."""

    slow = 0.0

    def __init__(self, server: InProcessServer, size: int) -> None:
        self.server, self.bytes, self.pid, self.alive = server, size, 1, True

    async def ask(self, asked: Asked) -> AsyncIterator[Part]:
        async for part in self.server.events(asked):
            await asyncio.sleep(self.slow)
            assert self.alive, "given up while it wrote"
            yield part

    async def figures(self) -> dict[str, Any]:
        return self.server.figures()

    async def stop(self) -> None:
        self.alive = False
        await self.server.__aexit__()


class Shop:
    """Starts toys, and notes what happened.

    Attributes:
        broken: targets that cannot be loaded.
        size: of the next one.
        patience: seconds that it takes to load.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.toys: dict[str, Toy] = {}
        self.broken: set[str] = set()
        self.size, self.patience = SIZE, 0.01

    async def start(self, model: LLMConfig, config: ServerConfig) -> Toy:
        await asyncio.sleep(self.patience)
        if model.target in self.broken:
            raise LoadError("its file is damaged")
        name = str(config.served_name)
        self.events.append(name)
        server = InProcessServer(toy_llm("none"), config)
        await server.__aenter__()
        self.toys[name] = Toy(server, self.size)
        return self.toys[name]
