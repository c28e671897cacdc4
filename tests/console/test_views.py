"""The views of the console, with real clients of both eras over HTTP. Covers `app.py`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.console import serving_console
from tests.support.receiver import receiving
from tests.support.sdk_clients import LEGACY, MODERN, open_client
from tidings import Policy
from tidings.cluster import MemoryBackend
from tidings.cluster.memory import MemoryTable
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio

TOOLS = {"toolsListChanged": True}
FILTER = "dev.tidings/filter"


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("version", [*LEGACY[-2:], MODERN])
async def test_sdk_client_that_fetches_after_a_change_is_shown(version: str) -> None:
    async with (
        serving_console() as served,
        open_client(f"{served.url}/mcp", version) as client,
        AsyncExitStack() as stack,
    ):
        if client.is_modern:
            await stack.enter_async_context(client.listen())
        await served.until(lambda found: found["clients"], "clients")
        served.change("new")
        await client.until(lambda: bool(client.received), "the change")
        (told,) = (await served.newest_change())["deliveries"]
        assert (told["state"], told["fetched"], told["fetchedAfter"]) == ("told", "waiting", None)
        await client.session.list_tools()
        change = await served.newest_change()
        (told,) = change["deliveries"]
        assert (told["state"], told["fetched"], told["fetchedAfter"] > 0) == ("told", "yes", True)
        assert (change["told"], change["fetched"], change["notFetched"]) == (1, 1, 0)
        assert change["items"] == [
            {
                "operation": "updated",
                "key": "clock",
                "fields": [{"path": "description", "before": "", "after": "new"}],
            }
        ]
        (row,) = (await served.get("clients"))["clients"]
        name = ("mcp", "modern") if client.is_modern else ("client", "legacy")
        assert (row["name"], row["era"], row["protocol"], row["transport"]) == (*name, version, "http")
        assert (row["delivered"], row["suppressed"], row["pending"], row["isSlow"]) == (1, 0, 0, False)
        detail = await served.get(f"clients/{row['id']}")
        tools = next(watch for watch in detail["watches"] if watch["topic"] == "tools")
        assert tools["told"] == tools["current"] == {"revision": change["revision"], "digest": change["digest"]}
        assert tools["lastFetched"] is not None
        assert [each["revision"] for each in detail["recent"]] == [change["revision"]]


async def test_change_lists_each_client_with_its_reason() -> None:
    async with serving_console() as served, AsyncExitStack() as stack:
        wire = served.modern()
        terms = {FILTER: {"operations": ["removed"]}}
        for request_id, meta in (("all", {}), ("removals", terms)):
            await stack.enter_async_context(wire.listen(request_id, TOOLS, meta))
        legacy = {"muted": served.legacy("2025-03-26"), "absent": served.legacy()}
        for session in legacy.values():
            await session.shake_hands()
        await served.until(lambda found: len(found["clients"]) == 4, "clients")
        served.change("new")
        change = await served.newest_change()
        states = sorted((each["state"], each["reason"]) for each in change["deliveries"] if each["state"] != "told")
        assert states == [("pending", None), ("suppressed", "filter"), ("suppressed", "muted")]
        assert (change["told"], change["pending"], change["suppressed"]) == (1, 1, 2)

        served.change("newer")
        first = (await served.get("changes"))["changes"][1]
        assert (first["superseded"], first["pending"]) == (1, 0)
        async with legacy["absent"].stream() as stream:
            while "list_changed" not in await stream.event():
                pass
            newest = await served.newest_change()
            assert (newest["told"], newest["pending"], newest["suppressed"]) == (2, 0, 2)
        await legacy["absent"].end()
        row = await served.until(lambda found: len(found["clients"]) == 3, "clients")
        assert row["clients"]


async def test_client_that_leaves_while_a_change_is_pending_is_shown() -> None:
    async with serving_console() as served:
        session = served.legacy()
        await session.shake_hands()
        served.change("new")
        await session.end()
        await served.until(lambda found: not found["clients"], "clients")
        change = await served.newest_change()
        assert [(each["state"], each["reason"]) for each in change["deliveries"]] == [("closed", "disconnected")]
        client = await served.get(f"clients/{change['deliveries'][0]['client']}")
        assert (client["closed"], client["watches"]) == ("disconnected", [])


async def test_content_that_a_client_reads_counts_as_fetched() -> None:
    async with (
        serving_console() as served,
        open_client(f"{served.url}/mcp", MODERN) as client,
        client.listen("local://r", tools=False),
    ):
        await served.until(lambda found: found["clients"], "clients")
        served.live.resources.updated("local://r", metadata={"author": "Ann"})
        served.live.bridge.publish_queued()
        await client.session.read_resource("local://r")
        change = await served.newest_change()
        assert (change["topic"], change["told"], change["fetched"]) == ("local://r", 1, 1)
        assert change["items"][0]["fields"][0]["path"].startswith("metadata")
        item = await served.get("item", feature="resources", key="local://r")
        assert len(item["watchers"]) == 1


async def test_changes_are_paged_and_searched() -> None:
    async with serving_console() as served:
        for text in ("one", "two", "three"):
            served.change(text)
        served.live.prompts.update("greet", title="Greeting")
        served.live.bridge.publish_queued()
        page = await served.get("changes", limit=2)
        assert ([each["id"] for each in page["changes"]], page["hasMore"]) == ([4, 3], True)
        rest = await served.get("changes", limit=2, before=3)
        assert ([each["id"] for each in rest["changes"]], rest["hasMore"]) == ([2, 1], False)
        for text, number in (("GREET", 1), ("title", 1), ("tools", 3), ("description", 3), ("nothing", 0)):
            assert len((await served.get("changes", text=text))["changes"]) == number, text
        assert (await served.get("changes", notFetched=1))["changes"] == []
        missing = await served.http.get("/console/api/changes/99")
        assert (missing.status_code, list(missing.json())) == (404, ["error"])


async def test_catalog_shows_items_with_history_and_watchers() -> None:
    async with serving_console() as served, served.modern().listen(1, TOOLS):
        await served.until(lambda found: found["clients"], "clients")
        served.change("new")
        catalog = await served.get("catalog")
        clock = by_name(catalog["tools"]["items"])["clock"]
        assert (clock["description"], clock["watchers"], clock["revision"]) == ("new", 1, catalog["tools"]["revision"])
        assert by_name(catalog["resources"]["items"])["detail"]["kind"] == "template"
        item = await served.get("item", feature="tools", key="clock")
        assert item["definition"]["description"] == "new"
        assert [each["operation"] for each in item["history"]] == ["updated", "added"]
        assert item["history"][0]["fields"] == [{"path": "description", "before": "", "after": "new"}]
        assert [each["id"] for each in item["watchers"]] == ["c1"]
        view = await served.get("clients/c1/view")
        assert (view["tools"], view["note"]) == (catalog["tools"]["items"], None)
        assert (await served.http.get("/console/api/item?feature=tools&key=none")).status_code == 404


async def test_view_of_a_client_says_if_lists_depend_on_the_caller() -> None:
    async with serving_console(shared_lists=False) as served, served.modern().listen(1, TOOLS):
        await served.until(lambda found: found["clients"], "clients")
        assert "for each caller" in (await served.get("clients/c1/view"))["note"]


async def test_calls_return_the_results_of_the_server() -> None:
    async with serving_console("write") as served:
        called = (await served.post("call", {"name": "weather", "arguments": {"city": "Oslo"}})).json()
        assert called["content"][0]["text"] == "Oslo"
        invalid = (await served.post("call", {"name": "weather", "arguments": {}})).json()
        assert invalid["isError"] is True
        read = (await served.post("read", {"uri": "local://r"})).json()
        assert read["contents"][0]["text"] == "12"
        prompt = (await served.post("prompt", {"name": "greet", "arguments": {"city": "Oslo"}})).json()
        assert prompt["messages"][0]["content"]["text"] == "Oslo"
        for path, body in (("read", {"uri": "none://"}), ("prompt", {"name": "none"}), ("call", {})):
            response = await served.post(path, body)
            assert (response.status_code, list(response.json())) == (400, ["error"]), path


async def test_stream_of_a_client_is_ended_with_its_result() -> None:
    async with serving_console("write") as served, served.modern().listen(7, TOOLS) as stream:
        await stream.message()
        await served.until(lambda found: found["clients"], "clients")
        assert (await served.post("clients/c1/end")).json() == {"ended": True}
        assert (await stream.message())["id"] == 7
        assert await stream.event() == ""
        again = await served.post("clients/c1/end")
        assert (again.status_code, "has left already" in again.text) == (404, True)


async def test_stream_of_a_legacy_session_is_ended_and_the_session_stays() -> None:
    async with serving_console("write") as served:
        session = served.legacy()
        await session.shake_hands()
        refused = await served.post("clients/c1/end")
        assert (refused.status_code, "no open stream" in refused.text) == (400, True)
        async with session.stream() as stream:
            await stream.event()  # the first one, which has only an id
            assert (await served.post("clients/c1/end")).json() == {"ended": True}
            while await stream.event():
                pass
        served.change("new")
        async with session.stream() as stream:
            while "list_changed" not in await stream.event():
                pass


async def test_webhooks_are_shown_with_their_failures() -> None:
    policy = Policy(webhook_private=True, webhook_attempts=1)
    async with receiving() as receiver, serving_console(policy=policy) as served:
        served.live.webhooks.put("hook", receiver.url, "tools")
        await served.until(lambda found: found["clients"], "clients")
        served.change("new")
        await receiver.next()
        await served.until(lambda change: change["changes"][0]["told"] == 1, "changes")
        (told,) = (await served.newest_change())["deliveries"]
        assert (told["state"], told["fetched"]) == ("told", "not applicable")
        receiver.answers(500)
        served.change("newer")
        overview = await served.until(lambda found: found["webhooks"][0]["state"] == "dead", "overview")
        (webhook,) = overview["webhooks"]
        assert (webhook["name"], webhook["url"], webhook["lastError"]) == ("hook", receiver.url, "answered 500")
        assert overview["failures"] == {"webhook": 1}
        change = (await served.get("changes"))["changes"][0]
        assert (change["told"], change["closed"]) == (0, 1)


async def test_replicas_are_shown_with_their_digests() -> None:
    table = MemoryTable()
    async with (
        serving_console(cluster=MemoryBackend(table)) as first,
        serving_console(cluster=MemoryBackend(table)) as second,
    ):
        digest = second.live.catalog.tools.version.digest
        overview = await first.until(
            lambda found: [each["digests"].get("tools") for each in found["replicas"]] == [digest] * 2, "overview"
        )
        assert sorted(each["isSelf"] for each in overview["replicas"]) == [False, True]
        second.change("new")
        await first.until(lambda found: found["changes"] and found["changes"][0]["source"] == "cluster", "changes")


async def test_problems_of_a_workspace_have_file_and_line(board: Path) -> None:
    (board / "tools" / "broken.py").write_text("def broken() -> str:\n    return (\n")
    async with serving_console(server=Workspace(board)) as served:
        overview = await served.get("overview")
        (problem,) = overview["problems"]
        assert (problem["file"], problem["line"]) == ("tools/broken.py", 2)
        assert (await served.get("overview"))["problems"] == [problem]
        await served.live.refresh()
        assert overview["mode"] == "read"


async def test_overview_counts_what_the_hub_counts() -> None:
    async with serving_console() as served, served.modern().listen(1, TOOLS):
        await served.until(lambda found: found["clients"], "clients")
        for number in range(3):
            served.change(str(number))
        overview = await served.get("overview")
        assert (overview["clients"], overview["watched"], overview["delivered"]) == (1, 1, 3)
        assert overview["latency"]["p50"] <= overview["latency"]["p95"] <= overview["latency"]["p99"]
        assert overview["catalog"]["tools"]["items"] == 2
        assert overview["replicas"] == []
        sampled = await served.until(lambda found: sum(found["history"]["deliveries"]), "overview")
        assert len({len(values) for values in sampled["history"].values()}) == 1
        assert sampled["deliveriesPerSecond"] > 0


async def test_secrets_of_sessions_are_not_shown() -> None:
    async with serving_console() as served:
        session = served.legacy()
        await session.shake_hands()
        served.change("new")
        shown = ""
        for path in ("overview", "clients", "clients/c1", "changes", "changes/1"):
            shown += (await served.http.get(f"/console/api/{path}")).text
        assert session.session_id not in shown
