"""The handshake and notifications of clients: what is advertised, repeated handshakes, and middleware of the user."""

from __future__ import annotations

from typing import Any

import anyio
import httpx2
import pytest
from mcp.client import Client
from mcp.server import Server
from mcp_types import ListToolsResult

from tests.support.sdk_clients import DEADLINE, serving
from tests.support.wire_clients import LegacyWire
from tidings import Feature, Live

pytestmark = pytest.mark.anyio

INFO = {"name": "wire", "version": "1"}
NOTHING = {"tools": False, "prompts": False, "resources": False, "subscribe": False}
ALL = {"tools": True, "prompts": True, "resources": True, "subscribe": True}


async def promised(wire: LegacyWire) -> dict[str, bool]:
    answer = await wire.post("initialize", protocolVersion=wire.version, capabilities={}, clientInfo=INFO)
    capabilities: dict[str, Any] = answer["result"]["capabilities"]
    told = {feature: capabilities[feature]["listChanged"] for feature in ("tools", "prompts", "resources")}
    return told | {"subscribe": capabilities["resources"]["subscribe"]}


@pytest.mark.parametrize("kind", ["mcpserver", "fastmcp"])
async def test_stateless_app_advertises_no_notifications(kind: str, http: httpx2.AsyncClient) -> None:
    with serving(kind, app={"stateless_http": True}) as url:
        assert await promised(LegacyWire(url, http)) == NOTHING


async def test_session_over_the_limit_advertises_nothing_and_gives_the_reason(http: httpx2.AsyncClient) -> None:
    with serving("mcpserver", policy={"max_streams": 1}) as url:
        first, second = LegacyWire(url, http), LegacyWire(url, http)
        assert await promised(first) == ALL
        assert await promised(second) == NOTHING
        await second.post("notifications/initialized", None)

        refused = await second.post("resources/subscribe", uri="board://sprint")
        assert "Policy.max_streams allows 1" in refused["error"]["message"]

        await first.end()
        assert await promised(LegacyWire(url, http)) == ALL


async def test_second_handshake_replaces_the_first_subscription(http: httpx2.AsyncClient) -> None:
    with serving("mcpserver", policy={"max_streams": 1}) as url:
        wire = LegacyWire(url, http)
        assert await promised(wire) == ALL
        await wire.post("notifications/initialized", None)
        await wire.post("resources/subscribe", uri="board://sprint")
        assert await promised(wire) == ALL
        await wire.post("notifications/initialized", None)

        async with wire.stream() as stream:
            for number in (1, 2):
                call: dict[str, Any] = {
                    "name": "change",
                    "arguments": {"what": "add", "args": {"feature": "tools", "key": f"t{number}"}},
                }
                await wire.post("tools/call", **call)
            heard = [await stream.received(), await stream.received()]
        assert [each.summary for each in heard] == ["tools added t1", "tools added t2"]


async def test_second_handshake_below_the_limit_ends_the_refusal_of_the_first(http: httpx2.AsyncClient) -> None:
    """Tidings now notifies the session, so the notifications that a handler sends to it are not sent as well."""
    with serving("lowlevel", policy={"max_streams": 1}) as url:
        first, second = LegacyWire(url, http), LegacyWire(url, http)
        await promised(first)
        assert await promised(second) == NOTHING
        await first.end()
        assert await promised(second) == ALL
        await second.post("notifications/initialized", None)
        async with second.stream() as stream:
            for name in ("one", "two"):
                args = {"feature": "prompts", "key": name, "item": {"name": name}}
                call: dict[str, Any] = {"name": "change", "arguments": {"what": "own_set_and_send", "args": args}}
                await second.post("tools/call", **call)
            heard = [await stream.received(), await stream.received()]
        assert [each.summary for each in heard] == ["prompts added one", "prompts added two"]


@pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")
async def test_notification_of_a_client_does_not_wait_for_lists() -> None:
    is_reading, is_heard = anyio.Event(), anyio.Event()
    should_wait = False

    async def list_tools(ctx: Any, params: Any) -> ListToolsResult:
        if should_wait:
            is_reading.set()
            await is_heard.wait()
        return ListToolsResult(tools=[])

    async def on_roots(ctx: Any, params: Any) -> None:
        is_heard.set()

    live = Live(Server("board", on_list_tools=list_tools, on_roots_list_changed=on_roots))
    live.list_reader.request_timeout = 2 * DEADLINE
    async with Client(live.lowlevel, mode="legacy") as client:
        should_wait = True
        live.list_reader.wake(Feature.TOOLS)
        with anyio.fail_after(DEADLINE):
            await is_reading.wait()
            await client.send_roots_list_changed()
            await is_heard.wait()


async def test_response_of_user_middleware_to_discover_stays_as_it_is() -> None:
    async def respond(ctx: Any, call_next: Any) -> Any:
        return {"ok": True} if ctx.method == "server/discover" else await call_next(ctx)

    server: Server[Any] = Server("board")
    server.middleware.append(respond)
    live = Live(server)
    assert await live.list_reader.request("server/discover", "2026-07-28") == {"ok": True}
