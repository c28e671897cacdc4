"""The number of executable tools that run at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from mcp.client.client import Client

from tests.support.waiting import DEADLINE, until
from tests.support.workspaces import script, write
from tidings.workspace import call_slots
from tidings.workspace.call_slots import TooManyCalls, call_slot
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio


class Calls:
    """Calls that run until `end` is set. Each appends its number to `started`."""

    def __init__(self, limit: int) -> None:
        self.started: list[int] = []
        self.end = asyncio.Event()
        self._limit = limit

    async def call(self, number: int) -> None:
        async with call_slot(self._limit):
            self.started.append(number)
            await self.end.wait()


async def test_calls_beyond_the_limit_wait_and_run_in_order() -> None:
    calls = Calls(limit=2)
    tasks = [asyncio.create_task(calls.call(number)) for number in range(6)]
    await until(lambda: len(calls.started) == 2)
    tasks[0].cancel()
    await until(lambda: calls.started == [0, 1, 2])
    tasks[3].cancel()  # while it waits
    calls.end.set()
    await asyncio.wait(tasks)
    assert calls.started == [0, 1, 2, 4, 5]
    async with call_slot(1):
        pass  # every slot is free again


async def test_call_that_is_cancelled_when_its_turn_comes_passes_it_on() -> None:
    calls = Calls(limit=1)
    async with call_slot(1):
        first, second = (asyncio.create_task(calls.call(number)) for number in (1, 2))
        await asyncio.sleep(0)  # they wait now
    first.cancel()
    await until(lambda: calls.started == [2])
    calls.end.set()
    await asyncio.wait([first, second])
    assert first.cancelled()


async def test_call_that_is_cancelled_before_a_slot_is_free_only_ends() -> None:
    calls = Calls(limit=1)
    async with call_slot(1):
        waiting = asyncio.create_task(calls.call(1))
        await asyncio.sleep(0)  # it waits now
        waiting.cancel()  # in the same turn of the event loop in which the slot becomes free
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def test_call_fails_if_too_many_are_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_slots, "MAX_WAITING", 1)
    calls = Calls(limit=1)
    tasks = [asyncio.create_task(calls.call(number)) for number in range(3)]
    done, _ = await asyncio.wait(tasks, timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED)
    assert done == {tasks[2]}
    with pytest.raises(TooManyCalls, match="1 tools are running and 1 calls are waiting"):
        tasks[2].result()
    calls.end.set()
    await asyncio.wait(tasks)
    assert calls.started == [0, 1]


async def test_number_of_tool_processes_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_slots, "MAX_WAITING", 1)
    wait = "echo started >> log; until [ -e gate ]; do sleep 0.01; done; echo done"
    write(tmp_path, {"tidings.toml": "[tools]\nmax_processes = 2\n", "tools/wait.sh": script("Wait", wait)})
    async with Client(Workspace(tmp_path).server) as client:
        tasks = [asyncio.create_task(client.call_tool("wait")) for _ in range(5)]
        await until(lambda: sum(task.done() for task in tasks) == 2)
        for task in tasks:
            if task.done():
                text = getattr(task.result().content[0], "text", "")
                assert text.startswith("wait: 2 tools are running and 1 calls are waiting; try again later")
        log = tmp_path / "log"
        await until(lambda: log.exists() and log.read_text() == "started\n" * 2)
        (tmp_path / "gate").touch()
        results = [await task for task in tasks]
        assert sum(not result.is_error for result in results) == 3
