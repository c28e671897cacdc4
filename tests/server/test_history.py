"""History: `live.history()`, and the method for clients of both eras."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError

from tests.support.sdk_clients import KINDS, MODERN, RecordingClient, open_client, stdio_server
from tidings import Change, Feature, Live, Policy, Version
from tidings.core.cursor import Cursor
from tidings.core.journal import change_json

HISTORY = "dev.tidings/history"
LEGACY = "2025-11-25"
DENY = {"*": ["prompts"], "bob": ["tools", *(f"board://page/{number}" for number in range(0, 450, 2))]}


def nothing() -> None:
    """A tool."""


def live_server(**knobs: Any) -> Live:
    return Live(MCPServer("history"), policy=Policy(**knobs))


def change_summaries(changes: tuple[Change, ...]) -> list[str]:
    return [f"{change.operation} {change.key}" for change in changes]


# In process


def test_history_of_one_list_one_content_and_all() -> None:
    live = live_server()
    live.tools.add(nothing, name="one")
    live.prompts.add(nothing, name="greet")
    live.resources.updated("board://a", author="Ann")
    live.resources.updated("board://b")
    live.tools.update("one", description="Another one.")
    live.tools.remove("one")

    assert change_summaries(live.history("tools").changes) == ["added one", "updated one", "removed one"]
    assert change_summaries(live.history(Feature.PROMPTS).changes) == ["added greet"]
    assert change_summaries(live.history(uri="board://a").changes) == ["updated board://a"]
    everything = live.history()
    assert change_summaries(everything.changes) == [
        "added one",
        "added greet",
        "updated board://a",
        "updated board://b",
        "updated one",
        "removed one",
    ]
    assert everything.complete
    revisions = [change.revision for change in everything.changes]
    assert revisions == sorted(set(revisions))


def test_history_after_a_revision_and_limited_to_the_newest() -> None:
    live = live_server()
    for name in "abcde":
        live.tools.add(nothing, name=name)
    second = live.history("tools").changes[1]

    assert change_summaries(live.history(since=second.revision).changes) == ["added c", "added d", "added e"]
    assert live.history(since=second.revision).complete
    newest = live.history(since=second.revision, limit=2)
    assert change_summaries(newest.changes) == ["added d", "added e"]
    assert not newest.complete
    assert live.history(since=second.revision, limit=3).complete
    assert live.history(since=live.catalog.revision) == ((), True)


def test_discarded_changes_make_a_history_incomplete() -> None:
    live = live_server(journal_changes=2)
    for name in "abc":
        live.tools.add(nothing, name=name)
    live.prompts.add(nothing, name="greet")

    past = live.history("tools")
    assert change_summaries(past.changes) == ["added b", "added c"]
    assert not past.complete
    assert live.history("tools", since=past.changes[0].revision - 1).complete
    assert live.history("prompts").complete
    assert not live.history().complete


def test_history_since_a_cursor_has_the_topics_of_the_cursor() -> None:
    live = live_server()
    live.tools.add(nothing, name="a")
    live.resources.updated("board://a")
    cursor = Cursor(live.epoch, {topic: live.catalog.version(topic) for topic in (Feature.TOOLS, "board://a")})
    assert live.history(since=cursor) == ((), True)
    live.prompts.add(nothing, name="greet")
    live.tools.add(nothing, name="b")
    live.resources.updated("board://a")
    live.resources.updated("board://b")

    past = live.history(since=cursor)
    assert change_summaries(past.changes) == ["added b", "updated board://a"]
    assert past.complete
    assert change_summaries(live.history("tools", since=cursor).changes) == ["added b"]
    assert live.history("prompts", since=cursor) == ((), True)


def test_unknown_cursor_makes_a_history_incomplete() -> None:
    live = live_server()
    live.tools.add(nothing, name="a")
    live.resources.updated("board://a")
    tools, content = live.catalog.version(Feature.TOOLS), live.catalog.version("board://a")

    elsewhere = live.history(since=Cursor("elsewhere", {Feature.TOOLS: Version(900, "0" * 32), "board://a": content}))
    assert change_summaries(elsewhere.changes) == ["added a", "updated board://a"]
    assert not elsewhere.complete
    # The digest of a list is of its content, whoever made it.
    assert live.history(since=Cursor("elsewhere", {Feature.TOOLS: tools})) == ((), True)
    never = live.history(since=Cursor(live.epoch, {Feature.TOOLS: None}))
    assert (change_summaries(never.changes), never.complete) == (["added a"], False)
    assert not live.history(since=Cursor(live.epoch, {Feature.TOOLS: Version(tools.revision, "0" * 32)})).complete


def test_change_json_has_all_fields() -> None:
    live = live_server()
    live.tools.add(nothing, name="one", description="First.")
    live.tools.remove("one")
    live.resources.updated("board://a", author="Ann")
    added, removed, content = (change_json(change, is_full=True) for change in live.history().changes)

    assert added.keys() == {"operation", "feature", "name", "revision", "digest", "time", "origin", "item"}
    assert (added["operation"], added["feature"], added["name"], added["origin"]) == ("added", "tools", "one", "local")
    assert added["item"]["description"] == "First."
    assert removed["item"] == added["item"]  # what it was
    assert (content["uri"], content["metadata"]) == ("board://a", {"author": "Ann"})
    assert "feature" not in content
    moment = datetime.fromisoformat(added["time"])
    assert added["time"].endswith("Z")
    assert abs(moment.timestamp() - live.history().changes[0].time) < 0.002
    assert "item" not in change_json(live.history().changes[0])


# On the wire


SERVERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in KINDS},
    **{f"{asks} guarded": ("mcpserver", {"auth": True, "deny": DENY, "asks": asks}) for asks in ("sync", "async")},
}


async def pages(client: RecordingClient, **params: Any) -> tuple[list[list[dict[str, Any]]], bool]:
    """All pages of a history, and whether each says that it is complete."""
    found: list[list[dict[str, Any]]] = []
    complete = True
    cursor: dict[str, str] = {}
    while True:
        answer = await client.request(HISTORY, **params, **cursor)
        found.append(answer["changes"])
        complete = complete and answer["complete"]
        if "nextCursor" not in answer:
            return found, complete
        cursor = {"cursor": answer["nextCursor"]}


def joined(found: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [change for page in found for change in page]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("where", "version"),
    [("mcpserver", MODERN), ("mcpserver", LEGACY), ("lowlevel", MODERN), ("fastmcp", LEGACY), ("stdio", MODERN)],
)
async def test_client_reads_all_pages_of_the_history(urls: dict[str, str], where: str, version: str) -> None:
    async with open_client(stdio_server("mcpserver") if where == "stdio" else urls[where], version) as client:
        name = f"t{version}"
        await client.change("add", feature="tools", key=name)
        await client.change("update", feature="tools", key=name, fields={"description": "Another."})
        await client.change("remove", feature="tools", key=name)
        steps = [{"what": "updated", "args": {"uri": f"board://page/{number}"}} for number in range(450)]
        await client.change("many", steps=steps)

        expected = await client.change("history")
        found, complete = await pages(client)
        assert joined(found) == expected["changes"]
        assert complete == expected["complete"] is True
        assert [len(page) <= 200 for page in found] == [True] * len(found)
        assert len(found) >= 3

        tools, _ = await pages(client, feature="tools", detail="full")
        assert joined(tools) == (await client.change("history", feature="tools", detail="full"))["changes"]
        assert [each["operation"] for each in joined(tools)][-3:] == ["added", "updated", "removed"]
        assert joined(tools)[-1]["item"]["name"] == name

        revision = expected["changes"][-300]["revision"]
        since, _ = await pages(client, since=revision)
        assert joined(since) == expected["changes"][-299:]
        newest, complete = await pages(client, limit=250)
        assert joined(newest) == expected["changes"][-250:]
        assert not complete
        known, _ = await pages(client, since={"epoch": "elsewhere", "topics": {"tools": None}})
        assert joined(known) == (await client.change("history", feature="tools"))["changes"]
        cursor = {"epoch": (await client.request(HISTORY, limit=1))["epoch"], "uris": {}}
        for change in expected["changes"]:
            if "page/" in change.get("uri", ""):
                cursor["uris"][change["uri"]] = {"revision": change["revision"] - 1, "digest": change["digest"]}
        resumed, _ = await pages(client, since=cursor)
        assert joined(resumed) == expected["changes"][-450:]
        garbage, complete = await pages(client, since={"epoch": 7})
        assert (joined(garbage), complete) == (expected["changes"], False)
        content, _ = await pages(client, uri="board://page/7")
        assert {change["uri"] for change in joined(content)} == {"board://page/7"}


@pytest.mark.anyio
@pytest.mark.parametrize("version", [MODERN, LEGACY])
@pytest.mark.parametrize("asks", ["sync", "async"])
async def test_caller_sees_only_the_history_of_what_it_may_watch(urls: dict[str, str], asks: str, version: str) -> None:
    url = urls[f"{asks} guarded"]
    async with open_client(url, version, token="alice") as alice, open_client(url, version, token="bob") as bob:
        await alice.change("add", feature="tools", key=f"t{version}")
        await alice.change("add", feature="prompts", key=f"p{version}")
        steps = [{"what": "updated", "args": {"uri": f"board://page/{number}"}} for number in range(450)]
        await alice.change("many", steps=steps)
        everything = (await alice.change("history"))["changes"]

        whole, _ = await pages(alice)
        assert joined(whole) == everything
        seen, _ = await pages(bob)
        denied = set(DENY["bob"])
        visible = [change for change in everything if not {change.get("feature"), change.get("uri")} & denied]
        assert joined(seen) == visible
        assert 0 < len(visible) < len(everything)
        newest, _ = await pages(bob, limit=100)
        assert joined(newest) == visible[-100:]
        hidden, _ = await pages(bob, feature="tools")
        assert hidden == [[]]


@pytest.mark.anyio
async def test_authorization_calls_per_page_are_limited() -> None:
    async with open_client(stdio_server("mcpserver", asks="sync"), MODERN) as client:
        steps = [{"what": "updated", "args": {"uri": f"board://many/{number}"}} for number in range(2_500)]
        await client.change("many", steps=steps)
        before = len((await client.change("state"))["asked"])
        answer = await client.request(HISTORY, limit=2_400)
        asked = len((await client.change("state"))["asked"]) - before
        assert asked == 1_000
        assert not answer["complete"]


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"feature": "tool"}, "tool"),
    ({"feature": "tools", "uri": "board://a"}, "name one of them"),
    ({"since": "yesterday"}, "since"),
    ({"since": -1}, "since"),
    ({"limit": 0}, "limit"),
    ({"limit": "ten"}, "limit"),
    ({"detail": "everything"}, "everything"),
    ({"cursor": "garbage"}, "belongs to another epoch"),
    ({"cursor": "0000.5"}, "belongs to another epoch"),
    ({"sinse": 5}, "sinse"),
]


@pytest.mark.anyio
@pytest.mark.parametrize("version", [MODERN, LEGACY])
async def test_invalid_params_are_refused_with_the_reason(urls: dict[str, str], version: str) -> None:
    async with open_client(urls["mcpserver"], version) as client:
        for params, said in INVALID:
            with pytest.raises(MCPError) as refused:
                await client.request(HISTORY, **params)
            assert refused.value.code == -32602
            assert said in refused.value.message, params
            assert HISTORY in refused.value.message


@pytest.mark.anyio
async def test_history_method_is_advertised(urls: dict[str, str]) -> None:
    async with open_client(urls["mcpserver"], MODERN) as client:
        assert client.capabilities is not None
        extensions = client.capabilities.extensions or {}
        assert HISTORY in extensions["dev.tidings/changes"]["methods"]
