"""Reading lists by requests: each by itself, again after a failure, and on one event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import mcp_types as types
import pytest
from mcp.client import Client
from mcp.server import Server

from tests.support.waiting import DEADLINE, until
from tidings import Live

pytestmark = pytest.mark.anyio


class Lists:
    """A low-level server with two lists. The list of tools can fail, and counts its requests."""

    def __init__(self) -> None:
        self.is_broken = False
        self.is_restless = False
        self.asked = 0
        self.prompts = ["first"]
        self.loops: set[asyncio.AbstractEventLoop] = set()
        self.server: Server[Any] = Server("lists", on_list_tools=self._tools, on_list_prompts=self._prompts)
        self.live = Live(self.server)

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
    said = [record.getMessage() for record in caplog.records]
    for name in ("prompts", "resources"):
        assert f"reading the server's {name} failed, too" in said


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
        for _ in range(50):
            with suppress(RuntimeError):
                await lists.live.refresh("tools")
        loop: Any = asyncio.get_running_loop()
        retries = [
            each for each in loop._scheduled if not each.cancelled() and each._callback == lists.live.list_reader.wake
        ]
        assert len(retries) <= 1
        assert lists.live.missing_for_readiness() == ["tools"]
        lists.is_broken = False
        await until(lambda: not lists.live.missing_for_readiness())


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
