"""Reading lists by requests: each by itself, again after a failure, and on one event loop."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from fastmcp import FastMCP
from fastmcp.prompts import Prompt
from fastmcp.resources import Resource
from fastmcp.server import create_proxy
from fastmcp.server.auth import require_scopes
from fastmcp.server.middleware import Middleware
from fastmcp.server.providers import FileSystemProvider
from fastmcp.tools import Tool
from mcp.client import Client
from mcp.server import Server
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.mcpserver import Context, MCPServer

from tests.support.waiting import DEADLINE, until
from tidings import Live
from tidings.core.filters import Filter
from tidings.core.model import Feature, Notification
from tidings.errors import TidingsError

pytestmark = pytest.mark.anyio


class Lists:
    """A low-level server with two lists. The list of tools can fail, and counts its requests."""

    def __init__(self, poll: float | None = None) -> None:
        self.is_broken = False
        self.is_restless = False
        self.asked = 0
        self.prompts_asked = 0
        self.prompts = ["first"]
        self.loops: set[asyncio.AbstractEventLoop] = set()
        self.server: Server[Any] = Server("lists", on_list_tools=self._tools, on_list_prompts=self._prompts)
        self.live = Live(self.server, poll=poll)

    async def _tools(self, ctx: Any, params: Any) -> types.ListToolsResult:
        self.asked += 1
        if self.is_restless:
            self.live.tools.add({"name": "restless", "description": f"{self.asked}"}, replace=True)
        self.loops.add(asyncio.get_running_loop())
        if self.is_broken:
            raise RuntimeError("the tools are broken")
        await asyncio.sleep(0)  # let other tasks run
        return types.ListToolsResult(tools=[types.Tool(name=f"t{self.asked}", input_schema={"type": "object"})])

    async def _prompts(self, ctx: Any, params: Any) -> types.ListPromptsResult:
        self.prompts_asked += 1
        return types.ListPromptsResult(prompts=[types.Prompt(name=name) for name in self.prompts])


async def test_failing_list_does_not_prevent_reading_others() -> None:
    lists = Lists()
    async with Client(lists.server) as client:
        await client.list_prompts()
        await lists.live.refresh()
        lists.is_broken = True
        lists.prompts.append("second")
        with pytest.raises(RuntimeError, match="the tools are broken"):
            await lists.live.refresh()
        assert [item["name"] for item in lists.live.prompts] == ["first", "second"]


async def test_each_failing_list_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(ctx: Any, params: Any) -> Any:
        raise RuntimeError("these are broken")

    live = Live(Server("broken", on_list_tools=fail, on_list_prompts=fail, on_list_resources=fail))
    async with Client(live.lowlevel):
        with pytest.raises(RuntimeError, match="these are broken"):
            await live.refresh()
        with pytest.raises(RuntimeError, match="these are broken"):
            await live.refresh()
    said = [record.getMessage() for record in caplog.records]
    for name in ("tools", "prompts", "resources"):
        # Once, because the cause is the same.
        assert len([text for text in said if f"reading the server's {name} failed" in text]) == 1
    assert live.failures["reading"] >= 6


async def test_list_that_changes_at_every_read_delays_no_other() -> None:
    lists = Lists()
    async with Client(lists.server) as client:
        await client.list_prompts()
        await lists.live.refresh()
        lists.is_restless = True
        lists.prompts.append("second")
        async with asyncio.timeout(DEADLINE):
            await lists.live.refresh()
        assert [item["name"] for item in lists.live.prompts] == ["first", "second"]
        lists.is_restless = False
        # The last change is read without a request.
        await until(lambda: lists.live.list_reader.is_loaded)
        shown = {tool.name: tool.description for tool in (await client.list_tools()).tools}
        assert {item["name"]: item.get("description") for item in lists.live.tools}["restless"] == shown["restless"]


async def test_failed_list_is_retried_once() -> None:
    lists = Lists()
    async with Client(lists.server) as client:
        await client.list_prompts()
        lists.is_broken = True
        loop: Any = asyncio.get_running_loop()
        await fail_to_read(lists)
        assert len(scheduled_reads(lists)) == 1
        assert lists.live.missing_for_readiness() == ["tools"]
        lists.is_broken = False
        await until(lambda: not lists.live.missing_for_readiness())
        # A list that fails again and again is read ever less often, and soon again after a success.
        lists.is_broken = True
        delays = []
        for _ in range(50):
            await fail_to_read(lists)
            (retry,) = scheduled_reads(lists)
            delays.append(retry.when() - loop.time())
        assert delays[0] < 2 < delays[2]
        assert 30 < delays[-1] <= 60
        lists.is_broken = False
        await lists.live.refresh("tools")
        lists.is_broken = True
        await fail_to_read(lists)
        (retry,) = scheduled_reads(lists)
        assert retry.when() - loop.time() < 2


async def fail_to_read(lists: Lists) -> None:
    with suppress(RuntimeError):
        await lists.live.refresh("tools")


def scheduled_reads(lists: Lists) -> list[Any]:
    loop: Any = asyncio.get_running_loop()
    reader = lists.live.list_reader
    return [each for each in loop._scheduled if not each.cancelled() and each._callback == reader.read_again]


# Lists that can't be read, or that differ by caller


class PerCaller(MCPServer[Any]):
    """Lists the tools whose name starts with `hidden` only to a caller with a token, or fails without one."""

    must_have_token = False

    async def list_tools(self) -> list[types.Tool]:
        if self.must_have_token and get_access_token() is None:
            raise PermissionError("no token")
        return [tool for tool in await super().list_tools() if not tool.name.startswith("hidden")]


def is_plain(notification: Notification) -> bool:
    """Return whether a notification says only that its list is another one."""
    return not notification.changes and not notification.complete


async def until_told(told: list[Notification], count: int) -> None:
    await until(lambda: len(told) >= count)
    assert len(told) == count


@pytest.mark.parametrize("must_have_token", [True, False])
async def test_change_that_can_not_be_read_is_told_once_without_details(
    must_have_token: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = PerCaller("per caller")
    live = Live(server)
    async with Client(server):
        server.must_have_token = must_have_token
        told: list[Notification] = []
        filtered: list[Notification] = []
        live.hub.subscribe(told.append, "tools")
        live.hub.subscribe(filtered.append, "tools", filter=Filter(names=("other*",)))
        for name in ("hidden1", "hidden2", "hidden3"):
            server.add_tool(lambda: "", name=name)
            await until_told(told, len(told) + 1)
        server.remove_tool("hidden1")
        await until_told(told, 4)
        assert all(map(is_plain, told))
        assert len({each.version.digest for each in told}) == 4
        assert [each.version for each in filtered] == [each.version for each in told]
        # An equal item, and a further attempt to read the list, are no change.
        live.list_reader.read_again(Feature.TOOLS)
        if not must_have_token:
            live.tools.add(live.server._tool_manager.get_tool("hidden2"), replace=True)
        await until(lambda: live.list_reader.is_loaded)
        if must_have_token:
            assert live.failures["reading"] >= 5
            assert len([each for each in caplog.records if "no token" in str(each.exc_info)]) == 1
        server.must_have_token = False
        server.add_tool(lambda: "", name="seen")
        await until_told(told, 5)
        assert [change.key for change in told[-1].changes] == ["seen"]


async def test_user_notification_of_a_list_per_caller_is_passed_on() -> None:
    server = PerCaller("per caller")

    @server.tool()
    async def announce(ctx: Context[Any, Any]) -> None:
        await ctx.notify_tools_changed()

    live = Live(server)
    async with Client(server) as client:
        told: list[Notification] = []
        await live.refresh()
        live.hub.subscribe(told.append, "tools")
        await client.call_tool("announce", {})
        await until_told(told, 1)
        assert is_plain(told[0])


async def test_fastmcp_tool_that_needs_a_scope_is_told_without_details() -> None:
    server = FastMCP("scopes")
    live = Live(server)
    server.tool(lambda: "", name="public")
    async with Client(live.lowlevel) as client:
        await client.list_tools()
        told: list[Notification] = []
        live.hub.subscribe(told.append, "tools")
        hidden = Tool.from_function(lambda: "", name="hidden", auth=require_scopes("admin"))
        server.add_tool(hidden)
        await until_told(told, 1)
        server.local_provider.remove_tool("hidden")
        await until_told(told, 2)
        assert all(map(is_plain, told))
        server.add_tool(Tool.from_function(lambda: "", name="seen"))
        await until_told(told, 3)
        assert [change.key for change in told[2].changes] == ["seen"]


async def test_restart_with_the_same_hidden_items_is_no_change(tmp_path: Path) -> None:
    """Items that are registered before the first read are compared with those before the restart."""
    versions = []
    for _ in range(2):
        server = PerCaller("per caller")
        live = Live(server, store=tmp_path / "state")
        for name in ("hidden", "seen"):
            server.add_tool(lambda: "", name=name)
        async with Client(server) as client:
            await client.list_tools()
            versions.append(live.catalog.tools.version.digest)
        live.close()
    assert len(set(versions)) == 1


class CountingMiddleware(Middleware):
    def __init__(self) -> None:
        self.methods: list[str | None] = []

    async def on_request(self, context: Any, call_next: Any) -> Any:
        self.methods.append(context.method)
        return await call_next(context)


async def test_change_of_a_fastmcp_reads_only_its_own_feature() -> None:
    server, counting = FastMCP("board"), CountingMiddleware()
    server.add_middleware(counting)
    live = Live(server)
    provider = server.local_provider
    added: list[tuple[Any, Any, list[str]]] = [
        (provider.add_tool, Tool.from_function(lambda: "", name="t"), ["tools/list"]),
        (provider.add_prompt, Prompt.from_function(lambda: "", name="p"), ["prompts/list"]),
        (
            provider.add_resource,
            Resource.from_function(lambda: "", uri="a://r"),
            ["resources/list", "resources/templates/list"],
        ),
    ]
    async with Client(live.lowlevel) as client:
        await client.list_tools()
        for add, component, methods in added:
            counting.methods.clear()
            told: list[Notification] = []
            live.hub.subscribe(told.append, *Feature)
            add(component)
            await until_told(told, 1)
            await until(lambda: live.list_reader.is_loaded)
            assert counting.methods == methods


async def test_refresh_from_another_loop_reads_on_the_server_loop() -> None:
    lists = Lists()
    async with Client(lists.server) as client:
        await client.list_tools()

        async def refresh() -> None:
            for _ in range(20):
                await lists.live.refresh("tools")

        elsewhere = [asyncio.to_thread(asyncio.run, refresh()) for _ in range(3)]
        await asyncio.gather(refresh(), *elsewhere)
        assert lists.loops == {asyncio.get_running_loop()}
        assert [item["name"] for item in lists.live.tools] == [f"t{lists.asked}"]


# Sources that change by themselves


class Upstream:
    """A server whose tools change without a call of the server in front of it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._folder = folder
        self._server = FastMCP("upstream")
        if kind == "files":
            provider = FileSystemProvider(folder, reload=True)
            self.front = FastMCP("front", providers=[provider])
        elif kind == "mounted":
            self.front = FastMCP("front")
            self.front.mount(self._server)
        else:
            self.front = create_proxy(self._server)
        self._is_folder = kind == "files"

    def add(self, name: str) -> None:
        if self._is_folder:
            text = f"from fastmcp.tools import tool\n\n@tool\ndef {name}() -> str:\n    return ''\n"
            (self._folder / f"{name}.py").write_text(text)
        else:
            self._server.tool(lambda: "", name=name)


