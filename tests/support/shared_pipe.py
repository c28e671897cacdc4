"""A named pipe that shows when the last process of a tool has exited."""

from __future__ import annotations

import os
import select
from pathlib import Path

from tests.support.waiting import DEADLINE

__all__ = ["SharedPipe"]


class SharedPipe:
    """A named pipe that every process of a run has open. It reaches its end when the last of them exits."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def read(self) -> bytes:
        """Wait for a byte, and return it; at the end of the pipe, return none."""
        readable, _, _ = select.select([self.descriptor], [], [], DEADLINE)
        assert readable, "no process writes to the pipe, and some have it open"
        return os.read(self.descriptor, 1)

    @property
    def has_ended(self) -> bool:
        return self.read() == b""
