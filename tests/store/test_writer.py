"""The background writer: no caller waits for a disk, and a disk that fails costs no unbounded memory."""

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
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp.server import MCPServer

from tests.support.memory_store import MemoryStore
from tests.support.stores import copy_open_file
from tests.support.waiting import DEADLINE
from tidings import Feature, Policy
from tidings.live import Live
from tidings.store import Batch, StoreBroken, StoreError, writer
from tidings.store.durable import DurableSubscription
from tidings.store.sqlite import peek

TOOLS, PROMPTS = Feature.TOOLS, Feature.PROMPTS


class ControlledStore(MemoryStore):
    """A store whose writes hang and fail as a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.may_write.set()
        self.has_write = threading.Event()
        """Set when the writer calls `write`."""
        self.errors: list[Exception] = []
        """Raised by the next writes."""
        self.hangs_after_error = False
        self.written: list[Batch] = []
        self.threads: set[int] = set()

    def write(self, batch: Batch) -> None:
        self.threads.add(threading.get_ident())
        self.has_write.set()
        assert self.may_write.wait(DEADLINE)
        if self.errors:
            if self.hangs_after_error:
                self.may_write.clear()
            raise self.errors.pop(0)
        super().write(batch)
        self.written.append(batch)


@contextmanager
def running(store: Any = None, **options: Any) -> Iterator[Live]:
    live = Live(MCPServer("board"), store=store, **options)
    try:
        yield live
    finally:
        live.close()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.005)


def add_tools(live: Live, *names: str) -> None:
    for name in names:
        live.catalog.tools.add({"name": name})


def test_changes_are_written_in_batches_on_another_thread() -> None:
    store = ControlledStore()
    with running(store) as live:
        add_tools(live, *map(str, range(100)))
        wait_for(lambda: sum(len(batch.changes) for batch in store.written) == 100)

        assert threading.get_ident() not in store.threads
        assert len(store.written) < 10
    assert [change.key for change in store.peek().journal] == list(map(str, range(100)))


@pytest.mark.anyio
async def test_store_that_hangs_delays_neither_changes_nor_the_event_loop() -> None:
    store = ControlledStore()
    with running(store) as live:
        received: list[Any] = []
        live.hub.subscribe(received.append, "tools")
        store.may_write.clear()
        add_tools(live, "first")
        await asyncio.to_thread(store.has_write.wait, DEADLINE)
        start = time.thread_time()
        for number in range(50):
            add_tools(live, f"t{number}")
            await asyncio.sleep(0)
        live.stop()

        assert len(received) == 51
        assert time.thread_time() - start < 1
        assert store.written == []
        store.may_write.set()
    assert len(store.peek().items) == 51


def test_changes_that_wait_for_a_store_need_no_more_memory_than_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_MAX_REMOVED_ITEMS", 2000)  # so that 3,000 removed items exceed it
    store = ControlledStore()
    with running(store, policy=Policy(journal_changes=50, max_contents=20)) as live:
        store.may_write.clear()
        add_tools(live, "first")
        assert store.has_write.wait(DEADLINE)
        tracemalloc.start()
        try:
            for number in range(3_000):
                live.catalog.tools.add({"name": f"t{number % 30}", "title": str(number)}, replace=True)
                live.catalog.resources.updated(f"a://{number}")
                live.catalog.prompts.add({"name": f"p{number}"})
                live.catalog.prompts.remove(f"p{number}")
            memory, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert memory < 2 << 20, "12,000 changes need much more"
        store.may_write.set()
        live.writer.flush(DEADLINE)
        versions = {feature: live.catalog.version(feature) for feature in (TOOLS, PROMPTS)}
        contents, floors = live.catalog.resources.contents(), live.hub.journal.floors()
    found = store.peek()
    assert {feature: found.versions[feature] for feature in (TOOLS, PROMPTS)} == versions
    assert sorted(item.key for item in found.items) == sorted({"first", *(f"t{number}" for number in range(30))})
    assert (found.contents, found.floors) == (contents, floors)
    assert len(found.journal) == 150


def test_failed_write_is_tried_again_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "RETRY_DELAY", 0.01)
    caplog.set_level(logging.INFO)
    store = ControlledStore()
    store.errors = [StoreError("state.db: the disk is full; free some space")] * 3 + [ValueError("unexpected")]
    store.hangs_after_error = True
    with running(store) as live:
        for name in ("stays", "removed during the outage"):
            live.durables.put(DurableSubscription(name=name, ttl=9))
        add_tools(live, "a")
        wait_for(lambda: live.writer.problem)
        assert "the disk is full" in (live.writer.problem or "")
        add_tools(live, "b")
        live.durables.remove((None, "removed during the outage"))
        store.hangs_after_error = False
        store.may_write.set()
        wait_for(lambda: live.writer.problem is None)

        assert live.failures["store"] == 4
        messages = [record.message for record in caplog.records if "the disk is full" in record.message]
        assert len(messages) == 1, "not at every try"
        assert "changes are saved to" in caplog.text
    found = store.peek()
    assert [change.key for change in found.journal] == ["a", "b"]
    assert list(found.durables) == [(None, "stays")]


@pytest.mark.parametrize("has_store", [True, False])
def test_nothing_is_queued_without_a_store_or_for_a_broken_one(has_store: bool) -> None:
    store = ControlledStore()
    store.errors = [StoreBroken("state.db is damaged")] * 100
    threads = threading.active_count()
    with running(store if has_store else None) as live:
        add_tools(live, "a")
        if has_store:
            wait_for(lambda: live.writer.problem)
        add_tools(live, "b")
        live.durables.put(DurableSubscription(name="laptop", ttl=9))

        assert not live.writer.wake()
        assert not live.durables.has_unsaved
        assert len(live.tools) == 2
        assert (live.failures["store"], live.writer.problem) == ((1, "state.db is damaged") if has_store else (0, None))
        wait_for(lambda: threading.active_count() <= threads)


def test_end_of_the_process_writes_the_last_changes(path: Path) -> None:
    program = f"""
