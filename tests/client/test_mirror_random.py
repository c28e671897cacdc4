"""The mirror equals the server after random changes, restarts, and lost or late notifications."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest
from mcp.client.client import Client

from tests.client.test_mirror import ERAS, QUICK
from tests.support.scripted_server import ScriptedServer
from tests.support.uvicorn_server import address_of
from tests.support.waiting import DEADLINE, until
from tidings import Mirror

pytestmark = pytest.mark.anyio

FEATURES = {"tools": "tools", "prompts": "prompts", "resources": "resources", "templates": "resources"}
ROUNDS = 12
CHANGES = 6


class Chaos:
    def __init__(self, server: ScriptedServer, chance: random.Random) -> None:
        self.server = server
        self.chance = chance
        self.pending: list[str] = []
        """Features that have changed without a notification so far."""

    def change(self) -> str:
        """Add, update or remove one item; return its feature."""
        name = self.chance.choice(list(FEATURES))
        items, key = self.server.lists[name], f"x://{self.chance.randrange(8)}"
        if key in items and self.chance.random() < 0.4:
            del items[key]
        else:
            items[key] = str(self.chance.random())
        return FEATURES[name]

    async def step(self) -> None:
        """Change something. Notify now or later, once or several times."""
        self.pending.append(self.change())
        if self.chance.random() < 0.5:
            await self.notify()

    async def notify(self) -> None:
        self.chance.shuffle(self.pending)
        for feature in self.pending:
            for _ in range(self.chance.choice([1, 1, 2, 3])):
                await self.server.notify(feature)
        self.pending.clear()

    async def between_pages(self, name: str) -> None:
        if self.chance.random() < 0.3:
            await self.server.notify(self.change())


def lists(mirror: Mirror) -> dict[str, dict[str, Any]]:
    found = {name: listing.items for name, listing in mirror.snapshot().listings.items()}
    return {name: {key: item.description for key, item in items.items()} for name, items in found.items()}


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("live", [True, False], ids=["tidings", "sdk"])
async def test_the_mirror_equals_the_server_after_each_round(live: bool, era: str, seed: int) -> None:
    chance = random.Random(seed)
    server = ScriptedServer(page_size=3)
    chaos = Chaos(server, chance)
    async with asyncio.timeout(4 * DEADLINE), AsyncExitStack() as outer:
        life = await outer.enter_async_context(AsyncExitStack())
        running = await life.enter_async_context(server.serving(live=live))
        port = address_of(running)[1]
        target = Client(server.url(running), mode=ERAS[era])
        mirror = await outer.enter_async_context(Mirror(target, timing=QUICK))
        for _ in range(ROUNDS):
            server.between_pages = chaos.between_pages
            fault = chance.choice(["none", "none", "drop", "restart"])
            for step in range(CHANGES):
                await chaos.step()
                if step == CHANGES // 2 and fault == "drop":
                    server.drop_connections(running)
                elif step == CHANGES // 2 and fault == "restart":
                    await life.aclose()
                    await chaos.step()
                    life = await outer.enter_async_context(AsyncExitStack())
                    running = await life.enter_async_context(server.serving(port, live=live))
            server.between_pages = None
            await chaos.notify()
            await until(lambda: lists(mirror) == server.lists)
            for name in FEATURES:
                assert list(mirror.snapshot().listings[name].items) == server.names(name)  # type: ignore[index]
