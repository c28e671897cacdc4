"""A live server on this event loop whose webhooks can be opened, watched and waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer

from tests.support.receiver import Receiver
from tests.support.waiting import DEADLINE, until
from tidings import Live, Policy
from tidings.store.durable import SERVER, DurableSubscription, Webhook


def nothing() -> None:
    """A tool."""


@asynccontextmanager
async def lively(store: Path | None = None, authorize: Any = None, **knobs: Any) -> AsyncIterator[Live]:
    """A server that is live on this event loop, without clients."""
    knobs = {"webhook_backoff": 0.01, "webhook_attempts": 4, "webhook_timeout": DEADLINE, **knobs}
    live = Live(MCPServer("hooks"), policy=Policy(**knobs), store=store, authorize=authorize)
    await live.attend()
    try:
        yield live
    finally:
        live.stop()
        live.keeper.close()


def webhook(live: Live, name: str = "hook") -> Webhook:
    durable = live.durables.get((SERVER, name))
    assert durable is not None
    assert durable.webhook is not None
    return durable.webhook


async def open_webhook(live: Live, receiver: Receiver, *features: str, **options: Any) -> DurableSubscription:
    """A webhook that listens."""
    name = options.pop("name", "hook")
    durable = live.webhooks.put(name, receiver.url, *features, **options)
    await until(lambda: live.durables.is_connected(durable.key))
    return durable


async def marked(live: Live, receiver: Receiver) -> list[str]:
    """What comes until a further change: to show that nothing else was sent."""
    live.resources.updated("board://marker")
    gists: list[str] = []
    while not gists or "board://marker" not in gists[-1]:
        gists.append((await receiver.next()).gist)
    return gists[:-1]
