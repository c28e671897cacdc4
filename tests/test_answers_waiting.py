"""A list that is being made: who asks for it meanwhile waits at the connection, and loses nothing by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from starlette.responses import Response
from starlette.routing import Route

from tests.support.http_server import Door, Line, open_door, some_server
from tests.support.kinds import Own
from tests.support.lists import ids, warm
from tests.support.lists import quick_door as door
from tests.support.waiting import until
from tidings.lanes import answers

__all__ = ["door"]

pytestmark = pytest.mark.anyio


class Making:
    """A list that changed, and is being made until the test says so."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.may = asyncio.Event()
        self.fails = False
        original = door.live.answered

        async def answered(method: str, version: str) -> dict[str, Any]:
            await self.may.wait()
            if self.fails:
                raise RuntimeError("no")
            return await original(method, version)

        door.live.answered = answered  # type: ignore[method-assign]
        door.live.tools.add(lambda: "", name="new", description="")
        self.before = dict(door.counts)

    @property
    def waiting(self) -> list[Any]:
        connections: set[Any] = self.door.server.server_state.connections
        return [each for each in connections if each._held is not None]

    async def until_waiting(self, number: int) -> None:
        await until(lambda: len(self.waiting) == number)

    def counted(self) -> tuple[int, int]:
        """How many the SDK has answered meanwhile, and how many the connections."""
        return tuple(self.door.counts[key] - self.before[key] for key in ("sdk", "connection"))  # type: ignore[return-value]

    @property
    def doors(self) -> list[Any]:
        return [each for each in answers._doors.values() if each.front is self.door.front]


@asynccontextmanager
async def herd(door: Door, size: int) -> AsyncIterator[tuple[Making, list[Line]]]:
    """Connections whose request for a list that is being made has come, and waits."""
    async with AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(door.line()) for _ in range(size)]
        for number, line in enumerate(lines):  # each was here before
            await line.send(line.asks("tools/list", number))
        making = Making(door)
        for number, line in enumerate(lines):
            line.writer.write(line.asks("tools/list", number))
        await making.until_waiting(size)
        yield making, lines


async def test_a_herd_waits_at_the_connection_for_a_list_that_is_being_made(door: Door) -> None:
    async with herd(door, 5) as (making, lines):
        assert not door.server.server_state.tasks
        making.may.set()
        told = [await line.answer() for line in lines]
        assert making.counted() == (0, 5)
        assert ids(told) == [0, 1, 2, 3, 4]
        assert all(b'"new"' in answer.body for answer in told)
        assert told[3] == await door.by_sdk(lambda line: line.asks("tools/list", 3))
        assert [each._waiting for each in making.doors] == [{}]


async def test_a_list_that_can_not_be_made_is_asked_for_by_one_of_those_who_wait(door: Door) -> None:
    async with herd(door, 5) as (making, lines):
        making.fails = True
        making.may.set()
        told = [await line.answer() for line in lines]
        assert all(b'"new"' in answer.body for answer in told)
        assert making.counted()[0] == 1


async def test_another_change_meanwhile_keeps_nobody_waiting(door: Door) -> None:
    async with herd(door, 3) as (making, lines):
        door.live.tools.add(lambda: "", name="newer", description="")
        making.may.set()
        told = [await line.answer() for line in lines]
        assert all(b'"newer"' in answer.body for answer in told)
        assert making.counted() == (0, 3)


async def test_one_that_leaves_while_it_waits_leaves_nothing_behind(door: Door) -> None:
    async with herd(door, 3) as (making, lines):
        lines[1].writer.close()
        await making.until_waiting(2)
        [waiting] = making.doors[0]._waiting.values()
        assert len(waiting) == 2
        making.may.set()
        assert ids([await lines[0].answer(), await lines[2].answer()]) == [0, 2]


async def test_one_that_fails_while_it_goes_on_takes_nobody_with_it(
    door: Door, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with herd(door, 3) as (making, lines):
        [waiting] = making.doors[0]._waiting.values()
        first = next(iter(waiting))

        def go_on(answers: Any) -> None:
            raise RuntimeError("no")

        monkeypatch.setattr(first, "go_on", go_on)
        making.may.set()
        assert ids([await lines[1].answer(), await lines[2].answer()]) == [1, 2]
        assert "a connection failed" in caplog.text


async def test_a_request_behind_one_that_waits_is_answered_after_it(door: Door) -> None:
    async with herd(door, 2) as (making, lines):
        lines[0].writer.write(lines[0].asks("tools/list", "next"))
        await making.until_waiting(1)
        making.may.set()
        assert ids([await lines[0].answer(), await lines[0].answer(), await lines[1].answer()]) == [0, "next", 1]


async def test_one_that_waits_when_the_server_stops_is_still_answered(door: Door) -> None:
    async with herd(door, 1) as (making, [line]):
        [protocol] = making.waiting
        protocol.shutdown()
        making.may.set()
        answer = await line.answer()
        assert b'"new"' in answer.body
        assert (b"connection", b"close") in answer.headers
        assert await line.ended()


async def test_one_that_waits_is_not_idle() -> None:
    async with open_door(some_server(), "connection", timeout_keep_alive=1) as door:
        await warm(door)
        async with herd(door, 1) as (making, [line]), door.line() as other:
            await other.send(other.request(b"", start="GET /nothing HTTP/1.1"))
            assert await other.ended()  # which is idle from then on, for as long as a connection may be
            making.may.set()
            assert b'"new"' in (await line.answer()).body
            assert await line.ended()


@pytest.mark.parametrize("what", ["middleware", "hosts", "not shared", "route"])
async def test_who_has_to_see_a_request_sees_one_that_waited(door: Door, what: str) -> None:
    async with herd(door, 3) as (making, lines):
        own: Any = Own()
        match what:
            case "middleware":
                door.live.server.middleware.append(own)
            case "hosts":
                door.live.server.session_manager.security_settings.allowed_hosts.clear()
            case "not shared":
                door.live._shared_lists = False
            case _:
                door.app.routes.insert(0, Route("/mcp", lambda request: Response(status_code=418), methods=["POST"]))
        making.may.set()
        told = [await line.answer() for line in lines]
        expected = {"hosts": b"421", "route": b"418"}.get(what, b"200")
        assert all(expected in answer.status for answer in told)
        assert making.counted() == (0 if what == "route" else 3, 0)
