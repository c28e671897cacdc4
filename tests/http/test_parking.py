"""When a stream is parked, what is released then, and how a parked connection behaves.

`test_stream.py` has the tests that both kinds of streams share.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import make_certificates
from tests.support.faults.wire import get_request, listen_request, open_session
from tests.support.loops import anyio_backend
from tests.support.streams import (
    NEXT_REQUEST,
    BodyMiddleware,
    HeaderMiddleware,
    QueueMiddleware,
    SendMiddleware,
    Server,
    check_change,
    check_ended,
    check_notified,
    connected,
    read_event,
    read_rest,
    serving,
)
from tests.support.waiting import DEADLINE, until
from tidings import Policy, Reason
from tidings.http.parking import ParkedStream
from tidings.http.stream import AsgiStream

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio

KEPT = ("ParkedStream", "ListenStream", "Subscriber")
RELEASED = ("AsgiStream", "HttpToolsProtocol", "RequestResponseCycle", "HttpRequestParser")


async def test_parked_stream_releases_task_request_parser_and_protocol() -> None:
    def count() -> Counter[str]:
        return Counter(type(each).__name__ for each in gc.get_objects() if type(each).__name__ in KEPT + RELEASED)

    gc.collect()
    others = count()  # left by other tests of this process
    async with serving() as server, connected(server, listen_request(0)) as (first, _):
        await check_notified(server, first)
        tasks = len(asyncio.all_tasks())
        gc.collect()
        gc.disable()  # nothing may depend on the garbage collector
        try:
            async with (
                connected(server, listen_request(1)) as (second, _),
                connected(server, listen_request(2)) as (third, _),
            ):
                await read_event(second)
                await read_event(third)
                assert server.stream_types == [ParkedStream] * 3
                connections: Any = server.uvicorn.server_state.connections
                assert [type(each) for each in connections] == [ParkedStream] * 3
                await until(lambda: len(asyncio.all_tasks()) == tasks)
                await until(lambda: not server.uvicorn.server_state.tasks)
                assert count() - others == dict.fromkeys(KEPT, 3)
            await until(lambda: count() - others == dict.fromkeys(KEPT, 1))
        finally:
            gc.enable()
        assert server.live.subscriptions.limits.count == 1


async def test_server_that_stops_without_a_signal_ends_parked_streams() -> None:
    """Its shutdown asks each connection to end, and waits for requests."""
    async with (
        serving(timeout_graceful_shutdown=DEADLINE) as server,
        connected(server, listen_request("mine")) as (stream, _),
    ):
        await read_event(stream)
        server.uvicorn.should_exit = True
        await check_ended(stream, "mine")


# When a stream is parked


class ReceivingMiddleware:
    """Receives in a task of its own, and waits for that task at the end."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received: asyncio.Queue[Any] = asyncio.Queue()

        async def forward() -> None:
            message = None
            while message is None or message["type"] != "http.disconnect":
                message = await receive()
                await received.put(message)

        forwarding = asyncio.create_task(forward())
        await self._app(scope, received.get, send)
        await forwarding


@pytest.mark.parametrize(
    ("middleware", "kind"),
    [
        (BodyMiddleware, AsgiStream),
        (QueueMiddleware, AsgiStream),
        (HeaderMiddleware, ParkedStream),
        (ReceivingMiddleware, ParkedStream),
    ],
)
async def test_stream_is_parked_only_if_the_connection_gets_what_the_app_sent(middleware: Any, kind: type) -> None:
    async with serving(middleware) as server, connected(server, listen_request(1)) as (stream, _):
        await check_notified(server, stream)
        assert server.stream_types == [kind]
        if kind is ParkedStream:
            await until(lambda: not server.uvicorn.server_state.tasks)
        server.live.stop()
        await check_ended(stream, 1)


@pytest.mark.parametrize("case", ["HTTP/1.0", "h11"])
async def test_stream_is_not_parked_with_another_protocol(case: str) -> None:
    request = listen_request(1)
    if case == "HTTP/1.0":
        request = request.replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    async with serving(http="h11" if case == "h11" else "httptools") as server, connected(server, request):
        await until(lambda: server.stream_types == [AsgiStream])


