"""All replicas get the same catalog from the same table, whenever each of them starts to watch it."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tidings.cluster.backend import Entry, Write
from tidings.cluster.shared_state import (
    ReplicaInfo,
    SharedState,
    content_write,
    item_write,
    leave_write,
    replica_write,
    unknown_write,
)
from tidings.core import digest
from tidings.core.catalog import Catalog
from tidings.core.model import Feature, Item
from tidings.policy import Policy

REPLICAS = st.sampled_from("AB")
URIS = st.sampled_from(["board://1", "board://2"])
JOINS = [replica_write(replica, ReplicaInfo(), 3) for replica in "AB"]


def item(uri: str, title: str) -> Item:
    definition = {"uri": uri, "name": uri, "title": title}
    return Item(
        Feature.RESOURCES, uri, msgspec.json.encode(definition), digest.item_hash(definition, Feature.RESOURCES)
    )


WRITES = st.one_of(
    st.sampled_from(JOINS),
    st.builds(leave_write, REPLICAS),
    st.builds(
        lambda replica, uri, title: item_write(replica, Feature.RESOURCES, uri, title and item(uri, title)),
        REPLICAS,
        URIS,
        st.sampled_from([None, "a"]),
    ),
    st.builds(lambda replica, uri: Write(f"item/{replica}/resources/{uri}", b'{"item":5}'), REPLICAS, URIS),
    st.builds(lambda replica: Write(f"replica/{replica}", b"?"), REPLICAS),
    st.builds(content_write, URIS, st.sampled_from(["one", digest.DELETED])),
    st.builds(lambda value: unknown_write(Feature.RESOURCES, value), st.sampled_from(["one", "two"])),
)


class Observer:
    """A replica without items of its own."""

    def __init__(self, name: str) -> None:
        # The policy of the replica that has an item decides whether it is too large.
        self.catalog = Catalog(Policy(max_item_bytes=1), life=name)
        self.state = SharedState(self.catalog, name)

    def versions(self) -> tuple[str, dict[str, str]]:
        """Return the digests of the list and of all contents."""
        resources = self.catalog.resources
        return resources.version.digest, {uri: version.digest for uri, version in resources.contents().items()}


@given(
    st.lists(st.tuples(WRITES, st.booleans()), max_size=30).map(
        lambda steps: [*((join, False) for join in JOINS), *steps]
    )
)
def test_snapshot_gives_the_versions_of_a_replica_that_saw_every_write(steps: list[tuple[Write, bool]]) -> None:
    seen_all, reloaded = Observer("seen all"), Observer("reloaded")
    table: dict[str, Entry] = {}
    for order, (write, is_reload) in enumerate(steps, 1):
        entry = Entry(write.key, write.value, order)
        table.pop(write.key, None)
        if write.value is not None:
            table[write.key] = entry
        seen_all.state.apply(entry)
        if is_reload:
            reloaded.state.load(list(table.values()), order, {})
        else:
            reloaded.state.apply(entry)
        new = Observer("new")
        new.state.load(list(table.values()), order, {})
        assert seen_all.versions() == reloaded.versions() == new.versions()
