"""Lists in legacy sessions: they are their owner's, and kept answers leave nothing out that the SDK would do."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from mcp.server.streamable_http import EventStore

from tests.support.http_server import open_door, some_server
from tests.support.lists import listed, sdk_requests
from tests.support.sdk_clients import LEGACY
from tests.support.tokens import authentication
from tests.support.waiting import DEADLINE
from tidings.server import internals as seams

pytestmark = pytest.mark.anyio


async def test_a_session_is_its_owners_until_it_ends() -> None:
    async with open_door(some_server(**authentication())) as door, door.line() as line:
        alice = await line.shake_hands(LEGACY[-1], Authorization="Bearer alice")
        for _ in range(2):
            assert b"200" in (await door.send(listed(**alice))).status
        for stranger in ({**alice, "Authorization": "Bearer bob"}, {**alice, "Mcp_Session_Id": "nobody"}):
            said = await door.by_sdk(listed(**stranger))
            assert b"404" in said.status
            with sdk_requests(door, 1):
                assert await door.send(listed(**stranger)) == said
        assert b"401" in (await door.send(listed(**{**alice, "Authorization": None}))).status

        with sdk_requests(door, 0):
            assert b"200" in (await door.send(listed(**alice))).status
        assert b"200" in (await line.send(line.request(b"", start="DELETE /mcp HTTP/1.1", **alice))).status
        with sdk_requests(door, 1):
            assert b"404" in (await door.send(listed(**alice))).status


@pytest.mark.parametrize(
    "changes",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Accept": "application/json"},
        {"Content_Type": "application/jsonish"},
        {"MCP_Protocol_Version": "2031-01-01"},
        {"Mcp_Session_Id": None},
    ],
)
async def test_a_legacy_request_in_doubt_is_the_sdks(changes: dict[str, str | None]) -> None:
    async with open_door(some_server()) as door, door.line() as line:
        named = await line.shake_hands(LEGACY[-1])
        for _ in range(2):
            await line.send(listed(**named)(line))
        said = await door.by_sdk(listed(**(named | changes)))
        assert said.status.split()[1][:1] == b"4"
        with sdk_requests(door, 2):
            for _ in range(2):
                again = await door.send(listed(**(named | changes)))
                assert (again.status, again.body) == (said.status, said.body)


async def test_a_version_that_the_session_did_not_agree_on_changes_nothing() -> None:
    """As with the SDK: the session's own version counts, whatever later headers say."""
    async with open_door(some_server()) as door, door.line() as line:
        named = await line.shake_hands("2024-11-05")
        newer = await line.shake_hands("2025-11-25")
        await door.send(listed(**named))
        await door.send(listed(**newer))
        for version in (None, "2025-11-25"):
            raw = listed(**(named | {"MCP_Protocol_Version": version}))
            with sdk_requests(door, 0):
                assert await door.send(raw) == await door.send(listed(**named))
            assert await door.by_sdk(raw) == await door.send(raw)


class Store(EventStore):
    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.resumed: asyncio.Queue[str] = asyncio.Queue()

    async def store_event(self, stream_id: str, message: Any) -> str:
        self.events.append((stream_id, message))
        return str(len(self.events))

    async def replay_events_after(self, last_event_id: str, send_callback: Any) -> str | None:
        self.resumed.put_nowait(last_event_id)
        return None


@pytest.mark.parametrize("json_response", [True, False])
async def test_a_server_that_stores_events_stores_those_of_every_list(json_response: bool) -> None:
    store = Store()
    options = {"event_store": store, "json_response": json_response}
    async with open_door(some_server(), app=options) as door, door.line() as line:
        named = await line.shake_hands(LEGACY[-1])
        before = len(store.events)
        with sdk_requests(door, 3):
            for _ in range(3):
                assert (b"id: " in (await door.send(listed(**named))).body) != json_response
        assert len(store.events) - before == (3 if json_response else 6)


async def test_a_server_that_stores_events_may_give_them_any_id() -> None:
    store = Store()
    async with open_door(some_server(), app={"event_store": store}) as door, door.line() as line:
        named = await line.shake_hands(LEGACY[-1])
        line.writer.write(line.request(b"", start="GET /mcp HTTP/1.1", Last_Event_ID="tidings-0", **named))
        async with asyncio.timeout(DEADLINE):
            assert await store.resumed.get() == "tidings-0"


async def test_a_server_without_sessions_answers_by_itself() -> None:
    async with open_door(some_server(), app={"stateless_http": True}) as door:
        with sdk_requests(door, 3):
            for _ in range(3):
                assert b"200" in (await door.send(listed(MCP_Protocol_Version=LEGACY[-1]))).status


async def test_a_list_that_is_kept_keeps_its_session_from_idling_out() -> None:
    async with open_door(some_server(), app={"session_idle_timeout": 60}) as door, door.line() as line:
        named = await line.shake_hands(LEGACY[-1])
        for _ in range(2):
            await line.send(listed(**named)(line))
        transport = seams.session_of(door.live.server.session_manager, named["Mcp_Session_Id"] or "", None)
        assert transport is not None
        assert transport.idle_scope is not None
        transport.idle_scope.deadline = before = anyio.current_time() + 30
        with sdk_requests(door, 0):
            await line.send(listed(**named)(line))
        assert transport.idle_scope.deadline > before + 20

        # A session that is ending is not held up.
        transport.idle_scope.cancel()
        with sdk_requests(door, 1):
            assert b"404" in (await line.send(listed(**named)(line))).status
