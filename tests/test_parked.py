"""Parked streams: when a connection is parked and when it is not, what is let go with it, and what it does then.

What a stream says is the same on both fronts, and tested over both elsewhere; here is what only the parked one has.
"""

from __future__ import annotations

import asyncio
import datetime
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
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from mcp.server.mcpserver import MCPServer
from starlette.middleware.base import BaseHTTPMiddleware

from tests.faults.wire import ALL, Stream, get_request, listen_request, modern_request, open_session
from tests.loops import anyio_backend
from tidings import Feature, Live, Policy, Reason
from tidings.lanes.app import _protocol
from tidings.lanes.channel import Channel
from tidings.lanes.parked import DirectLine, Parked

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio

DEADLINE = 20.0
KINDS = (
    *("Parked", "ListenStream", "Subscriber"),
    *("Channel", "Connection", "RequestResponseCycle", "HttpRequestParser"),
)


class Server:
    """uvicorn with our protocol, in this very event loop."""

    def __init__(self, live: Live, server: uvicorn.Server) -> None:
        self.live = live
        self.uvicorn = server

    @property
    def address(self) -> Any:
        return self.uvicorn.servers[0].sockets[0].getsockname()

    @property
    def outlets(self) -> list[Any]:
        return [stream.channel for streams in self.live.listen._streams for stream in streams]

    async def until(self, is_so: Any) -> None:
        async with asyncio.timeout(DEADLINE):
            while not is_so():  # noqa: ASYNC110  # of what others do there is no event
                await asyncio.sleep(0.01)

    def change(self, text: str) -> None:
        self.live.tools.update("echo", description=text)


@asynccontextmanager
async def serving(*middleware: Any, policy: Any = None, around: Any = None, **options: Any) -> AsyncIterator[Server]:
    mcp = MCPServer("parked", log_level="ERROR")
    mcp.add_tool(str.upper, name="echo", description="old")
    live = Live(mcp, policy=policy)
    app = live.http_app()
    for each in middleware:
        app.add_middleware(each)
    options = {"port": 0, "http": _protocol(), "timeout_graceful_shutdown": 1, **options}
    config = uvicorn.Config(app if around is None else around(app), log_level="critical", **options)
    server = Server(live, uvicorn.Server(config))
    # Not `serve()`, which would take the signals of the tests' own process.
    running = asyncio.create_task(server.uvicorn._serve())
    await server.until(lambda: server.uvicorn.started)
    try:
        yield server
    finally:
        server.uvicorn.should_exit = True
        async with asyncio.timeout(DEADLINE):
            await running


@asynccontextmanager
async def connected(server: Server, sent: bytes, **options: Any) -> AsyncIterator[tuple[Stream, asyncio.StreamWriter]]:
    """A client that has sent this, and read the head of the response."""
    if isinstance(server.address, str):
        reader, writer = await asyncio.open_unix_connection(server.address)
    else:
        reader, writer = await asyncio.open_connection(*server.address[:2], **options)
    stream = Stream(reader, writer)
    try:
        writer.write(sent)
        async with asyncio.timeout(DEADLINE):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        yield stream, writer
    finally:
        writer.close()


async def event(stream: Stream) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE):
        told = await stream.event()
    assert told is not None, "the stream ended"
    return told


async def check_told(server: Server, stream: Stream) -> None:
    """The stream is acknowledged, and told of a change."""
    assert (await event(stream))["method"] == "notifications/subscriptions/acknowledged"
    server.change("new")
    assert (await event(stream))["params"]["tool"]["description"] == "new"


async def rest(stream: Stream) -> list[dict[str, Any]]:
    async with asyncio.timeout(DEADLINE):
        return await stream.rest()


# What is let go


