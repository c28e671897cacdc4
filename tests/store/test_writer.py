"""Nobody waits for a disk, and a disk that fails costs no more than what it would have kept."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp.server import MCPServer

from tidings import Feature, Policy
from tidings.live import Live
from tidings.store import Batch, State, StoreBroken, StoreError, writer
from tidings.store.durable import DurableSubscription
from tidings.store.memory import MemoryStore
from tidings.store.sqlite import peek

DEADLINE = 60.0
TOOLS = Feature.TOOLS


class Moody(MemoryStore):
    """Writes when it may, and fails as often as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_asked = threading.Event()
        self.failures: list[Exception] = []
        self.fails_once = False
        """Whether it hangs after a failure, until it may write."""
        self.written: list[Batch] = []
        self.threads: set[int] = set()

    def write(self, batch: Batch) -> None:
        self.threads.add(threading.get_ident())
        self.is_asked.set()
        assert self.may_write.wait(DEADLINE)
        if self.failures:
            if self.fails_once:
                self.may_write.clear()
            raise self.failures.pop(0)
        super().write(batch)
        self.written.append(batch)


@contextmanager
def living(store: Any = None, **options: Any) -> Iterator[Live]:
    live = Live(MCPServer("board"), store=store, **options)
    try:
        yield live
    finally:
        live.close()


def until(is_so: Any, what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    pause = threading.Event()
    while not is_so():
        assert time.monotonic() < deadline, what
        pause.wait(0.005)


def add(live: Live, *names: str) -> None:
    for name in names:
        live.catalog.tools.add({"name": name})


def left(store: Moody) -> State:
    """What the next life would find."""
    store.close()
    return store.open()


def test_changes_are_written_on_a_thread_of_its_own_and_together() -> None:
    store = Moody()
    with living(store) as live:
        add(live, *map(str, range(100)))
        until(lambda: sum(len(batch.changes) for batch in store.written) == 100, "every change")

        assert threading.get_ident() not in store.threads
        assert len(store.written) < 10
    assert [change.key for change in left(store).journal] == list(map(str, range(100)))


@pytest.mark.anyio
async def test_a_store_that_hangs_holds_up_neither_changes_nor_the_event_loop() -> None:
    store = Moody()
    with living(store) as live:
        heard: list[Any] = []
        live.hub.subscribe(heard.append, "tools")
        store.may_write.clear()
        add(live, "first")
        await asyncio.to_thread(store.is_asked.wait, DEADLINE)  # it hangs from here on
        start = time.thread_time()
        for number in range(50):
            add(live, f"t{number}")
            await asyncio.sleep(0)
        live.stop()

        assert len(heard) == 51
        assert time.thread_time() - start < 1
        assert store.written == []
        store.may_write.set()
    assert len(left(store).items) == 51


def test_what_waits_for_a_store_that_hangs_is_no_more_than_the_state() -> None:
    store = Moody()
    with living(store, policy=Policy(journal_changes=50, max_contents=20)) as live:
        store.may_write.clear()
        add(live, "first")
        assert store.is_asked.wait(DEADLINE)
        for number in range(15_000):
            live.catalog.tools.add({"name": f"t{number % 30}", "title": str(number)}, replace=True)
            live.catalog.resources.updated(f"a://{number}")
            live.catalog.prompts.add({"name": f"p{number}"})
            live.catalog.prompts.remove(f"p{number}")

        waiting = live.writer._compacted
        assert len(live.writer._queue) <= writer._MAX_QUEUED + 4
        assert len(waiting.changes) <= 4 * 50 + writer._MAX_QUEUED
        assert len(waiting.contents) <= 20 + writer._MAX_QUEUED
        assert len(waiting.items) <= 31 + writer._MAX_REMOVED_ITEMS + 2 * writer._MAX_QUEUED
        store.may_write.set()
        live.writer.flush(DEADLINE)
        expected = {feature: live.catalog.version(feature) for feature in (TOOLS, Feature.PROMPTS)}
        contents = live.catalog.resources.contents()
        floors = live.hub.journal.floors()
    found = left(store)
    assert {feature: found.versions[feature] for feature in (TOOLS, Feature.PROMPTS)} == expected
    assert sorted(item.key for item in found.items) == sorted({"first", *(f"t{number}" for number in range(30))})
    assert found.contents == contents
    assert found.floors == floors
    assert len(found.journal) == 150


def test_a_store_that_fails_is_tried_again_and_nothing_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "RETRY_DELAY", 0.01)
    caplog.set_level(logging.INFO)
    store = Moody()
    store.failures = [StoreError("state.db: the disk is full; make room")] * 3 + [ValueError("what is this?")]
    store.fails_once = True
    with living(store) as live:
        add(live, "a")
        until(lambda: live.writer.problem, "a failure")
        assert "the disk is full" in (live.writer.problem or "")
        assert not live.writer.is_saving
        add(live, "b")
        store.fails_once = False
        store.may_write.set()
        until(lambda: store.written, "a success")
        until(lambda: live.writer.problem is None, "its being said")

        assert live.failures["store"] == 4
        assert live.writer.is_saving
        said = [record.message for record in caplog.records if "the disk is full" in record.message]
        assert len(said) == 1, "once, and not at every try"
        assert "are saved to" in caplog.text
    found = left(store)
    assert [change.key for change in found.journal] == ["a", "b"]


