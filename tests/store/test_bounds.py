"""The file and its log stay within bounds, whoever reads them, and whatever fails while room is made."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.stores import Server, shown_in
from tidings import Feature, Policy, Version
from tidings.store import StoreError, sqlite
from tidings.store.durable import DurableSubscription
from tidings.store.sqlite import SQLiteStore, peek

TOOLS = Feature.TOOLS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def whole(path: Path) -> int:
    """All that SQLite has on the disk, its log and its index included."""
    files = [path.with_name(path.name + end) for end in ("", "-wal", "-shm")]
    return sum(file.stat().st_size for file in files if file.exists())


def test_the_file_stays_within_bounds_over_many_changes(path: Path) -> None:
    policy = Policy(journal_changes=200, max_contents=100)
    server = Server(SQLiteStore(path), policy)
    sizes = []
    for number in range(30_000):
        server.catalog.tools.add({"name": f"tool {number % 50}", "title": str(number)}, replace=True)
        server.catalog.resources.updated(f"a://{number}")
        if number % 300 == 0:
            server.write()
            sizes.append(whole(path))

    assert len(server.journal) == 400
    assert max(sizes) < 10 << 20
    assert max(sizes[len(sizes) // 2 :]) <= max(sizes[: len(sizes) // 2]) * 1.1, "it grows no further"
    server.write()
    server.store.close()
    assert path.stat().st_size < 1 << 20
    assert len(peek(path).journal) == 400


def put_tools(server: Server, numbers: range, length: int = 1000) -> None:
    for number in numbers:
        text = str(number) + "x" * length
        server.catalog.tools.add({"name": f"tool {number % 50}", "title": text}, replace=True)


def test_the_log_is_no_larger_however_large_the_batches_are(path: Path) -> None:
    server = Server(SQLiteStore(path), Policy(journal_changes=1500))
    log = path.with_name("state.db-wal")
    sizes = []
    for size in (10, 900, 1, 1200, 300, 1500, 50, 700) * 5:
        put_tools(server, range(size))
        server.write()
        sizes.append(log.stat().st_size)

    assert 4 << 20 < max(sizes) < 8.5 * (1 << 20)
    server.store.close()


@pytest.mark.parametrize("share", [1, 25])
def test_the_log_is_no_larger_for_durable_subscriptions(path: Path, share: int) -> None:
    """All of them are told each time, or a few that lie far apart."""
    server = Server(SQLiteStore(path))
    log = path.with_name("state.db-wal")
    durables = [
        DurableSubscription(name=f"client {number}", features=(TOOLS,), ttl=3600.0) for number in range(1000 * share)
    ]
    server.write({durable.key: durable for durable in durables})
    sizes = []
    for number in range(60):
        known = {TOOLS: Version(number, "d" * 32)}
        told = [structs.replace(each, as_of=number, lists=known) for each in durables[number % 25 :: share * share]]
        server.write({durable.key: durable for durable in told})
        sizes.append(log.stat().st_size)

    assert 4 << 20 < max(sizes) < 8.5 * (1 << 20)
    server.store.close()


def test_a_log_that_a_killed_server_left_is_not_added_to(path: Path) -> None:
    server = Server(SQLiteStore(path), Policy(journal_changes=500))
    log, copied = path.with_name("state.db-wal"), path.with_name("copy.db-wal")
    for _ in range(10):
        put_tools(server, range(500))
        server.write()
    path.with_name("copy.db").write_bytes(path.read_bytes())
    copied.write_bytes(log.read_bytes())
    shown = server.shown()
    server.store.close()

    again = Server(SQLiteStore(path.with_name("copy.db")), Policy(journal_changes=500))
    assert again.shown() == shown
    for _ in range(10):
        put_tools(again, range(500))
        again.write()
    assert 4 << 20 < copied.stat().st_size < 8.5 * (1 << 20)
    again.store.close()


def test_a_batch_that_alone_is_larger_leaves_no_log_of_its_size(path: Path) -> None:
    server = Server(SQLiteStore(path))
    put_tools(server, range(100), 100_000)
    server.write()

    assert path.with_name("state.db-wal").stat().st_size == 0
    server.store.close()


def test_who_reads_the_file_holds_up_nobody_and_the_log_shrinks_when_they_have(path: Path) -> None:
    server = Server(SQLiteStore(path), Policy(journal_changes=500))
    put_tools(server, range(100))
    server.write()
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    seen = reader.execute("SELECT count(*) FROM journal").fetchone()

    start = time.monotonic()
    for _ in range(30):
        put_tools(server, range(500))
        server.write()
    assert time.monotonic() - start < 30, "each past the first ten would wait for two seconds, twice"
    assert path.with_name("state.db-wal").stat().st_size > 8 << 20
    assert reader.execute("SELECT count(*) FROM journal").fetchone() == seen

    reader.close()
    put_tools(server, range(10))
    server.write()
    assert path.with_name("state.db-wal").stat().st_size <= 8 << 20
    shown = server.shown()
    server.store.close()
    assert shown_in(path, Policy(journal_changes=500)) == shown


def test_a_write_that_failed_is_tried_again_with_room_made_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(SQLiteStore(path), Policy(journal_changes=500))
    log = path.with_name("state.db-wal")
    for _ in range(4):
        put_tools(server, range(500))
        server.write()
    before = log.read_bytes()
    put_tools(server, range(10))
    with monkeypatch.context() as broken:
        broken.setattr(sqlite, "_forget", fail)
        with pytest.raises(StoreError, match="disk I/O error"):
            server.write()
        with pytest.raises(StoreError, match="disk I/O error"):
            server.write()
    server.write()
    assert len(log.read_bytes()) == len(before), "it was begun anew, and not added to"
    assert log.read_bytes() != before
    shown = server.shown()
    server.store.close()
    assert shown_in(path, Policy(journal_changes=500)) == shown


def test_who_could_not_make_room_is_as_patient_as_before(path: Path) -> None:
    store = SQLiteStore(path)
    server = Server(store)
    put_tools(server, range(10))
    db = store._opened()
    db.set_authorizer(lambda _, name, *rest: sqlite3.SQLITE_DENY if name == "wal_checkpoint" else sqlite3.SQLITE_OK)
    with pytest.raises(StoreError):
        server.write()
    db.set_authorizer(None)
    assert db.execute("PRAGMA busy_timeout").fetchone() == (2000,)
    server.write()
    store.close()
    assert len(peek(path).journal) == 10


def fail(*args: object) -> None:
    raise sqlite3.OperationalError("disk I/O error")


def test_a_batch_that_is_written_is_not_written_again_because_making_room_failed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_vacuum", fail)
    server = Server(SQLiteStore(path), Policy(journal_changes=2))
    for number in range(5):
        server.catalog.tools.add({"name": str(number)})
        server.write()  # past its floor, so that the tables are brought up to date
    shown = server.shown()
    server.store.close()

    assert shown_in(path, Policy(journal_changes=2)) == shown
