"""The heartbeat of transports without one of their own."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.waiting import DEADLINE
from tidings.server.heartbeat import Heartbeat

pytestmark = pytest.mark.anyio


async def test_failing_connection_does_not_stop_the_heartbeat_of_others(caplog: pytest.LogCaptureFixture) -> None:
    heartbeat = Heartbeat(0.001)
    beats = 0
    is_thrice = asyncio.Event()

    def fail() -> None:
        raise RuntimeError("its connection is gone")

    def beat() -> None:
        nonlocal beats
        beats += 1
        if beats == 3:
            is_thrice.set()

    heartbeat.add(fail)
    heartbeat.add(beat)
    async with asyncio.timeout(DEADLINE):
        await is_thrice.wait()

    assert "a heartbeat could not be sent" in caplog.text
    for each in (fail, beat):
        heartbeat.remove(each)
