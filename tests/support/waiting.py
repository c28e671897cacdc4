"""Waiting for what nobody announces, always with a deadline.

What sets an event, writes a line or sends a message is waited for by that. What is only to be seen somewhere, as a flag
of uvicorn's or the port of another process, is looked at again and again: here, and nowhere else in the tests.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

__all__ = ["DEADLINE", "until", "until_served"]

DEADLINE = 60.0
"""Seconds for one wait: far above the slowest, so that only what never comes meets it."""
PAUSE = 0.002
"""Seconds between two looks: short beside anything that is waited for, and whoever is awaited has the machine."""


async def until(
    is_so: Callable[[], object], deadline: float | None = DEADLINE, *, doing: Callable[[], object] | None = None
) -> None:
    """Wait until it is so; `doing` is done after each look in vain. What is not so in time is a `TimeoutError`."""
    async with asyncio.timeout(deadline):
        while not is_so():
            if doing is None:
                await asyncio.sleep(PAUSE)
            else:
                doing()
                await asyncio.sleep(0)  # the others' turn


async def until_served(port: int) -> None:
    """Wait until connections to a local port are taken."""

    def is_taken() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    await until(is_taken)
