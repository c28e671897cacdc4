"""A server in memory that keeps names, may be started again from what it kept, and may die; and its clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidings import Catalog, Feature, Hub, Journal, Notification, Policy, Version
from tidings.core.subscriber import Subscriber
from tidings.server.uri_templates import read_template
from tidings.store import Batch
from tidings.store.durable import DurableSubscription, Key, Owner
from tidings.store.durable_connection import DurableConnection
from tidings.store.durable_registry import DurableSubscriptions
from tidings.store.memory import MemoryStore

TOOLS = Feature.TOOLS
KEY = (None, "laptop")


class Place:
    """A server in memory, which may be started again from what it kept."""

    def __init__(self, **knobs: Any) -> None:
        self.policy = Policy(**knobs)
        self.now = 1000.0
        self.store = MemoryStore()
        self.start()

    def start(self) -> None:
        state = self.store.open()
        self.catalog = Catalog(self.policy, clock=lambda: self.now)
        self.catalog.restore(state.items, state.versions, state.contents, state.run << 32)
        journal = Journal(self.policy)
        journal.restore(state.journal, state.floors)
        self.batch = Batch()
        self.catalog.follow(self.batch.add_changes)
        self.hub = Hub(self.catalog, journal=journal, clock=lambda: self.now, templates=read_template)
        self.durables = DurableSubscriptions(self.hub, state.durables.values(), wake=lambda: True)

    def collect(self) -> Mapping[Key, DurableSubscription | None]:
        """What there is to write, written."""
        found = self.durables.unsaved.collect()
        self.durables.unsaved.written()
        return found

    def save(self) -> None:
        self.batch.durables.update(self.durables.unsaved.collect())
        self.batch.forget(self.hub.journal.floors(), self.catalog.resources.forgotten)
        self.store.write(self.batch)
        self.batch.__init__()  # type: ignore[misc]
        self.durables.unsaved.written()

    def settle(self) -> None:
        """Let so much time pass that what was told before is beyond doubt."""
        self.now += 2 * (self.policy.write_deadline + self.policy.keep_alive)

    def die(self) -> None:
        """What was not saved is lost."""
        self.store.close()
        self.start()


class Client:
    """What came over its connection, and how to hold it up."""

    def __init__(self, place: Place, *features: Feature, uris: Any = (), name: Any = "laptop", **more: Any) -> None:
        self.place = place
        self.heard: list[Notification] = []
        self.answer: object = None
        self.is_ended = False
        self.subscriber: Subscriber | None = None
        self.visit = self._enter(features or (TOOLS,), [uris] if isinstance(uris, str) else list(uris), name, **more)

    def _enter(
        self,
        features: tuple[Feature, ...],
        uris: list[str],
        name: Any,
        *,
        owner: Owner = None,
        ttl: Any = None,
        resume: dict[Any, Version | None] | None = None,
        **options: Any,
    ) -> DurableConnection | None:
        hub, durables = self.place.hub, self.place.durables
        visit = durables.connect({"name": name, "ttl": ttl}, owner, features, uris, {}, self._end)
        self.subscriber = hub.open(self._deliver, **options)
        told: dict[Any, Version | None] = resume or {}
        if visit is not None:
            visit.attach(self.subscriber)
            told = {**visit.told(), **told}
        hub.subscribe(self.subscriber, *features, uris=uris, told=told)
        return visit

    def _deliver(self, notification: Notification) -> object:
        self.heard.append(notification)
        return self.answer

    def _end(self) -> None:
        self.is_ended = True
        self.leave()

    def leave(self) -> None:
        assert self.subscriber is not None
        self.subscriber.close()

    @property
    def keys(self) -> list[tuple[str, str]]:
        return [(change.operation.value, change.key) for each in self.heard for change in each.changes]


def add(place: Place, *names: str) -> None:
    for name in names:
        place.catalog.tools.add({"name": name})
