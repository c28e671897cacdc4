"""Many clients at the same time: some read, some do not."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

from tests.support.faults.wire import (
    ALL,
    TIMEOUT,
    Process,
    Stream,
    close_session,
    connect_unread,
    get_request,
    listen,
    listen_request,
    open_session,
)

MAX_CONCURRENT = 25
"""Connections that are opened at the same time. More would only wait in the server."""


def update(number: int, size: int = 0) -> dict[str, Any]:
    """Return a change of a tool, which notifies every client that listens to tools."""
    return {"do": "update", "of": "tools", "key": "echo", "text": f"{number} ", "size": size}


async def many(count: int, open_one: Any) -> list[Any]:
    gate = asyncio.Semaphore(MAX_CONCURRENT)

    async def one(number: int) -> Any:
        async with gate, asyncio.timeout(TIMEOUT):
            return await open_one(number)

    return list(await asyncio.gather(*map(one, range(count))))


async def open_legacy(port: int) -> Stream:
    stream = await Stream.open(port, get_request(await open_session(port)))
    assert stream.status == 200, stream.status
    return stream


@contextmanager
def sockets(opened: list[socket.socket]) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        for each in opened:
            stack.enter_context(each)
        yield opened


async def open_sessions(server: Process, count: int) -> list[str]:
    return await many(count, lambda _: open_session(server.port))


async def close_sessions(server: Process, session_ids: Sequence[str]) -> None:
    await many(len(session_ids), lambda number: close_session(server.port, session_ids[number]))


async def open_unread_streams(server: Process, listening: int, session_ids: Sequence[str] = ()) -> list[socket.socket]:
    """Open listen streams, and those of these sessions, without reading them. Make changes until each is full or the
    server has closed it."""
    before = await server.state()
    opened = [connect_unread(server.port, listen_request(number)) for number in range(listening)]
    opened += [connect_unread(server.port, get_request(session_id)) for session_id in session_ids]
    await server.until(
        lambda state: (
            state["subscribers"] + state["legacy_streams"]
            == before["subscribers"] + before["legacy_streams"] + len(opened)
        )
    )
    ready = before["subscribers"] - before["stuck"]  # a session is not ready until its stream is open
    for number in range(0, 1_000, 5):
        await server.change(*(update(number + each, 60_000) for each in range(5)))
        state = await server.state()
        if state["subscribers"] - state["stuck"] == ready:
            return opened
    raise AssertionError("the streams never became full")


class Readers:
    """Clients that read, and measure when."""

    def __init__(self, server: Process, streams: list[Stream]) -> None:
        self._server = server
        self._streams = streams
        self._number = 0

    async def round(self, size: int) -> float:
        """Return the seconds from a change until the last client is notified."""
        self._number += 1
        start = time.perf_counter()
        waiting = [asyncio.ensure_future(self._wait_for(stream, f"{self._number} ")) for stream in self._streams]
        await self._server.change(update(self._number, size))
        async with asyncio.timeout(TIMEOUT):
            times = await asyncio.gather(*waiting)
        return max(times) - start

    async def _wait_for(self, stream: Stream, text: str) -> float:
        while True:
            event = await stream.event()
            assert event is not None
            if event["params"]["tool"]["description"].startswith(text):
                return time.perf_counter()


@asynccontextmanager
async def readers(server: Process, count: int) -> AsyncIterator[Readers]:
    streams = await many(count, lambda number: listen(server.port, f"reader {number}"))
    try:
        yield Readers(server, streams)
    finally:
        for stream in streams:
            stream.close()


async def fill_sdk_streams(server: Process, count: int, wanted: Mapping[str, Any] = ALL) -> list[socket.socket]:
    """Open streams of the SDK without reading them, and fill them. Their subscribers are busy after each change."""
    before = await server.state()
    opened = [connect_unread(server.port, listen_request(number, wanted)) for number in range(count)]
    await server.until(lambda state: state["subscribers"] == before["subscribers"] + count)
    for number in range(100):
        await server.change(update(number, 60_000))

    def are_full(state: dict[str, Any]) -> bool:
        # A slow machine may find some of them aborted already.
        left: int = state["subscribers"] - before["subscribers"]
        return left == 0 or bool(state["stuck"] >= left and state["most_pending"] == 1)

    await server.until(are_full)
    return opened


async def read_until(client: socket.socket, text: bytes) -> bytes:
    client.setblocking(False)
    read = b""
    async with asyncio.timeout(TIMEOUT):
        while text not in read or not read.endswith(b"\r\n\r\n\r\n"):
            read += await asyncio.get_running_loop().sock_recv(client, 1 << 16)
    return read


async def measure_baseline(server: Process) -> Callable[[], Awaitable[None]]:
    """Return a function that waits until the server keeps no more than now, and checks that it logged no error."""
    base, fds = await server.state(is_deep=True), server.fds()

    async def until_nothing_is_left() -> None:
        kept = ("subscribers", "streams", "objects")
        await server.until(lambda state: all(state[each] == base[each] for each in kept), is_deep=True)
        await server.until(lambda _: server.fds() <= fds)
        assert not server.errors()

    return until_nothing_is_left


async def open_and_close(server: Process, streams: int, sessions: int) -> None:
    reset = struct.pack("ii", 1, 0)

    async def open_and_disconnect(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        sent = listen_request(number, ALL | {"resourceSubscriptions": [f"board://{number}", "board://all/**"]})
        way = number % 20
        writer.write(sent if way else sent[: number % len(sent)])  # some disconnect before they have sent the request
        if way > 1:  # and some before the response
            await reader.readuntil(b"acknowledged")
        if way % 2:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        writer.close()
        if number % 500 == 0:
            await server.change(update(number))

    async def open_and_close_session(number: int) -> None:
        session_id = await open_session(server.port)
        stream = await Stream.open(server.port, get_request(session_id))
        if number % 2:
            stream.close()
        await close_session(server.port, session_id)
        stream.close()

    await many(streams, open_and_disconnect)
    await many(sessions, open_and_close_session)
