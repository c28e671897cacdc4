"""One contract, two outlets: the ASGI response on any server, and the parked connection under uvicorn.

Each is that of a real request to a real uvicorn, and what it writes is read from a real socket.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.support.loops import anyio_backend
from tests.support.waiting import DEADLINE, until
from tidings.http.parking import Parked, ParkingProtocol
from tidings.http.stream import PARK, Channel, Outlet
from tidings.policy import Policy

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio

HELLO = b"hello"
BIG = b"x" * 60_000
END = b"<end>"

FRONTS: dict[str, type[asyncio.Protocol]] = {"asgi": HttpToolsProtocol, "parked": ParkingProtocol}


@pytest.fixture(params=list(FRONTS))
def front(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Owner:
    """Notes what it is told, and lets a test wait for it."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._news = asyncio.Condition()

    def on_free(self) -> None:
        self._note("free")

    def on_slow(self) -> None:
        self._note("slow")

    def on_lost(self) -> None:
        self._note("lost")

    def end(self) -> None:
        self._note("end")

    def give_way(self) -> None:
        self._note("give way")

    def _note(self, what: str) -> None:
        self.heard.append(what)
        self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def until(self, what: str) -> None:
        async with asyncio.timeout(DEADLINE), self._news:
            await self._news.wait_for(lambda: what in self.heard)


class Opened:
    """A stream from both of its ends."""

    def __init__(self, outlet: Outlet, owner: Owner, client: socket.socket) -> None:
        self.outlet = outlet
        self.owner = owner
        self._client = client
        self._body = b""
        self._rest = b""
        self._is_past_head = False

    async def text(self, length: int) -> bytes:
        """The body, once so much of it was read."""
        while len(self._body) < length:
            assert await self._receive(), f"the connection ended after {self._body[-100:]!r}"
        return self._body

    async def until_closed(self) -> None:
        while await self._receive():
            pass

    async def _receive(self) -> bool:
        async with asyncio.timeout(DEADLINE):
            try:
                read = await asyncio.get_running_loop().sock_recv(self._client, 1 << 16)
            except ConnectionResetError:
                return False
        self._rest += read
        if not self._is_past_head and b"\r\n\r\n" in self._rest:
            self._is_past_head, self._rest = True, self._rest.partition(b"\r\n\r\n")[2]
        while self._is_past_head and (match := re.match(rb"([0-9a-f]+)\r\n", self._rest)):
            size, start = int(match[1], 16), match.end()
            if len(self._rest) < start + size + 2:
                break
            self._body += self._rest[start : start + size] if size else END
            self._rest = self._rest[start + size + 2 :]
        return bool(read)

    async def fill(self) -> bytes:
        """Write until the reader has to be waited for; returns all that was taken."""
        written = b""
        for number in range(1_000):
            chunk = b"%d " % number + BIG
            written += chunk
            if not self.outlet.write(chunk):
                assert self.outlet.is_busy
                return written
        raise AssertionError("the reader never became full")

    def close(self) -> None:
        self._client.close()


@asynccontextmanager
async def opened(front: str, **knobs: Any) -> AsyncIterator[Opened]:
    owner = Owner()
    ready: asyncio.Future[Outlet] = asyncio.get_running_loop().create_future()
    # No deadline for those who wait for something else: what it ends would pass for that.
    policy = Policy(**{"write_deadline": 3600.0, **knobs})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        channel = Channel(send, receive, policy, asyncio.get_running_loop())
        channel.owner = owner
        await receive()
        witness = scope["extensions"][PARK]["watch"]() if front == "parked" else None
        await send({"type": "http.response.start", "status": 200})
        assert channel.write(HELLO)
        if witness is not None:
            ready.set_result(witness.park(HELLO, owner, policy.write_deadline))
            return
        ready.set_result(channel)
        while (await receive())["type"] != "http.disconnect":
            pass
        owner.on_lost()

    config = uvicorn.Config(
        app, port=0, lifespan="off", log_level="critical", http=FRONTS[front], timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve())
    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            async with asyncio.timeout(DEADLINE):
                await until(lambda: server.started)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(client, server.servers[0].sockets[0].getsockname())
                await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
                outlet = await ready
            assert isinstance(outlet, Parked if front == "parked" else Channel)
            stream = Opened(outlet, owner, client)
            assert await stream.text(len(HELLO)) == HELLO
            yield stream
    finally:
        server.should_exit = True
        await serving


