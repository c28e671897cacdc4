"""Lists in legacy sessions: only the owner gets them, and a cached response has the same effects as the SDK's."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from mcp.server.streamable_http import EventStore

from tests.support.http_server import example_server, serving
from tests.support.lists import listed, sdk_requests
from tests.support.sdk_clients import LEGACY
from tests.support.tokens import authentication
from tests.support.waiting import DEADLINE
from tidings.sdk import internals

pytestmark = pytest.mark.anyio


async def test_session_belongs_to_its_owner_until_it_ends() -> None:
    async with serving(example_server(**authentication())) as local, local.client() as client:
        alice = await client.initialize(LEGACY[-1], Authorization="Bearer alice")
        for _ in range(2):
            assert b"200" in (await local.send(listed(**alice))).status
        for stranger in ({**alice, "Authorization": "Bearer bob"}, {**alice, "Mcp_Session_Id": "nobody"}):
            said = await local.sdk_response(listed(**stranger))
            assert b"404" in said.status
            with sdk_requests(local, 1):
                assert await local.send(listed(**stranger)) == said
        assert b"401" in (await local.send(listed(**{**alice, "Authorization": None}))).status

        with sdk_requests(local, 0):
            assert b"200" in (await local.send(listed(**alice))).status
        assert b"200" in (await client.send(client.request(b"", start="DELETE /mcp HTTP/1.1", **alice))).status
        with sdk_requests(local, 1):
            assert b"404" in (await local.send(listed(**alice))).status


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
async def test_doubtful_legacy_request_goes_to_the_sdk(changes: dict[str, str | None]) -> None:
    async with serving(example_server()) as local, local.client() as client:
        named = await client.initialize(LEGACY[-1])
        for _ in range(2):
            await client.send(listed(**named)(client))
        said = await local.sdk_response(listed(**(named | changes)))
        assert said.status.split()[1][:1] == b"4"
        with sdk_requests(local, 2):
            for _ in range(2):
                again = await local.send(listed(**(named | changes)))
                assert (again.status, again.body) == (said.status, said.body)


async def test_version_of_the_session_counts() -> None:
    """As with the SDK, later headers do not change the version."""
    async with serving(example_server()) as local, local.client() as client:
        named = await client.initialize("2024-11-05")
        newer = await client.initialize("2025-11-25")
        await local.send(listed(**named))
        await local.send(listed(**newer))
        for version in (None, "2025-11-25"):
            raw = listed(**(named | {"MCP_Protocol_Version": version}))
            with sdk_requests(local, 0):
                assert await local.send(raw) == await local.send(listed(**named))
            assert await local.sdk_response(raw) == await local.send(raw)


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
async def test_event_store_gets_every_list_response(json_response: bool) -> None:
    store = Store()
    options = {"event_store": store, "json_response": json_response}
    async with serving(example_server(), app=options) as local, local.client() as client:
        named = await client.initialize(LEGACY[-1])
        before = len(store.events)
        with sdk_requests(local, 3):
            for _ in range(3):
                assert (b"id: " in (await local.send(listed(**named))).body) != json_response
        assert len(store.events) - before == (3 if json_response else 6)


async def test_event_store_may_use_any_event_id() -> None:
    store = Store()
    async with serving(example_server(), app={"event_store": store}) as local, local.client() as client:
        named = await client.initialize(LEGACY[-1])
        client.writer.write(client.request(b"", start="GET /mcp HTTP/1.1", Last_Event_ID="tidings-0", **named))
        async with asyncio.timeout(DEADLINE):
            assert await store.resumed.get() == "tidings-0"


async def test_stateless_server_gives_the_sdk_response() -> None:
    async with serving(example_server(), app={"stateless_http": True}) as local:
        with sdk_requests(local, 3):
            for _ in range(3):
                assert b"200" in (await local.send(listed(MCP_Protocol_Version=LEGACY[-1]))).status


async def test_cached_response_postpones_the_idle_timeout() -> None:
    async with (
        serving(example_server(), app={"session_idle_timeout": 60}) as local,
        local.client() as client,
    ):
        named = await client.initialize(LEGACY[-1])
        for _ in range(2):
            await client.send(listed(**named)(client))
        transport = internals.session_of(local.live.server.session_manager, named["Mcp_Session_Id"] or "", None)
        assert transport is not None
        assert transport.idle_scope is not None
        transport.idle_scope.deadline = before = anyio.current_time() + 30
        with sdk_requests(local, 0):
            await client.send(listed(**named)(client))
        assert transport.idle_scope.deadline > before + 20

        # A session that is ending is not kept open.
        transport.idle_scope.cancel()
        with sdk_requests(local, 1):
            assert b"404" in (await client.send(listed(**named)(client))).status
