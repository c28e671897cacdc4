"""The parts of uvicorn that the lanes rely on are where they look for them, shown by what they are for; a uvicorn that
lacks one is left alone.
"""

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

from tidings.http.disconnects import guard, leave_word
from tidings.http.parking import ParkingProtocol
from tidings.http.stream import PARK


@asynccontextmanager
async def connected(protocol: type[ParkingProtocol], app: Any) -> AsyncIterator[asyncio.StreamReader]:
    """A request to an app behind this protocol; gives what comes back."""
    config = uvicorn.Config(app, http=protocol, lifespan="off", log_level="critical")
    config.load()
    state = ServerState()
    listening = await asyncio.get_running_loop().create_server(lambda: protocol(config, state, {}), "127.0.0.1")
    async with asyncio.timeout(60), listening as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        yield reader
        writer.close()


class Nobody:
    """Whose stream it is, here."""

    def on_free(self) -> None: ...
    def on_slow(self) -> None: ...
    def on_lost(self) -> None: ...
    def end(self) -> None: ...
    def give_way(self) -> None: ...


@pytest.mark.anyio
async def test_a_connection_of_uvicorns_can_be_taken_over_in_the_middle_of_a_response() -> None:
    over: asyncio.Future[tuple[Any, Any]] = asyncio.get_running_loop().create_future()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            over.set_result((asyncio.current_task(), await take_over(scope, receive, send)))
        except BaseException as error:
            over.set_exception(error)
            raise

    async def take_over(scope: Any, receive: Any, send: Any) -> Any:
        await receive()
        transport = receive.__self__.transport  # where a channel looks for it
        watch = scope["extensions"][PARK]["watch"]
        witness = watch()
        assert witness is not None, "uvicorn has moved what parking takes apart; see `_name_parts` in parked.py"
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        assert watch() is None, "the response has begun"
        parked = witness.park(b"first", Nobody(), 1.0)
        assert parked is not None
        assert transport.get_protocol() is parked
        assert (await receive())["type"] == "http.disconnect"
        return parked

    async with connected(ParkingProtocol, app) as reader:
        task, parked = await over
        await task
        assert parked.write(b"second")
        assert parked.write(b"", is_last=True)
        head, body = (await reader.read()).split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200")
        assert body == b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", [HttpToolsProtocol, H11Protocol])
async def test_a_request_of_uvicorns_is_found_and_guarded_in_the_middle_of_its_response(protocol: Any) -> None:
    found: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def wrapped() -> Any:
            return await receive()

        async def look(scope: Any, receive: Any) -> None:
            guarded = guard(scope, receive, lambda reason: None)
            found.append(guarded is not None)
            if guarded is not None:
                guarded.leave()

        await look(scope, receive)
        await look(scope, wrapped)  # by its task
        leave_word(scope, receive)
        await asyncio.create_task(look(scope, wrapped))  # by the word
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b"end"})

    async with connected(protocol, app) as reader:
        await reader.readuntil(b"end")
    assert found == [True] * 3, "uvicorn has moved what guard.py uses; see `_name_parts` there"


@pytest.mark.anyio
async def test_a_uvicorn_without_those_parts_is_left_alone() -> None:
    class Other(ParkingProtocol):
        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.__dict__.pop("pipeline", None)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found = scope["extensions"][PARK]["watch"]()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": repr(found).encode(), "more_body": True})

    async with connected(Other, app) as reader:
        assert b"None" in await reader.readuntil(b"None")
