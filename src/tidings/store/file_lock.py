"""A file that one process at a time holds. The kernel lets go of it for a process that dies, however it dies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["FileLock", "identity"]


def identity(file: Path | int) -> tuple[int, int] | None:
    """Which file it is, by whatever name; None if there is none."""
    try:
        found = os.fstat(file) if isinstance(file, int) else file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


class FileLock:
    """Apart from the file that it stands for: SQLite's own locks on that one would be lost with any other handle."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def acquire(self) -> None:
        """Raises `BlockingIOError` if somebody has it, in this process or another one; any other `OSError` if there
        can't be a lock."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(handle)
        except OSError:
            os.close(handle)
            raise
        self._handle = handle

    def is_there(self) -> bool:
        """Whether others still find it held: whoever removes the file lets the next one in."""
        return self._handle is not None and identity(self._handle) == identity(self._path)

    def release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)  # the file stays: to remove it would let two in at once


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:  # its word for "held"
            raise BlockingIOError("it is held") from error

else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
