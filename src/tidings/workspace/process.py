"""One run of an executable: started without a shell, bounded in time and output, and gone when the call is over.

The executable leads a process group of its own. Whatever ends the call (its exit, the time limit, too much output, a
cancellation) also ends the group: SIGTERM, and SIGKILL after `GRACE`. A caller who is cancelled once more while it
waits for that is going away, perhaps with its event loop: the group is killed on the spot. So a call that has ended,
however it did, has left no process of its group and no pipe behind.

What this is not: a sandbox. A process that leaves its group (`setsid`) is out of reach; it can hold its pipes open, and
delays the call by no more than `LINGER`. POSIX only.
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

__all__ = ["CannotStart", "Outcome", "run_process"]

logger = logging.getLogger(__name__)

GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL: enough to remove a temporary file, not enough to annoy who cancelled."""

LINGER = 0.1
"""Seconds that the rest of the group may still write after its leader's exit, as the `tee` of `exec > >(tee log)`."""

STDERR_TAIL = 16 * 1024
"""Bytes kept of the end of stderr: the error is there, and a model reads it."""

LONGEST_LINE = 64 * 1024
"""Bytes of one line of the progress channel; what is longer is no progress, and is dropped."""

_CHUNK = 64 * 1024
"""The capacity of a pipe on Linux: one read empties it."""

_LAST_READS = 16
"""Of `_CHUNK` each: the largest pipe an unprivileged process can make. Bounds what a runaway may add at the end."""

_BUSY_RETRIES, _BUSY_PAUSE = 20, 0.005
"""A file that is being written can't be executed (ETXTBSY): an editor's save, or a fork that still holds it open."""


class CannotStart(TidingsError):
    """The executable could not be started; nothing ran."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `status` is None if we ended it, and `-n` if signal n did."""

    status: int | None
    stdout: bytes
    stderr: bytes
    """Only its end, `STDERR_TAIL` bytes."""
    is_timeout: bool
    is_truncated: bool


async def run_process(
    command: Sequence[str],
    *,
    stdin: bytes,
    env: Mapping[str, str],
    cwd: Path,
    timeout: float,  # noqa: ASYNC109  # ends a process group, which cancelling an await would not
    most_output: int,
    on_line: Callable[[str], None] | None = None,
    line_fd_env: str | None = None,
    on_stop: Callable[[], None] | None = None,
) -> Outcome:
    """Run `command` to its end, and take its whole process group with it.

    With `line_fd_env`, the process gets one more pipe, whose number that variable holds; each line written to it goes
    to `on_line` at once. `on_stop` is called before the group is told to end early.
    """
    run = _Run(asyncio.get_running_loop(), most_output, on_line, on_stop)
    for attempt in range(_BUSY_RETRIES + 1):
        try:
            run.start(command, env, cwd, line_fd_env)
            break
        except OSError as error:
            if error.errno != errno.ETXTBSY or attempt == _BUSY_RETRIES:
                raise CannotStart(_explain(command[0], cwd, error)) from error
            await asyncio.sleep(_BUSY_PAUSE)
    try:
        run.watch()
        run.feed(stdin)
        run.limit(timeout)
        await asyncio.shield(run.gone)
    except asyncio.CancelledError:
        run.stop()
        with anyio.CancelScope(shield=True):  # anyio cancels anew at every await, and the group must be gone first
            await asyncio.shield(run.gone)
        raise
    finally:
        run.end()
    return run.outcome()