async def test_a_parked_stream_keeps_neither_task_nor_cycle_nor_parser_nor_protocol() -> None:
    gc.collect()
    there = counted()  # what tests of other files have left in this process
    async with serving() as server, connected(server, listen_request(0)) as (first, _):
        await check_told(server, first)
        before = len(asyncio.all_tasks())
        gc.collect()
        gc.disable()  # what only the collector finds would be found too late, and by all
        try:
            async with (
                connected(server, listen_request(1)) as (second, _),
                connected(server, listen_request(2)) as (third, _),
            ):
                await event(second)
                await event(third)
                assert [type(outlet) for outlet in server.outlets] == [Parked] * 3
                await server.until(lambda: len(asyncio.all_tasks()) == before)
                await server.until(lambda: not server.uvicorn.server_state.tasks)
                assert kept(there) == {"Parked": 3, "ListenStream": 3, "Subscriber": 3}
            await server.until(lambda: len(server.outlets) == 1)
            await server.until(lambda: kept(there) == {"Parked": 1, "ListenStream": 1, "Subscriber": 1})
        finally:
            gc.enable()
        assert server.live.gate.count == 1


def counted() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each).__name__ in KINDS)


def kept(there: Counter[str]) -> dict[str, int]:
    """What is there now and was not."""
    return dict(counted() - there)


class Receiving:
    """A middleware that receives in a task of its own, and waits for it at the end."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received: asyncio.Queue[Any] = asyncio.Queue()

        async def pass_on() -> None:
            message = None
            while message is None or message["type"] != "http.disconnect":
                message = await receive()
                await received.put(message)

        passing = asyncio.create_task(pass_on())
        await self._app(scope, received.get, send)
        await passing


async def test_behind_one_uvicorns_own_connections_are_not_found() -> None:
    async with (
        serving(Receiving, http="httptools") as server,
        connected(server, listen_request(1)) as (stream, _),
    ):
        await check_told(server, stream)
        assert [type(outlet) for outlet in server.outlets] == [Channel]
        server.live.stop()
        await rest(stream)


async def test_a_middleware_that_still_receives_is_let_go() -> None:
    async with serving(Receiving) as server:
        before = len(asyncio.all_tasks())
        async with connected(server, listen_request(1)) as (stream, _):
            await check_told(server, stream)
            assert [type(outlet) for outlet in server.outlets] == [Parked]
            await server.until(lambda: not server.uvicorn.server_state.tasks)
            assert len(asyncio.all_tasks()) == before


async def test_the_server_goes_on_counting_requests_and_connections() -> None:
    async with serving() as server:
        state = server.uvicorn.server_state
        async with connected(server, listen_request(1)) as (stream, _):
            await event(stream)
            assert state.total_requests == 1
            (connection,) = state.connections
            assert isinstance(connection, Parked)
        await server.until(lambda: not state.connections)


async def test_a_server_that_stops_without_a_signal_ends_parked_streams_gracefully() -> None:
    """Its shutdown asks each connection to end; plain requests are waited for."""
    async with serving() as server, connected(server, listen_request("mine")) as (stream, _):
        await event(stream)
        server.uvicorn.should_exit = True
        (result,) = await rest(stream)
        assert result["id"] == "mine"
        assert stream.is_terminated


# When a stream is not parked


class Capitals:
    """A middleware that changes what is sent."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def changed(message: Any) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": message["body"].replace(b'"2.0"', b'"2.0" ')}
            await send(message)

        await self._app(scope, receive, changed if scope["type"] == "http" else send)


class Delayed(BaseHTTPMiddleware):
    """A middleware that hands on what is sent in its own time."""

    async def dispatch(self, request: Any, call_next: Any) -> Any:
        return await call_next(request)


