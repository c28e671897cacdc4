"""Translate errors of a state file into `StoreError`: which file, why, and what to do."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidings.store import StoreBroken, StoreBusy, StoreError

__all__ = ["PERMISSION_CODES", "primary_code", "translate_file_errors"]

PERMISSION_CODES = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)


@contextmanager
def translate_file_errors(path: Path, action: str = "written") -> Iterator[None]:
    """Raise `StoreError` in place of each `OSError` and `sqlite3.Error`. `action` is what was tried: read, written."""
    try:
        yield
    except BlockingIOError:
        raise StoreBusy(f"{path} is in use by another server; stop that server, or name another file") from None
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise _permission_error(path, action) from None
        reason = error.strerror or error
        raise StoreError(f"{path} can't be {action}: {reason}; fix that, or name another file") from None
    except sqlite3.Error as error:
        raise _translated(path, error, action) from None


def _translated(path: Path, error: sqlite3.Error, action: str) -> StoreError:
    primary = primary_code(error)
    if primary == sqlite3.SQLITE_FULL:
        return StoreError(f"{path}: the disk is full; free some space")
    if primary in PERMISSION_CODES:
        return _permission_error(path, action)
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreError(f"{path} is locked by another program; stop that program")
    if isinstance(error, sqlite3.OperationalError):
        return StoreError(f"{path} can't be {action} at present: {error}")
    if primary == sqlite3.SQLITE_NOTADB:
        return StoreBroken(
            f"{path} is damaged ({error}) or not a state file; move it away to start without it, or name another file"
        )
    return StoreBroken(f"{path} is damaged ({error}); move it away to start without it")


def _permission_error(path: Path, action: str) -> StoreError:
    return StoreError(f"{path} can't be {action} by this user; change its permissions, or name another file")


def primary_code(error: sqlite3.Error) -> int | None:
    """Return the SQLite result code of an error without its extended part."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None
