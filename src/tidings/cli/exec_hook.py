"""The command of `tidings watch --exec`: it runs once for each change, one after the other.

A command that fails is reported, and the next one runs. The queue is bounded: if commands are slower than changes, the
watch waits, and then sees the net difference.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from tidings.cli.output import print_stderr
from tidings.cli.watch_change import WatchedChange
from tidings.core.redact import one_line
from tidings.runtime.child import CannotStart, Child

__all__ = ["ExecHook"]

_MAX_PENDING = 100


class ExecHook:
    def __init__(self, command: str, *, is_json: bool) -> None:
        self._command = command
        self._is_json = is_json
        self._queue: asyncio.Queue[WatchedChange] = asyncio.Queue(_MAX_PENDING)
        self._is_running = False
        self.failures = 0

    @property
    def unfinished(self) -> int:
        """The number of changes whose command has not ended."""
        return self._queue.qsize() + self._is_running

    async def put(self, change: WatchedChange) -> None:
        """Queue a change. Wait for a command if the queue is full."""
        await self._queue.put(change)

    async def run(self) -> None:
        """Run the commands until this task is cancelled, which ends the running one."""
        while True:
            change = await self._queue.get()
            self._is_running = True
            problem = await self._run_once(change)
            self._is_running = False
            if problem:
                self.failures += 1
                name = one_line(change.name, 200)
                print_stderr(f"tidings: --exec: {problem} ({change.operation} {change.kind} {name})")

    async def _run_once(self, change: WatchedChange) -> str | None:
        """Run the command, and return what went wrong."""
        try:
            child = await Child.start(
                self._command,
                env=os.environ | change.as_variables(),
                # With --json, standard output contains nothing else. Not the descriptor 2, which may be the server's.
                stdout=sys.stderr if self._is_json else None,
                stderr=sys.stderr,
                kills_rest=False,
            )
        except CannotStart as error:
            return str(error)
        child.write(json.dumps(change.as_json()).encode() + b"\n", closes=True)
        status = await child.wait() or 0
        if status < 0:
            return f"the command was ended by signal {-status}"
        return f"the command ended with status {status}" if status else None
