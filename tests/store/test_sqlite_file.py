"""The file of the SQLite store: its owner's alone, read by anybody, and left as it is where it can't be used."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.stores import Server, die, fill, shown_in, written
from tidings import Feature
from tidings.store import Batch, StoreBroken, StoreBusy, StoreError, sqlite
from tidings.store import file_lock as lock
from tidings.store import rows as packed
from tidings.store.durable import DurableSubscription
from tidings.store.sqlite import SCHEMA, SQLiteStore, peek

TOOLS = Feature.TOOLS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def test_an_integer_that_is_too_large_to_write_holds_back_nothing(path: Path) -> None:
    server = Server(SQLiteStore(path))
    server.catalog.resources.updated("a://1", size=1 << 64, author="Ann")
    server.catalog.resources.updated("a://2", size=1 << 20)
    server.write()
    server.store.close()
    metadata = [change.metadata for change in peek(path).journal]
    assert metadata == [{"size": str(1 << 64), "author": "Ann"}, {"size": 1 << 20}]


def test_one_subscription_that_has_no_written_form_holds_back_nobody(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(SQLiteStore(path))
    fill(server)
    fine = DurableSubscription(name="laptop")
    bad = [
        DurableSubscription(name="\ud800"),
        DurableSubscription(name="uri", uris=("a://\ud800",)),
        DurableSubscription(name="terms", terms={"names": ["\ud800"]}),
        DurableSubscription(name="owner", owner=("\ud800", None)),
    ]
    server.write({(None, "\udfff"): None, **{each.key: each for each in (*bad, fine)}})
    shown = server.shown()
    server.store.close()

    again = Server(SQLiteStore(path))
    assert again.shown() == shown
    assert again.state.durables == {fine.key: fine}
    assert "'uri' can't be saved" in caplog.text
    again.store.close()


def test_the_file_is_its_owners_alone_and_says_what_it_is(path: Path) -> None:
    written(path)

    assert path.stat().st_mode & 0o777 == 0o600
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
        assert db.execute("PRAGMA application_id").fetchone() == (0x54494447,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    db.close()


def test_a_folder_of_its_own_is_made_and_kept_out_of_version_control(tmp_path: Path) -> None:
    written(tmp_path / ".tidings" / "state.db")

    assert (tmp_path / ".tidings" / ".gitignore").read_text() == "*\n"


def test_a_file_can_be_read_while_a_server_has_it_and_while_none_has(path: Path) -> None:
    server = Server(SQLiteStore(path))
    fill(server)
    server.write({(None, "x"): DurableSubscription(name="x")})

    while_open = peek(path)
    assert while_open.journal == server.journal.since(0)
    assert list(while_open.durables) == [(None, "x")]
    server.store.close()
    assert peek(path) == while_open
    assert peek(path).run == 1, "to look is no life"


def test_there_is_nothing_to_look_at_where_no_file_is(path: Path) -> None:
    with pytest.raises(StoreError, match="there is no such file"):
        peek(path)
    assert not path.exists()


def execute(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(statement)


def set_version(path: Path, version: int) -> None:
    execute(path, f"PRAGMA user_version = {version}")


@pytest.mark.parametrize("version", [0, -5])
def test_a_file_of_a_version_that_never_was_is_refused_and_left_as_it_is(path: Path, version: int) -> None:
    written(path)
    set_version(path, version)
    before = path.read_bytes()
    for use in (SQLiteStore(path).open, lambda: peek(path)):
        with pytest.raises(StoreBroken, match=f"is damaged .there is no format {version}.; move it away"):
            use()
    assert path.read_bytes() == before


def test_a_file_of_an_older_version_is_read_and_is_then_of_this_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(packed, "_without_repeated_items", list)  # as version 1 wrote it
        shown = written(path)
    set_version(path, 1)
    assert peek(path).journal == shown["journal"]
    assert shown_in(path) == shown
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA,)


def test_a_file_of_a_newer_version_is_refused_and_left_as_it_is(path: Path) -> None:
    shown = written(path)
    set_version(path, SCHEMA + 1)
    before = path.read_bytes()

    for _ in range(2):
        with pytest.raises(StoreBroken, match=f"newer Tidings .format {SCHEMA + 1}, this one knows {SCHEMA}"):
            SQLiteStore(path).open()
    assert path.read_bytes() == before
    set_version(path, SCHEMA)
    assert shown_in(path) == shown


def test_a_database_of_something_else_is_refused_and_left_as_it_is(path: Path) -> None:
    execute(path, "CREATE TABLE notes (text)")
    before = path.read_bytes()

    with pytest.raises(StoreBroken, match="a database of another program; name another file"):
        SQLiteStore(path).open()
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["text", "header", "middle", "items", "packed", "half"])
def test_a_damaged_file_is_refused_and_left_as_it_is(path: Path, damage: str) -> None:
    server = Server(SQLiteStore(path))
    for number in range(500):
        server.catalog.tools.add({"name": f"tool {number}", "description": "x" * 200})
    server.write()
    server.store.close()
    if damage == "items":
        execute(path, "DELETE FROM items WHERE key = 'tool 7'")
    elif damage == "packed":
        execute(path, "UPDATE journal SET changes = x'93'")
    else:
        content = bytearray(path.read_bytes())
        if damage == "text":
            content = bytearray(b"These are my notes.\n" * 50)
        elif damage == "header":
            content[:16] = b"x" * 16
        elif damage == "middle":
            content[4096 * 2 : 4096 * 20] = os.urandom(4096 * 18)
        else:
            del content[len(content) // 2 :]
        path.write_bytes(content)
    before = path.read_bytes()

    with pytest.raises(StoreBroken, match=r"is damaged .*; move it away to start without it"):
        SQLiteStore(path).open()
    assert path.read_bytes() == before


def test_a_full_disk_loses_nothing_that_was_written_and_can_be_written_to_again(path: Path) -> None:
    server = Server(SQLiteStore(path))
    fill(server)
    server.write()
    shown = server.shown()
    db = server.store._db  # type: ignore[attr-defined]
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages + 1}")
    for number in range(3000):
        server.catalog.tools.add({"name": f"tool {number}", "description": "x" * 100})

    with pytest.raises(StoreError, match="the disk is full; free some space") as caught:
        server.store.write(server.batch)
    assert not isinstance(caught.value, StoreBroken)
    found = peek(path)
    assert (found.versions[TOOLS], len(found.journal)) == (shown["versions"][TOOLS], len(shown["journal"]))

    db.execute("PRAGMA max_page_count = 1000000")
    server.catalog.tools.add({"name": "one more"})
    server.write()
    shown = server.shown()
    die(server.store)
    assert shown_in(path) == shown


def test_a_store_that_was_never_written_after_a_full_disk_is_closed_as_it_was(path: Path) -> None:
    server = Server(SQLiteStore(path))
    fill(server)
    server.write()
    shown = server.shown()
    db = server.store._db  # type: ignore[attr-defined]
    db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
    for number in range(3000):
        server.catalog.tools.add({"name": f"tool {number}", "description": "x" * 100})
    with pytest.raises(StoreError):
        server.store.write(server.batch)
    server.store.close()

    assert shown_in(path) == shown


def test_a_closed_store_takes_nothing(path: Path) -> None:
    store = SQLiteStore(path)
    store.open()
    store.close()
    store.close()

    with pytest.raises(StoreError, match="is closed"):
        store.write(Batch())


# What is said of a file that can't be used


def test_an_empty_file_is_said_to_be_empty_and_can_be_begun_with(path: Path) -> None:
    path.touch()

    with pytest.raises(StoreError, match="is empty; a server that uses it fills it"):
        peek(path)
    assert written(path) == shown_in(path)


def test_a_file_that_another_program_has_locked_is_said_to_be_locked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_BUSY_TIMEOUT", 0.01)
    written(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")

    for use in (peek, lambda path: SQLiteStore(path).open()):
        with pytest.raises(StoreError, match="is locked by another program; stop that program") as caught:
            use(path)
        assert not isinstance(caught.value, StoreBusy), "no server has it"
    other.close()


def test_a_file_without_its_tables_is_damaged(path: Path) -> None:
    written(path)
    execute(path, "DROP TABLE meta")

    for use in (peek, lambda path: SQLiteStore(path).open()):
        with pytest.raises(StoreBroken, match=r"is damaged \(no such table: meta\)"):
            use(path)


def test_where_no_lock_can_be_had_nobody_is_said_to_have_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "_lock", refuse)
    with pytest.raises(
        StoreError, match="can't be written: No locks available; fix that, or name another file"
    ) as caught:
        SQLiteStore(path).open()
    assert not isinstance(caught.value, StoreBusy)


@pytest.mark.parametrize("name", ["state.db", ":memory:", "file:state.db?mode=memory"])
def test_the_file_is_where_it_was_named_wherever_the_process_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    server = Server(SQLiteStore(name))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    fill(server)
    server.write()
    shown = server.shown()
    server.store.close()
    again = Server(SQLiteStore(tmp_path / name))
    assert again.shown() == shown
    again.store.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_that_is_begun_while_somebody_looks_is_not_damaged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.touch()
    store = SQLiteStore(path)
    connect, asked = sqlite._connect, []

    class Reader(sqlite3.Connection):
        def execute(self, *statement: Any) -> sqlite3.Cursor:
            asked.append(statement)
            if len(asked) == 2:
                with monkeypatch.context() as meanwhile:
                    meanwhile.setattr(sqlite, "_connect", connect)
                    store.open()
            return super().execute(*statement)

    monkeypatch.setattr(sqlite, "_connect", lambda location: sqlite3.connect(location, uri=True, factory=Reader))
    assert peek(path).journal == []
    assert len(asked) > 2
    store.close()


@pytest.mark.parametrize("name", ["state.db", ".tidings/state.db"])
def test_a_store_that_is_opened_elsewhere_than_it_was_made_is_where_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    store = SQLiteStore(name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    server = Server(store)
    fill(server)
    server.write()
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    server.store.close()
    assert peek(tmp_path / name).journal
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("beside", ["", "-lock"])
def test_what_was_moved_away_is_not_written_to_until_it_is_back(path: Path, beside: str) -> None:
    server = Server(SQLiteStore(path))
    fill(server)
    server.write()
    taken, elsewhere = Path(f"{path}{beside}"), path.with_name("elsewhere")
    taken.rename(elsewhere)
    server.catalog.tools.add({"name": "late"})
    with pytest.raises(StoreError, match=r"was moved, removed or replaced .* restart this server"):
        server.write()
    taken.touch()  # another one in its place is no better
    with pytest.raises(StoreError, match="was moved, removed or replaced"):
        server.write()
    elsewhere.replace(taken)
    server.write()
    shown = server.shown()
    server.store.close()
    again = Server(SQLiteStore(path))
    assert again.shown() == shown
    again.store.close()


def test_a_server_whose_lock_was_removed_undoes_nothing_of_the_next_ones(path: Path) -> None:
    former = Server(SQLiteStore(path))
    fill(former)
    former.write()
    Path(f"{path}-lock").unlink()
    server = Server(SQLiteStore(path))
    server.catalog.tools.replace([{"name": "new"}])
    server.write()
    shown = server.shown()

    former.catalog.tools.replace([])
    with pytest.raises(StoreError, match="lock file was moved"):
        former.write()
    former.store.close()
    server.store.close()
    again = Server(SQLiteStore(path))
    assert again.shown() == shown
    again.store.close()


def test_what_is_no_file_is_refused_and_nothing_is_made_beside_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(StoreError, match="is not a regular file"):
            SQLiteStore(path).open()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_file_that_is_no_database_may_be_anything_of_anybodys(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('name = "mine"\n' * 100)
    with pytest.raises(StoreBroken, match=r"or not a state file; .* or name another file"):
        SQLiteStore(settings).open()
