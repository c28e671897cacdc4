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

from tidings.http.disconnects import RequestReference, find_request

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


@pytest.mark.parametrize("protocol", [HttpToolsProtocol, H11Protocol])
async def test_request_of_uvicorn_is_found(protocol: Any) -> None:
    found: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def wrapped() -> Any:
            return await receive()

        async def look(scope: Any, receive: Any) -> None:
            found.append(find_request(scope, receive))

        async def look_in_a_task(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.create_task(look(scope, wrapped))

        await look(scope, receive)
        await look(scope, wrapped)  # found by the task
        await RequestReference(look_in_a_task)(scope, receive, send)
        found.append(receive.__self__)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b"end"})

    async with response_of(protocol, app) as reader:
        await reader.readuntil(b"end")
    assert found == found[-1:] * 4, "uvicorn has changed; see `_check_attributes` in disconnects.py"


@pytest.mark.parametrize("is_own", [True, False])
async def test_uvicorn_without_a_part_is_left_alone(
    is_own: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning says why, unless the protocol is the user's own."""
    begin = HttpToolsProtocol.on_message_begin

    def on_message_begin(self: Any) -> None:
        begin(self)
        self.__dict__.pop("pipeline", None)

    protocol = type("Own", (HttpToolsProtocol,), {"__module__": __name__}) if is_own else HttpToolsProtocol
    monkeypatch.setattr(protocol, "on_message_begin", on_message_begin)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        body = f"found: {find_request(scope, receive)};"
        await send({"type": "http.response.body", "body": body.encode(), "more_body": True})

    async with response_of(protocol, app) as reader:
        assert b"found: None" in await reader.readuntil(b";")
    name = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.pipeline"
    start = f"the connections of uvicorn are left alone: uvicorn {uvicorn.__version__} has no {name}, "
    said = [record.getMessage() for record in caplog.records if record.name == "tidings.http.disconnects"]
    assert [text.startswith(start) for text in said] == ([] if is_own else [True])
