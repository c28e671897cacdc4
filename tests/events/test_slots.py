"""The limits of concurrent requests per receiver."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.waiting import until
from tidings.events.slots import RequestSlots

pytestmark = pytest.mark.anyio

URL = "https://receiver.example/events"


async def test_limit_holds_when_a_receiver_recovers_and_fails_again() -> None:
    slots = RequestSlots()
    responds, fails = asyncio.Event(), asyncio.Event()
    active = peak = 0

    async def request(response: asyncio.Event) -> None:
        nonlocal active, peak
        async with slots.take(URL):
            active += 1
            peak = max(peak, active)
            await response.wait()
            slots.report(URL, is_failing=response is fails)
            active -= 1

    async with slots.take(URL):
        slots.report(URL, is_failing=True)
    async with asyncio.TaskGroup() as group:  # it recovers: 32 requests at once
        for response in (responds, *[fails] * 20):
            group.create_task(request(response))
        await until(lambda: active)
        responds.set()
        await until(lambda: active == 20)
        for _ in range(20):
            group.create_task(request(fails))
        await until(lambda: active >= 32)
        fails.set()
    assert peak == 32
    fails.clear()
    peak = 0
    async with asyncio.TaskGroup() as group:  # it fails again: one request at a time
        for _ in range(3):
            group.create_task(request(fails))
        await until(lambda: active)
        fails.set()
    assert peak == 1
