"""A store in one SQLite file.

The journal is a row for each batch and history; items, contents and versions are brought up to date every so many
changes, and what the journal has since then counts over them. So a change costs little more than its own bytes.

WAL, synchronous=NORMAL: a transaction that was committed is the kernel's, and survives the death of the process at any
point. What it may not survive is the death of the machine: the last moments are missing then, and the rest is whole.
Only the count of lives is also forced to the disk, since a revision must never be used twice.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from urllib.parse import quote

import msgspec

from tidings.core.digest import EMPTY, ListDigest
from tidings.core.model import Change, Feature, Item, Version
from tidings.store import Batch, History, State, StoreBroken, StoreError, journal_part
from tidings.store.durable import DurableSubscription
from tidings.store.errors import NOT_ALLOWED, explained, primary_code
from tidings.store.file_lock import FileLock, identity
from tidings.store.rows import packed, unpacked

__all__ = ["SQLiteStore", "peek"]

logger = logging.getLogger(__name__)

SCHEMA = 2
"""Counts up with every change of what is written that an older version could not read; this one reads all before it.
1: each change of the journal had what its item was before. 2: only where no earlier change of the row has it."""

_APPLICATION = 0x54494447
"""In the file's header, so that nobody else's database is taken for ours."""

_SETTLE = 8192
"""Changes after which the tables are brought up to date: so many are replayed at a start, in hundredths of a second."""

_PATIENCE = 2.0
"""Seconds to wait for somebody who reads the file at a bad moment, as a backup may."""

_PAGE = 8192
"""Bytes that are written at a time. Half as many calls as with SQLite's own 4096, which is a quarter of what a storm
costs; with more than this, a change by itself costs more."""

_LOG_BYTES = 8 << 20
"""Of the write-ahead log: before a batch would make it larger, it is taken into the file. A page that was written often
meanwhile is then written there once. Its own file stays, since it costs less to write over than to make."""

_COMMIT = 8 * _PAGE
"""Bytes that a commit logs besides what it is for: pages that are written whole, however little changes in them."""

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


_decode_durable = msgspec.json.Decoder(DurableSubscription).decode


class SQLiteStore:
    """One file, and beside it the ones that SQLite makes while it is open, and a lock."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        # Wherever the process goes. And no name is one of SQLite's own, as :memory: is.
        self._place = self.path.absolute()
        # Beside the file itself, as SQLite's own: two names of one file must not be two locks.
        self._lock = FileLock(Path(f"{os.path.realpath(path)}-lock"))
        self._db: sqlite3.Connection | None = None
        self._fresh = Batch()
        """What the journal has and the tables have not."""
        self._count = 0
        """How many changes that are."""
        self._newest = 0
        """The revision of the last of them."""
        self._settled = 0
        """The revision as of which the tables are up to date."""
        self._logged = _LOG_BYTES
        """Bytes that are in the log, about: of what an earlier life left there, nothing is known."""
        self._file: tuple[int, int] | None = None
        """Which one is open, whatever the path leads to later."""

    def __repr__(self) -> str:
        return str(self.path)

    def open(self) -> State:
        with explained(self.path):
            self._make_folder()
            if self._place.exists() and not self._place.is_file():
                # Before anything is made beside it.
                raise StoreError(f"{self.path} is not a file that could keep a state; name another one")
            self._lock.acquire()
            try:
                # Its owner's alone, from the first byte on: who may read a state may read all of it.
                os.close(os.open(self._place, os.O_RDWR | os.O_CREAT, 0o600))
                self._file = identity(self._place)
                self._db = _connect(str(self._place))
                _check(self._db, self.path)
                self._set_up()
                # Before the first write to it: a damaged file stays as it is.
                state, self._settled = _load(self._db)
                state.run = self._begin_life()
            except BaseException:
                self.close()
                raise
        self._fresh.take(change for change in state.journal if change.revision > self._settled)
        self._count = len(self._fresh.changes)
        self._newest = max(map(attrgetter("revision"), self._fresh.changes), default=self._settled)
        self._fresh.changes.clear()
        return state

    def write(self, batch: Batch) -> None:
        db = self._opened()
        count = self._count + len(batch.changes)
        newest = max(self._newest, *(version.revision for version in _versions(batch)), 0)
        rows, durables = _journal_rows(batch.changes), _durable_rows(batch)
        coming = _COMMIT + sum(len(row[-1]) for row in rows)
        is_due = (
            count >= _SETTLE or batch.replaces_items or any(floor > self._settled for floor in batch.floors.values())
        )
        if is_due:
            coming += _settle_bytes(self._fresh, batch)
        with explained(self.path), self._known_log():
            if not self._is_in_place():
                raise StoreError(
                    f"{self.path} or the lock beside it was moved, removed or replaced while this server has it; put "
                    "it back, or start this server anew"
                )
            coming += _durable_bytes(db, durables)
            self._limit_log(coming)
            with _transaction(db):
                # First, so that what comes has its room.
                _forget(db, batch)
                db.executemany("INSERT INTO journal (history, last, changes) VALUES (?, ?, ?)", rows)
                if is_due:
                    _settle(db, self._fresh, newest)
                    _settle(db, batch, newest)
                if batch.forgotten:
                    db.execute("DELETE FROM contents WHERE revision <= ?", (batch.forgotten,))
                    db.execute("INSERT OR REPLACE INTO meta VALUES ('forgotten', ?)", (batch.forgotten,))
                _write_durables(db, durables)
        # Only now: what could not be written is given again.
        self._newest = newest
        if is_due:
            self._fresh, self._count, self._settled = Batch(), 0, newest
        else:
            self._count = count
            self._fresh.items |= batch.items
            self._fresh.contents |= batch.contents
            self._fresh.versions |= batch.versions
        with suppress(sqlite3.Error, OSError):  # the batch is written, and must not be once more; room can wait
            if is_due:
                _give_back(db)
            if coming > _LOG_BYTES:
                self._limit_log(0, "TRUNCATE")

    def close(self) -> None:
        db, self._db = self._db, None
        fresh, self._fresh = self._fresh, Batch()
        try:
            if db is not None:
                with explained(self.path), closing(db):
                    if fresh and self._is_in_place():
                        with _transaction(db):
                            _settle(db, fresh, self._newest)
                        db.execute("PRAGMA incremental_vacuum").fetchall()
        finally:
            self._count = 0
            self._lock.release()

    def _is_in_place(self) -> bool:
        """Whether the file is still the one that others find, and find in use."""
        return identity(self._place) == self._file and self._lock.is_there()

    def _limit_log(self, coming: int, kind: str = "RESTART") -> None:
        """So many bytes are about to be logged: let the log begin anew if it would become too large."""
        if self._logged and self._logged + coming > _LOG_BYTES:
            db = self._opened()
            # Without waiting for somebody who reads: it is tried again with the next batch.
            db.execute("PRAGMA busy_timeout = 0")
            try:
                is_busy = db.execute(f"PRAGMA wal_checkpoint({kind})").fetchone()[0]
            finally:
                db.execute(f"PRAGMA busy_timeout = {int(1000 * _PATIENCE)}")
            if not is_busy:
                self._logged = 0
        self._logged += coming

    @contextmanager
    def _known_log(self) -> Iterator[None]:
        """What a write that failed has logged, and had to count, is not known: the next one begins by making room."""
        try:
            yield
        except BaseException:
            self._logged = _LOG_BYTES
            raise

    def _opened(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(f"{self.path} is closed")
        return self._db

    def _make_folder(self) -> None:
        folder = self._place.parent
        if not folder.exists():
            folder.mkdir(parents=True)
            if folder.name.startswith("."):
                # A folder of ours inside somebody's project: nothing in it is for their history.
                (folder / ".gitignore").write_text("*\n", encoding="utf-8")

    def _set_up(self) -> None:
        db = self._opened()
        is_new = not db.execute("PRAGMA user_version").fetchone()[0]
        if is_new:
            db.execute(f"PRAGMA page_size = {_PAGE}")
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # counts only before there are tables
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")  # but see `_limit_log`
        db.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        # Some builds of SQLite write all that is deleted once more, as zeroes: a third of what a storm costs.
        db.execute("PRAGMA secure_delete = FAST").fetchall()
        if is_new:
            with _transaction(db):
                for statement in _TABLES.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {_APPLICATION}")
                db.execute(f"PRAGMA user_version = {SCHEMA}")
                named = [("epoch", secrets.token_hex(8)), ("life", 0), ("settled", 0), ("forgotten", 0)]
                db.executemany("INSERT INTO meta VALUES (?, ?)", named)

    def _begin_life(self) -> int:
        db = self._opened()
        db.execute("PRAGMA synchronous = FULL")
        with _transaction(db):
            db.execute("UPDATE meta SET value = value + 1 WHERE name = 'life'")
            life = db.execute("SELECT value FROM meta WHERE name = 'life'").fetchone()[0]
            db.execute(f"PRAGMA user_version = {SCHEMA}")  # of one that an older version has written, too
        db.execute("PRAGMA synchronous = NORMAL")
        return int(life)


def peek(path: Path | str) -> State:
    """What is in a file, without taking hold of it: a server may have it meanwhile."""
    path = Path(path)
    with explained(path, "read"):
        if not path.is_file():
            raise StoreError(f"{path}: there is no such file; a server makes it when it first has something to keep")
        location = f"file:{quote(str(path.resolve()))}"
        try:
            return _look(f"{location}?mode=ro", path)
        except sqlite3.OperationalError as error:
            # Where not even the files beside it may be made; then nobody writes to it either.
            if primary_code(error) not in NOT_ALLOWED:
                raise
            log = Path(f"{path.resolve()}-wal")
            if log.exists() and log.stat().st_size:
                raise StoreError(f"{path} has a log beside it; copy both to a folder where you may write") from None
            return _look(f"{location}?immutable=1", path)


def _look(location: str, path: Path) -> State:
    with closing(_connect(location)) as db:
        if not _check(db, path):
            raise StoreError(f"{path} is empty; a server that is started with it writes to it what it has to keep")
        return _load(db)[0]


# Reading


def _load(db: sqlite3.Connection) -> tuple[State, int]:
    """All of it, as of one moment, and the revision as of which the tables are up to date."""
    try:
        with _transaction(db, "DEFERRED"):
            state, settled = _read(db)
    except (msgspec.MsgspecError, LookupError, ValueError, TypeError) as error:
        raise sqlite3.DatabaseError(str(error)) from None
    except sqlite3.OperationalError as error:
        if primary_code(error) == sqlite3.SQLITE_ERROR:  # a table is not there, or is another one
            raise sqlite3.DatabaseError(str(error)) from None
        raise
    _verify(state)
    return state, settled


def _read(db: sqlite3.Connection) -> tuple[State, int]:
    meta = dict(db.execute("SELECT name, value FROM meta").fetchall())
    state = State(str(meta["epoch"]), int(meta["life"]))
    items = {
        (Feature(feature), key): Item(Feature(feature), key, json, hashed)
        for feature, key, json, hashed in db.execute("SELECT feature, key, json, hash FROM items")
    }
    for feature, revision, digest in db.execute("SELECT feature, revision, digest FROM versions"):
        state.versions[Feature(feature)] = Version(revision, digest)
    for uri, revision, digest in db.execute("SELECT uri, revision, digest FROM contents ORDER BY revision"):
        state.contents[uri] = Version(revision, digest)
    for history, revision in db.execute("SELECT history, revision FROM floors"):
        state.floors[Feature(history) if history else None] = revision
    changes = [
        change
        for history, row in db.execute("SELECT history, changes FROM journal")
        for change in unpacked(row, Feature(history) if history else None)
    ]
    for (text,) in db.execute("SELECT state FROM durables"):
        durable = _decode_durable(text)
        state.durables[durable.key] = durable
    changes.sort(key=lambda change: change.revision)
    settled = int(meta["settled"])
    newer = Batch()
    newer.take(change for change in changes if change.revision > settled)
    items_now: dict[tuple[Feature, str], Item | None] = {**items, **newer.items}
    state.items = [item for item in items_now.values() if item is not None]
    state.versions |= newer.versions
    for uri, version in newer.contents.items():
        state.contents.pop(uri, None)
        state.contents[uri] = version
    state.forgotten = int(meta["forgotten"])
    state.contents = {uri: each for uri, each in state.contents.items() if each.revision > state.forgotten}
    state.journal = [change for change in changes if change.revision > state.floors.get(journal_part(change), 0)]
    return state, settled


def _verify(state: State) -> None:
    """The lists' digests are over their items, so they tell whether those are the right ones."""
    sums = {feature: ListDigest() for feature in Feature}
    for item in state.items:
        sums[item.feature].add(item.hash)
    for feature, found in sums.items():
        version = state.versions.get(feature)
        if found.hexdigest() != (version.digest if version else EMPTY):
            raise sqlite3.DatabaseError(f"the {feature.value} in it are not those that their digest is of")


# Writing


def _journal_rows(changes: Iterable[Change]) -> list[tuple[str, int, bytes]]:
    histories: dict[History, list[Change]] = {}
    for change in changes:
        histories.setdefault(journal_part(change), []).append(change)
    return [
        (history.value if history else "", last, row)
        for history, found in histories.items()
        for last, row in packed(found)
    ]


def _forget(db: sqlite3.Connection, batch: Batch) -> None:
    for history, floor in batch.floors.items():
        name = history.value if history else ""
        db.execute("INSERT OR REPLACE INTO floors VALUES (?, ?)", (name, floor))
        db.execute("DELETE FROM journal WHERE history = ? AND last <= ?", (name, floor))


def _settle(db: sqlite3.Connection, fresh: Batch, revision: int) -> None:
    """Bring the tables up to date."""
    if fresh.replaces_items:
        db.execute("DELETE FROM items")
    items = [(key[0].value, key[1], item) for key, item in fresh.items.items()]
    gone = [(feature, key) for feature, key, item in items if item is None]
    there = [(feature, key, item.json, item.hash) for feature, key, item in items if item is not None]
    db.executemany("DELETE FROM items WHERE feature = ? AND key = ?", gone)
    db.executemany("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?)", there)
    versions = [(feature.value, *version) for feature, version in fresh.versions.items()]
    db.executemany("INSERT OR REPLACE INTO versions VALUES (?, ?, ?)", versions)
    contents = [(uri, *version) for uri, version in fresh.contents.items()]
    db.executemany("INSERT OR REPLACE INTO contents VALUES (?, ?, ?)", contents)
    db.execute("INSERT OR REPLACE INTO meta VALUES ('settled', ?)", (revision,))


def _settle_bytes(*batches: Batch) -> int:
    """About what `_settle` writes."""
    items = sum(len(item.json) for batch in batches for item in batch.items.values() if item is not None)
    return items + 256 * sum(len(batch.items) + len(batch.contents) for batch in batches)


def _durable_rows(batch: Batch) -> list[tuple[str, str, str | None]]:
    """Owner, name and state of each. One that has no written form is left out: it must not hold back the others."""
    rows: list[tuple[str, str, str | None]] = []
    for (owner, name), durable in batch.durables.items():
        try:
            name.encode()
            state = None if durable is None else msgspec.json.encode(durable).decode()
            rows.append((msgspec.json.encode(owner).decode(), name, state))
        except (ValueError, TypeError, OverflowError) as error:
            logger.error("the durable subscription %r can't be saved: %s", name, error)
    return rows


def _durable_bytes(db: sqlite3.Connection, rows: Collection[tuple[str, str, str | None]]) -> int:
    """About what `_write_durables` logs: their own bytes; where they lie far apart, the pages that they are in, one of
    the table and one of its index for each."""
    if not rows:
        return 0
    size = sum(64 + sum(len(value) for value in row if value is not None) for row in rows)
    count = int(db.execute("SELECT count(*) FROM durables").fetchone()[0])
    return max(size, min(2 * _PAGE * len(rows), count * size // len(rows)))


def _write_durables(db: sqlite3.Connection, rows: Iterable[tuple[str, str, str | None]]) -> None:
    for owner, name, state in rows:
        if state is None:
            db.execute("DELETE FROM durables WHERE owner = ? AND name = ?", (owner, name))
        else:
            # In its place: a row that was replaced would be written elsewhere, and its index with it.
            db.execute(
                "INSERT INTO durables VALUES (?, ?, ?) ON CONFLICT (owner, name) DO UPDATE SET state = excluded.state",
                (owner, name, state),
            )


def _give_back(db: sqlite3.Connection) -> None:
    """After a storm, pages that are no longer needed are the file system's again."""
    free = db.execute("PRAGMA freelist_count").fetchone()[0]
    if free > 1024 and 2 * free > db.execute("PRAGMA page_count").fetchone()[0]:
        db.execute(f"PRAGMA incremental_vacuum({free // 2})").fetchall()


def _versions(batch: Batch) -> Iterator[Version]:
    yield from batch.versions.values()
    yield from batch.contents.values()


# Opening


def _connect(location: str) -> sqlite3.Connection:
    return sqlite3.connect(
        location,
        timeout=_PATIENCE,
        isolation_level=None,  # transactions are begun and ended here, by hand
        check_same_thread=False,  # one thread at a time, not always the same one
        uri=location.startswith("file:"),
    )


def _check(db: sqlite3.Connection, path: Path) -> bool:
    """Refuse what is not ours, before anything is changed about it; whether there is anything in it."""
    # In this order: a server may begin the file between the two.
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if not tables and not version:
        return False
    if db.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
        raise StoreBroken(f"{path} is a database of something else; name another file")
    if version < 1:
        raise StoreBroken(f"{path} is damaged (there is no format {version}); move it away to begin anew")
    if version > SCHEMA:
        raise StoreBroken(
            f"{path} was written by a newer Tidings (format {version}, this one knows {SCHEMA}); update this one, or "
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
        if db.in_transaction:  # some failures have ended it already
            db.execute("ROLLBACK")
        raise
