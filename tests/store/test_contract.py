"""One contract over every store: what was written is there after closing, and after no closing at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.support.stores import Server, die, fill
from tidings import Catalog, Feature, Policy, Version
from tidings.store import Batch, State, Store, StoreBusy
from tidings.store.durable import DurableSubscription, Webhook
from tidings.store.memory import MemoryStore
from tidings.store.sqlite import SQLiteStore

TOOLS, PROMPTS, RESOURCES = Feature.TOOLS, Feature.PROMPTS, Feature.RESOURCES


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

    assert (again.state.epoch, again.state.run) == (epoch, 2)
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
        lives.append(store.open().run)
        store.close()

    assert lives == [1, 2, 3]


def test_only_one_server_has_a_store(make: Callable[[], Store]) -> None:
    make().open()

    with pytest.raises(StoreBusy, match="in use by another server"):
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
    durable = DurableSubscription(
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
    other = DurableSubscription(name="laptop", owner=None)
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
    server.batch.replaces_items = True
    server.write()
    shown = server.shown()
    server.store.close()

    assert Server(make(), Policy(journal_changes=2)).shown() == shown


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
            server.batch.durables[None, name] = None if as_of is None else DurableSubscription(name=name, as_of=as_of)

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


def test_sqlite_knows_what_memory_knows(tmp_path: Path) -> None:
    Twins.path = tmp_path
    run_state_machine_as_test(Twins, settings=settings(max_examples=40, stateful_step_count=30))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, "1", "2"])), max_size=30), st.data())
@settings(max_examples=40)
def test_a_batch_in_parts_is_the_batch(steps: list[tuple[str, str | None]], data: st.DataObject) -> None:
    catalog = Catalog()
    whole, parts = Batch(), [Batch()]
    catalog.follow(whole.add_changes)
    catalog.follow(lambda changes: parts[-1].add_changes(changes))  # noqa: PLW0108  # the last one at that time
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
        folded.merge(part)

    for name in Batch.__slots__:
        assert getattr(folded, name) == getattr(whole, name), name
    assert list(folded.contents) == list(whole.contents)
