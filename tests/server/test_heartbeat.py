"""Heartbeats: those that carry a cursor on request, over every transport and in both eras."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp.client.extension import NotificationBinding
from mcp.client.session import ClientSession
from mcp.client.stdio import stdio_client
from pydantic import BaseModel, ConfigDict, Field

from tests.support.cursors import SPRINT, WATCHED, change_summaries, position, told
from tests.support.sdk_clients import DEADLINE, LEGACY, MODERN, stdio_server
from tests.support.wire_clients import Wires
from tidings.core.frames import CURSOR_KEY, EXTENSION, FILTER_KEY, HEARTBEAT_METHOD, RESUME_KEY, SUBSCRIPTION_KEY
from tidings.server.heartbeat import Heartbeat

pytestmark = pytest.mark.anyio

SERVERS: dict[str, tuple[str, dict[str, Any]]] = {"beating": ("mcpserver", {"policy": {"keep_alive": 0.2}})}


async def test_heartbeats_carry_a_cursor_on_request(wires: Wires) -> None:
    wire = wires.modern("beating")
    async with wire.listen("b", WATCHED, {FILTER_KEY: {"bookmarks": True}}) as stream:
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


async def test_heartbeat_has_no_pending_topics_and_includes_filtered_ones(wires: Wires) -> None:
    """A client that returns with its cursor misses nothing and gets nothing twice."""
    wire = wires.modern("beating")
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


class _Heartbeat(BaseModel):
    model_config = ConfigDict(extra="allow")
    meta: dict[str, Any] = Field(alias="_meta")


@pytest.mark.parametrize("version", [MODERN, LEGACY[-1]])
async def test_heartbeats_are_sent_on_stdio(version: str) -> None:
    """On a listen stream of the SDK, and in a legacy session."""
    beats: list[dict[str, Any]] = []
    came = anyio.Event()

    async def note(params: _Heartbeat) -> None:
        beats.append(params.meta[CURSOR_KEY])
        came.set()

    server = stdio_server("mcpserver", policy={"keep_alive": 0.2})
    binding = NotificationBinding(method=HEARTBEAT_METHOD, params_type=_Heartbeat, handler=note)
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


async def test_heartbeats_are_sent_on_legacy_streams(wires: Wires) -> None:
    legacy = wires.legacy("beating")
    await legacy.shake_hands({FILTER_KEY: {"bookmarks": True}})
    async with legacy.stream() as stream:
        beat = await stream.message()
    await legacy.end()

    assert beat["method"] == HEARTBEAT_METHOD
    assert beat["params"]["_meta"][CURSOR_KEY]["topics"].keys() == {"tools", "prompts", "resources"}


async def test_failing_connection_does_not_stop_the_heartbeat_of_others(caplog: pytest.LogCaptureFixture) -> None:
    heartbeat = Heartbeat(0.001)
    beats = 0
    is_thrice = anyio.Event()

    def fail() -> None:
        raise RuntimeError("its connection is gone")

    def beat() -> None:
        nonlocal beats
        beats += 1
        if beats == 3:
            is_thrice.set()

    heartbeat.add(fail)
    heartbeat.add(beat)
    with anyio.fail_after(DEADLINE):
        await is_thrice.wait()

    assert "a heartbeat could not be sent" in caplog.text
    for each in (fail, beat):
        heartbeat.remove(each)
