"""Changes of topics as events: they need no code, and a retry is recognisable as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.events import event_receiver, serving_events
from tests.support.hooks import nothing
from tests.support.waiting import until
from tidings import Feature

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
