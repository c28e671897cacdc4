"""A lock file for one process at a time. The kernel releases the lock when the process ends, however it ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["FileLock", "file_identity"]


def file_identity(file: Path | int) -> tuple[int, int] | None:
    """Return the device and inode of a path or descriptor, or None if there is no file."""
    try:
        found = os.fstat(file) if isinstance(file, int) else file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


class FileLock:
    """A lock on a file of its own: a lock on SQLite's file would be lost when any other handle of it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises `BlockingIOError` if it is taken, in this process or another; other `OSError` if there
        can be no lock."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(handle)
        except OSError:
            os.close(handle)
            raise
        self._handle = handle

    def is_effective(self) -> bool:
        """Return whether other processes still find the lock taken. If its file was removed, they do not."""
        return self._handle is not None and file_identity(self._handle) == file_identity(self._path)

    def release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)  # the file stays: after removing it, two processes could have the lock


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:  # what Windows raises if the lock is taken
            raise BlockingIOError("the lock is taken") from error

else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
