"""Execution of a program: without a shell, with limits for time and output, and without processes that remain.

`run_process` stops the group of the program when the call ends: after the exit, a timeout, too much output or a
cancellation (see `runtime/child.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tidings.runtime.child import LINGER, Child
from tidings.runtime.shutdown import GRACE

__all__ = ["Outcome", "run_process"]

logger = logging.getLogger(__name__)

PROGRESS_FD = "TIDINGS_PROGRESS_FD"
"""The variable with the file descriptor of the progress channel."""

MAX_LINE = 64 * 1024
"""Bytes of one line of the progress channel. A longer line is dropped."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run. `status` is None if `run_process` stopped it early, and `-n` if signal n ended it."""

    status: int | None
    stdout: bytes
    stderr: bytes
    """The end of it."""
    is_timeout: bool
    is_truncated: bool
    is_idle: bool = False
    """Whether the timeout was one without progress, of a run with `max_timeout`."""


async def run_process(
    command: Sequence[str],
    *,
    stdin: bytes,
    env: Mapping[str, str],
    cwd: Path,
    timeout: float,  # noqa: ASYNC109  # stops a process group, which cancelling an await would not
    max_output: int,
    max_timeout: float | None = None,
    on_line: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] | None = None,
    grace: float = GRACE,
    linger: float = LINGER,
) -> Outcome:
    """Run `command`, and stop its process group at the end. Raise `CannotStart`.

    With `max_timeout`, each line on the progress channel restarts `timeout`, and `max_timeout` limits the whole run.

    With `on_line`, the process gets one more pipe, the progress channel, and `on_line` is called immediately for each
    line that the process writes to it. `on_stop` is called before the group is stopped early.
    """
    run = _Run(max_output, on_line)
    lines: IO[bytes] | None = None
    pass_fds: tuple[int, ...] = ()
    if on_line is not None:
        read_end, write_end = os.pipe()
        lines, pass_fds = os.fdopen(read_end, "rb", buffering=0), (write_end,)
        env = {**env, PROGRESS_FD: str(write_end)}
    try:
        run.child = await Child.start(
            command,
            env=env,
            cwd=cwd,
            pass_fds=pass_fds,
            on_output=run.add_stdout,
            on_stop=on_stop or (lambda: None),
            grace=grace,
            linger=linger,
        )
    except BaseException:
        if lines is not None:
            lines.close()
        raise
    finally:
        for descriptor in pass_fds:
            os.close(descriptor)
    run.child.read(lines, run.add_lines)
    run.child.write(stdin, closes=True)
    run.limit(timeout, max_timeout)
    status = await run.child.wait()
    return run.outcome(status)


class _Run:
    """The output and the limits of one child."""

    child: Child

    def __init__(self, max_output: int, on_line: Callable[[str], None] | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._max_output = max_output
        self._on_line = on_line
        self._stdout = bytearray()
        self._line = b""
        self._is_timeout = self._is_truncated = self._is_idle = False
        self._last_line = 0.0

    def limit(self, timeout: float, max_timeout: float | None) -> None:
        if max_timeout is not None:
            self.child.call_later(timeout, self._on_idle, timeout)
        self.child.call_later(max_timeout or timeout, self._on_timeout)

    def outcome(self, status: int | None) -> Outcome:
        return Outcome(
            status=None if self.child.is_stopping else status,
            stdout=bytes(self._stdout),
            stderr=self.child.stderr,
            is_timeout=self._is_timeout,
            is_truncated=self._is_truncated,
            is_idle=self._is_idle,
        )

    def _on_timeout(self) -> None:
        self.child.stop()
        self._is_timeout = self.child.is_stopping

    def _on_idle(self, timeout: float) -> None:
        remaining = self._last_line + timeout - self._loop.time()
        if remaining > 0:
            self.child.call_later(remaining, self._on_idle, timeout)
        elif not self.child.is_stopping:
            self._is_idle = True
            self._on_timeout()

    def add_stdout(self, chunk: bytes) -> None:
        if self._is_truncated:
            return  # still read, so that a process that handles SIGTERM does not block in its write
        self._stdout += chunk
        if len(self._stdout) > self._max_output:
            del self._stdout[self._max_output :]
            self._is_truncated = True
            self.child.stop()

    def add_lines(self, chunk: bytes) -> None:
        if chunk:
            self._last_line = self._loop.time()
        *lines, rest = (self._line + (chunk or b"\n" * bool(self._line))).split(b"\n")
        self._line = rest[: MAX_LINE + 1]  # enough to see that it is too long
        for line in lines:
            if len(line) <= MAX_LINE and self._on_line is not None:
                try:
                    self._on_line(line.decode("utf-8", "replace"))
                except Exception:  # a failing callback must not prevent the end of the group
                    logger.exception("the callback for a line of progress failed")
