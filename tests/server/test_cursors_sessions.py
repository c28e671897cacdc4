"""Cursors of clients that can't send `_meta`, and of legacy clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import httpx2
import mcp_types as types
import pytest

from tests.support.cursors import SPRINT, change_summaries, position, told
from tests.support.sdk_clients import LEGACY, MARKER, MODERN, open_client, serving_all, stdio_server
from tests.support.wire_clients import LegacyWire, Wire, http
from tidings.core.frames import CURSOR_KEY, EXTENSION, REFETCH_KEY, RESUME_KEY

__all__ = ["http"]

pytestmark = pytest.mark.anyio

SERVERS: dict[str, tuple[str, dict[str, Any]]] = {"mcpserver": ("mcpserver", {})}


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    with serving_all(SERVERS) as urls:
        yield urls


@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_sdk_client_resumes_through_extension_settings(urls: dict[str, str], transport: str) -> None:
    server = urls["mcpserver"] if transport == "http" else stdio_server("mcpserver")
    lost = {"resume": {"epoch": "of another life", "topics": {"tools": {"revision": 1, "digest": "x"}}}}
    async with open_client(server, MODERN, extended="extensions", settings=lost) as client, client.listen():
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
async def test_legacy_client_resumes_from_its_cursor(
    urls: dict[str, str], http: httpx2.AsyncClient, where: str
) -> None:
    wire = Wire(urls["mcpserver"], http)
    known = await position(wire)
    await wire.change("add", feature="prompts", key="meanwhile")
    await wire.change("updated", uri=SPRINT)
    legacy = LegacyWire(wire.url, http)
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


async def test_legacy_client_with_an_invalid_cursor_is_told_to_refetch(
    urls: dict[str, str], http: httpx2.AsyncClient
) -> None:
    wire = Wire(urls["mcpserver"], http)
    for meta, expected in (({RESUME_KEY: 7}, 4), (None, 0)):
        legacy = LegacyWire(wire.url, http)
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


async def test_legacy_client_can_resume_a_pattern(urls: dict[str, str], http: httpx2.AsyncClient) -> None:
    wire = Wire(urls["mcpserver"], http)
    first = LegacyWire(wire.url, http)
    known = (await first.shake_hands(None, extensions={EXTENSION: {}}))["_meta"][CURSOR_KEY]
    await first.end()
    await wire.change("updated", uri="parts://1")
    await wire.change("updated", uri="parts://2")

    legacy = LegacyWire(wire.url, http)
    result = await legacy.shake_hands({RESUME_KEY: known})
    async with legacy.stream() as stream:
        for uri in ("parts://2", "parts://*", "parts://1", MARKER):
            await legacy.post("resources/subscribe", uri=uri)
        found = await told(stream, wire)
    await legacy.end()

    assert change_summaries(found) == [(["updated parts://2"], True), (["updated parts://1"], True)], "each once"
    assert result["_meta"][CURSOR_KEY]["asOf"] == known["asOf"], "it has not come to them yet"


@pytest.mark.parametrize("kind", ["mcpserver", "lowlevel"])
async def test_legacy_client_on_stdio_resumes_from_its_cursor(kind: str) -> None:
    lost = {"resume": {"epoch": "of another life", "topics": {"prompts": {"revision": 1, "digest": "x"}}}}
    async with open_client(stdio_server(kind), LEGACY[-1], extended="extensions", settings=lost) as client:
        await client.subscribe(MARKER)
        (heard,) = await client.settle("prompts None None")
        assert heard.change["complete"] is False
