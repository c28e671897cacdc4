"""Execution of a program: without a shell, with limits for time and output, and without processes that remain.

The program leads its own process group. `run_process` stops the group when the call ends: after the exit, a timeout,
too much output or a cancellation. The group gets SIGTERM, and SIGKILL after `GRACE`. If the caller is cancelled a
second time in the meantime, the event loop may be about to close, so `run_process` kills the group immediately. If
this process ends without any of that, the watchdog kills the group.

This is not a sandbox. A process that leaves the group (`setsid`) is not stopped; if it keeps the pipes open, it delays
the call by at most `LINGER`. POSIX only.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import anyio

from tidings.errors import TidingsError
from tidings.runtime.watchdog import watchdog

__all__ = ["CannotStart", "Outcome", "run_process"]

logger = logging.getLogger(__name__)

PROGRESS_FD = "TIDINGS_PROGRESS_FD"
"""The variable with the file descriptor of the progress channel."""

GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL: enough to remove a temporary file, and short for a user who cancelled."""

LINGER = 0.1
"""Seconds that the group may still write after its leader has exited, as `tee` does in `exec > >(tee log)`."""

STDERR_TAIL = 16 * 1024
"""Bytes kept of the end of stderr, where the error is."""

MAX_LINE = 64 * 1024
"""Bytes of one line of the progress channel. A longer line is dropped."""

_CHUNK = 64 * 1024
"""Bytes: the capacity of a pipe on Linux, so that one read empties it."""

_LAST_READS = 16
"""Chunks to read after the exit: 1 MiB, the largest pipe that an unprivileged process can create."""

_BUSY_RETRIES, _BUSY_PAUSE = 20, 0.005
"""The number of retries, and the seconds between them, for a file that another process is writing (ETXTBSY)."""


class CannotStart(TidingsError):
    """The executable could not be started."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run. `status` is None if `run_process` stopped it early, and `-n` if signal n ended it."""

    status: int | None
    stdout: bytes
    stderr: bytes
    """The last `STDERR_TAIL` bytes."""
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
) -> Outcome:
    """Run `command`, and stop its process group at the end.

    With `max_timeout`, each line on the progress channel restarts `timeout`, and `max_timeout` limits the whole run.

    With `on_line`, the process gets one more pipe, the progress channel, and `on_line` is called immediately for each
    line that the process writes to it. `on_stop` is called before the group is stopped early.
    """
    run = _Run(asyncio.get_running_loop(), max_output, on_line, on_stop)
    for attempt in range(_BUSY_RETRIES + 1):
        try:
            run.start(command, env, cwd)
            break
        except OSError as error:
            if error.errno != errno.ETXTBSY or attempt == _BUSY_RETRIES:
                raise CannotStart(_explain(command[0], cwd, error)) from error
            await asyncio.sleep(_BUSY_PAUSE)
    try:
        run.watch(stdin, timeout, max_timeout)
        await asyncio.shield(run.finished)
    except asyncio.CancelledError:
        run.stop()
        with anyio.CancelScope(shield=True):  # anyio repeats a cancellation at every await
            await asyncio.shield(run.finished)
        raise
    finally:
        run.finish()
    return run.outcome()