async def test_chunks_arrive_whole_and_in_order(front: str) -> None:
    async with opened(front) as stream:
        assert stream.outlet.write(b"one")
        assert stream.outlet.write(b"")
        assert stream.outlet.write(b"two" * 1_000)
        assert await stream.text(len(HELLO) + 3_003) == HELLO + b"one" + b"two" * 1_000
        assert not stream.outlet.is_over
        assert stream.owner.heard == []


async def test_after_the_last_chunk_nothing_more_is_written(front: str) -> None:
    async with opened(front) as stream:
        assert stream.outlet.write(b"last", is_last=True)
        assert stream.outlet.is_over
        assert not stream.outlet.write(b"more")
        expected = HELLO + b"last" + END
        assert await stream.text(len(expected)) == expected
        assert not stream.outlet.is_cut
        await stream.owner.until("lost")


async def test_the_last_chunk_may_be_empty(front: str) -> None:
    async with opened(front) as stream:
        assert stream.outlet.write(b"", is_last=True)
        assert await stream.text(len(HELLO + END)) == HELLO + END


async def test_a_reader_that_does_not_read_is_waited_for_and_loses_nothing(front: str) -> None:
    async with opened(front) as stream:
        written = await stream.fill()
        assert not stream.outlet.is_read
        assert not stream.outlet.write(b"refused")
        assert stream.owner.heard == []
        assert await stream.text(len(HELLO + written)) == HELLO + written
        await stream.owner.until("free")
        assert not stream.outlet.is_busy
        assert stream.outlet.is_read
        assert stream.outlet.write(b"after")
        expected = HELLO + written + b"after"
        assert await stream.text(len(expected)) == expected


async def test_a_reader_that_reads_again_in_time_is_not_cut_off(front: str) -> None:
    """The deadline of each wait is called off, which is seen without waiting for one."""
    async with opened(front) as stream:
        written = HELLO
        for _ in range(3):
            written += await stream.fill()
            deadline = stream.outlet._deadline  # type: ignore[attr-defined]
            assert not deadline.cancelled()
            await stream.text(len(written))
            await stream.owner.until("free")
            assert stream.owner.heard == ["free"]
            stream.owner.heard.clear()
            assert deadline.cancelled()
            assert stream.outlet._deadline is None  # type: ignore[attr-defined]
        assert not stream.outlet.is_cut
        assert stream.outlet.write(b"still")


async def test_past_the_deadline_the_owner_hears_of_it_and_the_connection_is_cut(front: str) -> None:
    async with opened(front, write_deadline=0.2) as stream:
        await stream.fill()
        await stream.owner.until("slow")
        await stream.owner.until("lost")
        assert stream.owner.heard == ["slow", "lost"]
        assert stream.outlet.is_over
        assert stream.outlet.is_cut
        await stream.until_closed()


async def test_who_does_not_read_the_end_is_cut_off_however_little_it_is() -> None:
    """Elsewhere it is the server's to keep: here, nobody else would."""
    async with opened("parked", write_deadline=0.2) as stream:
        transport = stream.outlet._transport  # type: ignore[attr-defined]

        def write() -> None:
            assert stream.outlet.write(b"x" * 10_000)

        await until(transport.get_write_buffer_size, doing=write)  # the kernel takes no more
        assert not stream.outlet.is_busy
        stream.outlet.write(b"", is_last=True)
        await stream.owner.until("slow")
        await stream.owner.until("lost")


async def test_abort_drops_the_connection_whatever_was_still_to_be_read(front: str) -> None:
    async with opened(front) as stream:
        await stream.fill()
        stream.outlet.abort()
        assert stream.outlet.is_over
        assert stream.outlet.is_cut
        assert not stream.outlet.write(b"more")
        await stream.owner.until("lost")
        await stream.until_closed()
        assert "slow" not in stream.owner.heard


async def test_a_client_that_leaves_is_noticed_and_writing_to_it_does_no_harm(front: str) -> None:
    async with opened(front) as stream:
        stream.close()
        await stream.owner.until("lost")
        for _ in range(10):
            stream.outlet.write(b"anybody?")
        stream.outlet.abort()
        assert stream.owner.heard == ["lost"]
