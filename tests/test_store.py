"""One contract over every store: what was written is there after closing, and after no closing at all."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec import structs

from tidings import Catalog, Feature, Journal, Policy, Version
from tidings.durable import Durable, Webhook
from tidings.store import Batch, State, Store, StoreBroken, StoreBusy, StoreError, lock, packed, sqlite
from tidings.store.memory import MemoryStore
from tidings.store.sqlite import SCHEMA, SQLiteStore, peek

TOOLS, PROMPTS, RESOURCES = Feature.TOOLS, Feature.PROMPTS, Feature.RESOURCES


class Server:
    """The part of a server that makes batches, without threads."""

    def __init__(self, store: Store, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.store = store
        self.clock = 1000.0
        self.begin()

    def begin(self) -> None:
        self.state = state = self.store.open()
        self.catalog = Catalog(self.policy, clock=lambda: self.clock)
        self.catalog.restore(state.items, state.versions, state.contents, state.life << 32)
        self.journal = Journal(self.policy)
        self.journal.restore(state.journal, state.floors)
        self.batch = Batch()
        self.catalog.follow(self.batch.take)
        self.catalog.follow(self.journal.append)

    def write(self, durables: dict[Any, Durable | None] | None = None) -> None:
        self.batch.durables.update(durables or {})
        self.batch.forget(self.journal.floors(), self.catalog.resources.forgotten)
        self.store.write(self.batch)
        self.batch.__init__()  # type: ignore[misc]

    def shown(self) -> dict[str, Any]:
        """What a client could ever find out."""
        return {
            "items": {feature: self.catalog.items(feature).snapshot() for feature in Feature},
            "versions": {feature: self.catalog.version(feature) for feature in Feature},
            "contents": self.catalog.resources.contents(),
            "journal": self.journal.since(max(self.journal.floors().values())),
            "floors": self.journal.floors(),
        }


@pytest.fixture(params=["memory", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Gives the same store at every call, in a new object where there is something outside of the process."""
    memory = MemoryStore()
    opened: list[Store] = []

    def make() -> Store:
        store: Store = memory if request.param == "memory" else SQLiteStore(tmp_path / "state.db")
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()


def fill(server: Server) -> None:
    catalog = server.catalog
    catalog.tools.replace([{"name": "a", "title": "1"}, {"name": "b"}, {"name": "ü"}])
    catalog.tools.update("a", title="2")
    catalog.tools.remove("b")
    catalog.prompts.add({"name": "tools"})
    catalog.resources.add({"uri": "tools", "name": "a resource whose URI is a feature's name"})
    catalog.resources.updated("tools", etag="1", size=3, nested={"a": [1, None, "ü", 2**63]})
    catalog.resources.updated("file:///a")
    catalog.resources.deleted("file:///b")


def test_a_store_begins_empty_with_an_id_of_its_own(make: Callable[[], Store]) -> None:
    state = make().open()

    assert state.epoch
    assert state == State(state.epoch, 1)


def test_what_was_written_is_there_in_the_next_life(make: Callable[[], Store]) -> None:
    server = Server(make())
    fill(server)
    server.write()
    before, epoch = server.shown(), server.state.epoch
    server.store.close()

    again = Server(make())

    assert (again.state.epoch, again.state.life) == (epoch, 2)
    assert again.shown() == before
    assert again.catalog.revision == 2 << 32
    assert [change.operation for change in again.journal.since(0, TOOLS) or ()] == [
        *("added", "added", "added", "updated", "removed")
    ]


def test_a_life_goes_on_where_the_last_one_ended_and_tells_only_what_differs(make: Callable[[], Store]) -> None:
    server = Server(make())
    fill(server)
    server.write()
    server.store.close()
    again = Server(make())
    changes: list[Any] = []
    again.catalog.follow(changes.extend)

    again.catalog.tools.replace([{"name": "a", "title": "2"}, {"name": "ü"}])
    again.catalog.resources.updated("tools", etag="1")
    assert changes == []

    again.catalog.tools.replace([{"name": "a", "title": "3"}])
    assert [(change.operation, change.key) for change in changes] == [("removed", "ü"), ("updated", "a")]
    again.write()
    shown = again.shown()
    again.store.close()
    assert Server(make()).shown() == shown


def test_what_an_item_was_before_each_change_is_known_in_one_batch_and_over_several(make: Callable[[], Store]) -> None:
    server = Server(make())
    tools = server.catalog.tools
    tools.add({"name": "a"})
    server.write()
    tools.update("a", title="1")
    server.write()
    for title in "23":
        tools.update("a", title=title)
    tools.remove("a")
    tools.add({"name": "a"})
    tools.update("a", title="4")
    server.write()
    shown = server.shown()
    server.store.close()

    again = Server(make())
    assert again.shown() == shown
    befores = [change.before and change.before.definition.get("title", "") for change in again.state.journal]
    assert befores == [None, "", "1", "2", "3", None, ""]


