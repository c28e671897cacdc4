"""Cursors of clients that can't send `_meta`, and of legacy clients."""

from __future__ import annotations

from typing import Any

import anyio
import mcp_types as types
import pytest

from tests.support.cursors import SPRINT, change_summaries, position, told
from tests.support.sdk_clients import LEGACY, MARKER, MODERN, listening, open_client, stdio_server
from tests.support.wire_clients import Wires
from tidings.core.frames import CURSOR_KEY, EXTENSION, REFETCH_KEY, RESUME_KEY

pytestmark = pytest.mark.anyio

SERVERS: dict[str, tuple[str, dict[str, Any]]] = {"mcpserver": ("mcpserver", {})}


@pytest.mark.parametrize(
    ("where", "version"),
    [("http", MODERN), ("mcpserver", MODERN), ("mcpserver", LEGACY[-1]), ("lowlevel", LEGACY[-1])],
)
async def test_sdk_client_resumes_through_extension_settings(urls: dict[str, str], where: str, version: str) -> None:
    """Over HTTP, or on stdio by the kind of server."""
    server = urls["mcpserver"] if where == "http" else stdio_server(where)
    lost = {"resume": {"epoch": "of another life", "topics": {"tools": {"revision": 1, "digest": "x"}}}}
    async with open_client(server, version, extended="extensions", settings=lost) as client, listening(client):
        (heard,) = await client.settle("tools None None")
        assert heard.change["complete"] is False
        assert heard.meta[CURSOR_KEY]["topics"].keys() == {"tools"}


async def test_sdk_session_resumes_with_meta_over_stdio() -> None:
    async with open_client(stdio_server("mcpserver"), MODERN) as client:
        cursor = (await client.request("tools/list"))["_meta"][CURSOR_KEY]
        await client.change("add", feature="tools", key="missed")
        wanted: Any = {"toolsListChanged": True, "resourceSubscriptions": [MARKER]}
        listen = types.SubscriptionsListenRequest(
            params=types.SubscriptionsListenRequestParams.model_validate(
                {"notifications": wanted, "_meta": {RESUME_KEY: cursor}}
            )
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.session.send_request, listen, types.SubscriptionsListenResult)
            await client.until(lambda: "tools added missed" in client.summaries, "what it missed")
            await client.mark()
            tasks.cancel_scope.cancel()
    told = [each for each in client.received if each.change]
    assert [each.summary for each in told] == ["tools added missed", f"content updated {MARKER}"]
    assert told[0].change["complete"] is True


@pytest.mark.parametrize("where", ["_meta", "extensions", "experimental"])
async def test_legacy_client_resumes_from_its_cursor(wires: Wires, where: str) -> None:
    wire = wires.modern("mcpserver")
    known = await position(wire)
    await wire.change("add", feature="prompts", key="meanwhile")
    await wire.change("updated", uri=SPRINT)
    legacy = wires.legacy("mcpserver")
    settings = {where: {EXTENSION: {"resume": known}}} if where != "_meta" else {}
    result = await legacy.shake_hands({RESUME_KEY: known} if where == "_meta" else None, **settings)
    async with legacy.stream() as stream:
        for uri in (SPRINT, MARKER):
            answer = await legacy.post("resources/subscribe", uri=uri)
            assert answer["result"]["_meta"][CURSOR_KEY]["uris"].keys() == {uri}
        found = await told(stream, wire)
    await legacy.end()

    assert change_summaries(found) == [(["added meanwhile"], True), (["updated " + SPRINT], True)]
    assert result["_meta"][CURSOR_KEY]["topics"]["prompts"] == known["topics"]["prompts"]
    await wire.change("remove", feature="prompts", key="meanwhile")


async def test_legacy_client_with_an_invalid_cursor_is_told_to_refetch(wires: Wires) -> None:
    wire = wires.modern("mcpserver")
    for meta, expected in (({RESUME_KEY: 7}, 4), (None, 0)):
        legacy = wires.legacy("mcpserver")
        result = await legacy.shake_hands(meta)
        async with legacy.stream() as stream:
            refetch = [
                (await legacy.post("resources/subscribe", uri=uri))["result"].get("_meta", {}).get(REFETCH_KEY)
                for uri in (SPRINT, "board://*", MARKER)
            ]
            found = await told(stream, wire)
        await legacy.end()
        assert change_summaries(found) == [([], False)] * expected
        assert refetch == [None, ["board://*"] if meta else None, None]
        assert (CURSOR_KEY in result.get("_meta", {})) == bool(meta)


async def test_legacy_client_can_resume_a_pattern(wires: Wires) -> None:
    wire = wires.modern("mcpserver")
    first = wires.legacy("mcpserver")
    known = (await first.shake_hands(None, extensions={EXTENSION: {}}))["_meta"][CURSOR_KEY]
    await first.end()
    await wire.change("updated", uri="parts://1")
    await wire.change("updated", uri="parts://2")

    legacy = wires.legacy("mcpserver")
    result = await legacy.shake_hands({RESUME_KEY: known})
    async with legacy.stream() as stream:
        for uri in ("parts://2", "parts://*", "parts://1", MARKER):
            await legacy.post("resources/subscribe", uri=uri)
        found = await told(stream, wire)
    await legacy.end()

    assert change_summaries(found) == [(["updated parts://2"], True), (["updated parts://1"], True)], "each once"
    assert result["_meta"][CURSOR_KEY]["asOf"] == known["asOf"], "it has not come to them yet"
