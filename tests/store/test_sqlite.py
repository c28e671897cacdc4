"""The state file of the SQLite store: who can use it, and what happens if it cannot be used."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.stores import StoredServer, create_file, deny, fill, state_after_restart
from tidings import Feature
from tidings.store import Batch, StoreBroken, StoreBusy, StoreError
from tidings.store.durable import DurableSubscription
from tidings.store.sqlite import SCHEMA, SQLiteStore, peek

TOOLS = Feature.TOOLS


def execute(path: Path, statement: str) -> Any:
    with closing(sqlite3.connect(path)) as db, db:
        return db.execute(statement).fetchone()


def open_store(path: Path) -> None:
    SQLiteStore(path).open()


def test_file_is_readable_by_its_owner_only_and_has_its_format_in_the_header(path: Path) -> None:
    create_file(path)

    assert path.stat().st_mode & 0o777 == 0o600
    assert execute(path, "PRAGMA user_version") == (SCHEMA,)
    assert execute(path, "PRAGMA application_id") == (0x54494447,)
    assert execute(path, "PRAGMA journal_mode") == ("wal",)


def test_file_can_be_read_with_and_without_a_server(path: Path) -> None:
    server = StoredServer(path)
    fill(server)
    server.write({(None, "x"): DurableSubscription(name="x")})

    state = peek(path)
    assert state.journal == server.journal.since(0)
    assert list(state.durables) == [(None, "x")]
    server.close()
    assert peek(path) == state
    assert state.run == 1, "reading does not count as a run"


@pytest.mark.parametrize("name", ["state.db", ".tidings/state.db", ":memory:", "file:state.db?mode=memory"])
def test_file_is_where_it_was_named_even_if_the_process_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    store = SQLiteStore(name)
    monkeypatch.chdir(elsewhere)
    server = StoredServer(store)
    fill(server)
    server.write()

    before = server.close()
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert state_after_restart(tmp_path / name) == before
    assert list(elsewhere.iterdir()) == []
    if name.startswith(".tidings"):
        assert (tmp_path / ".tidings" / ".gitignore").read_text() == "*\n"


def test_file_is_locked_under_all_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    link, linked_folder = tmp_path / "link.db", tmp_path / "folder"
    link.symlink_to(folder / "state.db")
    linked_folder.symlink_to(folder)
    stores = [SQLiteStore(path) for path in (folder / "state.db", link, linked_folder / "state.db")]
    for first in stores:
        first.open()
        for second in stores:
            if second is not first:
                with pytest.raises(StoreBusy, match="in use by another server"):
                    second.open()
        first.close()


def test_closed_store_refuses_a_write(path: Path) -> None:
    store = SQLiteStore(path)
    store.open()
    store.close()
    store.close()

    with pytest.raises(StoreError, match="is closed"):
        store.write(Batch())


# Values that cannot be encoded


def test_integer_that_is_too_large_for_the_format_is_written_as_text(path: Path) -> None:
    server = StoredServer(path)
    server.catalog.resources.updated("a://1", size=1 << 64, author="Ann")
    server.catalog.resources.updated("a://2", size=1 << 20)
    server.write()
    server.close()
    metadata = [change.metadata for change in peek(path).journal]
    assert metadata == [{"size": str(1 << 64), "author": "Ann"}, {"size": 1 << 20}]


def test_record_that_cannot_be_encoded_does_not_prevent_the_others(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = StoredServer(path)
    fill(server)
    valid = DurableSubscription(name="laptop")
    invalid = [
        DurableSubscription(name="\ud800"),
        DurableSubscription(name="uri", uris=("a://\ud800",)),
        DurableSubscription(name="terms", terms={"names": ["\ud800"]}),
        DurableSubscription(name="owner", owner=("\ud800", None)),
    ]
    server.write({(None, "\udfff"): None, **{record.key: record for record in (*invalid, valid)}})
    before = server.close()

    assert state_after_restart(path) == before
    assert peek(path).durables == {valid.key: valid}
    assert "'uri' can't be saved" in caplog.text


# Files that cannot be used


def overwrite(start: int, content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(
        path.read_bytes()[:start] + content + path.read_bytes()[start + len(content) :]
    )


def run_sql(statement: str) -> Callable[[Path], object]:
    return lambda path: execute(path, statement)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b"These are my notes.\n" * 50), r"or not a state file; .* or name another file"),
        (overwrite(0, b"x" * 16), r"is damaged .*; move it away to start without it"),
        (overwrite(4096 * 2, os.urandom(4096 * 18)), r"is damaged .*; move it away to start without it"),
        (lambda path: os.truncate(path, path.stat().st_size // 2), "is damaged .*; move it away to start without it"),
        (run_sql("DELETE FROM items WHERE key = 'tool 7'"), r"is damaged \(the tools do not match their digest\)"),
        (run_sql("UPDATE journal SET changes = x'93'"), "is damaged .*; move it away to start without it"),
        (run_sql("DROP TABLE meta"), r"is damaged \(no such table: meta\)"),
        (run_sql("PRAGMA user_version = 0"), r"is damaged \(there is no format 0\); move it away"),
        (run_sql("PRAGMA user_version = -5"), r"is damaged \(there is no format -5\); move it away"),
        (run_sql("PRAGMA application_id = 1"), "a database of another program; name another file"),
    ],
    ids=["text", "header", "middle", "half", "items", "journal", "table", "format 0", "format -5", "other program"],
)
def test_damaged_file_is_refused_and_not_changed(path: Path, damage: Callable[[Path], object], message: str) -> None:
    server = StoredServer(path)
    for number in range(500):
        server.catalog.tools.add({"name": f"tool {number}", "description": "x" * 200})
    server.write()
    server.close()
    damage(path)
    before = path.read_bytes()

    for use in (open_store, peek):
        with pytest.raises(StoreBroken, match=message):
            use(path)
    assert path.read_bytes() == before


def test_file_of_a_newer_format_is_refused_and_not_changed(path: Path) -> None:
    state = create_file(path)
    execute(path, f"PRAGMA user_version = {SCHEMA + 1}")
    before = path.read_bytes()

    for use in (open_store, peek):
        with pytest.raises(StoreBroken, match=f"newer Tidings .format {SCHEMA + 1}, this one knows {SCHEMA}"):
            use(path)
    assert path.read_bytes() == before
    execute(path, f"PRAGMA user_version = {SCHEMA}")
    assert state_after_restart(path) == state


def test_missing_and_empty_files_cannot_be_read_but_can_be_opened(path: Path) -> None:
    with pytest.raises(StoreError, match="there is no such file"):
        peek(path)
    assert not path.exists()
    path.touch()
    with pytest.raises(StoreError, match="is empty; a server that uses it fills it"):
        peek(path)
    assert create_file(path) == state_after_restart(path)


def test_path_of_no_regular_file_is_refused_and_nothing_is_created_beside_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(StoreError, match="is not a regular file"):
            open_store(path)
    assert list(tmp_path.iterdir()) == [pipe]


def test_file_that_another_program_has_locked_is_reported_as_locked(
    path: Path, connections: list[sqlite3.Connection]
) -> None:
    create_file(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")

    for use in (open_store, peek):
        with pytest.raises(StoreError, match="is locked by another program; stop that program") as caught:
            use(path)
        assert not isinstance(caught.value, StoreBusy), "no server has it"
    other.close()


def test_file_system_without_locks_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match="can't be written: No locks available; fix that, or name") as caught:
        open_store(path)
    assert not isinstance(caught.value, StoreBusy)


def test_file_that_a_server_creates_during_a_read_is_not_reported_as_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.touch()
    servers: list[StoredServer] = []
    connect = sqlite3.connect

    class Reader(sqlite3.Connection):
        def execute(self, *statement: Any) -> sqlite3.Cursor:
            if "user_version" in statement[0] and not servers:
                monkeypatch.undo()
                servers.append(StoredServer(path))
            return super().execute(*statement)

    monkeypatch.setattr(sqlite3, "connect", lambda location, **options: connect(location, factory=Reader, **options))
    assert peek(path).journal == []
    servers[0].close()


# Failures while the file is open


@pytest.mark.parametrize("is_freed", [True, False])
def test_full_disk_loses_nothing_that_was_written_and_can_be_written_to_again(
    path: Path, connections: list[sqlite3.Connection], is_freed: bool
) -> None:
    server = StoredServer(path)
    fill(server)
    server.write()
    before, db = server.visible_state(), connections[-1]
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages + 1}")
    for number in range(3000):
        server.catalog.tools.add({"name": f"tool {number}", "description": "x" * 100})

    with pytest.raises(StoreError, match="the disk is full; free some space") as caught:
        server.write()
    assert not isinstance(caught.value, StoreBroken)
    found = peek(path)
    assert (found.versions[TOOLS], found.journal) == (before["versions"][TOOLS], before["journal"])

    if is_freed:
        db.execute("PRAGMA max_page_count = 1000000")
        server.catalog.tools.add({"name": "one more"})
        server.write()
        before = server.visible_state()
        server.kill()
        assert server.visible_state() == before
    server.close()
    if not is_freed:
        assert state_after_restart(path) == before


@pytest.mark.parametrize("end", ["", "-lock"])
def test_file_that_was_moved_is_not_written_until_it_is_back(path: Path, end: str) -> None:
    server = StoredServer(path)
    fill(server)
    server.write()
    moved, elsewhere = Path(f"{path}{end}"), path.with_name("elsewhere")
    moved.rename(elsewhere)
    server.catalog.tools.add({"name": "late"})
    with pytest.raises(StoreError, match=r"was moved, removed or replaced .* restart this server"):
        server.write()
    moved.touch()  # another file under its name
    with pytest.raises(StoreError, match="was moved, removed or replaced"):
        server.write()
    elsewhere.replace(moved)
    server.write()
    assert server.close() == state_after_restart(path)


def test_server_whose_lock_file_was_removed_does_not_overwrite_the_next_server(path: Path) -> None:
    older = StoredServer(path)
    fill(older)
    older.write()
    Path(f"{path}-lock").unlink()
    newer = StoredServer(path)
    newer.catalog.tools.replace([{"name": "new"}])
    newer.write()

    older.catalog.tools.replace([])
    with pytest.raises(StoreError, match="lock file was moved"):
        older.write()
    older.close()
    assert newer.close() == state_after_restart(path)


def test_batch_is_not_written_again_if_only_the_vacuum_failed(
    path: Path, connections: list[sqlite3.Connection]
) -> None:
    server = StoredServer(path, journal_changes=2)
    deny(connections[-1], "freelist_count")
    for number in range(5):
        server.add_tools(str(number))
        server.write()  # cuts the journal, so that the tables are updated
    assert server.close() == state_after_restart(path, journal_changes=2)
