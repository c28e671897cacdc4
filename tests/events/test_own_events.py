"""Events of the server's own code: declared types, matching arguments, and the queue that survives a crash.

Covers `delivery.py`, `occurrences.py` and `types.py`.
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.server.mcpserver import MCPServer

from tests.support.events import POLICY, EventClient, event_receiver, serving_events
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE, until
from tidings import Live, Policy, TidingsError
from tidings.events import occurrences
from tidings.store.sqlite import peek
from tidings.telemetry.metrics import render

pytestmark = pytest.mark.anyio

NAME = "comment.created"
DOCUMENT = {"type": "object", "properties": {"document_id": {"type": "string"}}, "additionalProperties": False}


EMITTING = f"""
import os, signal, sys
from mcp.server.mcpserver import MCPServer
from tidings import Live

live = Live(MCPServer("events"), events=True, store=sys.argv[1])
live.event("{NAME}")
for number in range(20):
    live.emit("{NAME}", {{"document_id": "d1", "text": str(number)}})
os.kill(os.getpid(), signal.SIGKILL)
"""


def declare(live: Live) -> None:
    @live.event(NAME, arguments=DOCUMENT)
    @dataclass
    class CommentCreated:
        """Somebody has commented on a document."""

        document_id: str
        text: str


def comment(document_id: str = "d1", text: str = "…") -> dict[str, str]:
    return {"document_id": document_id, "text": text}


async def test_declared_type_has_the_schemas_and_the_description_of_its_class() -> None:
    async with serving_events(declare=declare) as (_, client):
        found = (await client.request("events/list"))["events"][-1]
        assert (found["name"], found["description"]) == (NAME, "Somebody has commented on a document.")
        assert found["inputSchema"] == DOCUMENT
        assert found["payloadSchema"]["required"] == ["document_id", "text"]


async def test_event_goes_to_the_subscriptions_whose_arguments_match() -> None:
    async with event_receiver() as one, event_receiver() as every, serving_events(declare=declare) as (live, client):
        await client.subscribe(one, NAME, {"document_id": "d1"})
        await client.subscribe(every, NAME)
        live.emit(NAME, comment("d2", "two"))
        event_id = live.emit(NAME, comment("d1", "one"), event_id="upstream-1")
        live.emit(NAME, comment("d2", "hidden"), matching={"document_id": "d1"})
        assert event_id == "upstream-1"
        first, second = await one.next_event(), await one.next_event()
        assert (first["eventId"], first["data"]["text"]) == ("upstream-1", "one")
        assert second["data"]["text"] == "hidden"
        assert [(await every.next_event())["data"]["text"] for _ in range(3)] == ["two", "one", "hidden"]


async def test_invalid_events_are_refused() -> None:
    cyclic: dict[str, Any] = {}
    cyclic["text"] = cyclic
    async with serving_events(declare=declare) as (live, _):
        for name, data, reason in (
            ("comment.deleted", {}, "there is no event type"),
            ("tools.list_changed", {}, "the server emits it by itself"),
            (NAME, {"document_id": "d1"}, "'text' is a required property"),
            (NAME, comment(text="x" * (256 << 10)), "262144 are allowed"),
            (NAME, {"document_id": object(), "text": ""}, "no JSON form"),
            (NAME, comment(text="\ud800"), "no JSON form"),
            (NAME, cyclic, "no JSON form"),
        ):
            with pytest.raises(TidingsError, match=reason):
                live.emit(name, data)
        mistakes: list[tuple[Any, str]] = [(["text"], "must be a mapping"), (cyclic, "matching has no JSON form")]
        for matching, reason in mistakes:
            with pytest.raises(TidingsError, match=reason):
                live.emit(NAME, comment(), matching)
        ids: list[Any] = ["", "two.parts", "ä", "line\n", "x" * 257, 5]
        for event_id in ids:
            with pytest.raises(TidingsError, match="is not the id of an event"):
                live.emit(NAME, comment(), event_id=event_id)
        with pytest.raises(TidingsError, match="there is an event type"):
            live.event(NAME)
        with pytest.raises(TidingsError, match="is not the name of an event"):
            live.event("two words")
        with pytest.raises(TidingsError, match="schema of the payload"):
            live.event("x", payload={"type": "nothing"})
        with pytest.raises(TidingsError, match="has no JSON form"):  # all clients would get no list
            live.event("x", payload={"type": "object", "default": object()})


async def test_event_of_another_thread_is_delivered() -> None:
    async with event_receiver() as receiver, serving_events(declare=declare) as (live, client):
        await client.subscribe(receiver, NAME)
        thread = threading.Thread(target=live.emit, args=(NAME, comment(text="thread")))
        thread.start()
        assert (await receiver.next_event())["data"]["text"] == "thread"
        thread.join()


async def test_hooks_are_called_for_the_first_and_the_last_subscriber_of_the_same_arguments(tmp_path: Path) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def declare(live: Live) -> None:
        async def on_last(arguments: dict[str, Any]) -> None:
            calls.append(("last", arguments))

        on_first: Callable[[dict[str, Any]], None] = lambda arguments: calls.append(("first", arguments))  # noqa: E731
        live.event(NAME, arguments=DOCUMENT, on_first=on_first, on_last=on_last)

    store = tmp_path / "state.db"
    async with event_receiver("/1") as one, event_receiver("/2") as two:
        async with serving_events(store, declare=declare) as (_, client):
            await client.subscribe(one, NAME, {"document_id": "d1"})
            await client.subscribe(two, NAME, {"document_id": "d1"})
            await client.subscribe(one, NAME, {"document_id": "d2"})
            assert calls == [("first", {"document_id": "d1"}), ("first", {"document_id": "d2"})]
            await unsubscribe(client, one.url, "d2")
            await until(lambda: calls[2:] == [("last", {"document_id": "d2"})])
        calls.clear()
        async with serving_events(store, declare=declare) as (_, client):
            await client.request("server/discover")
            assert calls == [("first", {"document_id": "d1"})]
            await unsubscribe(client, one.url, "d1")
            await unsubscribe(client, two.url, "d1")
            await until(lambda: calls[1:] == [("last", {"document_id": "d1"})])


async def test_hook_for_the_first_subscriber_is_called_again_when_the_application_is_started_again() -> None:
    calls: list[dict[str, Any]] = []
    live = Live(MCPServer("events"), events=True, policy=Policy(**POLICY, webhooks="anyone"))
    live.event(NAME, on_first=calls.append)
    async with event_receiver() as receiver, httpx2.AsyncClient(timeout=DEADLINE, verify=False) as http:
        for count in (1, 2):
            async with run_uvicorn(live.http_app()) as running:
                client = EventClient(f"http://127.0.0.1:{address_of(running)[1]}/mcp", http, token="")
                await client.subscribe(receiver, NAME)
                assert calls == [{}] * count


async def unsubscribe(client: EventClient, url: str, document_id: str) -> None:
    await client.request("events/unsubscribe", name=NAME, arguments={"document_id": document_id}, delivery={"url": url})


async def test_undelivered_events_survive_a_restart_in_order_with_their_ids(tmp_path: Path) -> None:
    store = tmp_path / "state.db"
    async with event_receiver() as receiver:
        receiver.answers(500)
        async with serving_events(store, declare=declare) as (live, client):
            await client.subscribe(receiver, NAME)
            ids = [live.emit(NAME, comment(text=str(number))) for number in range(5)]
            assert (await receiver.next()).id == ids[0]
        receiver.answers(200)
        async with serving_events(store, declare=declare) as (live, client):
            await client.request("server/discover")
            await until(lambda: not len(live.events.occurrences))
            got = [(await receiver.next()).id]
            while got[-1] != ids[-1]:
                got.append((await receiver.next()).id)
            assert list(dict.fromkeys(got)) == ids
        assert not [row for row in peek(store).events if row[1]]


async def test_event_that_was_emitted_survives_kill_9(tmp_path: Path) -> None:
    """The event is in the store when `emit` returns, even if the thread of the writer has not run."""
    store = tmp_path / "state.db"
    async with event_receiver() as receiver:
        async with serving_events(store, declare=declare) as (_, client):
            result = await client.subscribe(receiver, NAME)
        emitting = await asyncio.create_subprocess_exec(sys.executable, "-c", EMITTING, store)
        assert await emitting.wait() == -signal.SIGKILL
        assert len([row for row in peek(store).events if row[1] == result["id"]]) == 20
        async with serving_events(store, declare=declare) as (_, client):
            await client.request("server/discover")
            assert [(await receiver.next_event())["data"]["text"] for _ in range(20)] == [str(n) for n in range(20)]


async def test_queue_of_a_subscription_is_bounded_and_drops_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occurrences, "MAX_QUEUED", 3)
    async with event_receiver() as receiver, serving_events(declare=declare) as (live, client):
        await client.subscribe(receiver, NAME)
        receiver.receiver.gate.clear()
        live.emit(NAME, comment(text="0"))
        assert (await receiver.next_event())["data"]["text"] == "0"
        for number in range(1, 6):
            live.emit(NAME, comment(text=str(number)))
        assert len(live.events.occurrences) == 3
        assert live.hub.counts.events["dropped"] == 3
        receiver.receiver.gate.set()
        assert [(await receiver.next_event())["data"]["text"] for _ in range(3)] == ["3", "4", "5"]


async def test_bytes_of_all_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occurrences, "MAX_BYTES", 1000)
    async with event_receiver() as receiver, serving_events(declare=declare) as (live, client):
        await client.subscribe(receiver, NAME)
        receiver.receiver.gate.clear()
        for number in range(10):
            live.emit(NAME, comment(text=str(number) * 300))
        assert len(live.events.occurrences) == 2


async def test_event_that_is_too_old_is_not_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "state.db"
    async with event_receiver() as receiver:
        receiver.answers(500)
        async with serving_events(store, declare=declare) as (live, client):
            await client.subscribe(receiver, NAME)
            live.emit(NAME, comment(text="old"))
            await receiver.next()
        monkeypatch.setattr(occurrences, "MAX_AGE", 0.0)
        receiver.answers(200)
        async with serving_events(store, declare=declare) as (live, client):
            await client.request("server/discover")
            await until(lambda: live.hub.counts.events["dropped"] == 1)
            monkeypatch.setattr(occurrences, "MAX_AGE", 60.0)
            live.emit(NAME, comment(text="new"))
            event = await receiver.next_event()
            while event["data"]["text"] == "old":  # before the restart
                event = await receiver.next_event()
            assert event["data"]["text"] == "new"


async def test_store_of_an_older_version_gets_the_table_of_events(tmp_path: Path) -> None:
    store = tmp_path / "state.db"
    async with serving_events(store, declare=declare):
        pass
    with closing(sqlite3.connect(store)) as db, db:
        db.execute("DROP TABLE events")
    assert peek(store).events == {}
    async with serving_events(store, declare=declare) as (live, _):
        assert live.writer.problem is None
        assert live.writer.flush()


async def test_metrics_count_deliveries() -> None:
    async with event_receiver() as receiver, serving_events(declare=declare) as (live, client):
        await client.subscribe(receiver, NAME)
        receiver.answers(500, 200)
        live.emit(NAME, comment())
        await until(lambda: live.hub.counts.events["delivered"])
        metrics = render(live.metrics)
        for line in (
            'tidings_events_total{outcome="emitted"} 1',
            'tidings_events_total{outcome="failed"} 1',
            'tidings_events_total{outcome="delivered"} 1',
            'tidings_events_total{outcome="verified"} 1',
            "tidings_events_subscriptions 1",
        ):
            assert f"{line}\n" in metrics


async def test_history_has_the_newest_events_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(occurrences, "_HISTORY", 2)
    store = tmp_path / "state.db"
    async with event_receiver() as receiver:
        async with serving_events(store, declare=declare) as (live, client):
            live.emit(NAME, comment(text="0"))
            await client.subscribe(receiver, NAME)
            for number in range(1, 4):
                live.emit(NAME, comment(text=str(number)), event_id=f"id-{number}")
            await until(lambda: live.hub.counts.events["delivered"] == 3)
            live.emit(NAME, comment(text="again"), event_id="id-3")
            assert [each["data"]["text"] for each in live.events.history()] == ["2", "3"]
            receiver.answers(500)
            live.emit(NAME, comment(text="4"))
            assert [each["waiting"] for each in live.events.history(2)] == [0, 1]
        async with serving_events(store, declare=declare) as (live, _):
            assert [each["data"]["text"] for each in live.events.history()] == ["2", "3", "4"]
        assert len([row for row in peek(store).events if not row[1]]) == 3


SERVING = f"""
import asyncio, sys
from mcp.server.mcpserver import MCPServer
from tests.support.waiting import until
from tidings import Live, Policy

async def main():
    live = Live(MCPServer("events"), events=True, store=sys.argv[1], policy=Policy(webhook_private=True))
    live.event("{NAME}")
    await live.list_reader.ensure_loaded()
    while True:
        print(live.emit("{NAME}", {{"document_id": "d1", "text": ""}}), flush=True)
        await until(lambda: len(live.events.occurrences) <= 20)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 200])
async def test_server_that_is_killed_while_it_delivers_loses_no_event(tmp_path: Path, lines: int) -> None:
    store = tmp_path / "state.db"
    async with event_receiver() as receiver:
        async with serving_events(store, declare=declare) as (_, client):
            await client.subscribe(receiver, NAME)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVING, store, stdout=pipe)
        assert process.stdout is not None
        emitted = [(await process.stdout.readline()).strip() for _ in range(lines)]
        process.kill()
        emitted += (await process.stdout.read()).splitlines()[:-1]  # the last line may be incomplete
        await process.wait()
        missing = {event_id.decode() for event_id in emitted}
        async with serving_events(store, declare=declare):
            while missing:
                missing.discard((await receiver.next()).id)