class _Run:
    """The pipes and the leader of one process group. `gone` is set when the leader is reaped and all pipes closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        most_output: int,
        on_line: Callable[[str], None] | None,
        on_stop: Callable[[], None] | None,
    ) -> None:
        self.gone: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._most_output = most_output
        self._on_line = on_line
        self._on_stop = on_stop
        self._stdout = bytearray()
        self._stderr = bytearray()
        self._line = bytearray()
        self._is_line_too_long = False
        self._input = memoryview(b"")
        self._readers: dict[int, Callable[[bytes], None]] = {}
        self._files: dict[int, IO[bytes]] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._has_exited = self._is_stopping = self._is_over = False
        self._is_timeout = self._is_truncated = False
        self._pidfd = -1
        self._lines: IO[bytes] | None = None

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, line_fd_env: str | None) -> None:
        # As bytes, because the locale of this process says nothing about what a client may send.
        environment = {name.encode(): value.encode("utf-8", "surrogateescape") for name, value in env.items()}
        theirs = -1
        if line_fd_env is not None:
            ours, theirs = os.pipe()
            self._lines = os.fdopen(ours, "rb", buffering=0)
            environment[line_fd_env.encode()] = str(theirs).encode()
        try:
            # No preexec_fn, user or umask: CPython then starts it by vfork, whatever the size of this process.
            self._leader = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=cwd,
                env=environment,
                start_new_session=True,
                pass_fds=(theirs,) if theirs >= 0 else (),
            )
        except BaseException:
            if self._lines is not None:
                self._lines.close()
            raise
        finally:
            if theirs >= 0:
                os.close(theirs)

    def watch(self) -> None:
        self._read(self._leader.stdout, self._take_stdout)
        self._read(self._leader.stderr, self._take_stderr)
        self._read(self._lines, self._take_lines)
        self._await_exit()

    def feed(self, data: bytes) -> None:
        assert self._leader.stdin is not None
        os.set_blocking(self._leader.stdin.fileno(), False)
        self._input = memoryview(data)
        self._write()

    def limit(self, timeout: float) -> None:
        self._timers.append(self._loop.call_later(timeout, self._expire))

    def stop(self) -> None:
        """Tell the group to end early. What it has written until then is kept."""
        if self._has_exited:
            self.end()
            return
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._on_stop is not None:
            self._guard(self._on_stop)
        self._signal(signal.SIGTERM)
        self._timers.append(self._loop.call_later(GRACE, self._signal, signal.SIGKILL))

    def end(self) -> None:
        """Kill what is left of the group, and let go of it. Waits for no more than the moment that a kill takes."""
        if self._is_over:
            return
        self._is_over = True
        self._signal(signal.SIGKILL)
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
                file.close()  # also those that were never watched
        self._close_pidfd()
        if self._line:
            self._take_lines(b"\n")
        try:
            self._leader.wait(GRACE)
        except subprocess.TimeoutExpired:  # the loop has others to serve
            logger.error("%r could not be killed, and runs on as process %d", self._leader.args, self._leader.pid)
        self.gone.set_result(None)

    def outcome(self) -> Outcome:
        return Outcome(
            status=None if self._is_stopping else self._leader.returncode,
            stdout=bytes(self._stdout),
            stderr=bytes(self._stderr[-STDERR_TAIL:]),
            is_timeout=self._is_timeout,
            is_truncated=self._is_truncated,
        )

    def _expire(self) -> None:
        self._is_timeout = not self._has_exited
        self.stop()

    # Pipes

    def _read(self, file: IO[bytes] | None, take: Callable[[bytes], None]) -> None:
        if file is None:
            return
        descriptor = file.fileno()
        os.set_blocking(descriptor, False)
        self._files[descriptor] = file
        self._readers[descriptor] = take
        self._loop.add_reader(descriptor, self._on_readable, descriptor)

    def _on_readable(self, descriptor: int) -> bool:
        """Take one chunk. False: there is none, or there will be no more."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            chunk = b""
        if chunk:
            self._readers[descriptor](chunk)
            return descriptor in self._readers
        self._close(descriptor)
        if self._has_exited and not self._readers:
            self.end()
        return False

    def _close(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        del self._readers[descriptor]
        self._files.pop(descriptor).close()

    def _take_stdout(self, chunk: bytes) -> None:
        if self._is_truncated:
            return  # still read, so that a process that handles SIGTERM is not stuck in its write
        self._stdout += chunk
        if len(self._stdout) > self._most_output:
            del self._stdout[self._most_output :]
            self._is_truncated = True
            self.stop()

    def _take_stderr(self, chunk: bytes) -> None:
        self._stderr += chunk
        if len(self._stderr) > 2 * _CHUNK:
            del self._stderr[:-STDERR_TAIL]

    def _take_lines(self, chunk: bytes) -> None:
        *whole, rest = chunk.split(b"\n")
        for part in whole:
            self._extend_line(part)
            if not self._is_line_too_long and self._on_line is not None:
                self._guard(self._on_line, self._line.decode("utf-8", "replace"))
            self._line.clear()
            self._is_line_too_long = False
        self._extend_line(rest)

    def _extend_line(self, part: bytes) -> None:
        if len(self._line) + len(part) > LONGEST_LINE:
            self._is_line_too_long = True
            self._line.clear()
        elif not self._is_line_too_long:
            self._line += part

    def _guard(self, call: Callable[..., None], *arguments: str) -> None:
        try:
            call(*arguments)
        except Exception:  # the listener's trouble must neither end the run nor keep its group alive
            logger.exception("a listener of %r failed", self._leader.args)

    def _write(self) -> None:
        """Write what the pipe takes; a process that never reads its input costs nothing but the buffer."""
        assert self._leader.stdin is not None
        descriptor = self._leader.stdin.fileno()
        try:
            while self._input:
                self._input = self._input[os.write(descriptor, self._input) :]
        except BlockingIOError:
            self._loop.add_writer(descriptor, self._write)
            return
        except OSError:
            pass  # it has closed its input: it knows enough
        self._close_input()

    def _close_input(self) -> None:
        assert self._leader.stdin is not None
        if not self._leader.stdin.closed:
            self._loop.remove_writer(self._leader.stdin.fileno())
            self._leader.stdin.close()

    # The group

    def _signal(self, number: int) -> None:
        # Only ever before the leader is reaped: until then its process id, which names the group, is not given anew.
        try:
            os.killpg(self._leader.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # none left; macOS says EPERM where there are only zombies

    def _await_exit(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self._leader.pid)
        except (AttributeError, OSError):  # not Linux, or a sandbox without it
            threading.Thread(target=self._await_exit_in_thread, daemon=True).start()
        else:
            self._loop.add_reader(self._pidfd, self._on_exit)

    def _await_exit_in_thread(self) -> None:
        if hasattr(os, "waitid"):
            try:
                os.waitid(os.P_PID, self._leader.pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                return  # it was reaped before: the run is over
        else:
            self._leader.wait()
        try:
            self._loop.call_soon_threadsafe(self._on_exit)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    def _on_exit(self) -> None:
        if self._is_over:
            return  # the thread that waited says it late
        self._close_pidfd()
        self._has_exited = True
        if self._is_stopping or not self._readers:
            self.end()
        else:
            self._timers.append(self._loop.call_later(LINGER, self.end))

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def _explain(path: str, cwd: Path, error: OSError) -> str:
    reasons = {
        errno.ENOENT: "it is not there, or the interpreter that its first line names is not",
        errno.EACCES: f"it is not executable; try: chmod +x {path}",
        errno.EPERM: "it may not be executed here",
        errno.ENOEXEC: "its first line names no interpreter; begin it with one, as in #!/bin/sh",
        errno.ETXTBSY: "it is still being written",
        errno.E2BIG: "its arguments and environment are larger than this system takes",
        errno.EAGAIN: "too many processes are running; allow more (ulimit -u), or call fewer tools at once",
        errno.EMFILE: "too many files are open; allow more (ulimit -n), or call fewer tools at once",
        errno.ENOTDIR: f"{cwd} is not a directory",
    }
    return f"{path} could not be started: {reasons.get(error.errno or 0, error.strerror)}"