@pytest.mark.parametrize("behind", [NEXT_REQUEST, NEXT_REQUEST[:30]], ids=["a request", "the beginning of one"])
async def test_stream_with_another_request_behind_it_ends(behind: bytes) -> None:
    async with serving() as server:
        async with connected(server, listen_request(1) + behind) as (stream, _):
            assert (await read_event(stream))["method"] == "notifications/subscriptions/acknowledged"
            await check_ended(stream, 1)
        live, state = server.live, server.uvicorn.server_state
        await until(lambda: not state.connections and not state.tasks)
        assert (live.subscriptions.limits.count, len(live.listen_streams), len(live.hub)) == (0, 0, 0)


class StartMiddleware:
    """Waits after the start of the response until the test allows it to continue."""

    def __init__(self, app: Any, started: asyncio.Event, may_continue: asyncio.Event, errors: list[Exception]) -> None:
        self._app = app
        self._started = started
        self._may_continue = may_continue
        self._errors = errors

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def waiting(message: Any) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                self._started.set()
                await self._may_continue.wait()

        try:
            await self._app(scope, receive, waiting if scope["type"] == "http" else send)
        except Exception as error:
            self._errors.append(error)
            raise


async def test_disconnect_while_the_response_is_buffered_is_no_error() -> None:
    errors: list[Exception] = []
    started, may_continue = asyncio.Event(), asyncio.Event()
    middleware = partial(StartMiddleware, started=started, may_continue=may_continue, errors=errors)
    async with serving(middleware) as server:
        _, writer = await asyncio.open_connection(*server.address[:2])
        writer.write(listen_request(1))
        async with asyncio.timeout(DEADLINE):
            await started.wait()
        writer.close()
        state = server.uvicorn.server_state
        await until(lambda: not state.connections)
        may_continue.set()
        await until(lambda: not state.tasks)
        assert not errors
        assert server.live.subscriptions.limits.count == 0


# Data and requests on a parked connection


async def test_later_request_ends_the_stream_and_the_connection() -> None:
    async with serving() as server, connected(server, listen_request("mine")) as (stream, writer):
        await read_event(stream)
        assert server.stream_types == [ParkedStream]
        writer.write(NEXT_REQUEST)
        await check_ended(stream, "mine")
        await until(lambda: not server.streams)
        assert server.live.subscriptions.limits.count == 0
        assert dict(server.live.hub.counts.closed) == {Reason.REPLACED: 1}


async def test_stream_that_loses_its_durable_name_ends_as_replaced() -> None:
    durable = {"dev.tidings/durable": {"name": "mine", "ttl": 60}}
    async with serving() as server, connected(server, listen_request(1, meta=durable)) as (older, _):
        await read_event(older)
        async with connected(server, listen_request(2, meta=durable)) as (newer, _):
            await check_notified(server, newer)
            await check_ended(older, 1)
            assert dict(server.live.hub.counts.closed) == {Reason.REPLACED: 1}


async def test_line_break_after_the_request_is_ignored() -> None:
    async with serving() as server, connected(server, listen_request(1)) as (stream, writer):
        await read_event(stream)
        writer.write(b"\r\n")
        await writer.drain()
        await check_change(server, stream, "first")
        await check_change(server, stream, "second")  # by now the server has read the line break
        assert server.stream_types == [ParkedStream]


# Other connections than TCP over IPv4


@pytest.mark.parametrize("kind", ["IPv6", "Unix socket", "TLS"])
async def test_stream_over_any_connection_is_parked(kind: str, tmp_path: Path) -> None:
    request, options, client = listen_request(1), {}, {}
    if kind == "IPv6":
        if not socket.has_ipv6:
            pytest.skip("this machine has no IPv6")
        request, options = request.replace(b"127.0.0.1:80", b"[::1]:80"), {"host": "::1"}
    elif kind == "Unix socket":
        options = {"uds": str(tmp_path / "s")}
    else:
        options = certificate(tmp_path)
        client = {"ssl": ssl.create_default_context(cafile=options["ssl_ca_certs"]), "server_hostname": "localhost"}
    async with serving(**options) as server, connected(server, request, **client) as (stream, _):
        await check_notified(server, stream)
        assert server.stream_types == [ParkedStream]
        server.live.stop()
        await check_ended(stream, 1)


