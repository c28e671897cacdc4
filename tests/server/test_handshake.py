"""The handshake of legacy sessions: stateless apps, sessions over the limit, and repeated handshakes."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.support.sdk_clients import serving
from tests.support.wire_clients import LegacyWire

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