@pytest.mark.parametrize("kind", ["proxy", "mounted", "files"])
async def test_source_that_changes_by_itself_is_polled_while_it_is_watched(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream, counting, rounds = Upstream(kind, tmp_path), CountingMiddleware(), 0

    def count_round(low: float, high: float) -> float:
        nonlocal rounds
        rounds += 1
        assert low < 1 < high
        return 1.0

    monkeypatch.setattr("tidings.server.list_reader.random.uniform", count_round)
    upstream.front.add_middleware(counting)
    live = Live(upstream.front, poll=0.02)
    async with Client(live.lowlevel) as client:
        await client.list_tools()
        told: list[Notification] = []

        def tell(notification: Notification) -> None:
            told.append(notification)

        for name in ("first", "second"):
            counting.methods.clear()
            start = rounds
            await until(lambda start=start: rounds > start + 3)  # type: ignore[misc]
            assert not counting.methods, "no client is subscribed"

            told.clear()
            live.hub.subscribe(tell, "tools")
            upstream.add(name)
            await until_told(told, 1)
            assert [change.key for change in told[0].changes] == [name]
            start = rounds
            await until(lambda start=start: rounds > start + 3)  # type: ignore[misc]
            assert len(told) == 1, "nothing else has changed"
            assert set(counting.methods) == {"tools/list"}, "only tools have a subscriber"
            live.hub.unsubscribe(tell)
            await until(lambda: live.list_reader.is_loaded)
    live.close()


async def test_polled_list_that_fails_is_left_to_the_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidings.server.list_reader._RETRY_DELAY", 60.0)
    lists = Lists(poll=0.001)
    async with Client(lists.server) as client:
        await client.list_prompts()
        lists.live.hub.subscribe(print, "tools", "prompts")
        lists.is_broken = True
        await until(lambda: lists.live.failures["reading"])
        asked, read = lists.asked, lists.prompts_asked
        await until(lambda: lists.prompts_asked > read + 5)
        assert lists.asked == asked
    lists.live.close()


@pytest.mark.parametrize("poll", [0, -1, math.nan, math.inf, True, "5"])
def test_wrong_polling_interval_is_refused(poll: Any) -> None:
    with pytest.raises(TidingsError, match=r"Live\(poll=…\) must be a number of seconds"):
        Live(Server("lists"), poll=poll)
