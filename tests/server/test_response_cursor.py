"""The cursor of a list result: the version of the items in it, or none. A client that returns misses no change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mcp.server.mcpserver import MCPServer

from tests.support.list_copy import Copy
from tests.support.sdk_clients import MODERN
from tidings import Live
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY, FrameFormat, encode_frame
from tidings.core.model import Feature, Notification
from tidings.core.resume import resume
from tidings.sdk.internals import WatchedDict, registry_of
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio


def elsewhere(act: Callable[[], object]) -> None:
    """Call a function in another thread and wait. Its commits stay queued for the event loop."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def told(live: Live, cursor: Any, *topics: Feature) -> list[Notification]:
    """Return the list of notifications that a client gets that returns with this cursor."""
    heard: list[Notification] = []
    live.hub.delivery.publish_queued()
    where = resume(cursor, live.epoch, live.hub, topics)
    live.hub.subscribe(heard.append, *topics, told=where.told)
    return heard


async def test_unpublished_list_has_its_version() -> None:
    server = MCPServer("board")
    live = Live(server)
    await live.list_reader.ensure_loaded(None)
    before = live.catalog.tools.version
    elsewhere(lambda: server.add_tool(lambda: "", name="new"))
    assert live.hub.notifications.version(Feature.TOOLS) == before

    result = await live.list_reader.request("tools/list", MODERN)

    assert [tool["name"] for tool in result["tools"]] == ["new"]
    cursor = result["_meta"][CURSOR_KEY]
    assert cursor["topics"]["tools"]["digest"] == Copy(Feature.TOOLS, result["tools"]).digest
    elsewhere(lambda: live.tools.remove("new"))
    live.hub.delivery.publish_queued()
    assert live.catalog.tools.version.digest == before.digest
    (notification,) = told(live, cursor, Feature.TOOLS)
    assert [(change.operation, change.key) for change in notification.changes] == [("removed", "new")]


@pytest.mark.parametrize("is_early", [True, False], ids=["before it is read", "after it is read"])
async def test_list_that_changes_during_the_request_has_no_version(tmp_path: Path, is_early: bool) -> None:
    file = tmp_path / "resources" / "new.txt"
    file.parent.mkdir()
    workspace = Workspace(tmp_path)
    live = Live(workspace)
    await live.list_reader.ensure_loaded(None)
    before = live.catalog.resources.version
    listed = workspace.server.list_resources

    def change() -> None:
        file.write_text("x")
        elsewhere(lambda: workspace.rescan([file]))

    async def list_resources() -> Any:
        if is_early:
            change()
        found = await listed()
        if not is_early:
            change()
        return found

    workspace.server.list_resources = list_resources  # type: ignore[method-assign]
    result = await live.list_reader.request("resources/list", MODERN)
    workspace.server.list_resources = listed  # type: ignore[method-assign]

    assert ("workspace:///new.txt" in [each["uri"] for each in result["resources"]]) == is_early
    cursor = result["_meta"][CURSOR_KEY]
    assert cursor["topics"] == {"resources": None}
    file.unlink()
    elsewhere(lambda: workspace.rescan([file]))
    live.hub.delivery.publish_queued()
    assert live.catalog.resources.version.digest == before.digest
    (notification,) = told(live, cursor, Feature.RESOURCES)
    assert not notification.complete
    again = await live.list_reader.request("resources/list", MODERN)
    assert again["_meta"][CURSOR_KEY]["topics"]["resources"] == live.catalog.resources.version._asdict()


async def test_stale_list_has_no_version() -> None:
    """The list of a server with its own list method has to be requested, which takes a while."""

    class Own(MCPServer[Any]):
        async def list_tools(self) -> Any:
            if changes:
                self.add_tool(changes.pop(), name="new")
            return await super().list_tools()

    server = Own("board")
    changes: list[Callable[[], str]] = []
    live = Live(server)
    await live.list_reader.ensure_loaded(None)
    changes.append(lambda: "")
    result = await live.list_reader.request("tools/list", MODERN)

    assert result["_meta"][CURSOR_KEY]["topics"] == {"tools": None}
    await live.refresh()
    known = (await live.list_reader.request("tools/list", MODERN))["_meta"][CURSOR_KEY]["topics"]["tools"]
    assert known == live.catalog.tools.version._asdict()


async def test_list_during_a_change_by_another_thread_has_its_version() -> None:
    server = MCPServer("board")
    live = Live(server)
    await live.list_reader.ensure_loaded(None)
    before = live.catalog.tools.version
    tools = registry_of(server, "tools")
    assert isinstance(tools, WatchedDict)
    is_changed, is_listed, tell = threading.Event(), threading.Event(), tools._changed

    def tell_late(*change: Any) -> None:
        is_changed.set()
        is_listed.wait(0.3)  # the request may wait for this in turn
        tell(*change)

    tools._changed = tell_late
    thread = threading.Thread(target=lambda: server.add_tool(lambda: "", name="new"))
    thread.start()
    assert is_changed.wait(10)
    result = await live.list_reader.request("tools/list", MODERN)
    is_listed.set()
    thread.join()
    tools._changed = tell
    live.hub.delivery.publish_queued()

    cursor = result["_meta"][CURSOR_KEY]
    assert cursor["topics"]["tools"]["digest"] == Copy(Feature.TOOLS, result["tools"]).digest
    live.tools.remove("new")
    assert live.catalog.tools.version.digest == before.digest
    assert told(live, cursor, Feature.TOOLS), "it was shown what is no longer there"
    live.close()


async def test_deltas_keep_a_copy_of_a_folder_equal_to_the_list(tmp_path: Path) -> None:
    folder = tmp_path / "resources"
    folder.mkdir()
    (folder / "old.txt").write_text("x" * 10)
    (folder / "any.meta.json").write_text('{"uriTemplate": "any://{+path}", "path": "resources/{path}"}')
    workspace = Workspace(tmp_path)
    live = Live(workspace)
    await live.list_reader.ensure_loaded(None)
    copy, cursor = await resources_of(live)
    assert {"workspace:///old.txt", "any://{+path}"} <= copy.items.keys()
    assert copy.items["workspace:///old.txt"]["size"] == 10
    assert copy.digest == cursor["topics"]["resources"]["digest"]

    heard = told(live, cursor, Feature.RESOURCES)
    for path, length in ((folder / "new.txt", 20), (folder / "old.txt", 30), (folder / "last.txt", 40)):
        path.write_text("y" * length)
        elsewhere(lambda path=path: workspace.rescan([path]))  # type: ignore[misc]
        live.hub.delivery.publish_queued()
    for notification in heard:
        frame = msgspec.json.decode(encode_frame(notification, FrameFormat(detail="delta")))
        assert copy.apply(frame["params"]["_meta"][CHANGE_KEY])
    assert len(heard) == 2, "another size alone is another content, and no other list"
    again, cursor = await resources_of(live)
    assert again.items["workspace:///old.txt"]["size"] == 30
    assert copy.digest == again.digest == cursor["topics"]["resources"]["digest"]
    live.close()


async def resources_of(live: Live) -> tuple[Copy, Any]:
    """Return a copy of the list that a client gets, and its cursor."""
    listed = await live.list_reader.request("resources/list", MODERN)
    templates = await live.list_reader.request("resources/templates/list", MODERN)
    return Copy("resources", [*listed["resources"], *templates["resourceTemplates"]]), listed["_meta"][CURSOR_KEY]
