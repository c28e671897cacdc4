"""The mirror equals the server after random changes, restarts, and lost or late notifications."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters

from tests.client.test_mirror import ERAS, QUICK
from tests.support.mirrored_servers import FastServer, NodeServer
from tests.support.scripted_server import ScriptedServer
from tests.support.stress import sized
from tests.support.waiting import DEADLINE, free_port, until
from tests.typescript.node import MODULES, needs_node, node
from tidings import Mirror
from tidings.client.snapshot import KEYS

pytestmark = pytest.mark.anyio

FEATURES = {"tools": "tools", "prompts": "prompts", "resources": "resources", "templates": "resources"}
ROUNDS = sized(12, 60)
CHANGES = 6
SERVERS: dict[str, type[ScriptedServer]] = {
    "tidings": ScriptedServer,
    "sdk": ScriptedServer,
    "fastmcp": FastServer,
    "typescript": NodeServer,
}
NEEDS = {"fastmcp": [pytest.mark.slow], "typescript": [pytest.mark.node, needs_node]}
NOT_NOTIFIED = replace(QUICK, recheck=0.05)


class Chaos:
    def __init__(self, server: ScriptedServer, chance: random.Random) -> None:
        self.server = server
        self.chance = chance
        self.pending: list[str] = []
        """Features that have changed without a notification so far."""

    def change(self) -> str:
        """Add, update or remove one item; return its feature."""
        name = self.chance.choice(list(FEATURES))
        key = f"x://{self.chance.randrange(8)}" + ("/{n}" if name == "templates" else "")
        items = self.server.lists[name]
        if key in items and self.chance.random() < 0.4:
            del items[key]
        else:
            items[key] = str(self.chance.random())
        return FEATURES[name]

    async def step(self) -> None:
        """Change something. Notify now or later, once or several times."""
        self.pending.append(self.change())
        await self.server.changed()
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
    found = {name: mirror.snapshot().listings[name].items for name in KEYS}
    return {name: {key: item.description for key, item in items.items()} for name, items in found.items()}


@pytest.mark.stress
@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=NEEDS.get(kind, [])) for kind in SERVERS])
async def test_the_mirror_equals_the_server_after_each_round(kind: str, era: str, seed: int) -> None:
    chance = random.Random(seed)
    server = SERVERS[kind](page_size=3)
    chaos = Chaos(server, chance)
    port, live = free_port(), kind == "tidings"
    async with asyncio.timeout(ROUNDS / 3 * DEADLINE), AsyncExitStack() as outer:
        life = await outer.enter_async_context(AsyncExitStack())
        running = await life.enter_async_context(server.serving(port, live=live))
        target = Client(server.url(running), mode=ERAS[era])
        timing = NOT_NOTIFIED if kind == "fastmcp" else QUICK
        mirror = await outer.enter_async_context(Mirror(target, timing=timing))
        for _ in range(ROUNDS):
            server.between_pages = chaos.between_pages
            fault = chance.choice(["none", "none", "drop", "restart"])
            for step in range(CHANGES):
                await chaos.step()
                if step == CHANGES // 2 and fault == "drop":
                    await server.drop(running)
                elif step == CHANGES // 2 and fault == "restart":
                    await life.aclose()
                    chaos.change()
                    life = await outer.enter_async_context(AsyncExitStack())
                    running = await life.enter_async_context(server.serving(port, live=live))
            server.between_pages = None
            await chaos.notify()
            await until(lambda: lists(mirror) == server.lists)
            for name in FEATURES:
                assert list(mirror.snapshot().listings[name].items) == server.names(name)  # type: ignore[index]


@pytest.mark.node
@needs_node
async def test_the_mirror_follows_the_everything_server() -> None:
    """Its tools can add resources, and have no other effect on its lists."""
    script = MODULES / "@modelcontextprotocol" / "server-everything" / "dist" / "index.js"
    target = StdioServerParameters(command=node() or "", args=[str(script), "stdio"])
    timing = replace(QUICK, first_poll=3600, recheck=3600)  # only notifications can tell
    async with asyncio.timeout(DEADLINE), Mirror(target, timing=timing) as mirror:
        await until(lambda: mirror.status.state == "fresh")
        first = mirror.snapshot()
        assert first.tools
        assert first.prompts
        assert first.templates
        for name in ("b.gz", "a.gz", "b.gz"):
            result = await mirror.call("gzip-file-as-resource", {"name": name, "data": "data:text/plain,hello"})
            assert not result.is_error, result
            await mirror.wait_for(f"demo://resource/session/{name}", "resources")
        assert mirror.snapshot().is_superset_of(first)
        listed = (await mirror.client.list_resources()).resources
        assert list(mirror.resources) == sorted(resource.uri for resource in listed)
        assert list(mirror.tools) == sorted(tool.name for tool in (await mirror.client.list_tools()).tools)
