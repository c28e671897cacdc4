"""The command of `tidings watch --exec`: it runs once for each change, one after the other.

A command that fails is reported, and the next one runs. The queue is bounded: if commands are slower than changes, the
watch waits, and then sees the net difference.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

from tidings.cli.output import print_stderr
from tidings.cli.watch_change import WatchedChange
from tidings.core.redact import one_line

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

    def _start(self, change: WatchedChange) -> subprocess.Popen[bytes]:
        """Start the command, in one step: what it starts at once would survive a cancelled start of asyncio."""
        return subprocess.Popen(
            self._command,
            shell=True,
            stdin=subprocess.PIPE,
            # With --json, standard output contains nothing else. Not the descriptor 2, which may be the server's.
            stdout=sys.stderr if self._is_json else None,
            stderr=sys.stderr,
            env=os.environ | change.as_variables(),
            start_new_session=True,  # so that all its processes can be ended
        )

    async def _run_once(self, change: WatchedChange) -> str | None:
        """Run the command, and return what went wrong."""
        try:
            process = self._start(change)
        except OSError as error:
            return f"the command can't be run: {error.strerror or error}"
        written = json.dumps(change.as_json()).encode() + b"\n"
        ended = asyncio.create_task(asyncio.to_thread(process.communicate, written))
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                await asyncio.wait([ended], timeout=_STOP_TIMEOUT)
            raise
        status = process.returncode
        if status < 0:
            return f"the command was ended by signal {-status}"
        return f"the command ended with status {status}" if status else None