class _Run:
    """The leader and the pipes of one process group. `finished` is done when these are reaped and closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        max_output: int,
        on_line: Callable[[str], None] | None,
        on_stop: Callable[[], None] | None,
    ) -> None:
        self.finished: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._max_output = max_output
        self._on_line = on_line
        self._on_stop = on_stop
        self._stdout = bytearray()
        self._stderr = bytearray()
        self._line = bytearray()
        self._is_line_too_long = False
        self._input = memoryview(b"")
        self._readers: dict[int, tuple[IO[bytes], Callable[[bytes], None]]] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._has_exited = self._is_stopping = self._is_finished = False
        self._is_timeout = self._is_truncated = self._is_idle = False
        self._last_line = 0.0
        self._pidfd = -1
        self._lines: IO[bytes] | None = None

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        watchdog.start()
        # Use bytes, because the locale of this process may not be able to encode the arguments of a client.
        environment = {name.encode(): value.encode("utf-8", "surrogateescape") for name, value in env.items()}
        write_end = -1
        if self._on_line is not None:
            read_end, write_end = os.pipe()
            self._lines = os.fdopen(read_end, "rb", buffering=0)
            environment[PROGRESS_FD.encode()] = str(write_end).encode()
        try:
            # No preexec_fn, user or umask: CPython can then use vfork, whose cost does not grow with this process.
            self._leader = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=cwd,
                env=environment,
                start_new_session=True,
                pass_fds=(write_end,) if write_end >= 0 else (),
            )
        except BaseException:
            if self._lines is not None:
                self._lines.close()
            raise
        finally:
            if write_end >= 0:
                os.close(write_end)
        watchdog.add(self._leader.pid)

    def watch(self, stdin: bytes, timeout: float, max_timeout: float | None) -> None:
        assert self._leader.stdin is not None
        self._read(self._leader.stdout, self._add_stdout)
        self._read(self._leader.stderr, self._add_stderr)
        self._read(self._lines, self._add_lines)
        self._watch_exit()
        os.set_blocking(self._leader.stdin.fileno(), False)
        self._input = memoryview(stdin)
        self._write()
        if max_timeout is not None:
            self._timers.append(self._loop.call_later(timeout, self._on_idle, timeout))
        self._timers.append(self._loop.call_later(max_timeout or timeout, self._on_timeout))

    def stop(self) -> None:
        """Stop the group early, and keep its output so far."""
        if self._has_exited:
            self.finish()
            return
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._on_stop is not None:
            self._call_safely(self._on_stop)
        self._signal(signal.SIGTERM)
        self._timers.append(self._loop.call_later(GRACE, self._signal, signal.SIGKILL))

    def finish(self) -> None:
        """Kill the rest of the group, close the pipes and reap the leader. Block for at most `GRACE`."""
        if self._is_finished:
            return
        self._is_finished = True
        self._signal(signal.SIGKILL)
        watchdog.remove(self._leader.pid)
        for timer in self._timers:
            timer.cancel()
        self._close_input()
        for descriptor in list(self._readers):
            for _ in range(_LAST_READS):
                if not self._on_readable(descriptor):
                    break
        for descriptor in list(self._readers):
            self._close(descriptor)
        for file in (self._leader.stdout, self._leader.stderr, self._lines):
            if file is not None:
                file.close()  # some may never have been watched
        self._close_pidfd()
        if self._line:
            self._add_lines(b"\n")
        try:
            self._leader.wait(GRACE)
        except subprocess.TimeoutExpired:  # don't block the event loop any longer
            logger.error("%r could not be killed; it still runs as process %d", self._leader.args, self._leader.pid)
        self.finished.set_result(None)

    def outcome(self) -> Outcome:
        return Outcome(
            status=None if self._is_stopping else self._leader.returncode,
            stdout=bytes(self._stdout),
            stderr=bytes(self._stderr[-STDERR_TAIL:]),
            is_timeout=self._is_timeout,
            is_truncated=self._is_truncated,
            is_idle=self._is_idle,
        )

    def _on_timeout(self) -> None:
        self._is_timeout = not self._has_exited
        self.stop()

    def _on_idle(self, timeout: float) -> None:
        remaining = self._last_line + timeout - self._loop.time()
        if remaining > 0:
            self._timers.append(self._loop.call_later(remaining, self._on_idle, timeout))
        elif not self._is_stopping:
            self._is_idle = True
            self._on_timeout()

    def _read(self, file: IO[bytes] | None, consume: Callable[[bytes], None]) -> None:
        if file is None:
            return
        descriptor = file.fileno()
        os.set_blocking(descriptor, False)
        self._readers[descriptor] = (file, consume)
        self._loop.add_reader(descriptor, self._on_readable, descriptor)

    def _on_readable(self, descriptor: int) -> bool:
        """Read one chunk. Return False if there is none, or the end is reached."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            chunk = b""
        if chunk:
            self._readers[descriptor][1](chunk)
            return descriptor in self._readers
        self._close(descriptor)
        if self._has_exited and not self._readers:
            self.finish()
        return False

    def _close(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        file, _ = self._readers.pop(descriptor)
        file.close()

    def _add_stdout(self, chunk: bytes) -> None:
        if self._is_truncated:
            return  # still read, so that a process that handles SIGTERM does not block in its write
        self._stdout += chunk
        if len(self._stdout) > self._max_output:
            del self._stdout[self._max_output :]
            self._is_truncated = True
            self.stop()

    def _add_stderr(self, chunk: bytes) -> None:
        self._stderr += chunk
        if len(self._stderr) > 2 * _CHUNK:
            del self._stderr[:-STDERR_TAIL]

    def _add_lines(self, chunk: bytes) -> None:
        self._last_line = self._loop.time()
        *whole, rest = chunk.split(b"\n")
        for part in whole:
            self._extend_line(part)
            if not self._is_line_too_long and self._on_line is not None:
                self._call_safely(self._on_line, self._line.decode("utf-8", "replace"))
            self._line.clear()
            self._is_line_too_long = False
        self._extend_line(rest)

    def _extend_line(self, part: bytes) -> None:
        if len(self._line) + len(part) > MAX_LINE:
            self._is_line_too_long = True
            self._line.clear()
        elif not self._is_line_too_long:
            self._line += part

    def _call_safely(self, call: Callable[..., None], *arguments: str) -> None:
        try:
            call(*arguments)
        except Exception:  # a failing callback must not prevent the end of the group
            logger.exception("a callback for %r failed", self._leader.args)

    def _write(self) -> None:
        """Write as much as possible without blocking, because the process may never read its input."""
        assert self._leader.stdin is not None
        descriptor = self._leader.stdin.fileno()
        try:
            while self._input:
                self._input = self._input[os.write(descriptor, self._input) :]
        except BlockingIOError:
            self._loop.add_writer(descriptor, self._write)
            return
        except OSError:
            pass  # the process has closed its input
        self._close_input()

    def _close_input(self) -> None:
        assert self._leader.stdin is not None
        if not self._leader.stdin.closed:
            self._loop.remove_writer(self._leader.stdin.fileno())
            self._leader.stdin.close()

    def _signal(self, number: int) -> None:
        # Only before the leader is reaped: until then the system does not reuse its process id, which names the group.
        try:
            os.killpg(self._leader.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # no process is left; macOS raises EPERM if there are only zombies

    def _watch_exit(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self._leader.pid)
        except (AttributeError, OSError):  # not Linux, or a sandbox without it
            threading.Thread(target=self._wait_in_thread, daemon=True).start()
        else:
            self._loop.add_reader(self._pidfd, self._on_exit)

    def _wait_in_thread(self) -> None:
        if hasattr(os, "waitid"):
            try:
                os.waitid(os.P_PID, self._leader.pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                return  # reaped already: the run has ended
        else:
            self._leader.wait()
        try:
            self._loop.call_soon_threadsafe(self._on_exit)
        except RuntimeError:
            pass  # the loop is closed

    def _on_exit(self) -> None:
        if self._is_finished:
            return  # the waiting thread reports it too late
        self._close_pidfd()
        self._has_exited = True
        if self._is_stopping or not self._readers:
            self.finish()
        else:
            self._timers.append(self._loop.call_later(LINGER, self.finish))

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def _explain(path: str, cwd: Path, error: OSError) -> str:
    reasons = {
        errno.ENOENT: "the file, or the interpreter that its first line names, does not exist",
        errno.EACCES: f"it is not executable; run: chmod +x {path}",
        errno.EPERM: "this system does not permit to execute it",
        errno.ENOEXEC: "its first line names no interpreter; start it with a line like #!/bin/sh",
        errno.ETXTBSY: "another process is still writing it; try again",
        errno.E2BIG: "its arguments and environment are larger than this system permits",
        errno.EAGAIN: "too many processes are running; raise the limit (ulimit -u), or call fewer tools at once",
        errno.EMFILE: "too many files are open; raise the limit (ulimit -n), or call fewer tools at once",
        errno.ENOTDIR: f"{cwd} is not a directory",
    }
    return f"{path} could not be started: {reasons.get(error.errno or 0, error.strerror)}"
