"""Both kinds of response streams behave the same: `AsgiStream` and `ParkedStream`.

Each belongs to a real request to uvicorn, and the test reads from a real socket.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.loops import anyio_backend
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE, until
from tidings.http.parking import ParkedStream, buffer_response
from tidings.http.stream import AsgiStream, ResponseStream
from tidings.policy import Policy

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio

HELLO = b"hello"
BIG = b"x" * 60_000
END = b"<end>"


@pytest.fixture(params=[AsgiStream, ParkedStream])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


class Callbacks:
    """Records the calls, and lets a test wait for one."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._called = asyncio.Condition()

    def on_writable(self) -> None:
        self._record("writable")

    def on_write_timeout(self) -> None:
        self._record("write timeout")

    def on_disconnect(self) -> None:
        self._record("disconnect")

    def end(self, reason: Any) -> None:
        self._record(f"end: {reason}")

    def _record(self, call: str) -> None:
        self.calls.append(call)
        self._notifying = asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._called:
            self._called.notify_all()

    async def wait_for(self, call: str) -> None:
        async with asyncio.timeout(DEADLINE), self._called:
            await self._called.wait_for(lambda: call in self.calls)


class OpenStream:
    """Both ends of a stream."""

    def __init__(self, response: ResponseStream, callbacks: Callbacks, client: socket.socket) -> None:
        self.response = response
        self.callbacks = callbacks
        self._client = client
        self._body = b""
        self._rest = b""
        self._is_past_head = False

    async def text(self, length: int) -> bytes:
        """Read the body up to this length."""
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
        """Write until the stream is busy. Return what was written."""
        written = b""
        for number in range(1_000):
            chunk = b"%d " % number + BIG
            written += chunk
            if not self.response.write(chunk):
                assert self.response.is_busy
                return written
        raise AssertionError("the stream never became busy")

    def close(self) -> None:
        self._client.close()


@asynccontextmanager
async def open_stream(kind: Any, **settings: Any) -> AsyncIterator[OpenStream]:
    callbacks = Callbacks()
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    # By default no deadline: a test that waits for something else must not see its effect.
    policy = Policy(**{"write_deadline": 3600.0, **settings})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        response = AsgiStream(scope, receive, send, policy)
        response.callbacks = callbacks
        await receive()
        buffered = buffer_response(scope, response.request) if kind is ParkedStream else None
        await send({"type": "http.response.start", "status": 200})
        assert response.write(HELLO)
        if buffered is not None:
            ready.set_result(buffered.park(HELLO, callbacks, policy.write_deadline))
            return
        ready.set_result(response)
        while (await receive())["type"] != "http.disconnect":
            pass
        callbacks.on_disconnect()

    async with run_uvicorn(app, lifespan="off", http="httptools") as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            async with asyncio.timeout(DEADLINE):
                loop = asyncio.get_running_loop()
                await loop.sock_connect(client, address_of(server))
                await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
                opened = await ready
            assert type(opened) is kind
            stream = OpenStream(opened, callbacks, client)
            assert await stream.text(len(HELLO)) == HELLO
            yield stream


async def test_chunks_arrive_whole_and_in_order(kind: Any) -> None:
    async with open_stream(kind) as stream:
        assert stream.response.write(b"one")
        assert stream.response.write(b"")
        assert stream.response.write(b"two" * 1_000)
        assert await stream.text(len(HELLO) + 3_003) == HELLO + b"one" + b"two" * 1_000
        assert not stream.response.is_closed
        assert stream.callbacks.calls == []


@pytest.mark.parametrize("last", [b"last", b""])
async def test_after_the_last_chunk_nothing_more_is_written(kind: Any, last: bytes) -> None:
    async with open_stream(kind) as stream:
        assert stream.response.write(last, is_last=True)
        assert stream.response.is_closed
        assert not stream.response.write(b"more")
        expected = HELLO + last + END
        assert await stream.text(len(expected)) == expected
        await stream.callbacks.wait_for("disconnect")


async def test_client_that_does_not_read_loses_nothing(kind: Any) -> None:
    """Each time it reads again, its deadline is cancelled."""
    async with open_stream(kind) as stream:
        written = HELLO
        for _ in range(3):
            written += await stream.fill()
            assert not stream.response.is_flushed
            assert not stream.response.write(b"refused")
            assert stream.callbacks.calls == []
            deadline = stream.response._deadline  # type: ignore[attr-defined]
            assert not deadline.cancelled()
            assert await stream.text(len(written)) == written
            await stream.callbacks.wait_for("writable")
            assert stream.callbacks.calls == ["writable"]
            stream.callbacks.calls.clear()
            assert deadline.cancelled()
            assert not stream.response.is_busy
            assert stream.response.is_flushed
        assert stream.response.write(b"after")
        assert await stream.text(len(written) + 5) == written + b"after"


async def test_connection_is_aborted_after_the_write_deadline(kind: Any) -> None:
    async with open_stream(kind, write_deadline=0.2) as stream:
        await stream.fill()
        await stream.callbacks.wait_for("write timeout")
        await stream.callbacks.wait_for("disconnect")
        assert stream.callbacks.calls == ["write timeout", "disconnect"]
        assert stream.response.is_closed
        await stream.until_closed()


async def test_connection_whose_client_does_not_read_the_end_is_aborted() -> None:
    """Only of a parked stream: the server closes other responses."""
    async with open_stream(ParkedStream, write_deadline=0.2) as stream:
        transport = stream.response._transport  # type: ignore[attr-defined]

        def write() -> None:
            assert stream.response.write(b"x" * 10_000)

        await until(transport.get_write_buffer_size, action=write)  # the kernel's buffer is full
        assert not stream.response.is_busy
        stream.response.write(b"", is_last=True)
        await stream.callbacks.wait_for("write timeout")
        await stream.callbacks.wait_for("disconnect")


async def test_abort_closes_the_connection_with_unread_data(kind: Any) -> None:
    async with open_stream(kind) as stream:
        await stream.fill()
        stream.response.abort()
        assert stream.response.is_closed
        assert not stream.response.write(b"more")
        await stream.callbacks.wait_for("disconnect")
        await stream.until_closed()
        assert "write timeout" not in stream.callbacks.calls


async def test_disconnect_is_detected_and_later_writes_do_no_harm(kind: Any) -> None:
    async with open_stream(kind) as stream:
        stream.close()
        await stream.callbacks.wait_for("disconnect")
        for _ in range(10):
            stream.response.write(b"lost")
        stream.response.abort()
        assert stream.callbacks.calls == ["disconnect"]
