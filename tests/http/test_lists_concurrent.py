"""The herd that asks for a list after a change: one asks the SDK, nobody waits for anybody but that one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import mcp_types as types
import pytest
from mcp.server import Server, ServerRequestContext

from tests.support.http_server import Answer, Door, Line, open_door, some_server
from tests.support.lists import sdk_requests, warm
from tests.support.sdk_clients import DEADLINE
from tests.support.waiting import until
from tidings import Feature, Policy

pytestmark = pytest.mark.anyio


def asks(line: Line) -> bytes:
    return line.asks("tools/list")


class Slow:
    """A low-level server whose list is made when the test says so."""

    def __init__(self) -> None:
        self.asked = 0
        self.begun = asyncio.Event()
        self.may = asyncio.Event()
        self.description = ""
        self.server: Server[Any] = Server("slow", on_list_tools=self._list)

    async def _list(self, ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
        if ctx.request is not None:  # and not Live, which reads it as nobody
            self.asked += 1
            self.begun.set()
            await self.may.wait()
        tool = types.Tool(name="slow", description=self.description, input_schema={"type": "object"})
        return types.ListToolsResult(tools=[tool])


@asynccontextmanager
async def herd(slow: Slow, size: int, **options: Any) -> AsyncIterator[tuple[Door, list[asyncio.Task[Answer]]]]:
    """Requests that all wait for the list, each in a task of its own that can be cancelled."""
    async with open_door(slow.server, shared_lists=True, **options) as door:
        tasks = []
        waiting: list[int] = []
        original = door.live.list_cache.find_pending

        def asked(method: str, version: str) -> Any:
            waiting.append(1)
            return original(method, version)

        door.live.list_cache.find_pending = asked  # type: ignore[method-assign]
        for number in range(size):
            tasks.append(asyncio.ensure_future(call(door, number)))
            await until(lambda: slow.begun.is_set() and len(waiting) == len(tasks))
        yield door, tasks


async def call(door: Door, number: int) -> Answer:
    """A request straight into the ASGI app: its task can be cancelled, as by a middleware with a time limit."""
    head, _, body = Line(door.port, None, None).asks("tools/list", number).partition(b"\r\n\r\n")  # type: ignore[arg-type]
    lines = [line.partition(b": ") for line in head.split(b"\r\n")[1:]]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/mcp",
        "root_path": "",
        "query_string": b"",
        "headers": [(name.lower(), value) for name, _, value in lines],
    }
    messages = [{"type": "http.request", "body": body}]
    said: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        said.append(message)

    await door.app(scope, receive, send)
    return Answer(b"%d" % said[0]["status"], said[0]["headers"], said[1]["body"])


async def finish(tasks: list[asyncio.Task[Answer]]) -> list[int]:
    with anyio.fail_after(DEADLINE):
        told = await asyncio.gather(*tasks)
    assert all(b"slow" in answer.body for answer in told)
    return [json.loads(answer.body)["id"] for answer in told]


async def test_a_herd_asks_once() -> None:
    slow = Slow()
    async with herd(slow, 5) as (_, tasks):
        slow.may.set()
        assert await finish(tasks) == [0, 1, 2, 3, 4]
        assert slow.asked == 1


async def test_one_that_gives_up_waiting_takes_nobody_with_it() -> None:
    slow = Slow()
    async with herd(slow, 5) as (_, tasks):
        tasks[2].cancel()
        with anyio.fail_after(DEADLINE):
            await asyncio.wait([tasks[2]])
        slow.may.set()
        assert await finish([*tasks[:2], *tasks[3:]]) == [0, 1, 3, 4]
        assert slow.asked == 1


async def test_when_the_one_who_asked_leaves_one_other_asks() -> None:
    slow = Slow()
    async with herd(slow, 5) as (_, tasks):
        slow.begun.clear()
        tasks[0].cancel()
        with anyio.fail_after(DEADLINE):
            await slow.begun.wait()
        slow.may.set()
        assert await finish(tasks[1:]) == [1, 2, 3, 4]
        assert slow.asked == 2


async def test_nobody_waits_for_the_one_who_asked_to_read() -> None:
    """Its client sends two requests and reads neither answer; the second one asks the SDK."""
    slow = Slow()
    slow.description = "x" * 900_000
    slow.may.set()
    async with open_door(slow.server, shared_lists=True) as door, door.line() as deaf:
        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for number in range(20):
            deaf.writer.write(deaf.asks("tools/list", number))
        connections: set[Any] = door.server.server_state.connections
        await until(lambda: any(each.cycle and each.flow.write_paused for each in connections))
        door.live.list_cache.clear()  # as after a change
        for _ in range(3):
            assert b"slow" in (await door.send(asks)).body


async def test_an_old_answer_goes_on_while_one_asks_anew() -> None:
    slow = Slow()
    slow.may.set()
    async with open_door(slow.server, shared_lists=True, policy=Policy(list_memory=0.0)) as door:
        assert b"slow" in (await door.send(asks)).body
        slow.may.clear()
        slow.begun.clear()
        slow.description = "anew"
        asker = asyncio.ensure_future(door.send(asks))
        with anyio.fail_after(DEADLINE):
            await slow.begun.wait()
        assert b"anew" not in (await door.send(asks)).body
        slow.may.set()
        assert b"anew" in (await asker).body


@pytest.mark.parametrize(("cpu", "requests"), [(0.0, 5), (0.2, 0)], ids=["cheap", "expensive"])
async def test_an_expensive_list_is_requested_from_the_sdk_less_often(cpu: float, requests: int) -> None:
    """One that takes 0.2 s of CPU is used for 10 s, however short `list_memory` is."""

    class Expensive(Slow):
        async def _list(self, ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
            end = time.thread_time() + cpu
            while time.thread_time() < end:
                pass
            return await super()._list(ctx, params)

    slow = Expensive()
    slow.may.set()
    async with open_door(slow.server, shared_lists=True, policy=Policy(list_memory=0.001 if cpu else 0.0)) as door:
        await door.send(asks)
        with sdk_requests(door, requests):
            for _ in range(5):
                await door.send(asks)


async def test_nobody_gets_the_old_list_while_the_server_is_being_read() -> None:
    class SlowlyRead(Slow):
        read = asyncio.Event()

        async def _list(self, ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
            if ctx.request is None:
                await self.read.wait()
            return await super()._list(ctx, params)

    slow = SlowlyRead()
    slow.may.set()
    slow.read.set()
    async with open_door(slow.server, shared_lists=True) as door:
        for _ in range(3):
            await door.send(asks)
        assert slow.asked == 1
        slow.read.clear()
        slow.description = "anew"
        door.live.list_reader.wake(Feature.TOOLS)
        for _ in range(3):  # the first waits for the reading, as long as anybody does
            assert b"anew" in (await door.send(asks)).body
        slow.read.set()
        await until(lambda: door.live.list_reader.is_loaded)
        before = slow.asked
        for _ in range(3):
            assert b"anew" in (await door.send(asks)).body
        assert slow.asked <= before + 1  # it may have been made beforehand


async def test_what_can_not_be_shared_is_asked_for_by_each() -> None:
    """A page: with it, a herd is no herd."""

    class Pages(Slow):
        async def _list(self, ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
            result = await super()._list(ctx, params)
            return result.model_copy(update={"next_cursor": None if params and params.cursor else "2"})

    slow = Pages()
    async with herd(slow, 4) as (_, tasks):
        slow.may.set()
        assert await finish(tasks) == [0, 1, 2, 3]
        assert slow.asked == 4


@pytest.mark.parametrize("case", ["made", "cannot be made", "changed again"])
async def test_requests_during_a_change_wait_for_the_list_that_is_being_made(case: str) -> None:
    async with open_door(some_server()) as door:
        await warm(door)
        may = asyncio.Event()
        original, asked = door.live.list_reader.request, door.live.list_cache.find_pending
        waiting: list[Any] = []

        async def answered(method: str, version: str) -> dict[str, Any]:
            await may.wait()
            if case == "cannot be made":
                raise RuntimeError("no")
            return await original(method, version)

        def noted(method: str, version: str) -> Any:
            waiting.append(asked(method, version))
            return waiting[-1]

        door.live.list_reader.request = answered  # type: ignore[method-assign]
        door.live.list_cache.find_pending = noted  # type: ignore[method-assign]
        door.live.tools.add(lambda: "", name="slow")
        waiting.clear()
        tasks = [asyncio.ensure_future(call(door, number)) for number in range(5)]
        await until(lambda: len(waiting) == 5 and all(waiting))
        if case == "changed again":
            door.live.tools.add(lambda: "", name="newer")
        with sdk_requests(door, 1 if case == "cannot be made" else 0):
            may.set()
            assert await finish(tasks) == [0, 1, 2, 3, 4]
        assert case != "changed again" or all(b"newer" in task.result().body for task in tasks)