def test_each_opening_is_a_life_of_its_own(make: Callable[[], Store]) -> None:
    lives = []
    for _ in range(3):
        store = make()
        lives.append(store.open().life)
        store.close()

    assert lives == [1, 2, 3]


def test_only_one_server_has_a_store(make: Callable[[], Store]) -> None:
    make().open()

    with pytest.raises(StoreBusy, match=r"open already|in use by another server"):
        make().open()


def test_only_one_server_has_a_file_by_whatever_name(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    link, far = tmp_path / "link.db", tmp_path / "folder"
    link.symlink_to(folder / "state.db")
    far.symlink_to(folder)
    stores = [SQLiteStore(path) for path in (folder / "state.db", link, far / "state.db")]
    for first in stores:
        first.open()
        for second in stores:
            if second is not first:
                with pytest.raises(StoreBusy, match="in use by another server"):
                    second.open()
        first.close()


def test_durable_subscriptions_are_kept_and_removed(make: Callable[[], Store]) -> None:
    durable = Durable(
        name="laptop",
        owner=("client", None),
        features=(TOOLS, RESOURCES),
        uris=("file:///a", "file:///{+path}"),
        terms={"operations": ["added"], "minInterval": 1.5},
        as_of=7,
        lists={TOOLS: Version(3, "d"), RESOURCES: None},
        contents={"tools": Version(4, "e"), "file:///a": None},
        ttl=60.0,
        created=1.0,
        expires=61.0,
        webhook=Webhook(url="https://example.com/", secret="whsec_x", attempts=2, last_error="503"),
    )
    other = Durable(name="laptop", owner=None)
    server = Server(make())
    server.write({durable.key: durable, other.key: other})
    server.store.close()

    again = Server(make())
    assert again.state.durables == {durable.key: durable, other.key: other}
    assert again.state.durables[durable.key].told["tools"] == Version(4, "e")
    again.write({other.key: None, (None, "never"): None})
    again.store.close()
    assert make().open().durables == {durable.key: durable}


def test_the_journal_is_forgotten_as_its_floor_says(make: Callable[[], Store]) -> None:
    server = Server(make(), Policy(journal_changes=3))
    for number in range(10):
        server.catalog.tools.add({"name": str(number)})
        server.write()
    server.store.close()

    again = Server(make(), Policy(journal_changes=3))
    assert len(again.state.journal) == 3
    assert again.journal.since(0, TOOLS) is None
    assert [change.key for change in again.journal.since((1 << 32) + 7, TOOLS) or ()] == ["7", "8", "9"]
    assert len(again.catalog.tools) == 10


def test_contents_are_forgotten_as_the_catalog_forgets_them(make: Callable[[], Store]) -> None:
    server = Server(make(), Policy(max_contents=2))
    for number in range(5):
        server.catalog.resources.updated(f"a://{number}")
    server.write()
    server.catalog.resources.updated("a://3")
    server.catalog.resources.updated("a://5")
    server.write()
    server.store.close()

    assert list(make().open().contents) == ["a://3", "a://5"]


def test_a_batch_that_was_folded_is_whole_but_for_what_its_floors_say(make: Callable[[], Store]) -> None:
    """As when the disk was away for long: items and versions are the last ones, the journal begins later."""
    server = Server(make(), Policy(journal_changes=2))
    server.catalog.tools.add({"name": "old"})
    server.write()
    for number in range(50):
        server.catalog.tools.add({"name": f"t{number % 7}", "title": str(number)}, replace=True)
    server.batch.items = {(item.feature, item.key): item for item in server.catalog.tools.snapshot()}
    server.batch.is_whole = True
    server.write()
    shown = server.shown()
    server.store.close()

    assert Server(make(), Policy(journal_changes=2)).shown() == shown


def test_an_integer_that_is_too_large_to_write_holds_back_nothing(path: Path) -> None:
    server = Server(SQLiteStore(path))
    server.catalog.resources.updated("a://1", size=1 << 64, author="Ann")
    server.catalog.resources.updated("a://2", size=1 << 20)
    server.write()
    server.store.close()
    metadata = [change.metadata for change in peek(path).journal]
    assert metadata == [{"size": str(1 << 64), "author": "Ann"}, {"size": 1 << 20}]


# SQLite against memory


class Twins(RuleBasedStateMachine):
    """Random commits, batches, deaths and starts: the file knows what the memory knows."""

    path: Path
    number = 0

    @initialize(most=st.sampled_from([0, 1, 3, 100]), contents=st.sampled_from([2, 100]))
    def start(self, most: int, contents: int) -> None:
        policy = Policy(journal_changes=most, max_contents=contents, journal_bytes=500, journal_age=50)
        Twins.number += 1
        self.file = self.path / f"{Twins.number}.db"
        self.servers = [Server(MemoryStore(), policy), Server(SQLiteStore(self.file), policy)]

    names = st.sampled_from(["a", "b", "c", "tools", "ü"])

    @rule(feature=st.sampled_from([TOOLS, PROMPTS]), name=names, title=st.sampled_from(["", "1", "2" * 100]))
    def put(self, feature: Feature, name: str, title: str) -> None:
        for server in self.servers:
            server.catalog.items(feature).add({"name": name, "title": title}, replace=True)

    @rule(feature=st.sampled_from([TOOLS, PROMPTS]), name=names)
    def take_away(self, feature: Feature, name: str) -> None:
        for server in self.servers:
            if name in server.catalog.items(feature):
                server.catalog.items(feature).remove(name)

    @rule(name=names, etag=st.sampled_from([None, "1", "2"]), size=st.none() | st.integers(0, 2**64 - 1))
    def say(self, name: str, etag: str | None, size: int | None) -> None:
        for server in self.servers:
            server.catalog.resources.updated(name, etag=etag, **({} if size is None else {"size": size}))

    @rule(name=names)
    def delete(self, name: str) -> None:
        for server in self.servers:
            server.catalog.resources.deleted(name)

    @rule(seconds=st.sampled_from([1.0, 60.0]))
    def wait(self, seconds: float) -> None:
        for server in self.servers:
            server.clock += seconds

    @rule(name=names, as_of=st.none() | st.integers(0, 9))
    def subscribe(self, name: str, as_of: int | None) -> None:
        for server in self.servers:
            server.batch.durables[None, name] = None if as_of is None else Durable(name=name, as_of=as_of)

    @rule()
    def write(self) -> None:
        for server in self.servers:
            server.write()

    @rule(is_graceful=st.booleans())
    def restart(self, is_graceful: bool) -> None:
        memory, file = self.servers
        memory.store.close()
        if is_graceful:
            file.store.close()
        else:
            die(file.store)
        file.store = SQLiteStore(self.file)
        for server in self.servers:
            server.begin()

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "servers"):
            return
        memory, file = self.servers
        assert memory.shown() == file.shown()
        assert _as_dict(memory.state) == _as_dict(file.state)

    def teardown(self) -> None:
        for server in getattr(self, "servers", ()):
            server.store.close()


