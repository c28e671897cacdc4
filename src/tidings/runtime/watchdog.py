"""A process that ends the children of this process when this process ends, however it ends.

After `kill -9`, or at the end of the time for a shutdown, this process can't stop its children. The watchdog is one
shell, started with the first child. It reads the process groups that run from a pipe, each with the signal that ends
it, and sends these signals when the pipe is closed.

If this process dies while a child starts, the number of its group is in no line yet. The watchdog then finds the child
by a variable of its environment. That needs `/proc`; on other systems, such a child survives.

A parent-death signal (`PR_SET_PDEATHSIG`) would reach only the first process of a group. It is also sent when the
thread that started the child ends, and requires code between fork and exec.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["watchdog"]

logger = logging.getLogger(__name__)

_SCRIPT = """\
trap '' HUP INT TERM
while read -r line; do groups=$line; done
set -- $groups
starts=
while [ $# -gt 0 ]; do
    case $1 in START) starts="$starts $2" ;; *) kill -s "$1" -- "-$2" ;; esac
    shift 2
done
for token in $starts; do
    for attempt in 1 2 3 4 5 6 7 8 9 10; do  # /proc shows the environment a moment after the pipe is closed
        for file in $(grep -ls "TIDINGS_START=$token" /proc/[0-9]*/environ); do
            file=${file#/proc/}
            kill -s KILL -- "-${file%/environ}"
        done
        sleep 0.1
    done
done
"""


class _Watchdog:
    def __init__(self) -> None:
        self._groups: dict[int | str, str] = {}
        """The signals by process group, and `START` by the token of a child that is being started."""
        self._lock = threading.Lock()
        self._shell: subprocess.Popen[bytes] | None = None

    @contextmanager
    def starting(self) -> Iterator[tuple[dict[str, str], Callable[[int, str], None]]]:
        """Yield the variables for a child that is started in this block, and the function to call afterwards with its
        group and the name of the signal that the group gets."""
        token = secrets.token_hex(8)

        def add(group: int, signal_on_parent_death: str) -> None:
            with self._lock:
                self._groups[group] = signal_on_parent_death

        with self._lock:
            self._groups[token] = "START"
            self._write()
        try:
            yield {"TIDINGS_START": token}, add
        finally:
            self.remove(token)

    def remove(self, group: int | str) -> None:
        """Remove a group. Call this before its leader is reaped: afterwards, the system may reuse the number."""
        with self._lock:
            self._groups.pop(group, None)
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
                os.write(self._shell.stdin.fileno(), self._line())
                return
            except BrokenPipeError:
                self._close()  # something has killed it
            except OSError as error:
                logger.warning("child processes may survive if this process is killed: %s", error)
                return

    def _line(self) -> bytes:
        return (" ".join(f"{name} {group}" for group, name in self._groups.items()) + "\n").encode()

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
