"""One contract for every store: a restart restores what was written, also after a kill. Covers `rows.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.support.memory_store import MemoryStore
from tests.support.stores import StoredServer, fill
from tidings import Catalog, Feature, Version
from tidings.store import Batch, State, StoreBusy
from tidings.store.durable import DurableSubscription, Webhook
from tidings.store.sqlite import SQLiteStore

TOOLS, PROMPTS, RESOURCES = Feature.TOOLS, Feature.PROMPTS, Feature.RESOURCES
CreateServer: TypeAlias = Callable[..., StoredServer]


@pytest.fixture(params=["memory", "sqlite"])
def create_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CreateServer]:
    store = MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "state.db")
    servers: list[StoredServer] = []

    def create(**settings: Any) -> StoredServer:
        servers.append(StoredServer(store, **settings))
        return servers[-1]

    yield create
    for server in servers:
        server.store.close()


@pytest.fixture
def server(create_server: CreateServer) -> StoredServer:
    return create_server()


def test_new_store_is_empty_and_has_an_id(server: StoredServer) -> None:
    assert server.state.epoch
    assert server.state == State(server.state.epoch, 1)


@pytest.mark.parametrize("is_killed", [False, True])
def test_restart_restores_what_was_written(server: StoredServer, is_killed: bool) -> None:
    fill(server)
    server.write()
    before, epoch = server.visible_state(), server.state.epoch
    for run in (2, 3):
        server.restart(is_killed=is_killed)

        assert (server.state.epoch, server.state.run) == (epoch, run)
        assert server.visible_state() == before
        assert server.catalog.revision == run << 32
    operations = [change.operation for change in server.journal.since(0, TOOLS) or ()]
    assert operations == ["added", "added", "added", "updated", "removed"]


def test_restart_with_other_content_makes_only_the_changes_that_differ(server: StoredServer) -> None:
    fill(server)
    server.write()
    server.restart()
    changes: list[Any] = []
    server.catalog.follow(changes.extend)

    server.catalog.tools.replace([{"name": "a", "title": "2"}, {"name": "ü"}])
    server.catalog.resources.updated("tools", etag="1")
    assert changes == []

    server.catalog.tools.replace([{"name": "a", "title": "3"}])
    assert [(change.operation, change.key) for change in changes] == [("removed", "ü"), ("updated", "a")]
    server.write()
    before = server.visible_state()
    server.restart()
    assert server.visible_state() == before


def test_journal_keeps_the_item_before_each_change_in_one_batch_and_over_several(server: StoredServer) -> None:
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
    before = server.visible_state()
    server.restart()

    assert server.visible_state() == before
    titles = [change.before and change.before.definition.get("title", "") for change in server.state.journal]
    assert titles == [None, "", "1", "2", "3", None, ""]


@pytest.mark.parametrize("is_published", [True, False])
def test_change_to_an_unknown_content_is_kept_as_a_version_without_a_journal(
    server: StoredServer, is_published: bool
) -> None:
    """The commit may be written before it is published, and then the journal in memory still has the older changes."""
    tools = server.catalog.tools
    tools.add({"name": "a"})
    server.write()
    if not is_published:
        server.catalog.publisher = None
    tools.update("a", title="1")
    changed = tools.mark_changed()[-1]
    server.write()
    server.restart()
    assert server.catalog.version(TOOLS) == changed.version
    assert server.catalog.tools.get("a") == {"name": "a", "title": "1"}
    assert server.journal.floors()[TOOLS] == changed.revision
    assert server.journal.since(changed.revision, TOOLS) == []
    # A client that was told the version before must not take the same items for the same list.
    tools = server.catalog.tools
    tools.add({"name": "b"})
    tools.remove("b")
    assert tools.version.digest == changed.version.digest != changed.previous.digest


def test_second_server_is_refused(server: StoredServer, create_server: CreateServer) -> None:
    with pytest.raises(StoreBusy, match="in use by another server"):
        create_server()


def test_durable_subscriptions_are_written_and_removed(server: StoredServer) -> None:
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
        expires=5000.0,
        webhook=Webhook(url="https://example.com/", secret="whsec_x", attempts=2, last_error="503", is_dead=True),
    )
    other = DurableSubscription(name="laptop", owner=None, expires=5000.0)
    server.write({durable.key: durable, other.key: other})
    server.restart()

    assert server.state.durables == {durable.key: durable, other.key: other}
    assert server.state.durables[durable.key].told["tools"] == Version(4, "e")
    server.write({other.key: None, (None, "never"): None})
    server.restart()
    assert server.state.durables == {durable.key: durable}


def test_contents_are_restored_in_the_order_of_their_last_changes(server: StoredServer) -> None:
    for is_killed, uris in ((False, ["a://1", "a://2"]), (True, ["a://1"])):
        for uri in uris:
            server.catalog.resources.updated(uri)
        server.write()
        server.restart(is_killed=is_killed)
    assert list(server.state.contents) == ["a://2", "a://1"]


def test_batch_can_replace_all_items(create_server: CreateServer) -> None:
    """The writer makes such a batch after a long outage of the disk."""
    server = create_server(journal_changes=2)
    server.add_tools("written")
    server.write()
    server.add_tools("in a failed batch")
    failed, server.batch = server.batch, Batch()
    server.catalog.tools.replace([])
    for number in range(50):
        server.catalog.tools.add({"name": f"t{number % 7}", "title": str(number)}, replace=True)
    server.batch.items = {(item.feature, item.key): item for item in server.catalog.tools.snapshot()}
    server.batch.replaces_items = True
    failed.merge(server.batch)
    server.batch = failed
    server.write()
    before = server.visible_state()
    server.restart()

    assert server.visible_state() == before


# SQLite compared with memory


class TwoStores(RuleBasedStateMachine):
    """Random changes, writes, kills and restarts. Both stores have the same state, and a restart restores what was
    written."""

    folder: Path
    number = 0

    @initialize(journal=st.sampled_from([0, 1, 3, 100]), contents=st.sampled_from([2, 100]))
    def start(self, journal: int, contents: int) -> None:
        policy: dict[str, Any] = {
            "journal_changes": journal,
            "max_contents": contents,
            "journal_bytes": 500,
            "journal_age": 50,
        }
        TwoStores.number += 1
        self.servers = [StoredServer(**policy), StoredServer(self.folder / f"{TwoStores.number}.db", **policy)]

    names = st.sampled_from(["a", "b", "c", "tools", "ü"])

    @rule(feature=st.sampled_from([TOOLS, PROMPTS]), name=names, title=st.sampled_from(["", "1", "2" * 100]))
    def add_item(self, feature: Feature, name: str, title: str) -> None:
        for server in self.servers:
            server.catalog.items(feature).add({"name": name, "title": title}, replace=True)

    @rule(feature=st.sampled_from([TOOLS, PROMPTS]), name=names)
    def remove_item(self, feature: Feature, name: str) -> None:
        for server in self.servers:
            if name in server.catalog.items(feature):
                server.catalog.items(feature).remove(name)

    @rule(name=names, etag=st.sampled_from([None, "1", "2"]), size=st.none() | st.integers(0, 2**64 - 1))
    def update_content(self, name: str, etag: str | None, size: int | None) -> None:
        for server in self.servers:
            server.catalog.resources.updated(name, etag=etag, **({} if size is None else {"size": size}))

    @rule(name=names)
    def delete_content(self, name: str) -> None:
        for server in self.servers:
            server.catalog.resources.deleted(name)

    @rule(seconds=st.sampled_from([1.0, 60.0]))
    def wait(self, seconds: float) -> None:
        for server in self.servers:
            server.now += seconds

    @rule(name=names, as_of=st.none() | st.integers(0, 9))
    def put_durable(self, name: str, as_of: int | None) -> None:
        record = None if as_of is None else DurableSubscription(name=name, as_of=as_of, expires=10.0**9)
        for server in self.servers:
            server.batch.durables[None, name] = record

    @rule()
    def write(self) -> None:
        for server in self.servers:
            server.write()

    @rule(is_killed=st.booleans(), is_written=st.booleans())
    def restart(self, is_killed: bool, is_written: bool) -> None:
        for server in self.servers:
            if is_written:
                server.write()
            before = server.visible_state()
            server.restart(is_killed=is_killed)
            if is_written:
                assert server.visible_state() == before

    @invariant()
    def have_the_same_state(self) -> None:
        if not hasattr(self, "servers"):
            return
        memory, file = self.servers
        assert memory.visible_state() == file.visible_state()
        assert _comparable(memory.state) == _comparable(file.state)
        assert list(memory.state.contents) == list(file.state.contents)

    def teardown(self) -> None:
        for server in getattr(self, "servers", ()):
            server.store.close()


def _comparable(state: State) -> dict[str, Any]:
    items = sorted(state.items, key=lambda item: (item.feature.value, item.key))  # their order is not defined
    return {**asdict(state), "items": items, "epoch": ""}


def test_sqlite_store_has_the_same_state_as_the_memory_store(tmp_path: Path) -> None:
    TwoStores.folder = tmp_path
    run_state_machine_as_test(TwoStores, settings=settings(max_examples=40, stateful_step_count=30))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, "1", "2"])), max_size=30), st.data())
@settings(max_examples=40)
def test_merged_batches_equal_one_batch(steps: list[tuple[str, str | None]], data: st.DataObject) -> None:
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
    merged = Batch()
    for part in parts:
        merged.merge(part)

    for name in Batch.__slots__:
        assert getattr(merged, name) == getattr(whole, name), name
    assert list(merged.contents) == list(whole.contents)
