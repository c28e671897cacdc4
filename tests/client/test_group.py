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
        assert list(group.tools) == ["board_add", "board_move", "notes_move"]
        assert (group.tools["notes_move"].name, group.tools["notes_move"].description) == ("notes_move", "a note")
        assert list(group.prompts) == ["board_greet"]
        assert group.resources["board+plain://one"].uri == "board+plain://one"
        assert list(group.templates) == ["board+plain://each/{name}", "notes+note://{name}"]
        states = [group.status.state]
        pinned, changes, removed = group.snapshot(), group.changes(), asyncio.Event()
        group.on_removed(lambda change: removed.set())

        board.add_tool(lambda: "", name="archive")
        change = await anext(changes)
        assert change[:3] == ("added", "tools", "board_archive")
        assert await group.wait_for("board_archive") is change.item
        assert group.snapshot().is_superset_of(pinned)
        assert group.tools["notes_move"] is pinned.tools["notes_move"]
        board.remove_tool("move")
        assert (await anext(changes))[:3] == ("removed", "tools", "board_move")
        await removed.wait()

        result: Any = await group.call("notes_move")
        assert result.content[0].text == "move ran"
        mirror, uri = group.resolve("board+plain://one", "resources")
        read: Any = await mirror.client.read_resource(uri)
        assert read.contents[0].text == "1"
        for name in ("move", "other_move"):
            with pytest.raises(NotFound, match="there are board_, notes_"):
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


def test_a_prefix_has_no_separator() -> None:
    for prefix in ("", "a_b", "a+b", "1"):
        with pytest.raises(TidingsError, match="is no prefix"):
            MirrorGroup({prefix: "http://127.0.0.1:1/mcp"})