class Labelled:
    """A middleware that only adds to the headers."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def labelled(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-label", b"yes")]}
            await send(message)

        await self._app(scope, receive, labelled if scope["type"] == "http" else send)


@pytest.mark.parametrize("is_ours", [True, False], ids=["our protocol", "uvicorn's"])
@pytest.mark.parametrize(("middleware", "outlet"), [(Capitals, Channel), (Delayed, Channel), (Labelled, Parked)])
async def test_a_stream_is_parked_only_if_it_reaches_the_connection_as_it_was_sent(
    middleware: Any, outlet: type, is_ours: bool
) -> None:
    options = {} if is_ours else {"http": "httptools"}
    async with serving(middleware, **options) as server, connected(server, listen_request(1)) as (stream, _):
        await check_told(server, stream)
        assert [type(each) for each in server.outlets] == [outlet]
        server.live.stop()
        (result,) = await rest(stream)
        assert result["id"] == 1
        assert stream.is_terminated


class Waiting:
    """A middleware that goes on only when it may, after the start of the response."""

    def __init__(self, app: Any, started: asyncio.Event, may_go_on: asyncio.Event, failed: list[Exception]) -> None:
        self._app = app
        self._started = started
        self._may_go_on = may_go_on
        self._failed = failed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def waiting(message: Any) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                self._started.set()
                await self._may_go_on.wait()

        try:
            await self._app(scope, receive, waiting if scope["type"] == "http" else send)
        except Exception as error:
            self._failed.append(error)
            raise


@pytest.mark.parametrize("is_ours", [True, False], ids=["our protocol", "uvicorn's"])
async def test_a_client_that_leaves_before_its_response_has_left_is_no_error(is_ours: bool) -> None:
    failed: list[Exception] = []
    started, may_go_on = asyncio.Event(), asyncio.Event()
    middleware = partial(Waiting, started=started, may_go_on=may_go_on, failed=failed)
    async with serving(middleware, **({} if is_ours else {"http": "httptools"})) as server:
        _, writer = await asyncio.open_connection(*server.address[:2])
        writer.write(listen_request(1))
        async with asyncio.timeout(DEADLINE):
            await started.wait()
        writer.close()
        state = server.uvicorn.server_state
        await server.until(lambda: not state.connections)
        may_go_on.set()
        await server.until(lambda: not state.tasks)
        assert not failed
        assert server.live.gate.count == 0


async def test_a_client_of_http_1_0_is_not_parked() -> None:
    async with serving() as server, connected(server, listen_request(1).replace(b"HTTP/1.1", b"HTTP/1.0", 1)):
        await server.until(lambda: len(server.outlets) == 1)
        assert isinstance(server.outlets[0], Channel)


ANOTHER = modern_request("tools/list", 2)


@pytest.mark.parametrize("behind", [ANOTHER, ANOTHER[:30]], ids=["a request", "the beginning of one"])
async def test_a_stream_with_another_request_behind_it_is_not_parked(behind: bytes) -> None:
    """Nor is it kept: what is behind it would wait for ever."""
    async with serving() as server:
        async with connected(server, listen_request(1) + behind) as (stream, _):
            assert (await event(stream))["method"] == "notifications/subscriptions/acknowledged"
            assert [told["id"] for told in await rest(stream)] == [1]
            assert stream.is_terminated, "the connection is left for the request behind it"
        live, state = server.live, server.uvicorn.server_state
        await server.until(lambda: not state.connections and not state.tasks)
        assert (live.gate.count, len(live.listen), len(live.hub)) == (0, 0, 0)


async def test_with_another_parser_there_is_nothing_to_park_with() -> None:
    async with serving(http="h11") as server, connected(server, listen_request(1)) as (stream, _):
        await check_told(server, stream)
        assert [type(each) for each in server.outlets] == [Channel]


# Legacy streams, which stay responses


class Seeing:
    """A middleware that changes a few events only."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.seen = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def changed(message: Any) -> None:
            if message["type"] == "http.response.body" and scope["method"] == "GET":
                self.seen += b"edition" in message["body"]
                message = {**message, "body": message["body"].replace(b"edition 2", b"edition X")}
            await send(message)

        await self._app(scope, receive, changed if scope["type"] == "http" else send)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What went out on direct lines."""
    written: list[bytes] = []

    def noted(self: DirectLine, chunk: bytes) -> bool:
        is_written = write(self, chunk)
        written.extend([chunk] if is_written else [])
        return is_written

    write = DirectLine.write
    monkeypatch.setattr(DirectLine, "write", noted)
    return written


async def legacy_editions(server: Server) -> list[str]:
    """What a legacy client is told of three changes."""
    session_id = await open_session(server.address[1])
    told = []
    async with connected(server, get_request(session_id)) as (stream, _):
        for number in range(3):
            server.change(f"edition {number}")
            told.append((await event(stream))["params"]["tool"]["description"])
        server.live.stop()
        assert await rest(stream) == []
        assert stream.is_terminated
    return told


EDITIONS = ["edition 0", "edition 1", "edition 2"]


@pytest.mark.parametrize("http", [{}, {"http": "httptools"}], ids=["our protocol", "uvicorn's"])
@pytest.mark.parametrize("middleware", [(), (Labelled,), (Capitals,)], ids=["none", "labelled", "capitals"])
async def test_events_take_the_direct_line_only_if_nobody_else_would_see_them(
    middleware: tuple[Any, ...], http: dict[str, str], direct: list[bytes]
) -> None:
    async with serving(*middleware, **http) as server:
        assert await legacy_editions(server) == EDITIONS
    assert len(direct) == (0 if middleware else 2), "the first one shows how it arrives"


@pytest.mark.parametrize("is_around", [True, False], ids=["around the app", "in the app"])
async def test_a_middleware_sees_and_may_change_every_event(is_around: bool, direct: list[bytes]) -> None:
    seeing: list[Seeing] = []

    def made(app: Any) -> Seeing:
        seeing.append(Seeing(app))
        return seeing[-1]

    async with serving(*([] if is_around else [made]), around=made if is_around else None, http="httptools") as server:
        assert await legacy_editions(server) == [*EDITIONS[:2], "edition X"]
    assert sum(each.seen for each in seeing) == 3
    assert direct == []


# What comes in on a parked connection


async def test_a_request_that_comes_in_later_ends_the_stream_and_the_connection() -> None:
    """It would wait for the end of a response that has none."""
    async with serving() as server, connected(server, listen_request("mine")) as (stream, writer):
        await event(stream)
        assert isinstance(server.outlets[0], Parked)
        writer.write(ANOTHER)
        (result,) = await rest(stream)
        assert result["id"] == "mine"
        assert stream.is_terminated
        await server.until(lambda: not server.outlets)
        assert server.live.gate.count == 0
        assert dict(server.live.hub.counts.closed) == {Reason.REPLACED: 1}


async def test_the_connection_that_loses_its_name_to_another_is_no_shutdown() -> None:
    durable = {"dev.tidings/durable": {"name": "mine", "ttl": 60}}
    async with serving() as server, connected(server, listen_request(1, meta=durable)) as (older, _):
        await event(older)
        async with connected(server, listen_request(2, meta=durable)) as (newer, _):
            await check_told(server, newer)
            (result,) = await rest(older)
            assert result["id"] == 1
            assert dict(server.live.hub.counts.closed) == {Reason.REPLACED: 1}


async def test_a_line_break_after_the_request_is_none() -> None:
    async with serving() as server, connected(server, listen_request(1)) as (stream, writer):
        await event(stream)
        writer.write(b"\r\n")
        await writer.drain()
        server.change("first")
        assert (await event(stream))["params"]["tool"]["description"] == "first"
        # Surely read by now: what is written is answered in the order in which it comes.
        server.change("second")
        assert (await event(stream))["params"]["tool"]["description"] == "second"
        assert isinstance(server.outlets[0], Parked)


# Other kinds of connection


async def test_a_stream_over_ipv6_is_parked() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    request = listen_request(1).replace(b"127.0.0.1:80", b"[::1]:80")
    async with serving(host="::1") as server, connected(server, request) as (stream, _):
        await check_told(server, stream)
        assert isinstance(server.outlets[0], Parked)


async def test_a_stream_over_a_unix_socket_is_parked(tmp_path: Path) -> None:
    async with (
        serving(uds=str(tmp_path / "s")) as server,
        connected(server, listen_request(1)) as (stream, _),
    ):
        await check_told(server, stream)
        assert isinstance(server.outlets[0], Parked)


async def test_a_stream_over_tls_is_parked(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    trust = ssl.create_default_context(cafile=files["ssl_certfile"])
    async with (
        serving(**files) as server,
        connected(server, listen_request(1), ssl=trust, server_hostname="localhost") as (stream, _),
    ):
        await check_told(server, stream)
        assert isinstance(server.outlets[0], Parked)
        server.live.stop()
        (result,) = await rest(stream)
        assert result["id"] == 1
        assert stream.is_terminated


class Curt:
    """A client over TLS that reads what it is sent, and never says that it will close its end too."""

    def __init__(self, address: Any, trust: ssl.SSLContext, request: bytes) -> None:
        self._socket = trust.wrap_socket(socket.create_connection(address, DEADLINE), server_hostname="localhost")
        self._socket.sendall(request)
        self.text = b""

    def read_until(self, mark: bytes) -> None:
        while mark not in self.text:
            data = self._socket.recv(1 << 16)
            assert data, f"the connection ended after {self.text[-100:]!r}"
            self.text += data

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def curt(server: Server, files: dict[str, str], request: bytes) -> AsyncIterator[Curt]:
    trust = ssl.create_default_context(cafile=files["ssl_certfile"])
    client = await asyncio.to_thread(Curt, server.address, trust, request)
    try:
        yield client
    finally:
        client.close()


@pytest.mark.parametrize("is_parked", [True, False], ids=["parked", "plain"])
async def test_over_tls_who_never_says_goodbye_cannot_keep_the_process(tmp_path: Path, is_parked: bool) -> None:
    """As under `uvicorn --ssl-keyfile …`, which waits for every connection, however long it takes."""
    files = certificate(tmp_path)
    middleware = [] if is_parked else [Capitals]
    async with (
        serving(*middleware, http="httptools", timeout_graceful_shutdown=None, **files) as server,
        curt(server, files, listen_request(1)) as client,
    ):
        await asyncio.to_thread(client.read_until, b"acknowledged")
        await server.until(lambda: [type(outlet) for outlet in server.outlets] == [Parked if is_parked else Channel])
        server.live.stop()
        server.uvicorn.should_exit = True
        await asyncio.to_thread(client.read_until, b"\r\n0\r\n\r\n")
        async with asyncio.timeout(2):
            await server.until(lambda: not server.uvicorn.server_state.connections)


async def test_over_tls_a_stream_that_has_ended_takes_nobodys_place_and_its_connection_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = certificate(tmp_path)
    async with (
        serving(policy=Policy(write_deadline=1.0, max_streams=1), **files) as server,
        curt(server, files, listen_request(1)) as client,
    ):
        await asyncio.to_thread(client.read_until, b"acknowledged")
        await asyncio.to_thread(client.send, ANOTHER)
        await asyncio.to_thread(client.read_until, b"\r\n0\r\n\r\n")
        async with curt(server, files, listen_request(2)) as other:
            await asyncio.to_thread(other.read_until, b"acknowledged")
            assert server.live.gate.count == 1
            await server.until(lambda: len(server.outlets) == 1)
        assert dict(server.live.hub.counts.cut_off) == {}, "it has read everything"
        assert "not read" not in caplog.text


def certificate(folder: Path) -> dict[str, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = {"ssl_certfile": folder / "certificate.pem", "ssl_keyfile": folder / "key.pem"}
    files["ssl_certfile"].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    files["ssl_keyfile"].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return {name: str(path) for name, path in files.items()}


# What all share


async def test_an_acknowledgement_that_is_shared_says_what_is_true_now_and_whose_it_is() -> None:
    said = []
    async with serving() as server:
        for request_id in (1, "two", 3):
            if request_id == 3:
                server.change("new")
            async with connected(server, listen_request(request_id, ALL)) as (stream, _):
                meta = (await event(stream))["params"]["_meta"]
            assert meta["io.modelcontextprotocol/subscriptionId"] == request_id
            said.append(meta["dev.tidings/cursor"]["topics"])
        assert said[0] == said[1]
        assert said[2]["tools"]["revision"] == server.live.catalog.version(Feature.TOOLS).revision
        assert said[2]["tools"] != said[1]["tools"]
        assert said[2]["prompts"] == said[1]["prompts"]