def test_for_a_store_that_is_gone_for_good_nothing_is_noted() -> None:
    store = Moody()
    with living(store) as live:
        store.failures.append(StoreBroken("it is damaged"))
        live.durables.put(DurableSubscription(name="laptop", ttl=9))
        until(lambda: live.writer.problem, "the store to fail")
        live.durables.put(DurableSubscription(name="other", ttl=9))
        assert not live.durables.unsaved.has_records
    with living() as live:
        live.durables.put(DurableSubscription(name="laptop", ttl=9))
        assert not live.durables.unsaved.has_records


def test_names_that_come_and_go_during_an_outage_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RETRY_DELAY", 0.001)
    monkeypatch.setattr(writer, "MAX_RETRY_DELAY", 0.001)
    store = Moody()
    with living(store) as live:
        live.durables.put(DurableSubscription(name="kept", ttl=9))
        live.writer.flush(DEADLINE)
        store.failures = [StoreError("state.db: the disk is full; make room")] * 10_000
        for number in range(200):
            live.durables.put(DurableSubscription(name=f"n{number}", ttl=9))
            live.writer.flush(DEADLINE)
            live.durables.remove((None, f"n{number}"))
        live.writer.flush(DEADLINE)

        assert live.failures["store"] >= 200
        assert len(live.writer._batch.durables) == 0
        store.failures.clear()
        until(lambda: live.writer.problem is None, "a success")
    assert [name for _, name in left(store).durables] == ["kept"]


def test_a_store_that_is_broken_is_left_alone() -> None:
    store = Moody()
    store.failures = [StoreBroken("state.db is damaged")] * 100
    with living(store) as live:
        add(live, "a")
        until(lambda: live.writer.problem, "a failure")
        thread = live.writer._thread
        assert thread is not None
        thread.join(DEADLINE)
        add(live, "b")

        assert not thread.is_alive()
        assert len(live.tools) == 2
        assert live.failures["store"] == 1


