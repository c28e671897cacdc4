"""A store in one SQLite file.

Each batch adds a row per part of the journal. The tables of items, contents and versions are updated only after many
changes; until then, the newer changes in the journal count. So a write costs little more than the bytes of its changes.

With WAL and synchronous=NORMAL, a committed batch survives a crash of the process at any moment. A crash of the
machine may lose the last batches, but never damages earlier ones. The number of runs is forced to the disk, because a
revision must never be used twice.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from tidings.core.digest import EMPTY, ListDigest, split_digest
from tidings.core.model import Change, Feature, Item, Version
from tidings.store import Batch, EventRow, JournalPart, State, StoreBroken, StoreError, journal_part
from tidings.store.durable import DurableSubscription
from tidings.store.file_errors import PERMISSION_CODES, primary_code, translate_file_errors
from tidings.store.file_lock import FileLock, file_identity
from tidings.store.rows import decode_row, encode_rows

__all__ = ["SQLiteStore", "create_folder", "peek"]

logger = logging.getLogger(__name__)

SCHEMA = 1
"""The version of the file format. It is incremented when an older version of Tidings could not read the file."""

_APPLICATION_ID = 0x54494447
"""In the header of the file, to recognize databases of other programs."""

_MAX_UNAPPLIED = 8192
"""Changes after which the tables are updated. A start replays at most this many, in hundredths of a second."""

_BUSY_TIMEOUT = 2.0
"""Seconds to wait while another program, such as a backup, reads the file."""

_PAGE_SIZE = 8192
"""Bytes. With SQLite's default of 4096, many changes cost a quarter more; with larger pages, a single change does."""

