"""`MirrorGroup` with two real servers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.client.test_mirror import QUICK, plain_server
from tests.support.scripted_server import ScriptedServer
from tests.support.waiting import DEADLINE, free_port, until
from tidings import Disconnected, Live, Mirror, MirrorGroup, NotFound, TidingsError

pytestmark = pytest.mark.anyio


async def test_the_lists_of_all_servers_are_one() -> None:
    board, notes = plain_server("move"), ScriptedServer()
    notes.lists["tools"]["move"] = "a note"
    notes.lists["templates"]["note://{name}"] = ""
    Live(board)
    async with asyncio.timeout(DEADLINE), MirrorGroup({"board": Mirror(board), "notes": notes.server}) as group:
        assert list(group.tools) == ["board__add", "board__move", "notes__move"]
        assert (group.tools["notes__move"].name, group.tools["notes__move"].description) == ("notes__move", "a note")
        assert list(group.prompts) == ["board__greet"]
        assert group.resources["plain://one"].uri == "plain://one"
        assert list(group.templates) == ["note://{name}", "plain://each/{name}"]
        states = [group.status.state]
        pinned, changes, removed = group.snapshot(), group.changes(), asyncio.Event()
        group.on_removed(lambda change: removed.set())

        board.add_tool(lambda: "", name="archive")
        change = await anext(changes)
        assert change[:3] == ("added", "tools", "board__archive")
        assert await group.wait_for("board__archive") is change.item
        assert group.snapshot().is_superset_of(pinned)
        assert group.tools["notes__move"] is pinned.tools["notes__move"]
        board.remove_tool("move")
        assert (await anext(changes))[:3] == ("removed", "tools", "board__move")
        await removed.wait()

        result: Any = await group.call("notes__move")
        assert result.content[0].text == "move ran"
        mirror, uri = group.resolve("plain://one", "resources")
        read: Any = await mirror.client.read_resource(uri)
        assert read.contents[0].text == "1"
        for name in ("move", "other__move", "board_move"):
            with pytest.raises(NotFound, match="none of these servers: board, notes"):
                await group.call(name)
    assert [change async for change in changes] == []
    assert [*states, group.status.state] == ["fresh", "closed"]


async def test_the_status_is_that_of_the_least_current_server() -> None:
    server, other = ScriptedServer(), ScriptedServer()
    async with (
        asyncio.timeout(DEADLINE),
        server.serving() as running,
        MirrorGroup({"a": server.url(running), "b": other.server}, timing=QUICK) as group,
    ):
        running.should_exit = True
        await until(lambda: (group.status.reason or "").startswith("a: "))
        assert group.status.state == "reconnecting"
        assert group.status.stale_since is not None
        assert group.mirrors["b"].status.state == "fresh"


async def test_no_server_stays_connected_if_one_cannot_be_reached() -> None:
    group = MirrorGroup({"a": plain_server(), "b": f"http://127.0.0.1:{free_port()}/mcp"})
    with pytest.raises(Disconnected, match="can't be reached"):
        async with asyncio.timeout(DEADLINE), group:
            pytest.fail("one of the servers does not exist")
    assert group.mirrors["a"].status.state == "closed"


async def test_a_uri_that_two_servers_have_begins_with_the_name_of_the_later_one() -> None:
    first, second = ScriptedServer(), ScriptedServer()
    first.lists["templates"]["note://{name}"] = "first"
    second.lists["templates"]["note://{name}"] = "second"
    second.lists["resources"]["file://a"] = "second"
    async with (
        asyncio.timeout(DEADLINE),
        MirrorGroup({"first": first.server, "second": second.server}, timing=QUICK) as group,
    ):
        assert list(group.templates) == ["note://{name}", "second+note://{name}"]
        for name, owner in {"note://x": "first", "second+note://x": "second", "file://a": "second"}.items():
            mirror, uri = group.resolve(name, "resources")
            assert (mirror, uri) == (group.mirrors[owner], name.removeprefix("second+"))
        with pytest.raises(NotFound):
            group.resolve("other://x", "resources")

        first.lists["resources"]["file://a"] = "first"
        await first.notify("resources")
        await group.wait_for("second+file://a", "resources")
        assert {name: item.description for name, item in group.resources.items()} == {
            "file://a": "first",
            "second+file://a": "second",
        }
        del first.lists["resources"]["file://a"]
        await first.notify("resources")
        await until(lambda: list(group.resources) == ["file://a"])
        assert group.resources["file://a"].description == "second"


async def test_a_scheme_with_a_plus_sign_is_not_the_name_of_a_server() -> None:
    git, other = ScriptedServer(), ScriptedServer()
    other.lists["templates"]["git+ssh://{host}"] = "a repository"
    async with asyncio.timeout(DEADLINE), MirrorGroup({"git": git.server, "other": other.server}) as group:
        assert group.resolve("git+ssh://x", "resources") == (group.mirrors["other"], "git+ssh://x")
        assert group.resolve("git+file://x", "resources") == (group.mirrors["git"], "file://x")


def test_a_name_of_a_server_has_no_separator() -> None:
    for name in ("", "a__b", "a_", "a+b", "1"):
        with pytest.raises(TidingsError, match="is no name of a server"):
            MirrorGroup({name: "http://127.0.0.1:1/mcp"})
    MirrorGroup({"a_b-c": "http://127.0.0.1:1/mcp"})
