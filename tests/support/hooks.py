"""A live server on this event loop, and its webhooks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer

from tests.support.receiver import Receiver
from tests.support.waiting import DEADLINE, until
from tidings import Feature, Live, Notification, Policy, Subscriber
from tidings.store.durable import SERVER, DurableSubscription, Webhook
from tidings.webhooks.http_client import PostResult, WebhookClient


def nothing() -> None:
    """A tool."""


class InterruptingClient(WebhookClient):
    """Calls `then` after its next request, before the result is processed."""

    then: Callable[[], object] | None = None

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, *, max_answer: int = 0) -> PostResult:
        result = await super().post(url, headers, body, max_answer=max_answer)
        then, self.then = self.then, None
        if then is not None:
            then()
        return result


@asynccontextmanager
async def live_server(
    store: Path | None = None, authorize: Any = None, then: Callable[[Live], object] | None = None, **policy: Any
) -> AsyncIterator[Live]:
    """Run a server without clients. `then` is called with it after the first request of a webhook."""
    policy = {"webhook_backoff": 0.01, "webhook_attempts": 4, "webhook_timeout": DEADLINE, **policy}
    live = Live(MCPServer("hooks"), policy=Policy(**policy), store=store, authorize=authorize)
    if then is not None:
        client = live.webhooks.http_client = InterruptingClient(timeout=DEADLINE)
        client.then = lambda: then(live)
    await live.list_reader.ensure_loaded()
    try:
        yield live
    finally:
        live.close()


def durable_of(live: Live, name: str = "hook", owner: Any = SERVER) -> DurableSubscription:
    durable = live.durables.get((owner, name))
    assert durable is not None
    return durable


def webhook_of(live: Live, name: str = "hook", owner: Any = SERVER) -> Webhook:
    webhook = durable_of(live, name, owner).webhook
    assert webhook is not None
    return webhook


async def until_open(live: Live, name: str = "hook", owner: Any = SERVER) -> None:
    await until(lambda: live.durables.is_connected((owner, name)))


async def open_webhook(live: Live, receiver: Receiver, *features: str, name: str = "hook", **options: Any) -> Webhook:
    live.webhooks.put(name, receiver.url, *features, **options)
    await until_open(live, name)
    return webhook_of(live, name)


def connect_stream(live: Live, feature: Feature, deliver: Callable[[Notification], object]) -> Subscriber:
    """Open a stream that takes over the durable subscription of the webhook `hook`."""
    connection = live.durables.connect({"name": "hook"}, SERVER, [feature], (), {}, nothing)
    assert connection is not None
    stream = live.hub.open(deliver)
    connection.attach(stream)
    live.hub.subscribe(stream, feature, told=connection.told())
    return stream


async def summaries_until_now(live: Live, receiver: Receiver) -> list[str]:
    """Return what the receiver gets before the notification of one more change: to show that nothing else was sent."""
    live.resources.updated("board://marker")
    summaries: list[str] = []
    while not summaries or "board://marker" not in summaries[-1]:
        summaries.append((await receiver.next()).summary)
    return summaries[:-1]