_WAL_SIZE, _MAX_WAL_SIZE = 6 << 20, 8 << 20
"""Bytes of the write-ahead log. A batch that makes it larger than the first is followed by a checkpoint, which writes a
page that was logged many times once. The next batch starts the log again, and cuts its file to the second."""

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE items (feature TEXT, key TEXT, json BLOB, hash BLOB, PRIMARY KEY (feature, key));
CREATE TABLE versions (feature TEXT PRIMARY KEY, revision INTEGER, digest TEXT) WITHOUT ROWID;
CREATE TABLE contents (uri TEXT PRIMARY KEY, revision INTEGER, digest TEXT) WITHOUT ROWID;
CREATE INDEX contents_by_age ON contents (revision);
CREATE TABLE journal (id INTEGER PRIMARY KEY, history TEXT, last INTEGER, changes BLOB);
CREATE INDEX journal_by_age ON journal (history, last);
CREATE TABLE floors (history TEXT PRIMARY KEY, revision INTEGER) WITHOUT ROWID;
CREATE TABLE durables (owner TEXT, name TEXT, state TEXT, PRIMARY KEY (owner, name));
"""

_EVENTS = "CREATE TABLE IF NOT EXISTS events (id TEXT, subscription TEXT, event BLOB, PRIMARY KEY (id, subscription))"
"""Not part of `_TABLES`: files of the same format without it exist, and older versions do not read it."""

_decode_durable = msgspec.json.Decoder(DurableSubscription).decode


class SQLiteStore:
    """A store in one file. While it is open, there are also the files that SQLite creates and a lock file."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        # Absolute, because the process may change its directory, and because SQLite treats names like :memory:
        # specially.
        self._absolute = self.path.absolute()
        # Two names of one file must share one lock.
        self._lock = FileLock(Path(f"{os.path.realpath(path)}-lock"))
        self._db: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        """The file that is open, even if another one has its path later."""
        self._unapplied = Batch()
        """Changes that are in the journal, but not yet in the tables."""
        self._unapplied_count = 0
        """The number of changes in it."""
        self._newest = 0
        """The revision of the last change in it."""
        self._applied = 0
        """The revision up to which the tables are up to date."""

    def __repr__(self) -> str:
        return str(self.path)

    def open(self) -> State:
        with translate_file_errors(self.path):
            create_folder(self._absolute.parent)
            if self._absolute.exists() and not self._absolute.is_file():
                raise StoreError(f"{self.path} is not a regular file; name another one")
            self._lock.acquire()
            try:
                # Only the owner may read the state, from the first byte on.
                os.close(os.open(self._absolute, os.O_RDWR | os.O_CREAT, 0o600))
                self._identity = file_identity(self._absolute)
                self._db = _connect(str(self._absolute))
                _check(self._db, self.path)
                self._set_up()
                # Before the first write: a damaged file must not be changed.
                state, self._applied = _load(self._db)
                state.run = self._start_run()
            except BaseException:
                self.close()
                raise
        newer = [change for change in state.journal if change.revision > self._applied]
        self._unapplied.add_changes(newer)
        self._unapplied.changes.clear()
        self._unapplied_count = len(newer)
        self._newest = newer[-1].revision if newer else self._applied
        return state

    def write(self, batch: Batch) -> None:
        db = self._opened()
        count = self._unapplied_count + len(batch.changes)
        versions = (*batch.versions.values(), *batch.contents.values())
        newest = max([self._newest, *(version.revision for version in versions)])
        rows, durables = _journal_rows(batch.changes), _durable_rows(batch)
        is_apply_due = (
            count >= _MAX_UNAPPLIED
            or batch.replaces_items
            or any(floor > self._applied for floor in batch.floors.values())
        )
        with translate_file_errors(self.path):
            if not self._is_in_place():
                raise StoreError(
                    f"{self.path} or its lock file was moved, removed or replaced while this server uses it; put it "
                    "back, or restart this server"
                )
            with _transaction(db):
                _forget(db, batch)  # first, so that its space can be reused
                db.executemany("INSERT INTO journal (history, last, changes) VALUES (?, ?, ?)", rows)
                if is_apply_due:
                    _apply(db, self._unapplied, newest)
                    _apply(db, batch, newest)
                if batch.forgotten:
                    db.execute("DELETE FROM contents WHERE revision <= ?", (batch.forgotten,))
                    db.execute("INSERT OR REPLACE INTO meta VALUES ('forgotten', ?)", (batch.forgotten,))
                _write_durables(db, durables)
                _write_events(db, batch.events)
        # After the write, because the caller passes a batch again that could not be written.
        self._newest = newest
        if not is_apply_due:
            self._unapplied_count = count
            self._unapplied.items |= batch.items
            self._unapplied.contents |= batch.contents
            self._unapplied.versions |= batch.versions
            return
        self._unapplied, self._unapplied_count, self._applied = Batch(), 0, newest
        with suppress(sqlite3.Error, OSError):  # the batch is written and must not be written again
            _vacuum(db)

    def close(self) -> None:
        db, self._db = self._db, None
        unapplied, self._unapplied = self._unapplied, Batch()
        try:
            if db is not None:
                with translate_file_errors(self.path), closing(db):
                    if unapplied and self._is_in_place():
                        with _transaction(db):
                            _apply(db, unapplied, self._newest)
                        db.execute("PRAGMA incremental_vacuum").fetchall()
        finally:
            self._unapplied_count = 0
            self._lock.release()

    def _is_in_place(self) -> bool:
        """Return whether other servers find this file under its path, and find it locked."""
        return file_identity(self._absolute) == self._identity and self._lock.is_effective()

    def _opened(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(f"{self.path} is closed")
        return self._db

    def _set_up(self) -> None:
        db = self._opened()
        is_new = not db.execute("PRAGMA user_version").fetchone()[0]
        if is_new:
            db.execute(f"PRAGMA page_size = {_PAGE_SIZE}")
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has no effect once there are tables
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA wal_autocheckpoint = {_WAL_SIZE // _PAGE_SIZE}")  # does not wait for readers
        db.execute(f"PRAGMA journal_size_limit = {_MAX_WAL_SIZE}")
        # Some builds of SQLite overwrite deleted data with zeroes: a third of the cost of many changes.
        db.execute("PRAGMA secure_delete = FAST").fetchall()
        if is_new:
            with _transaction(db):
                for statement in _TABLES.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {SCHEMA}")
                meta = [("epoch", secrets.token_hex(8)), ("run", 0), ("applied", 0), ("forgotten", 0)]
                db.executemany("INSERT INTO meta VALUES (?, ?)", meta)
        db.execute(_EVENTS)

    def _start_run(self) -> int:
        db = self._opened()
        db.execute("PRAGMA synchronous = FULL")
        with _transaction(db):
            db.execute("UPDATE meta SET value = value + 1 WHERE name = 'run'")
            run = db.execute("SELECT value FROM meta WHERE name = 'run'").fetchone()[0]
        db.execute("PRAGMA synchronous = NORMAL")
        return int(run)


def create_folder(folder: Path) -> None:
    """Create the folder of a state file, if it does not exist."""
    if not folder.exists():
        folder.mkdir(parents=True)
        if folder.name.startswith("."):
            # A folder like .tidings/ in a user's project does not belong into its version control.
            (folder / ".gitignore").write_text("*\n", encoding="utf-8")


def peek(path: Path | str) -> State:
    """Return the state in a file without opening the store. A server may use the file meanwhile."""
    path = Path(path)
    with translate_file_errors(path, "read"):
        if not path.is_file():
            raise StoreError(f"{path}: there is no such file; a server creates it when it starts")
        location = f"file:{quote(str(path.resolve()))}"
        try:
            return _read_only(f"{location}?mode=ro", path)
        except sqlite3.OperationalError as error:
            # In a read-only folder SQLite cannot create its own files. No server can write to it there either.
            if primary_code(error) not in PERMISSION_CODES:
                raise
            wal = Path(f"{path.resolve()}-wal")
            if wal.exists() and wal.stat().st_size:
                raise StoreError(f"{path} has a log beside it; copy both to a folder that you can write to") from None
            return _read_only(f"{location}?immutable=1", path)


def _read_only(location: str, path: Path) -> State:
    with closing(_connect(location)) as db:
        if not _check(db, path):
            raise StoreError(f"{path} is empty; a server that uses it fills it")
        return _load(db)[0]


# Reading


def _load(db: sqlite3.Connection) -> tuple[State, int]:
    """Return the state at one moment, and the revision up to which the tables are up to date."""
    try:
        with _transaction(db, "DEFERRED"):
            state, applied = _read(db)
    except (msgspec.MsgspecError, LookupError, ValueError, TypeError) as error:
        raise sqlite3.DatabaseError(str(error)) from None
    except sqlite3.OperationalError as error:
        if primary_code(error) == sqlite3.SQLITE_ERROR:  # a table or a column is missing
            raise sqlite3.DatabaseError(str(error)) from None
        raise
    _verify(state)
    return state, applied


def _read(db: sqlite3.Connection) -> tuple[State, int]:
    meta = dict(db.execute("SELECT name, value FROM meta").fetchall())
    state = State(str(meta["epoch"]), int(meta["run"]))
    items = {
        (Feature(feature), key): Item(Feature(feature), key, json, hashed)
        for feature, key, json, hashed in db.execute("SELECT feature, key, json, hash FROM items")
    }
    for feature, revision, digest in db.execute("SELECT feature, revision, digest FROM versions"):
        state.versions[Feature(feature)] = Version(revision, digest)
    for uri, revision, digest in db.execute("SELECT uri, revision, digest FROM contents ORDER BY revision"):
        state.contents[uri] = Version(revision, digest)
    for part, revision in db.execute("SELECT history, revision FROM floors"):
        state.floors[Feature(part) if part else None] = revision
    changes = [
        change
        for part, row in db.execute("SELECT history, changes FROM journal")
        for change in decode_row(row, Feature(part) if part else None)
    ]
    for (text,) in db.execute("SELECT state FROM durables"):
        durable = _decode_durable(text)
        state.durables[durable.key] = durable
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'events'").fetchone():
        state.events = {
            (event_id, subscription): event
            for event_id, subscription, event in db.execute("SELECT id, subscription, event FROM events ORDER BY rowid")
        }
    changes.sort(key=lambda change: change.revision)
    applied = int(meta["applied"])
    newer = Batch()
    newer.add_changes(change for change in changes if change.revision > applied)
    current: dict[tuple[Feature, str], Item | None] = {**items, **newer.items}
    state.items = [item for item in current.values() if item is not None]
    state.versions |= newer.versions
    for uri, version in newer.contents.items():
        state.contents.pop(uri, None)
        state.contents[uri] = version
    state.forgotten = int(meta["forgotten"])
    state.contents = {uri: each for uri, each in state.contents.items() if each.revision > state.forgotten}
    state.journal = [change for change in changes if change.revision > state.floors.get(journal_part(change), 0)]
    return state, applied


def _verify(state: State) -> None:
    """Compare the items with the digests of their lists."""
    digests = {feature: ListDigest() for feature in Feature}
    for item in state.items:
        digests[item.feature].add(item.hash)
    for feature, digest in digests.items():
        version = state.versions.get(feature)
        if digest.hexdigest() != (split_digest(version.digest)[0] if version else EMPTY):
            raise sqlite3.DatabaseError(f"the {feature.value} do not match their digest")


# Writing


def _journal_rows(changes: Iterable[Change]) -> list[tuple[str, int, bytes]]:
    parts: dict[JournalPart, list[Change]] = {}
    for change in changes:
        parts.setdefault(journal_part(change), []).append(change)
    return [
        (part.value if part else "", last, row) for part, found in parts.items() for last, row in encode_rows(found)
    ]


def _forget(db: sqlite3.Connection, batch: Batch) -> None:
    for part, floor in batch.floors.items():
        name = part.value if part else ""
        db.execute("INSERT OR REPLACE INTO floors VALUES (?, ?)", (name, floor))
        db.execute("DELETE FROM journal WHERE history = ? AND last <= ?", (name, floor))


def _apply(db: sqlite3.Connection, batch: Batch, revision: int) -> None:
    """Update the tables."""
    if batch.replaces_items:
        db.execute("DELETE FROM items")
    items = [(key[0].value, key[1], item) for key, item in batch.items.items()]
    removed = [(feature, key) for feature, key, item in items if item is None]
    present = [(feature, key, item.json, item.hash) for feature, key, item in items if item is not None]
    db.executemany("DELETE FROM items WHERE feature = ? AND key = ?", removed)
    db.executemany("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?)", present)
    versions = [(feature.value, *version) for feature, version in batch.versions.items()]
    db.executemany("INSERT OR REPLACE INTO versions VALUES (?, ?, ?)", versions)
    contents = [(uri, *version) for uri, version in batch.contents.items()]
    db.executemany("INSERT OR REPLACE INTO contents VALUES (?, ?, ?)", contents)
    db.execute("INSERT OR REPLACE INTO meta VALUES ('applied', ?)", (revision,))


def _durable_rows(batch: Batch) -> list[tuple[str, str, str | None]]:
    """Return owner, name and record of each. Leave out one that cannot be encoded: it must not prevent the others."""
    rows: list[tuple[str, str, str | None]] = []
    for (owner, name), durable in batch.durables.items():
        try:
            name.encode()
            record = None if durable is None else msgspec.json.encode(durable).decode()
            rows.append((msgspec.json.encode(owner).decode(), name, record))
        except (ValueError, TypeError, OverflowError) as error:
            logger.error("the durable subscription %r can't be saved: %s", name, error)
    return rows


def _write_durables(db: sqlite3.Connection, rows: Iterable[tuple[str, str, str | None]]) -> None:
    for owner, name, record in rows:
        if record is None:
            db.execute("DELETE FROM durables WHERE owner = ? AND name = ?", (owner, name))
        else:
            # Not REPLACE: that writes the row to another place, and its index too.
            db.execute(
                "INSERT INTO durables VALUES (?, ?, ?) ON CONFLICT (owner, name) DO UPDATE SET state = excluded.state",
                (owner, name, record),
            )


def _write_events(db: sqlite3.Connection, rows: Mapping[EventRow, bytes | None]) -> None:
    removed = [row for row, event in rows.items() if event is None]
    added = [(*row, event) for row, event in rows.items() if event is not None]
    db.executemany("DELETE FROM events WHERE id = ? AND subscription = ?", removed)
    db.executemany("INSERT OR REPLACE INTO events VALUES (?, ?, ?)", added)


def _vacuum(db: sqlite3.Connection) -> None:
    """Return unused pages to the file system if there are many."""
    free = db.execute("PRAGMA freelist_count").fetchone()[0]
    if free > 1024 and 2 * free > db.execute("PRAGMA page_count").fetchone()[0]:
        db.execute(f"PRAGMA incremental_vacuum({free // 2})").fetchall()


# Opening


def _connect(location: str) -> sqlite3.Connection:
    return sqlite3.connect(
        location,
        timeout=_BUSY_TIMEOUT,
        isolation_level=None,  # `_transaction` starts and ends them
        check_same_thread=False,  # one thread at a time uses it, but not always the same one
        uri=location.startswith("file:"),
    )


def _check(db: sqlite3.Connection, path: Path) -> bool:
    """Refuse a file that is not a store, before it is changed. Return whether the file has a state."""
    # In this order: a server may create the tables between the two.
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if not tables and not version:
        return False
    if db.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
        raise StoreBroken(f"{path} is a database of another program; name another file")
    if version < 1:
        raise StoreBroken(f"{path} is damaged (there is no format {version}); move it away to start without it")
    if version > SCHEMA:
        raise StoreBroken(
            f"{path} was written by a newer Tidings (format {version}, this one knows {SCHEMA}); update Tidings, or "
            "name another file"
        )
    return True


@contextmanager
def _transaction(db: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    db.execute(f"BEGIN {kind}")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # some errors end it
            db.execute("ROLLBACK")
        raise
