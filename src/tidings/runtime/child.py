"""A child process: without a shell unless asked, and without processes that remain.

The child leads its own process group. `stop` sends SIGTERM to the group, and SIGKILL after `grace`. When the leader has
exited, the rest of the group is killed. If this process ends without any of that, the watchdog kills the group.

This is not a sandbox. A process that leaves the group (`setsid`) is not stopped; if it keeps the pipes open, it delays
the end by at most `linger`. POSIX only.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import anyio

from tidings.errors import TidingsError
from tidings.runtime.shutdown import GRACE
from tidings.runtime.watchdog import watchdog

__all__ = ["LINGER", "STDERR_TAIL", "CannotStart", "Child"]

logger = logging.getLogger(__name__)

LINGER = 0.1
"""Seconds that the group may still write after its leader has exited, as `tee` does in `exec > >(tee log)`."""

STDERR_TAIL = 16 * 1024
"""Bytes kept of the end of stderr, where the error is."""

_CHUNK = 64 * 1024
"""Bytes: the capacity of a pipe on Linux, so that one read empties it."""

_LAST_READS = 16
"""Chunks to read after the exit: 1 MiB, the largest pipe that an unprivileged process can create."""

_BUSY_RETRIES, _BUSY_PAUSE = 20, 0.005
"""The number of retries, and the seconds between them, for a file that another process is writing (ETXTBSY)."""

_POLL_PAUSE = 0.005
"""Seconds between two looks at a child without an event loop."""


class CannotStart(TidingsError):
    """The executable could not be started."""


class Child:
    """A process group, its leader and the pipes of the leader.

    With the constructor, the child runs without an event loop: the owner calls `poll` and `stop_blocking`. With
    `start`, the running event loop serves the pipes, and the owner awaits `wait`.
    """

    def __init__(
        self,
        command: Sequence[str | Path] | str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int = subprocess.PIPE,
        stdout: int | IO[Any] | None = subprocess.PIPE,
        stderr: int | IO[Any] | None = subprocess.PIPE,
        pass_fds: Sequence[int] = (),
        signal_on_parent_death: str = "KILL",
        on_output: Callable[[bytes], None] = lambda chunk: None,
        on_stop: Callable[[], None] = lambda: None,
        grace: float = GRACE,
        linger: float = LINGER,
        kills_rest: bool = True,
    ) -> None:
        """Start `command`; a string is a command for the shell. Raise `CannotStart`.

        `signal_on_parent_death` is the signal that the group gets when this process dies. The rest is for `start`:
        `on_output` is called with each chunk of stdout, and with `b""` at its end; `on_stop` before the group is
        stopped early. With `kills_rest=False`, processes that the leader has left behind may go on, unless the group
        was stopped early.
        """
        try:
            with watchdog.starting() as (variables, add):
                # Bytes, because the locale of this process may not be able to encode the arguments of a client.
                environment = {
                    name.encode("utf-8", "surrogateescape"): value.encode("utf-8", "surrogateescape")
                    for name, value in {**(os.environ if env is None else env), **variables}.items()
                }
                # No preexec_fn, user or umask: CPython can then use vfork, whose cost does not grow with this process.
                self._leader = subprocess.Popen(
                    command,
                    shell=isinstance(command, str),
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    bufsize=0,
                    cwd=cwd,
                    env=environment,
                    start_new_session=True,
                    pass_fds=pass_fds,
                )
                self.pid = self._leader.pid
                add(self.pid, signal_on_parent_death)
        except OSError as error:
            name = command if isinstance(command, str) else str(command[0])
            raise CannotStart(_explain(name, cwd, error)) from error
        self.finished: asyncio.Future[None]
        """Done when the group has ended and the leader is reaped. Of a child that was started with `start`."""
        self.is_stopping = False
        """Whether `stop` was called before the leader exited."""
        self._loop: asyncio.AbstractEventLoop
        self._on_output = on_output
        self._on_stop = on_stop
        self._grace = grace
        self._linger = linger
        self._kills_rest = kills_rest
        self._stderr = bytearray()
        self._input = bytearray()
        self._closes_input = False
        self._written: asyncio.Future[None] | None = None
        self._readers: dict[int, tuple[IO[bytes], Callable[[bytes], None]]] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._has_exited = self._is_finished = False
        self._pidfd = -1

    @classmethod
    async def start(cls, command: Sequence[str | Path] | str, **options: Any) -> Child:
        """Start a child that this event loop serves. `options` are those of the constructor."""
        for attempt in range(_BUSY_RETRIES + 1):
            if attempt:
                await asyncio.sleep(_BUSY_PAUSE)
            try:
                child = cls(command, **options)
            except CannotStart as error:
                if attempt == _BUSY_RETRIES or getattr(error.__cause__, "errno", None) != errno.ETXTBSY:
                    raise
            else:
                child._serve()
                return child
        raise AssertionError

    def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.finished = self._loop.create_future()
        try:
            self.read(self._leader.stdout, self._on_output)
            self.read(self._leader.stderr, self._add_stderr)
            if self._leader.stdin is not None:
                os.set_blocking(self._leader.stdin.fileno(), False)
            self._watch_exit()
        except BaseException:
            self.kill_now()
            raise

    @property
    def status(self) -> int | None:
        """The exit status, or `-n` if signal n ended the leader. None if it is not reaped."""
        return self._leader.returncode

    @property
    def stderr(self) -> bytes:
        """The last `STDERR_TAIL` bytes of stderr, as far as they are read."""
        return bytes(self._stderr[-STDERR_TAIL:])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the group."""
        if self._leader.returncode is not None:
            return  # Reaped: the system may have reused the number of the group.
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # no process is left; macOS raises EPERM if there are only zombies

    # Without an event loop

    def poll(self, timeout: float = 0.0) -> bool:
        """Return whether the leader has exited; then kill the rest of the group, and reap the leader.

        Wait at most `timeout` seconds for it."""
        has_exited = self._wait_for_exit(timeout)
        if has_exited:
            self.signal(signal.SIGKILL)
            self._reap(None)
        return has_exited

    def stop_blocking(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL when the leader has exited, or after `grace` seconds. With 0, send SIGKILL only."""
        if grace:
            self.signal(signal.SIGTERM)
            self._wait_for_exit(grace)
        self.signal(signal.SIGKILL)
        self._reap(None)

    def _wait_for_exit(self, timeout: float) -> bool:
        """Return whether the leader has exited. Do not reap it: its number is still that of the group."""
        end = time.monotonic() + timeout
        while not self._has_leader_exited():
            remaining = end - time.monotonic()
            if remaining <= 0:
                return False
            time.sleep(min(_POLL_PAUSE, remaining))  # noqa: TID251  # nothing waits with a timeout and does not reap
        return True

    def _has_leader_exited(self) -> bool:
        if self._leader.returncode is not None or not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._leader.poll() is not None
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        except ChildProcessError:
            return True  # this process ignores SIGCHLD, so the system has reaped it

    # On the event loop

    async def wait(self) -> int | None:
        """Wait until the group has ended, and return the status.

        If the caller is cancelled, stop the group. If it is cancelled a second time in the meantime, the event loop may
        be about to close: kill the group at once."""
        try:
            await asyncio.shield(self.finished)
        except asyncio.CancelledError:
            self.stop()
            with anyio.CancelScope(shield=True):  # anyio repeats a cancellation at every await
                await asyncio.shield(self.finished)
            raise
        finally:
            self.kill_now()
        return self.status

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after the grace period."""
        if self._has_exited:
            self.kill_now()
        elif not self.is_stopping:
            self.is_stopping = True
            try:
                self._on_stop()
            except Exception:  # a failing callback must not prevent the end of the group
                logger.exception("the callback before the end of %r failed", self._leader.args)
            self.signal(signal.SIGTERM)
            self.call_later(self._grace, self.signal, signal.SIGKILL)

    def kill_now(self) -> None:
        """Kill the rest of the group, read what it has written, and reap the leader. Block for at most `GRACE`."""
        if self._is_finished:
            return
        self._is_finished = True
        if self._kills_rest or self.is_stopping or not self._has_exited:
            self.signal(signal.SIGKILL)
        for timer in self._timers:
            timer.cancel()
        self._close_input()
        for descriptor in list(self._readers):
            for _ in range(_LAST_READS):
                if not self._on_readable(descriptor):
                    break
        for descriptor in list(self._readers):
            self._close(descriptor)
        self._close_pidfd()
        self._reap(GRACE)
        self.finished.set_result(None)

    def call_later(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        """Call a function later, unless the child has ended by then."""
        self._timers.append(self._loop.call_later(seconds, call, *arguments))

    def write(self, data: bytes, *, closes: bool = False) -> None:
        """Write to stdin as much as the child reads, without blocking. With `closes`, close stdin after that."""
        self._input += data
        self._closes_input = self._closes_input or closes
        self._write()

    async def until_written(self) -> None:
        """Wait until the child has read everything, or can't read any longer."""
        if self._input:
            self._written = self._written or self._loop.create_future()
            await asyncio.shield(self._written)

    @property
    def is_input_closed(self) -> bool:
        return self._leader.stdin is None or self._leader.stdin.closed

    def read(self, file: IO[bytes] | None, consume: Callable[[bytes], None]) -> None:
        """Pass each chunk of a pipe to `consume`, and `b""` at its end. Then close it."""
        if file is not None:
            os.set_blocking(file.fileno(), False)
            self._readers[file.fileno()] = (file, consume)
            self.set_reading(True)

    def set_reading(self, is_reading: bool) -> None:
        """Stop reading the pipes for a time, or go on."""
        for descriptor in self._readers:
            if is_reading:
                self._loop.add_reader(descriptor, self._on_readable, descriptor)
            else:
                self._loop.remove_reader(descriptor)

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
            self.kill_now()
        return False

    def _close(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        file, consume = self._readers.pop(descriptor)
        file.close()
        consume(b"")

    def _add_stderr(self, chunk: bytes) -> None:
        self._stderr += chunk
        if len(self._stderr) > 2 * _CHUNK:
            del self._stderr[:-STDERR_TAIL]

    def _write(self) -> None:
        if self.is_input_closed:
            self._input.clear()
        else:
            assert self._leader.stdin is not None
            descriptor = self._leader.stdin.fileno()
            try:
                while self._input:
                    del self._input[: os.write(descriptor, memoryview(self._input)[:_CHUNK])]
            except BlockingIOError:
                self._loop.add_writer(descriptor, self._write)
                return
            except OSError:
                self._closes_input = True  # the process has closed its input
            self._loop.remove_writer(descriptor)
            if self._closes_input:
                self._close_input()
        if self._written is not None:
            self._written.set_result(None)
            self._written = None

    def _close_input(self) -> None:
        if self._leader.stdin is not None and not self._leader.stdin.closed:
            self._loop.remove_writer(self._leader.stdin.fileno())
            self._leader.stdin.close()
            self._write()

    def _reap(self, timeout: float | None) -> None:
        watchdog.remove(self.pid)
        for file in (self._leader.stdin, self._leader.stdout, self._leader.stderr):
            if file is not None:
                file.close()  # some may never have been watched
        try:
            self._leader.wait(timeout)
        except subprocess.TimeoutExpired:  # don't block the event loop any longer
            logger.error("%r could not be killed; it still runs as process %d", self._leader.args, self.pid)

    def _watch_exit(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or a sandbox without it
            threading.Thread(target=self._wait_in_thread, daemon=True).start()
        else:
            self._loop.add_reader(self._pidfd, self._notice_exit)

    def _wait_in_thread(self) -> None:
        if hasattr(os, "waitid"):
            try:
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                return  # reaped already: the child has ended
        else:
            self._leader.wait()
        try:
            self._loop.call_soon_threadsafe(self._notice_exit)
        except RuntimeError:
            pass  # the loop is closed

    def _notice_exit(self) -> None:
        if self._is_finished:
            return  # the waiting thread reports it too late
        self._close_pidfd()
        self._has_exited = True
        if self.is_stopping or not self._readers:
            self.kill_now()
        else:
            self.call_later(self._linger, self.kill_now)

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def _explain(path: str, cwd: Path | None, error: OSError) -> str:
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
