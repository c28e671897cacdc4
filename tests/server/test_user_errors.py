"""Functions and handlers of the user that raise or hang: they fail no request of a client."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from tempfile import TemporaryFile
from typing import Any

import pytest
from mcp.client import Client
from mcp.client.stdio import stdio_client
from mcp.shared.exceptions import MCPError

from tests.support.faults.many_clients import open_legacy, update
from tests.support.faults.wire import (
    HTTP,
    TIMEOUT,
    WATCHED,
    How,
    Process,
    Settings,
    Stream,
    get_request,
    listen,
    modern_request,
    open_session,
    request,
    serve,
    session_headers,
    stdio_server,
)
from tests.support.messages import ACCEPT_BOTH, MODERN

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connect(
    how: How, settings: Settings, mode: str, told: asyncio.Queue[Any]
) -> AsyncIterator[tuple[Client, Any]]:
    """Yield a client of the SDK, and a function that waits for a line in the server's log."""

    async def note(message: Any) -> None:
        told.put_nowait(message)

    if how == "stdio":
        with TemporaryFile("w+") as log:

            async def read_log(pattern: str) -> None:
                log.seek(0)
                assert re.search(pattern, log.read())

            async with Client(
                stdio_client(stdio_server(settings), errlog=log), mode=mode, message_handler=note
            ) as client:
                yield client, read_log
    else:
        async with serve(how, settings) as server:
            url = f"http://127.0.0.1:{server.port}/mcp"
            async with Client(url, mode=mode, message_handler=note) as client:
                yield client, server.logged


@pytest.mark.filterwarnings("ignore:resources/subscribe is removed")
@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ("uvicorn", MODERN),
        ("run", "legacy"),
        ("stdio", MODERN),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("uvicorn", "legacy"), ("run", MODERN), ("stdio", "legacy"))
        ),
    ],
)
async def test_failing_user_function_fails_no_request_or_tool_call(how: How, mode: str) -> None:
    """`authorize`, both hooks, a follower of the catalog and a callback of the hub raise."""
    told: asyncio.Queue[Any] = asyncio.Queue()
    async with connect(how, Settings(is_broken=True), mode, told) as (client, logged), AsyncExitStack() as stack:
        if mode == "legacy":
            await client.subscribe_resource(WATCHED)
            with pytest.raises(MCPError, match="may not watch"):
                await client.subscribe_resource("board://other")
        else:
            listening = client.listen(tools_list_changed=True, resource_subscriptions=[WATCHED, "board://other"])
            subscription = await stack.enter_async_context(listening)
            assert subscription.honored.resource_subscriptions == [WATCHED]
        echoed = await client.call_tool("echo", {"text": "hello"})
        assert echoed.content[0].text == "hello"  # type: ignore[union-attr]
        changes = [update(1), {"do": "updated", "of": "resources", "key": WATCHED, "text": "etag"}]
        changed = await client.call_tool("change", {"operations": changes})
        assert not changed.is_error
        async with asyncio.timeout(TIMEOUT):
            heard = {(await told.get()).method, (await told.get()).method}
        assert heard == {"notifications/tools/list_changed", "notifications/resources/updated"}
        assert [tool.description for tool in (await client.list_tools()).tools if tool.name == "echo"] == ["1 "]
        for culprit in ("user's authorize", "user's hook", "sink of the catalog", "user's callback"):
            await logged(f"RuntimeError: the {culprit} is broken|RuntimeError: a {culprit} is broken")


@pytest.mark.parametrize("how", HTTP)
async def test_failing_list_handler_fails_no_other_request(how: How) -> None:
    async with serve(how, Settings(is_lowlevel=True)) as server:
        await server.change({"do": "fail", "of": "tools", "key": "", "text": "yes"})
        called = json.loads(await ask(server, "tools/call", {"name": "echo", "arguments": {"text": "hello"}}))
        assert called["result"]["content"][0]["text"] == "hello"
        stream = await listen(server.port, 1)
        session_id = await open_session(server.port)
        legacy = await Stream.open(server.port, get_request(session_id))
        assert legacy.status == 200
        await server.change({"do": "add", "of": "tools", "key": "unseen"})
        failed = json.loads(await ask(server, "tools/list", {}))
        assert failed["error"]["code"] == -32603, "the user's own error is the user's own"
        await server.logged("RuntimeError: the user's list handler is broken")
        await server.change({"do": "fail", "of": "tools", "key": ""}, {"do": "add", "of": "tools", "key": "seen"})
        for each in (stream, legacy):
            async with asyncio.timeout(TIMEOUT):
                event = await each.event()
            assert event is not None
            assert event["method"] == "notifications/tools/list_changed"
        listed = json.loads(await ask(server, "tools/list", {}))
        assert {"seen", "unseen"} <= {tool["name"] for tool in listed["result"]["tools"]}


@pytest.mark.alone
@pytest.mark.parametrize("how", HTTP)
async def test_hanging_list_handler_blocks_no_other_request(how: How) -> None:
    """Only the start of the server waits for it, for a second. Three attempts, because the machine may be slow."""
    took: list[float] = []
    while not took or (took[-1] >= 1 and len(took) < 3):
        async with serve(how, Settings(is_lowlevel=True, lists_fail="hang")) as server:
            await server.logged("lists were not read in 1.0 s; handling the request without them")
            start = time.monotonic()
            await ask_for_everything_else(server)
            took.append(time.monotonic() - start)
    assert min(took) < 1


async def ask_for_everything_else(server: Process) -> None:
    session_id = await open_session(server.port)
    await listen(server.port, 1)
    await open_legacy(server.port)
    # The SDK itself requests the list before a call in the modern protocol.
    call = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "echo", "arguments": {"text": "hi"}},
    }
    headers = ACCEPT_BOTH | session_headers(session_id)
    status, _, body = await request(server.port, "POST", "/mcp", headers, call)
    assert status == 200
    assert b'"text":"hi"' in body


async def ask(server: Process, method: str, params: dict[str, Any]) -> bytes:
    """Send a modern request; the response is JSON, or the only event of a stream."""
    async with asyncio.timeout(TIMEOUT):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            writer.write(modern_request(method, 1, params).replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
            answer = await reader.read()
        finally:
            writer.close()
    return bytes(re.findall(rb"\{.*\}", answer)[-1])
