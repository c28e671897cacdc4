"""Many clients request a list after a change: one request reaches the SDK, and the others wait for its response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import mcp_types as types
import pytest
from mcp.server import Server, ServerRequestContext

from tests.support.http_server import LocalServer, RawClient, example_server, serving
from tests.support.lists import fill_cache, sdk_requests
from tests.support.messages import modern_headers, modern_message
from tests.support.sdk_clients import DEADLINE
from tests.support.waiting import until
from tidings import Feature, Policy

pytestmark = pytest.mark.anyio


def modern(client: RawClient) -> bytes:
    return client.modern("tools/list")


class Slow:
    """A low-level server that returns its list when the test allows it."""

    def __init__(self) -> None:
        self.asked = 0
        self.begun = asyncio.Event()
        self.may = asyncio.Event()
        self.description = ""
        self.server: Server[Any] = Server("slow", on_list_tools=self._list)

    async def _list(self, ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
        if ctx.request is not None:  # not the request of Live, which has no principal
            self.asked += 1
            self.begun.set()
            await self.may.wait()
        tool = types.Tool(name="slow", description=self.description, input_schema={"type": "object"})
        return types.ListToolsResult(tools=[tool])


def record_pending(local: LocalServer) -> list[Any]:
    """Return a list to which each request appends the pending request to the SDK that it found, or None."""
    waiting: list[Any] = []
    original = local.live.list_cache.find_pending

    def find_pending(method: str, version: str) -> Any:
        waiting.append(original(method, version))
        return waiting[-1]

    local.live.list_cache.find_pending = find_pending  # type: ignore[method-assign]
    return waiting


@asynccontextmanager
async def waiting_requests(slow: Slow) -> AsyncIterator[list[asyncio.Task[httpx2.Response]]]:
    """Start five requests that all wait for the list, each in its own task."""
    async with serving(slow.server, shared_lists=True) as local:
        tasks = []
        waiting = record_pending(local)
        for number in range(5):
            tasks.append(asyncio.ensure_future(call(local, number)))
            await until(lambda: slow.begun.is_set() and len(waiting) == len(tasks))
        yield tasks


async def call(local: LocalServer, number: int) -> httpx2.Response:
    """Call the ASGI app directly, so that the task can be cancelled as by a middleware with a time limit."""
    transport = httpx2.ASGITransport(local.app)
    async with httpx2.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{local.port}") as client:
        request = modern_message("tools/list", number)
        return await client.post("/mcp", json=request, headers=modern_headers("tools/list"))


async def finish(tasks: list[asyncio.Task[httpx2.Response]]) -> list[int]:
    with anyio.fail_after(DEADLINE):
        told = await asyncio.gather(*tasks)
    assert all("slow" in answer.text for answer in told)
    return [answer.json()["id"] for answer in told]


async def test_many_clients_cause_one_request_to_the_sdk() -> None:
    slow = Slow()
    async with waiting_requests(slow) as tasks:
        slow.may.set()
        assert await finish(tasks) == [0, 1, 2, 3, 4]
        assert slow.asked == 1


async def test_waiting_client_that_disconnects_does_not_cancel_others() -> None:
    slow = Slow()
    async with waiting_requests(slow) as tasks:
        tasks[2].cancel()
        with anyio.fail_after(DEADLINE):
            await asyncio.wait([tasks[2]])
        slow.may.set()
        assert await finish([*tasks[:2], *tasks[3:]]) == [0, 1, 3, 4]
        assert slow.asked == 1


async def test_another_client_asks_if_the_first_disconnects() -> None:
    slow = Slow()
    async with waiting_requests(slow) as tasks:
        slow.begun.clear()
        tasks[0].cancel()
        with anyio.fail_after(DEADLINE):
            await slow.begun.wait()
        slow.may.set()
        assert await finish(tasks[1:]) == [1, 2, 3, 4]
        assert slow.asked == 2


async def test_clients_do_not_wait_for_the_first_to_read() -> None:
    """The first client sends requests and reads no response; the others get theirs from the cache."""
    slow = Slow()
    slow.description = "x" * 900_000
    slow.may.set()
    async with serving(slow.server, shared_lists=True) as local, local.client() as deaf:
        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for number in range(20):
            deaf.writer.write(deaf.modern("tools/list", number))
        connections: set[Any] = local.server.server_state.connections
        await until(lambda: any(each.cycle and each.flow.write_paused for each in connections))
        for _ in range(3):
            assert b"slow" in (await local.send(modern)).body


async def test_expired_response_is_used_while_a_new_one_is_made() -> None:
    slow = Slow()
    slow.may.set()
    async with serving(slow.server, shared_lists=True, policy=Policy(list_max_age=0.0)) as local:
        assert b"slow" in (await local.send(modern)).body
        slow.may.clear()
        slow.begun.clear()
        slow.description = "anew"
        asker = asyncio.ensure_future(local.send(modern))
        with anyio.fail_after(DEADLINE):
            await slow.begun.wait()
        assert b"anew" not in (await local.send(modern)).body
        slow.may.set()
        assert b"anew" in (await asker).body


@pytest.mark.parametrize(("cpu", "requests"), [(0.0, 5), (0.2, 0)], ids=["cheap", "expensive"])
async def test_expensive_list_is_requested_from_the_sdk_less_often(cpu: float, requests: int) -> None:
    """One that takes 0.2 s of CPU is used for 10 s, however short `list_max_age` is."""

    class Expensive(Slow):
        async def _list(self, ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
            end = time.thread_time() + cpu
            while time.thread_time() < end:
                pass
            return await super()._list(ctx, params)

    slow = Expensive()
    slow.may.set()
    async with serving(slow.server, shared_lists=True, policy=Policy(list_max_age=0.001 if cpu else 0.0)) as local:
        await local.send(modern)
        with sdk_requests(local, requests):
            for _ in range(5):
                await local.send(modern)


async def test_old_list_is_not_sent_while_the_server_is_read() -> None:
    class SlowlyRead(Slow):
        read = asyncio.Event()

        async def _list(self, ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
            if ctx.request is None:
                await self.read.wait()
            return await super()._list(ctx, params)

    slow = SlowlyRead()
    slow.may.set()
    slow.read.set()
    async with serving(slow.server, shared_lists=True) as local:
        for _ in range(3):
            await local.send(modern)
        assert slow.asked == 1
        slow.read.clear()
        slow.description = "anew"
        local.live.list_reader.wake(Feature.TOOLS)
        for _ in range(3):  # the first waits until the list is read
            assert b"anew" in (await local.send(modern)).body
        slow.read.set()
        await until(lambda: local.live.list_reader.is_loaded)
        before = slow.asked
        for _ in range(3):
            assert b"anew" in (await local.send(modern)).body
        assert slow.asked <= before + 1  # it may have been made in advance


async def test_response_that_cannot_be_shared_is_requested_by_each_client() -> None:
    """A page of a list."""

    class Pages(Slow):
        async def _list(self, ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
            result = await super()._list(ctx, params)
            return result.model_copy(update={"next_cursor": None if params and params.cursor else "2"})

    slow = Pages()
    async with waiting_requests(slow) as tasks:
        slow.may.set()
        assert await finish(tasks) == [0, 1, 2, 3, 4]
        assert slow.asked == 5


@pytest.mark.parametrize("case", ["made", "cannot be made", "changed again"])
async def test_requests_during_a_change_wait_for_the_new_list(case: str) -> None:
    async with serving(example_server()) as local:
        await fill_cache(local)
        may = asyncio.Event()
        original = local.live.list_reader.request

        async def answered(method: str, version: str) -> dict[str, Any]:
            await may.wait()
            if case == "cannot be made":
                raise RuntimeError("no")
            return await original(method, version)

        local.live.list_reader.request = answered  # type: ignore[method-assign]
        local.live.tools.add(lambda: "", name="slow")
        await asyncio.sleep(0)  # the end of the turn, at which the change is published
        waiting = record_pending(local)
        tasks = [asyncio.ensure_future(call(local, number)) for number in range(5)]
        await until(lambda: len(waiting) == 5 and all(waiting))
        if case == "changed again":
            local.live.tools.add(lambda: "", name="newer")
        with sdk_requests(local, 1 if case == "cannot be made" else 0):
            may.set()
            assert await finish(tasks) == [0, 1, 2, 3, 4]
        assert case != "changed again" or all("newer" in task.result().text for task in tasks)
