"""A process that kills running tools when this process ends, however it ends.

After `kill -9`, or at the end of the time for a shutdown, this process can't stop its tools. The watchdog is one shell,
started with the first tool. It reads the process groups that run from a pipe, and kills them when the pipe is closed.

A parent-death signal (`PR_SET_PDEATHSIG`) would reach only the first process of a group. It is also sent when the
thread that started the tool ends, and requires code between fork and exec.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading

__all__ = ["watchdog"]

logger = logging.getLogger(__name__)

_SCRIPT = """\
trap '' HUP INT TERM
while read -r line; do groups=$line; done
for group in $groups; do kill -s KILL -- "-$group"; done
"""


class _Watchdog:
    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._lock = threading.Lock()
        self._shell: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the shell. Call this before a tool starts, so that `add` takes no time afterwards."""
        with self._lock:
            if self._shell is None:
                self._write()

    def add(self, group: int) -> None:
        with self._lock:
            self._groups.add(group)
            self._write()

    def remove(self, group: int) -> None:
        """Remove a group. Call this before its leader is reaped: afterwards, the system may reuse the number."""
        with self._lock:
            self._groups.discard(group)
            self._write()

    def reset_after_fork(self) -> None:
        """Close the pipe in a fork of this process. The shell belongs to the process that started it."""
        self._lock = threading.Lock()
        self._groups.clear()
        self._close()

    def _write(self) -> None:
        for _ in range(2):
            try:
                if self._shell is None:
                    self._shell = _start()
                assert self._shell.stdin is not None
                os.write(self._shell.stdin.fileno(), (" ".join(map(str, self._groups)) + "\n").encode())
                return
            except BrokenPipeError:
                self._close()  # something has killed it
            except OSError as error:
                logger.warning("running tools may survive if this server is killed: %s", error)
                return

    def _close(self) -> None:
        if self._shell is not None:
            assert self._shell.stdin is not None
            self._shell.stdin.close()
            self._shell.poll()
            self._shell = None


def _start() -> subprocess.Popen[bytes]:
    shell = subprocess.Popen(
        ["/bin/sh", "-c", _SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd="/",
        start_new_session=True,
    )
    assert shell.stdin is not None
    os.set_blocking(shell.stdin.fileno(), False)  # a shell that does not read must not stop this process
    return shell


watchdog = _Watchdog()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=watchdog.reset_after_fork)