def test_the_end_of_the_process_writes_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    program = f"""
from mcp.server import MCPServer
from tidings.live import Live
live = Live(MCPServer("board"), store={str(path)!r})
for number in range(5):
    live.catalog.tools.add({{"name": str(number)}})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

    assert not path.with_name("state.db-wal").exists(), "it was closed"
    assert len(peek(path).items) == 5


def test_a_second_server_on_one_file_says_so_and_goes_on_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.db"
    with living(path) as first:
        add(first, "a")
        with living(path) as second:
            add(second, "b")
            second.writer.flush()

            assert "in use by another server" in (second.writer.problem or "")
            assert second.failures["store"] == 1
            assert second.epoch != first.epoch
            assert "in use by another server" in caplog.text
            assert len(second.tools) == 1
        first.writer.flush()
        assert first.writer.problem is None
    assert [item.key for item in peek(path).items] == ["a"]


def test_a_server_in_the_same_process_may_have_it_next(tmp_path: Path) -> None:
    with living(tmp_path / "state.db") as first:
        add(first, "a")
        epoch, version = first.epoch, first.catalog.version(TOOLS)
    with living(tmp_path / "state.db") as second:
        assert second.epoch == epoch
        assert "a" in second.tools, "until a client comes, it may still be added"
        asyncio.run(second.list_reader.ensure_loaded())
        # The server itself has no tools, so what was there in the last life is gone now, and says so.
        changes = second.hub.journal.since(version.revision, TOOLS)
        assert changes is not None
        assert [(change.operation, change.key) for change in changes] == [("removed", "a")]


def test_a_restart_with_the_same_items_changes_nothing(tmp_path: Path) -> None:
    def server() -> MCPServer:
        found: MCPServer = MCPServer("board")
        for name in "abc":
            found.add_tool(lambda: "", name=name)
        return found

    versions = []
    for _ in range(3):
        live = Live(server(), store=tmp_path / "state.db")
        live.resources.updated("a://b", etag="1")
        versions.append((live.catalog.version(TOOLS), live.catalog.version("a://b"), len(live.hub.journal)))
        live.close()

    assert len(set(versions)) == 1


def test_a_restart_of_a_server_whose_decorators_come_after_it_changes_nothing(tmp_path: Path) -> None:
    def start(*names: str) -> tuple[list[str], int]:
        server: MCPServer = MCPServer("board")
        live = Live(server, store=tmp_path / "state.db")
        for name in names:
            server.tool(name)(lambda: "")
        asyncio.run(live.list_reader.ensure_loaded())
        try:
            return [item.key for item in live.catalog.tools.snapshot()], len(live.hub.journal)
        finally:
            live.close()

    assert [start("a", "b", "c") for _ in range(3)] == [(["a", "b", "c"], 3)] * 3
    assert start("a", "c", "d") == (["a", "c", "d"], 5), "b is gone, and d is new"
    assert start() == ([], 8)


def test_a_restored_backup_gives_no_content_a_version_that_the_other_server_gave(tmp_path: Path) -> None:
    with living(tmp_path / "state.db"):
        pass
    shutil.copy(tmp_path / "state.db", tmp_path / "backup.db")
    given = []
    for name in ("state.db", "backup.db"):
        with living(tmp_path / name) as live:
            live.resources.updated("a://b")
            given.append((live.epoch, *live.catalog.version("a://b")))

    assert given[0][:2] == given[1][:2], "they can't know of each other"
    assert given[0][2] != given[1][2]


@contextmanager
def as_nobody() -> Iterator[None]:
    """For root, who may write to everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may look into."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["file", "folder", "no folder"])
def test_what_may_not_be_written_is_said_and_left_as_it_is(
    open_folder: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = open_folder / "state.db" if what != "no folder" else open_folder / "deeper" / "state.db"
    if what != "no folder":
        with living(path) as live:
            add(live, "a")
        path.chmod(0o444)
        path.with_name("state.db-lock").chmod(0o666 if what == "file" else 0o444)
    before = path.read_bytes() if path.exists() else None
    open_folder.chmod(0o777 if what == "file" and os.geteuid() == 0 else 0o555)

    with as_nobody(), living(path) as live:
        add(live, "b")

        assert len(live.tools) == 1
        assert f"{path} can't be written by this user; change its permissions, or name another file" in caplog.text
        assert live.failures["store"] == 1
        assert not live.writer.is_saving
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_log_that_can_not_be_read_is_not_passed_over(open_folder: Path) -> None:
    """As where nobody may write after a server was killed: without its log the file is an older one."""
    path = open_folder / "state.db"
    with living(path) as live:
        add(live, "a")
        live.writer.flush(DEADLINE)
        copied = {
            path.with_name(f"copy.db{end}"): path.with_name(f"state.db{end}").read_bytes() for end in ("", "-wal")
        }
    for copy, content in copied.items():
        copy.write_bytes(content)
        copy.chmod(0o444)
    open_folder.chmod(0o555)

    with (
        as_nobody(),
        pytest.raises(StoreError, match="has a log beside it; copy both to a folder that you can write to"),
    ):
        peek(path.with_name("copy.db"))
    path.chmod(0o444)
    with as_nobody():
        assert len(peek(path).items) == 1, "that one was closed, and has none"


def test_a_damaged_file_and_one_of_a_newer_version_leave_a_server_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, newer = tmp_path / "damaged.db", tmp_path / "newer.db"
    damaged.write_bytes(b"SQLite format 3\0" + os.urandom(8192))
    with living(newer):
        pass
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    before = {path: path.read_bytes() for path in (damaged, newer)}

    for path, said in ((damaged, "is damaged"), (newer, "was written by a newer Tidings")):
        with living(path) as live:
            add(live, "a")
            assert said in (live.writer.problem or "")
            assert f"{path} {said}" in caplog.text
            assert len(live.tools) == 1
        assert path.read_bytes() == before[path]


def test_without_a_store_there_is_no_thread_and_no_problem() -> None:
    with living() as live:
        add(live, "a")

        assert live.writer._thread is None
        assert live.writer.problem is None
        assert not live.writer.is_saving
