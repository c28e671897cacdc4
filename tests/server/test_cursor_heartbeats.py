"""Bookmarks: heartbeats that carry a cursor on request, over every transport and in both eras."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import anyio
import httpx2
import mcp_types as types
import pytest
from mcp.client.extension import NotificationBinding
from mcp.client.session import ClientSession
from mcp.client.stdio import stdio_client
from pydantic import BaseModel, ConfigDict, Field

from tests.support.cursors import SPRINT, WATCHED, change_summaries, position, told
from tests.support.sdk_clients import DEADLINE, LEGACY, MODERN, serving_all, stdio_server
from tests.support.wire_clients import LegacyWire, Wire, http
from tidings.core.frames import CURSOR_KEY, EXTENSION, FILTER_KEY, HEARTBEAT_METHOD, RESUME_KEY, SUBSCRIPTION_KEY

__all__ = ["http"]

pytestmark = pytest.mark.anyio

SERVERS: dict[str, tuple[str, dict[str, Any]]] = {"beating": ("mcpserver", {"policy": {"keep_alive": 0.2}})}


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    with serving_all(SERVERS) as urls:
        yield urls


async def test_heartbeats_carry_a_cursor_on_request(urls: dict[str, str], http: httpx2.AsyncClient) -> None:
    wire = Wire(urls["beating"], http)
    bookmarks = {FILTER_KEY: {"bookmarks": True}}
    async with wire.listen("b", WATCHED, bookmarks) as stream:
        acknowledged = (await stream.message())["params"]["_meta"]
        assert acknowledged[FILTER_KEY] == {"bookmarks": True}
        beat = await stream.message()
        assert beat["method"] == HEARTBEAT_METHOD
        assert beat["params"]["_meta"] == {SUBSCRIPTION_KEY: "b", CURSOR_KEY: acknowledged[CURSOR_KEY]}

        await wire.change("add", feature="tools", key="beaten")
        while (message := await stream.message())["method"] == HEARTBEAT_METHOD:
            pass
        tools = message["params"]["_meta"][CURSOR_KEY]["topics"]["tools"]
        beat = await stream.message()
        assert beat["params"]["_meta"][CURSOR_KEY]["topics"]["tools"] == tools
    await wire.change("remove", feature="tools", key="beaten")

    async with wire.listen("plain", WATCHED) as stream:
        await stream.message()
        assert await stream.event() == ": keep-alive"


async def test_bookmark_has_no_pending_topics_and_includes_filtered_ones(
    urls: dict[str, str], http: httpx2.AsyncClient
) -> None:
    """A client that returns with a bookmark misses nothing and gets nothing twice."""
    wire = Wire(urls["beating"], http)
    terms = {"bookmarks": True, "names": ["x*"], "quietGap": 3600}
    async with wire.listen(1, WATCHED, {FILTER_KEY: terms}) as stream:
        first = (await stream.message())["params"]["_meta"][CURSOR_KEY]
        await wire.change("add", feature="tools", key="ruled-out")
        await wire.change("updated", uri=SPRINT)
        now = await position(wire)
        while (beat := (await stream.message())["params"]["_meta"][CURSOR_KEY]) == first:
            pass
    assert beat["topics"]["tools"] == now["topics"]["tools"]
    assert beat["uris"][SPRINT] == first["uris"][SPRINT] != now["uris"][SPRINT]

    async with wire.listen(2, WATCHED, {FILTER_KEY: {"names": ["x*"]}, RESUME_KEY: beat}) as stream:
        await stream.message()
        assert change_summaries(await told(stream, wire)) == [(["updated " + SPRINT], True)]
    await wire.change("remove", feature="tools", key="ruled-out")


class _Bookmark(BaseModel):
    model_config = ConfigDict(extra="allow")
    meta: dict[str, Any] = Field(alias="_meta")


@pytest.mark.parametrize("version", [MODERN, LEGACY[-1]])
async def test_heartbeats_are_sent_on_stdio(version: str) -> None:
    """On a listen stream of the SDK, and in a legacy session."""
    beats: list[dict[str, Any]] = []
    came = anyio.Event()

    async def note(params: _Bookmark) -> None:
        beats.append(params.meta[CURSOR_KEY])
        came.set()

    server = stdio_server("mcpserver", policy={"keep_alive": 0.2})
    binding = NotificationBinding(method=HEARTBEAT_METHOD, params_type=_Bookmark, handler=note)
    settings: dict[str, dict[str, Any]] = {EXTENSION: {"filter": {"bookmarks": True}}}
    async with AsyncExitStack() as stack:
        reader, writer = await stack.enter_async_context(stdio_client(server))
        session = ClientSession(reader, writer, notification_bindings=[binding], extensions=settings)
        await stack.enter_async_context(session)
        async with anyio.create_task_group() as tasks:
            with anyio.fail_after(DEADLINE):
                if version == MODERN:
                    await session.discover()
                    listen = types.SubscriptionsListenRequest.model_validate(
                        {"params": {"notifications": {"toolsListChanged": True}}}
                    )
                    tasks.start_soon(session.send_request, listen, types.SubscriptionsListenResult)
                else:
                    await session.initialize()
                await came.wait()
            tasks.cancel_scope.cancel()
    assert "tools" in beats[0]["topics"]


async def test_heartbeats_are_sent_on_legacy_streams(urls: dict[str, str], http: httpx2.AsyncClient) -> None:
    legacy = LegacyWire(urls["beating"], http)
    await legacy.shake_hands({FILTER_KEY: {"bookmarks": True}})
    async with legacy.stream() as stream:
        beat = await stream.message()
    await legacy.end()

    assert beat["method"] == HEARTBEAT_METHOD
    assert beat["params"]["_meta"][CURSOR_KEY]["topics"].keys() == {"tools", "prompts", "resources"}
