"""uvicorn has every part that `tidings.http` uses, and a uvicorn without one of them is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from tests.support.faults.wire import get_request, open_session
from tests.support.streams import connected, read_rest, serving
from tests.support.waiting import until
from tidings.http.disconnects import RequestReference, watch_connection
from tidings.http.parking import buffer_response

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def response_of(protocol: type[Any], app: Any) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request to an app behind this protocol."""
    config = uvicorn.Config(app, http=protocol, lifespan="off", log_level="critical")
    config.load()
    state = ServerState()
    listening = await asyncio.get_running_loop().create_server(lambda: protocol(config, state, {}), "127.0.0.1")
    async with asyncio.timeout(60), listening as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        yield reader
        writer.close()


class Callbacks:
    def on_writable(self) -> None: ...
    def on_write_timeout(self) -> None: ...
    def on_disconnect(self) -> None: ...
    def end(self, reason: Any) -> None: ...


async def test_connection_can_be_parked_in_the_middle_of_a_response() -> None:
    done: asyncio.Future[tuple[Any, Any]] = asyncio.get_running_loop().create_future()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            done.set_result((asyncio.current_task(), await park(scope, receive, send)))
        except BaseException as error:
            done.set_exception(error)
            raise

    async def park(scope: Any, receive: Any, send: Any) -> Any:
        await receive()
        transport = receive.__self__.transport
        buffered = buffer_response(scope, receive)
        assert buffered is not None, "uvicorn has changed; see `_check_attributes` in parking.py"
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        assert buffer_response(scope, receive) is None, "the response has begun"
        parked = buffered.park(b"first", Callbacks(), 1.0)
        assert parked is not None
        assert transport.get_protocol() is parked
        assert (await receive())["type"] == "http.disconnect"
        return parked

    async with response_of(HttpToolsProtocol, app) as reader:
        task, parked = await done
        await task
        assert parked.write(b"second")
        assert parked.write(b"", is_last=True)
        head, body = (await reader.read()).split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200")
        assert body == b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"


@pytest.mark.parametrize("protocol", [HttpToolsProtocol, H11Protocol])
async def test_connection_of_a_request_is_found_and_watched(protocol: Any) -> None:
    found: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def wrapped() -> Any:
            return await receive()

        async def look(scope: Any, receive: Any, send: Any = None) -> None:
            watcher = watch_connection(scope, receive, lambda reason: None)
            found.append(watcher is not None)
            if watcher is not None:
                watcher.close()

        async def look_in_a_task(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.create_task(look(scope, wrapped))

        await look(scope, receive)
        await look(scope, wrapped)  # found by the task
        await RequestReference(look_in_a_task)(scope, receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b"end"})

    async with response_of(protocol, app) as reader:
        await reader.readuntil(b"end")
    assert found == [True] * 3, "uvicorn has changed; see `_check_attributes` in disconnects.py"


async def test_legacy_stream_has_a_direct_writer() -> None:
    async with (
        serving() as server,
        connected(server, get_request(await open_session(server.address[1]))) as (stream, _),
    ):
        await until(lambda: len(server.live.legacy_streams))
        (response,) = server.live.legacy_streams._ends
        assert response.write_directly is not None, "uvicorn has changed; see `direct_writer`"
        server.live.stop()
        await read_rest(stream)


async def test_uvicorn_without_a_part_is_left_alone() -> None:
    class Other(HttpToolsProtocol):
        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.__dict__.pop("pipeline", None)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        buffered = buffer_response(scope, receive)
        watcher = watch_connection(scope, receive, lambda reason: None)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": repr((buffered, watcher)).encode(), "more_body": True})

    async with response_of(Other, app) as reader:
        assert b"(None, None)" in await reader.readuntil(b")")