class TlsClient:
    """Reads what it is sent, and never closes its side of the TLS connection."""

    def __init__(self, address: Any, trust: ssl.SSLContext, request: bytes) -> None:
        self._socket = trust.wrap_socket(socket.create_connection(address, DEADLINE), server_hostname="localhost")
        self._socket.sendall(request)
        self.text = b""

    async def read_until(self, mark: bytes) -> None:
        while mark not in self.text:
            data = await asyncio.to_thread(self._socket.recv, 1 << 16)
            assert data, f"the connection ended after {self.text[-100:]!r}"
            self.text += data

    async def send(self, data: bytes) -> None:
        await asyncio.to_thread(self._socket.sendall, data)

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def tls_client(server: Server, files: dict[str, str], request: bytes) -> AsyncIterator[TlsClient]:
    trust = ssl.create_default_context(cafile=files["ssl_ca_certs"])
    client = await asyncio.to_thread(TlsClient, server.address, trust, request)
    try:
        yield client
    finally:
        client.close()


@pytest.mark.parametrize("kind", [ParkedStream, AsgiStream])
async def test_tls_client_that_never_closes_cannot_keep_the_process(tmp_path: Path, kind: type) -> None:
    """As under `uvicorn --ssl-keyfile …`, which waits for every connection without a limit."""
    files = certificate(tmp_path)
    middleware = [] if kind is ParkedStream else [BodyMiddleware]
    async with (
        serving(*middleware, timeout_graceful_shutdown=None, **files) as server,
        tls_client(server, files, listen_request(1)) as client,
    ):
        await client.read_until(b"acknowledged")
        await until(lambda: server.stream_types == [kind])
        server.live.stop()
        server.uvicorn.should_exit = True
        await client.read_until(b"\r\n0\r\n\r\n")
        async with asyncio.timeout(15):  # the event loops give up by themselves after 30 s
            await until(lambda: not server.uvicorn.server_state.connections)


async def test_ended_stream_of_a_tls_client_does_not_count_and_its_connection_is_aborted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = certificate(tmp_path)
    async with (
        serving(policy=Policy(write_deadline=1.0, max_streams=1), **files) as server,
        tls_client(server, files, listen_request(1)) as client,
    ):
        await client.read_until(b"acknowledged")
        await client.send(NEXT_REQUEST)
        await client.read_until(b"\r\n0\r\n\r\n")
        async with tls_client(server, files, listen_request(2)) as other:
            await other.read_until(b"acknowledged")
            assert server.live.subscriptions.limits.count == 1
            await until(lambda: len(server.streams) == 1)
        assert dict(server.live.hub.counts.cut_off) == {}, "the client has read everything"
        assert "not read" not in caplog.text


def certificate(folder: Path) -> dict[str, str]:
    authority, own = make_certificates(folder, "localhost")
    return {"ssl_certfile": str(own), "ssl_keyfile": str(own), "ssl_ca_certs": str(authority)}


# Legacy streams


class EditingMiddleware(SendMiddleware):
    """Changes a few events."""

    def change(self, message: Any) -> Any:
        body = message.get("body", b"").replace(b"edition 2", b"edition X")
        return {**message, "body": body} if message["type"] == "http.response.body" else message


@pytest.mark.parametrize("case", ["direct", "middleware", "around", "proxy headers"])
async def test_legacy_events_are_written_directly_only_without_middleware(case: str) -> None:
    middleware = [EditingMiddleware] if case == "middleware" else []
    around = EditingMiddleware if case == "around" else None
    async with (
        serving(*middleware, around=around, proxy_headers=case == "proxy headers") as server,
        connected(server, get_request(await open_session(server.address[1]))) as (stream, _),
    ):
        await until(lambda: len(server.live.legacy_streams))
        (response,) = server.live.legacy_streams._open
        is_direct = response.write_directly is not None
        descriptions = []
        for number in range(3):
            server.change(f"edition {number}")
            descriptions.append((await read_event(stream))["params"]["tool"]["description"])
        server.live.stop()
        assert await read_rest(stream) == []
        assert stream.is_terminated
    assert is_direct is (case in ("direct", "proxy headers"))
    assert descriptions == ["edition 0", "edition 1", "edition 2" if is_direct else "edition X"]