from mcp.server import MCPServer
from tidings.live import Live
live = Live(MCPServer("board"), store={str(path)!r})
for number in range(5):
    live.catalog.tools.add({{"name": str(number)}})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

    assert not path.with_name("state.db-wal").exists(), "the store was closed"
    assert len(peek(path).items) == 5


@pytest.mark.parametrize("is_early", [True, False])
def test_restart_with_the_same_items_makes_no_change(path: Path, is_early: bool) -> None:
    """Whether the tools are registered before `Live` is created or after it."""

    def start(*names: str) -> tuple[list[str], int, Any]:
        server: MCPServer = MCPServer("board")
        live = None if is_early else Live(server, store=path)
        for name in names:
            server.add_tool(lambda: "", name=name)
        live = live or Live(server, store=path)
        with closing(live):
            asyncio.run(live.refresh())
            live.resources.updated("a://b", etag="1")
            versions = live.epoch, live.catalog.version(TOOLS), live.catalog.version("a://b")
            return [item.key for item in live.catalog.tools.snapshot()], len(live.hub.journal), versions

    first = start("a", "b", "c")
    assert first[:2] == (["a", "b", "c"], 4)
    assert [start("a", "b", "c") for _ in range(2)] == [first, first]
    assert start("a", "c", "d")[:2] == (["a", "c", "d"], 6), "b was removed, and d added"
    assert start()[:2] == ([], 9)


def test_server_with_a_restored_backup_gives_no_version_that_the_original_gave(tmp_path: Path) -> None:
    with running(tmp_path / "state.db"):
        pass
    shutil.copy(tmp_path / "state.db", tmp_path / "backup.db")
    versions = []
    for name in ("state.db", "backup.db"):
        with running(tmp_path / name) as live:
            live.resources.updated("a://b")
            versions.append((live.epoch, *live.catalog.version("a://b")))

    assert versions[0][:2] == versions[1][:2], "epoch and revision are the same"
    assert versions[0][2] != versions[1][2]


# Files that cannot be used


def test_second_server_of_one_file_continues_in_memory(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(path) as first:
        add_tools(first, "a")
        with running(path) as second:
            add_tools(second, "b")
            second.writer.flush()

            assert "in use by another server" in (second.writer.problem or "")
            assert "in use by another server" in caplog.text
            assert second.failures["store"] == 1
            assert second.epoch != first.epoch
            assert len(second.tools) == 1
        first.writer.flush()
        assert first.writer.problem is None
    assert [item.key for item in peek(path).items] == ["a"]


def test_server_with_a_damaged_file_or_one_of_a_newer_format_continues_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, newer = tmp_path / "damaged.db", tmp_path / "newer.db"
    damaged.write_bytes(b"SQLite format 3\0" + os.urandom(8192))
    with running(newer):
        pass
    with closing(sqlite3.connect(newer)) as db, db:
        db.execute("PRAGMA user_version = 99")

    for path, message in ((damaged, "is damaged"), (newer, "was written by a newer Tidings")):
        before = path.read_bytes()
        with running(path) as live:
            add_tools(live, "a")
            assert message in (live.writer.problem or "")
            assert f"{path} {message}" in caplog.text
            assert len(live.tools) == 1
        assert path.read_bytes() == before


@contextmanager
def without_root() -> Iterator[None]:
    """Run as another user, because root can write everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user can read."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("read_only", ["file", "folder", "missing folder"])
def test_file_that_is_not_writable_is_reported_and_not_changed(
    public_folder: Path, read_only: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = public_folder / "state.db" if read_only != "missing folder" else public_folder / "deeper" / "state.db"
    if read_only != "missing folder":
        with running(path) as live:
            add_tools(live, "a")
        path.chmod(0o444)
        path.with_name("state.db-lock").chmod(0o666 if read_only == "file" else 0o444)
    before = path.read_bytes() if path.exists() else None
    public_folder.chmod(0o777 if read_only == "file" and os.geteuid() == 0 else 0o555)

    with without_root(), running(path) as live:
        add_tools(live, "b")

        assert len(live.tools) == 1
        message = f"{path} can't be written by this user; change its permissions, or name another file"
        assert message in caplog.text
        assert live.failures["store"] == 1
    assert (path.read_bytes() if path.exists() else None) == before


def test_read_only_file_is_not_read_without_the_log_beside_it(public_folder: Path) -> None:
    """A killed server leaves a log. Without it, the file has an older state."""
    path = public_folder / "state.db"
    with running(path) as live:
        add_tools(live, "a")
        live.writer.flush(DEADLINE)
        killed = copy_open_file(path)
    for file in (path, killed, Path(f"{killed}-wal")):
        file.chmod(0o444)
    public_folder.chmod(0o555)

    with without_root(), pytest.raises(StoreError, match="has a log beside it; copy both to a folder that you can"):
        peek(killed)
    with without_root():
        assert len(peek(path).items) == 1, "this one was closed, and has no log"
