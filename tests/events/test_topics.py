"""Changes of topics as events: they need no code, and a retry has the id of the first attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import mcp_types as types
import pytest
from fastmcp import FastMCP
from mcp.server import Server
from mcp.server.mcpserver import MCPServer

from tests.support.events import EventClient, event_receiver, serving_events
from tests.support.hooks import nothing
from tests.support.messages import LATEST_LEGACY, MODERN
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE, until
from tests.support.wire_clients import LegacyWire, Wire
from tidings import Feature, Live, Policy, Principal
from tidings.core.frames import DURABLE_KEY
from tidings.events import delivery

pytestmark = pytest.mark.anyio

NAMES = ["tools.list_changed", "prompts.list_changed", "resources.list_changed", "resource.updated"]


async def test_capability_is_advertised_and_every_topic_is_an_event_type() -> None:
    async with serving_events() as (_, client):
        assert (await client.request("server/discover"))["capabilities"]["events"] == {}
        found = (await client.request("events/list"))["events"]
        assert [each["name"] for each in found] == NAMES
        assert {tuple(each["delivery"]) for each in found} == {("webhook",)}
        assert found[-1]["inputSchema"]["required"] == ["uri"]


async def test_challenge_comes_first_and_a_change_has_its_metadata() -> None:
    async with event_receiver() as receiver, serving_events() as (live, client):
        result = await client.subscribe(receiver, "tools.list_changed")
        assert result.keys() >= {"id", "refreshBefore", "cursor", "truncated"}
        assert (result["cursor"], result["truncated"]) == (None, False)
        assert receiver.challenges == 1
        await until(lambda: live.durables.is_connected((("alice", None), result["id"])))
        live.tools.add(nothing, name="one")

        delivery = await receiver.next()
        event = delivery.envelope
        assert event["name"] == "tools.list_changed"
        assert (event["data"]["operation"], event["data"]["tool"]["name"]) == ("added", "one")
        assert event["data"]["_meta"]["dev.tidings/change"]["revision"] == live.catalog.version(Feature.TOOLS).revision
        assert event["cursor"] is None
        assert delivery.headers["x-mcp-subscription-id"] == result["id"]


async def test_pattern_of_uris_gets_one_event_per_resource() -> None:
    async with event_receiver() as receiver, serving_events() as (live, client):
        await client.subscribe(receiver, "resource.updated", {"uri": "docs://*"})
        await until(lambda: len(live.hub))
        live.resources.updated("docs://a", author="Ann")
        event = await receiver.next_event()
        assert (event["data"]["uri"], event["data"]["metadata"]) == ("docs://a", {"author": "Ann"})
        live.resources.updated("other://x")
        live.resources.updated("docs://b")
        assert (await receiver.next_event())["data"]["uri"] == "docs://b"


async def test_retry_has_the_same_id_also_after_a_restart_and_a_later_change_another_one(tmp_path: Path) -> None:
    store = tmp_path / "state.db"
    async with event_receiver() as receiver:
        receiver.answers(503)
        async with serving_events(store) as (live, client):
            await client.subscribe(receiver, "tools.list_changed")
            await until(lambda: len(live.hub))
            live.tools.add(nothing, name="one")
            first = await receiver.next()
            again = await receiver.next()
            assert (first.id, first.body) == (again.id, again.body)
        while not receiver.receiver.came.empty():
            receiver.receiver.came.get_nowait()
        async with serving_events(store, declare=lambda live: live.tools.add(nothing, name="one")) as (live, client):
            await client.request("server/discover")
            assert (await receiver.next()).id == first.id
            receiver.answers(200)
            await until(lambda: len(live.hub))
            live.tools.add(nothing, name="two")
            event = await receiver.next()
            while "two" not in event.body.decode():
                event = await receiver.next()
            assert event.id != first.id


@pytest.mark.parametrize("kind", ["lowlevel", "fastmcp"])
@pytest.mark.parametrize("version", [MODERN, LATEST_LEGACY])
async def test_every_kind_of_server_serves_events_in_both_eras(kind: str, version: str) -> None:
    server: Any = Server("low", on_list_tools=list_no_tools) if kind == "lowlevel" else FastMCP("fast")
    live = Live(server, events=True)
    async with run_uvicorn(live.http_app()) as running, httpx2.AsyncClient(timeout=DEADLINE, verify=False) as http:
        url = f"http://127.0.0.1:{address_of(running)[1]}/mcp"
        if version == MODERN:
            client = EventClient(url, http, token="")
            capabilities = (await client.request("server/discover"))["capabilities"]
            found = (await client.request("events/list"))["events"]
        else:
            wire = LegacyWire(url, http, version)
            capabilities = (await wire.shake_hands())["capabilities"]
            found = (await wire.post("events/list"))["result"]["events"]
        assert capabilities["events"] == {}
        assert "tools.list_changed" in {each["name"] for each in found}
    live.close()


async def list_no_tools(ctx: Any, params: Any) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[])


async def test_subscription_ends_when_authorize_is_asked_again_and_refuses() -> None:
    refused: set[Any] = set()

    def authorize(principal: Principal | None, topic: Any) -> bool:
        return topic not in refused

    async with (
        event_receiver() as receiver,
        serving_events(authorize=authorize, authorize_interval=0.01) as (live, client),
    ):
        await client.subscribe(receiver, "tools.list_changed")
        await until(lambda: len(live.hub))
        refused.add(Feature.TOOLS)
        assert (await receiver.next()).envelope["type"] == "terminated"
        await until(lambda: not live.durables.all())


async def test_subscription_is_opened_again_after_its_rights_end_and_return() -> None:
    answers = iter([True, True, False])  # for the request, the check before opening, and the opening itself

    async with event_receiver() as receiver, serving_events(authorize=lambda *_: next(answers, True)) as (live, client):
        await client.subscribe(receiver, "tools.list_changed")
        await until(lambda: len(live.hub))
        assert next(answers, None) is None
        live.tools.add(nothing, name="one")
        assert (await receiver.next_event())["data"]["tool"]["name"] == "one"


async def test_subscription_resumes_after_a_stream_that_used_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_RECHECK_DELAY", 0.01)
    async with event_receiver() as receiver, serving_events() as (live, client):
        name = (await client.subscribe(receiver, "tools.list_changed"))["id"]
        await until(lambda: len(live.hub))
        receiver.receiver.gate.clear()
        live.tools.add(nothing, name="one")
        await receiver.next()
        wire = Wire(client.url, client.http, {"Authorization": "Bearer alice"})
        async with wire.listen(1, {"toolsListChanged": True}, {DURABLE_KEY: {"name": name}}) as stream:
            await stream.message()
        await until(lambda: [each.kind.transport for each in live.hub] == ["events"])


async def test_receiver_that_missed_too_much_is_told_once_what_to_read_again(tmp_path: Path) -> None:
    store = tmp_path / "state.db"
    async with event_receiver() as receiver:
        async with serving_events(store) as (live, client):
            await client.subscribe(receiver, "resource.updated", {"uri": "docs://*"})
            await until(lambda: len(live.hub))
            live.resources.updated("docs://1")
            await receiver.next()
            await until(lambda: live.hub.counts.events["delivered"])
        forgetful = Live(MCPServer("events"), policy=Policy(max_contents=1, journal_changes=1), store=store)
        for number in range(5):
            forgetful.resources.updated(f"docs://{number}")
        forgetful.close()
        receiver.answers(500, 200)
        async with serving_events(store) as (live, client):
            first, again = await receiver.next(), await receiver.next()
            assert (first.id, first.envelope["name"]) == (again.id, "resource.updated")
            assert again.envelope["data"]["_meta"]["dev.tidings/refetch"] == ["docs://*"]
            await until(lambda: len(live.hub))
            live.resources.updated("docs://7")
            assert (await receiver.next_event())["data"]["uri"] == "docs://7"


async def test_change_over_the_limit_is_sent_without_the_items() -> None:
    async with event_receiver() as receiver, serving_events() as (live, client):
        await client.subscribe(receiver, "tools.list_changed")
        await until(lambda: len(live.hub))
        with live.catalog.batch():
            for number in range(3):
                live.tools.add(nothing, name=f"t{number}", description="x" * 100_000)
        delivery = await receiver.next()
        assert len(delivery.body) <= 256 << 10
        names = [each["name"] for each in delivery.envelope["data"]["_meta"]["dev.tidings/change"]["changes"]]
        assert names == ["t0", "t1", "t2"]
