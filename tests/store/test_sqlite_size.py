"""The state file and its write-ahead log stay within their bounds."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.stores import StoredServer, state_after_restart
from tidings import Feature, Version
from tidings.store.durable import DurableSubscription
from tidings.store.sqlite import peek

TOOLS = Feature.TOOLS
MAX_WAL_SIZE = 8 << 20


def change_tools(server: StoredServer, count: int, length: int = 1000) -> None:
    for number in range(count):
        title = str(number) + "x" * length
        server.catalog.tools.add({"name": f"tool {number % 50}", "title": title}, replace=True)


def wal_size(server: StoredServer) -> int:
    return Path(f"{server.store}-wal").stat().st_size


def assert_wal_was_restarted(sizes: list[int]) -> None:
    assert MAX_WAL_SIZE / 2 < max(sizes) < 1.06 * MAX_WAL_SIZE


def test_file_stays_within_bounds_over_many_changes(path: Path) -> None:
    server = StoredServer(path, journal_changes=200, max_contents=100)
    files = [path.with_name(path.name + end) for end in ("", "-wal", "-shm")]
    sizes = []
    for number in range(30_000):
        server.catalog.tools.add({"name": f"tool {number % 50}", "title": str(number)}, replace=True)
        server.catalog.resources.updated(f"a://{number}")
        if number % 300 == 0:
            server.write()
            sizes.append(sum(file.stat().st_size for file in files))

    assert len(server.journal) == 400
    assert max(sizes) < 10 << 20
    assert max(sizes[len(sizes) // 2 :]) <= max(sizes[: len(sizes) // 2]) * 1.1, "it does not grow further"
    server.write()
    server.close()
    assert path.stat().st_size < 1 << 20
    assert len(peek(path).journal) == 400


def test_log_stays_within_its_limit_for_batches_of_any_size_and_after_a_kill(path: Path) -> None:
    server = StoredServer(path, journal_changes=1500)
    for _ in range(2):
        sizes = []
        for count in (10, 900, 1, 1200, 300, 1500, 50, 700) * 3:
            change_tools(server, count)
            server.write()
            sizes.append(wal_size(server))
        assert_wal_was_restarted(sizes)
        before = server.visible_state()
        server.kill()  # the new run does not know how much is in the log
        assert server.visible_state() == before
    server.close()


@pytest.mark.parametrize("share", [1, 25])
def test_log_stays_within_its_limit_for_durable_subscriptions(path: Path, share: int) -> None:
    """All records are written each time, or a few that are far apart in the file."""
    server = StoredServer(path)
    records = [
        DurableSubscription(name=f"client {number}", features=(TOOLS,), ttl=3600.0) for number in range(1000 * share)
    ]
    server.write({record.key: record for record in records})
    sizes = []
    for number in range(60):
        told = {TOOLS: Version(number, "d" * 32)}
        changed = [structs.replace(each, as_of=number, lists=told) for each in records[number % 25 :: share * share]]
        server.write({record.key: record for record in changed})
        sizes.append(wal_size(server))

    assert_wal_was_restarted(sizes)
    server.close()


def test_log_of_a_batch_that_is_larger_than_the_limit_shrinks_with_the_next_batch(path: Path) -> None:
    server = StoredServer(path)
    change_tools(server, 100, 100_000)
    server.write()
    change_tools(server, 1)
    server.write()

    assert wal_size(server) <= MAX_WAL_SIZE
    server.close()


def test_reader_delays_no_write_and_the_log_shrinks_when_it_has_finished(path: Path) -> None:
    server = StoredServer(path, journal_changes=500)
    change_tools(server, 100)
    server.write()
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    read = reader.execute("SELECT count(*) FROM journal").fetchone()

    start = time.monotonic()
    for _ in range(30):
        change_tools(server, 500)
        server.write()
    assert time.monotonic() - start < 30, "with waiting, each of the last twenty would take four seconds"
    assert wal_size(server) > MAX_WAL_SIZE
    assert reader.execute("SELECT count(*) FROM journal").fetchone() == read

    reader.close()
    for _ in range(2):  # the first one is followed by a checkpoint, and the second one starts the log again
        change_tools(server, 10)
        server.write()
    assert wal_size(server) <= MAX_WAL_SIZE
    assert server.close() == state_after_restart(path, journal_changes=500)
