"""What a failure of a state file means, in words: which file, why, and what to do."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidings.store import StoreBroken, StoreBusy, StoreError

__all__ = ["NOT_ALLOWED", "explained", "primary_code"]

NOT_ALLOWED = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)


@contextmanager
def explained(path: Path, what: str = "written") -> Iterator[None]:
    """Say of what fails meanwhile what it is."""
    try:
        yield
    except BlockingIOError:
        raise StoreBusy(f"{path} is in use by another server; stop that one, or name another file") from None
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreError(f"{path} may not be {what} by this user; allow it, or name another file") from None
        reason = error.strerror or error
        raise StoreError(f"{path} can't be {what}: {reason}; mend that, or name another file") from None
    except sqlite3.Error as error:
        raise _translated(path, error, what) from None


def _translated(path: Path, error: sqlite3.Error, what: str) -> StoreError:
    primary = primary_code(error)
    if primary == sqlite3.SQLITE_FULL:
        return StoreError(f"{path}: the disk is full; make room")
    if primary in NOT_ALLOWED:
        return StoreError(f"{path} may not be {what} by this user; allow it, or name another file")
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreError(f"{path} is locked by another program; end that one")
    if isinstance(error, sqlite3.OperationalError):
        return StoreError(f"{path} can't be {what} for now: {error}")
    if primary == sqlite3.SQLITE_NOTADB:
        return StoreBroken(
            f"{path} is damaged ({error}), or never was a state; move it away to begin anew, or name another file"
        )
    return StoreBroken(f"{path} is damaged ({error}); move it away to begin anew")


def primary_code(error: sqlite3.Error) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None