def _as_dict(state: State) -> dict[str, Any]:
    items = sorted(state.items, key=lambda item: (item.feature.value, item.key))  # which come in any order
    return {**asdict(state), "items": items, "epoch": ""}


def die(store: Store) -> None:
    """What is left of a store when its process is killed: the connection is gone without a word, and so is the lock."""
    assert isinstance(store, SQLiteStore)
    assert store._db is not None
    store._db.close()
    store._db = None
    store.close()


def test_sqlite_knows_what_memory_knows(tmp_path: Path) -> None:
    Twins.path = tmp_path
    run_state_machine_as_test(Twins, settings=settings(max_examples=40, stateful_step_count=30))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, "1", "2"])), max_size=30), st.data())
@settings(max_examples=40)
def test_a_batch_in_parts_is_the_batch(steps: list[tuple[str, str | None]], data: st.DataObject) -> None:
    catalog = Catalog()
    whole, parts = Batch(), [Batch()]
    catalog.follow(whole.take)
    catalog.follow(lambda changes: parts[-1].take(changes))  # noqa: PLW0108  # the last one at that time
    for name, title in steps:
        if title is not None:
            catalog.tools.add({"name": name, "title": title}, replace=True)
        elif name in catalog.tools:
            catalog.tools.remove(name)
        catalog.resources.updated(f"a://{name}", etag=title)
        if data.draw(st.booleans()):
            parts.append(Batch())
    folded = Batch()
    for part in parts:
        folded.add(part)

    for name in Batch.__slots__:
        assert getattr(folded, name) == getattr(whole, name), name
    assert list(folded.contents) == list(whole.contents)


# The file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def written(path: Path) -> dict[str, Any]:
    server = Server(SQLiteStore(path))
    fill(server)
    server.write()
    shown = server.shown()
    server.store.close()
    return shown


