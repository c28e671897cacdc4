"""The server-sent events for a page: live, merged, and complete after the page reconnects."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from tests.support.console import serving_console
from tests.support.sdk_clients import DEADLINE
from tests.support.waiting import until
from tidings.console.record import Record

pytestmark = pytest.mark.anyio

TOOLS = {"toolsListChanged": True}


def record_of(served: Any) -> Record:
    record = served.live.subscriptions.client_observer
    assert isinstance(record, Record)
    return record


async def test_page_is_told_of_changes_clients_and_fetches() -> None:
    async with serving_console() as served, served.events() as events:
        name, hello = await events.next()
        assert (name, set(hello)) == ("hello", {"epoch", "revision", "started"})
        overview = await events.until("overview")
        assert overview["server"]["started"] == hello["started"]
        assert "history" not in overview
        async with served.modern().listen(1, TOOLS):
            (client,) = (await events.until("clients", lambda data: data["upserted"]))["upserted"]
            assert (client["name"], client["delivered"]) == ("dör", 0)
            served.change("new")
            change = await events.until("change")
            assert (change["items"][0]["key"], change["told"], change["fetched"]) == ("clock", 1, 0)
            (client,) = (await events.until("clients", lambda data: data["upserted"]))["upserted"]
            assert client["delivered"] == 1
            catalog = await events.until("catalog")
            assert catalog == {"feature": "tools", "revision": change["revision"], "digest": change["digest"]}
            await served.modern().post("tools/list", 2)
            changed = await events.until("changed")
            assert (changed["id"], changed["fetched"]) == (change["id"], 1)
        assert (await events.until("clients", lambda data: data["removed"]))["removed"] == [client["id"]]


async def test_page_that_reconnects_starts_again() -> None:
    async with serving_console() as served:
        async with served.events() as events:
            first = (await events.next())[1]
        served.change("meanwhile")
        async with served.events() as events:
            again = (await events.next())[1]
            assert (again["started"], again["revision"]) == (first["started"], first["revision"] + 1)
            served.change("after")
            assert (await events.until("change"))["items"][0]["fields"][0]["after"] == "after"
        await until(lambda: not record_of(served).updates)


async def test_many_changes_in_one_turn_are_cut_and_can_be_requested() -> None:
    async with serving_console() as served, served.events() as events:
        await events.until("overview")
        for number in range(120):
            served.change(str(number))
        ids = [(await events.until("change"))["id"] for _ in range(25)]
        assert ids == list(range(96, 121))
        assert len((await served.get("changes", before=96))["changes"]) == 95


async def test_slow_page_costs_no_more_than_the_record() -> None:
    """The server keeps one set of ids for a page that does not read, and no queue."""
    async with serving_console() as served, served.modern().listen(1, TOOLS):
        await served.until(lambda found: found["clients"], "clients")
        record = record_of(served)
        async with served.events() as events:
            await events.next()
            (updates,) = record.updates
            for number in range(3000):
                served.change(str(number))
            assert len(updates.changes) <= 1000
            assert len(updates.clients) <= 1
            for _ in range(2000):
                served.live.hub.open(lambda _: None).close()
            assert len(updates.removed) == 1000


async def test_streams_end_when_the_server_stops() -> None:
    async with serving_console() as served, served.events() as events:
        await events.next()
        served.live.stop()
        with anyio.fail_after(DEADLINE):
            async for _ in events.events:
                pass


async def test_quiet_page_gets_heartbeats_and_the_overview(monkeypatch: pytest.MonkeyPatch) -> None:
    from tidings.console import stream

    monkeypatch.setattr(stream, "_HEARTBEAT", 0.3)
    async with serving_console() as served, served.events() as events:
        for _ in range(3):
            await events.until("overview")


async def test_change_is_updated_when_the_time_to_fetch_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from tidings.console import change as change_module
    from tidings.console import record

    for module in (change_module, record):
        monkeypatch.setattr(module, "FETCH_TIMEOUT", 0.2)
    async with serving_console() as served, served.modern().listen(1, TOOLS), served.events() as events:
        await events.until("overview", lambda data: data["clients"])
        served.change("new")
        change = await events.until("change")
        changed = await events.until("changed", lambda data: data["notFetched"])
        assert (changed["id"], changed["told"], changed["fetched"]) == (change["id"], 1, 0)
        (found,) = (await served.get("changes", notFetched=1))["changes"]
        assert found["id"] == change["id"]


def test_one_server_has_one_record() -> None:
    async def main() -> None:
        async with serving_console() as served:
            before = record_of(served)
            served.live.console_routes("write", token="another")
            assert record_of(served) is before

    asyncio.run(main())
