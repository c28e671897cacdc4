"""Poll for a condition, always with a deadline; and ports and processes of servers.

A test that can wait for an event, a line of output or a message waits for that. Only state that is never announced,
such as a flag of uvicorn or the port of another process, is polled. All polling of the tests is here.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

__all__ = ["DEADLINE", "free_port", "is_running", "is_served", "until", "until_served"]

DEADLINE = 60.0
"""Seconds for one wait: far above the slowest, so that only a condition that never becomes true reaches it."""
POLL_INTERVAL = 0.002
"""Seconds between two checks: short compared with any wait, but long enough to leave the CPU to other processes."""


async def until(
    condition: Callable[[], object], deadline: float | None = DEADLINE, *, action: Callable[[], object] | None = None
) -> None:
    """Wait until the condition is true, and call `action` after each check before that.

    Raise `TimeoutError` at the deadline.
    """
    async with asyncio.timeout(deadline):
        while not condition():
            if action is None:
                await asyncio.sleep(POLL_INTERVAL)
            else:
                action()
                await asyncio.sleep(0)  # let other tasks run


def free_port() -> int:
    """Return a local port that no server uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def is_served(port: int) -> bool:
    """Return whether a local port accepts connections."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


async def until_served(port: int) -> None:
    await until(lambda: is_served(port))


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended. Its parent may not have collected its status yet."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()  # it has just ended, or this system has no /proc
