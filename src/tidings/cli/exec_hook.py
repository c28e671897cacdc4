"""The command of `tidings watch --exec`: it runs once for each change, one after the other.

A command that fails is reported, and the next one runs. The queue is bounded: if commands are slower than changes, the
watch waits, and then sees the net difference.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress

from tidings.cli.output import print_stderr
from tidings.cli.watch_change import WatchedChange

__all__ = ["ExecHook"]

_MAX_PENDING = 100
_STOP_TIMEOUT = 1.0
"""Seconds for a running command to end after SIGTERM."""


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

    async def put(self, change: WatchedChange) -> bool:
        """Queue a change. Return whether that had to wait for a command."""
        is_full = self._queue.full()
        await self._queue.put(change)
        return is_full

    async def run(self) -> None:
        """Run the commands until this task is cancelled, which ends the running one."""
        while True:
            change = await self._queue.get()
            self._is_running = True
            problem = await self._run_once(change)
            self._is_running = False
            if problem:
                self.failures += 1
                print_stderr(f"tidings: --exec: {problem} ({change.operation} {change.kind} {change.name:.200})")

    async def _run_once(self, change: WatchedChange) -> str | None:
        """Run the command, and return what went wrong."""
        try:
            process = await asyncio.create_subprocess_shell(
                self._command,
                stdin=asyncio.subprocess.PIPE,
                # Standard output contains nothing but JSON then. Not the descriptor 2, which may be the server's.
                stdout=sys.stderr if self._is_json else None,
                stderr=sys.stderr,
                env=os.environ | change.as_variables(),
                start_new_session=True,  # so that all processes of the command can be ended
            )
        except OSError as error:
            return f"the command can't be run: {error.strerror or error}"
        try:
            await process.communicate(json.dumps(change.as_json()).encode() + b"\n")
        finally:
            if process.returncode is None:
                await _stop(process)
        status = process.returncode or 0
        if status < 0:
            return f"the command was ended by signal {-status}"
        return f"the command ended with status {status}" if status else None


async def _stop(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT):
                await process.wait()
                return