def test_one_subscription_that_has_no_written_form_holds_back_nobody(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(SQLiteStore(path))
    fill(server)
    fine = Durable(name="laptop")
    bad = [
        Durable(name="\ud800"),
        Durable(name="uri", uris=("a://\ud800",)),
        Durable(name="terms", terms={"names": ["\ud800"]}),
        Durable(name="owner", owner=("\ud800", None)),
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
    server.write({(None, "x"): Durable(name="x")})

    while_open = peek(path)
    assert while_open.journal == server.journal.since(0)
    assert list(while_open.durables) == [(None, "x")]
    server.store.close()
    assert peek(path) == while_open
    assert peek(path).life == 1, "to look is no life"


def test_there_is_nothing_to_look_at_where_no_file_is(path: Path) -> None:
    with pytest.raises(StoreError, match="there is no such file"):
        peek(path)
    assert not path.exists()


def set_version(path: Path, version: int) -> None:
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {version}")
    db.close()


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
        before.setattr(packed, "_thinned", list)  # as version 1 wrote it
        shown = written(path)
    set_version(path, 1)
    assert peek(path).journal == shown["journal"]
    assert Server(SQLiteStore(path)).shown() == shown
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
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA}")
    db.close()
    assert Server(SQLiteStore(path)).shown() == shown


def test_a_database_of_something_else_is_refused_and_left_as_it_is(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE notes (text)")
    db.close()
    before = path.read_bytes()

    with pytest.raises(StoreBroken, match="a database of something else; name another file"):
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
        with sqlite3.connect(path) as db:
            db.execute("DELETE FROM items WHERE key = 'tool 7'")
        db.close()
    elif damage == "packed":
        with sqlite3.connect(path) as db:
            db.execute("UPDATE journal SET changes = x'93'")
        db.close()
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

    with pytest.raises(StoreBroken, match=r"is damaged .*; move it away to begin anew"):
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

    with pytest.raises(StoreError, match="the disk is full; make room") as caught:
        server.store.write(server.batch)
    assert not isinstance(caught.value, StoreBroken)
    found = peek(path)
    assert (found.versions[TOOLS], len(found.journal)) == (shown["versions"][TOOLS], len(shown["journal"]))

    db.execute("PRAGMA max_page_count = 1000000")
    server.catalog.tools.add({"name": "one more"})
    server.write()
    shown = server.shown()
    die(server.store)
    assert Server(SQLiteStore(path)).shown() == shown


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

    assert Server(SQLiteStore(path)).shown() == shown


def test_a_closed_store_takes_nothing(path: Path) -> None:
    store = SQLiteStore(path)
    store.open()
    store.close()
    store.close()

    with pytest.raises(StoreError, match="is closed"):
        store.write(Batch())


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
    durables = [Durable(name=f"client {number}", features=(TOOLS,), ttl=3600.0) for number in range(1000 * share)]
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
    assert Server(SQLiteStore(path), Policy(journal_changes=500)).shown() == shown


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
    assert Server(SQLiteStore(path), Policy(journal_changes=500)).shown() == shown


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
    monkeypatch.setattr(sqlite, "_give_back", fail)
    server = Server(SQLiteStore(path), Policy(journal_changes=2))
    for number in range(5):
        server.catalog.tools.add({"name": str(number)})
        server.write()  # past its floor, so that the tables are brought up to date
    shown = server.shown()
    server.store.close()

    assert Server(SQLiteStore(path), Policy(journal_changes=2)).shown() == shown


# What is said of a file that can't be used


def test_an_empty_file_is_said_to_be_empty_and_can_be_begun_with(path: Path) -> None:
    path.touch()

    with pytest.raises(StoreError, match="is empty; a server that is started with it writes to it"):
        peek(path)
    assert written(path) == Server(SQLiteStore(path)).shown()


def test_a_file_that_another_program_has_locked_is_said_to_be_locked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_PATIENCE", 0.01)
    written(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")

    for use in (peek, lambda path: SQLiteStore(path).open()):
        with pytest.raises(StoreError, match="is locked by another program; end that one") as caught:
            use(path)
        assert not isinstance(caught.value, StoreBusy), "no server has it"
    other.close()


def test_a_file_without_its_tables_is_damaged(path: Path) -> None:
    written(path)
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE meta")
    db.close()

    for use in (peek, lambda path: SQLiteStore(path).open()):
        with pytest.raises(StoreBroken, match=r"is damaged \(no such table: meta\)"):
            use(path)


def test_where_no_lock_can_be_had_nobody_is_said_to_have_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "_lock", refuse)
    with pytest.raises(
        StoreError, match="can't be written: No locks available; mend that, or name another file"
    ) as caught:
        SQLiteStore(path).open()
    assert not isinstance(caught.value, StoreBusy)
