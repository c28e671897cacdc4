"""The backend for replicas in several processes or on several machines: NATS with JetStream, version 2.11 or newer.

It knows nothing of items and clients. It reconnects by itself, and takes a new snapshot of the table each time.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tidings.cluster.backend import CallHandler, NotDelivered, OnProgress, Unavailable, Watcher, Write
from tidings.cluster.nats_calls import Calls
from tidings.cluster.nats_client import Client, Lost, Options, Refused, connect, request_json
from tidings.cluster.nats_names import encode_name
from tidings.cluster.nats_table import Table, find_stream
from tidings.runtime.backoff import Backoff

__all__ = ["Nats"]

logger = logging.getLogger(__name__)

FIRST_DELAY = 0.1
LONGEST_DELAY = 1.0
"""Seconds between two attempts: a replica must be back soon after NATS is, and one attempt costs little."""
STABLE = 5.0
"""A connection that lasted for so many seconds resets the delay to `FIRST_DELAY`."""


class Nats:
    """Share the catalog of a server with its replicas through NATS with JetStream.

    `url` is `nats://HOST:PORT` or `tls://HOST:PORT`, or several with commas between them; it may have a user and a
    password, or a token. `credentials` is the path of a .creds file. With `tls` or `tls://`, no secret is sent to a
    server without TLS. All subjects and buckets start with `prefix`. `copies` is the number of NATS servers that store
    a new table; it does not change an existing one.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "tidings",
        credentials: str | Path | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        copies: int = 1,
    ) -> None:
        self._options = Options.parse(url, credentials, token, tls)
        self._prefix = encode_name(prefix)
        self._copies = copies
        self._table: Table | None = None
        self._calls: Calls | None = None
        self._is_lost = False
        self._old_consumers: set[str] = set()
        self._reason = "the cluster is not started"
        self.undecodable = 0
        """The number of messages that were skipped because they could not be decoded."""

    async def run(self, name: str, replica: str, watcher: Watcher, handler: CallHandler) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(FIRST_DELAY, LONGEST_DELAY, jitter=True, stable=STABLE)  # not all replicas at once
        self._is_lost = False
        while True:
            started = loop.time()
            try:
                await self._serve(name, replica, watcher, handler)
            except Lost as error:
                self._lose(watcher, str(error))
            await asyncio.sleep(backoff.fail(loop.time() - started))

    async def write(self, writes: Sequence[Write]) -> list[int | None]:
        if self._table is None:
            raise Unavailable(self._reason)
        return await self._table.write(writes)

    async def call(self, replica: str, request: bytes, on_progress: OnProgress, timeout: float) -> bytes:  # noqa: ASYNC109 – as in the protocol
        if self._calls is None:
            raise NotDelivered(self._reason)
        return await self._calls.call(replica, request, on_progress, timeout)

    async def list_servers(self) -> list[str]:
        """Return the names of the servers that have a table, as they are in NATS. Raise `Unavailable`."""
        async with self._connected(f"{self._prefix}.inbox") as client:
            streams: list[str] = []
            while True:  # the server returns them in pages
                page = await request_json(client, "STREAM.NAMES", offset=len(streams))
                streams += page.get("streams") or ()
                if not page.get("streams") or len(streams) >= page["total"]:
                    break
        start = f"KV_{self._prefix}-"
        return sorted(stream.removeprefix(start) for stream in streams if stream.startswith(start))

    async def has_server(self, name: str) -> bool:
        """Return whether a server has a table. Raise `Unavailable`."""
        server = encode_name(name)
        async with self._connected(f"{self._prefix}.{server}.inbox") as client:
            return await find_stream(client, f"KV_{self._prefix}-{server}") is not None

    @asynccontextmanager
    async def _connected(self, inbox: str) -> AsyncIterator[Client]:
        try:
            client = await connect(self._options, "tidings", inbox, lambda: None)
        except Lost as error:
            raise Unavailable(f"NATS cannot be reached: {error}") from None
        try:
            yield client
        except (Lost, Refused) as error:
            raise Unavailable(str(error)) from None
        finally:
            await client.close_soon()

    async def _serve(self, name: str, replica: str, watcher: Watcher, handler: CallHandler) -> None:
        """Connect, and serve until the connection is lost."""
        closed = asyncio.Event()
        server = encode_name(name)
        subject = f"{self._prefix}.{server}"
        client = await connect(self._options, f"tidings {name} {replica}", f"{subject}.inbox", closed.set)
        table = Table(client, f"{self._prefix}-{server}", self._copies, self._old_consumers, self._count_undecodable)
        calls = Calls(client, subject, replica, handler, self._count_undecodable)
        reason = None
        watching: asyncio.Task[None] | None = None
        try:
            _check_version(client)
            await calls.open()
            self._calls = calls
            watching = asyncio.create_task(table.watch(watcher, lambda: self._set_loaded(table)))
            waiting = asyncio.create_task(closed.wait())
            try:
                ends: list[asyncio.Future[Any]] = [watching, waiting, client.denied]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
            if watching.done():
                watching.result()  # raises the reason: `watch` never returns
            # A denied subject may leave the table incomplete without another error, for example that of flow control.
            if client.denied.done():
                raise Lost(f"the NATS server denies a subject: {client.denied.result()}")
            raise Lost(f"the connection to NATS was lost: {client.last_error or 'closed by the server'}")
        except Lost as error:
            reason = str(error)
        except Exception as error:  # an error of nats-py or of the watcher; the next connection loads the table
            reason = f"{type(error).__name__}: {error}"
            logger.exception("the connection to NATS ended unexpectedly")
        finally:
            self._table = self._calls = None
            if reason is None:
                self._reason = text = "this replica has left the cluster"
            else:
                self._lose(watcher, reason)
                text = self._reason
            table.close(text)
            async with AsyncExitStack() as steps:  # all of them run, even if this task is cancelled meanwhile
                steps.push_async_callback(client.close_soon)
                if reason is None:
                    steps.push_async_callback(table.leave)
                steps.push_async_callback(calls.close, text)
                if watching is not None:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)

    def _set_loaded(self, table: Table) -> None:
        self._table = table
        self._is_lost = False

    def _lose(self, watcher: Watcher, reason: str) -> None:
        """Report the loss of the connection once, until the table is loaded again."""
        self._reason = f"NATS cannot be reached: {reason}"
        if not self._is_lost:
            self._is_lost = True
            watcher.lose(reason)

    def _count_undecodable(self) -> None:
        self.undecodable += 1
        if self.undecodable == 1:
            logger.warning("a message in NATS cannot be decoded, and is skipped; more are only counted")


def _check_version(client: Client) -> None:
    version = client.connected_server_version
    if (version.major, version.minor) < (2, 11):
        raise Lost(f"the NATS server has version {version}; Tidings needs 2.11 or newer")
