"""The SDK's `SubscriptionBus` over NATS, for servers of the SDK that use no other part of Tidings.

The replicas share only events, not lists or contents: each replica must have these already. Nothing is stored. After a
lost connection, the bus sends every listener one event per list, because it may have missed one. The bus does not
repeat a missed update of a resource.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import ssl
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from mcp.server.subscriptions import (
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ServerEvent,
    ToolsListChanged,
)

from tidings.cluster.nats_client import Client, Lost, Msg, NatsError, Options, connect
from tidings.cluster.nats_names import encode_name

__all__ = ["NatsSubscriptionBus"]

logger = logging.getLogger(__name__)

FIRST_DELAY = 0.1
LONGEST_DELAY = 2.0
"""Seconds between two attempts to connect."""

FIRST_CONNECTION = 2.0
"""Seconds for which the first event waits for the connection."""

_LISTS: dict[str, type[ToolsListChanged | PromptsListChanged | ResourcesListChanged]] = {
    "tools": ToolsListChanged,
    "prompts": PromptsListChanged,
    "resources": ResourcesListChanged,
}


class NatsSubscriptionBus:
    """Share the events of `MCPServer(subscriptions=bus)` with all replicas that use this `name` and `prefix`.

    It connects when the first listener subscribes or the first event is published. `publish` delivers to the listeners
    of this replica at once, also without NATS. Call `close`, or use it as an async context manager, to disconnect.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        prefix: str = "tidings",
        credentials: str | Path | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._options = Options.parse(url, credentials, token, tls)
        self._name = name
        self._base = f"{encode_name(prefix)}.{encode_name(name)}"
        self._listeners: dict[object, Callable[[ServerEvent], None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._reason = "NATS did not respond in time"
        self._ready = asyncio.Event()
        """Set when the first attempt to connect has ended."""
        self.undecodable = 0
        """The number of messages that were skipped because they could not be decoded."""

    async def publish(self, event: ServerEvent) -> None:
        """Deliver the event to the listeners of this replica, and send it to the others if NATS can be reached."""
        self._deliver(event)
        self._start()
        try:
            async with asyncio.timeout(FIRST_CONNECTION):
                await self._ready.wait()
            if self._client is None:
                raise Lost(self._reason)
            await self._client.publish(f"{self._base}.event", _encode(event))
        except (Lost, NatsError, TimeoutError) as error:  # the request that publishes must not fail
            logger.warning("an event was not sent to the other replicas: %s", str(error) or self._reason)

    def subscribe(self, listener: Callable[[ServerEvent], None]) -> Callable[[], None]:
        """Register a listener, and return a function that removes it. Call this on the event loop of the server."""
        key = object()
        self._listeners[key] = listener
        self._start()

        def unsubscribe() -> None:
            self._listeners.pop(key, None)

        return unsubscribe

    @property
    def is_connected(self) -> bool:
        """Whether the events of the other replicas arrive."""
        return self._client is not None

    async def close(self) -> None:
        """Disconnect. The next `publish` or `subscribe` connects again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def __aenter__(self) -> NatsSubscriptionBus:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._ready.clear()
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        delay = FIRST_DELAY
        may_have_missed = is_lost = False
        while True:
            closed = asyncio.Event()
            try:
                self._client = await self._connect(closed)
                if is_lost:
                    logger.info("the bus is connected to NATS again")
                is_lost, delay = False, FIRST_DELAY
                self._ready.set()
                if may_have_missed:
                    for kind in _LISTS.values():
                        self._deliver(kind())
                may_have_missed = True
                await closed.wait()
                raise Lost(f"the connection was lost: {self._client.last_error or 'closed by the server'}")
            except Lost as error:
                self._reason = str(error)
                if not is_lost:
                    is_lost = True
                    logger.warning("events are not shared with other replicas: %s", error)
            finally:
                self._ready.set()
                if self._client is not None:
                    client, self._client = self._client, None
                    await client.close_soon()
            await asyncio.sleep(delay * random.uniform(0.5, 1))  # not all replicas at once
            delay = min(delay * 2, LONGEST_DELAY)

    async def _connect(self, closed: asyncio.Event) -> Client:
        # No echo, because `publish` delivers to the listeners of this replica. Frequent pings detect a dead connection.
        client = await connect(
            self._options, f"tidings {self._name} bus", f"{self._base}.inbox", closed.set, no_echo=True, ping_interval=2
        )
        try:
            await client.subscribe(f"{self._base}.event", cb=self._receive)
            await client.flush()
        except (NatsError, OSError) as error:
            await client.close_soon()
            raise Lost(str(error)) from error
        return client

    async def _receive(self, message: Msg) -> None:
        try:
            event = _decode(message.data)
        except (ValueError, KeyError, TypeError):
            self.undecodable += 1
        else:
            self._deliver(event)

    def _deliver(self, event: ServerEvent) -> None:
        for listener in list(self._listeners.values()):
            try:
                listener(event)
            except Exception:  # one listener must not prevent the others
                logger.exception("a listener of the bus failed")


def _encode(event: ServerEvent) -> bytes:
    if isinstance(event, ResourceUpdated):
        return json.dumps({"updated": event.uri}).encode()
    return json.dumps({"changed": next(name for name, kind in _LISTS.items() if isinstance(event, kind))}).encode()


def _decode(data: bytes) -> ServerEvent:
    values = json.loads(data)
    if "updated" in values:
        uri = values["updated"]
        if not isinstance(uri, str):
            raise TypeError("a URI is text")
        return ResourceUpdated(uri)
    return _LISTS[values["changed"]]()
