"""Whatever readers and their store do: durable readers are told of all, of nothing twice, and of nothing too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.test_hold import Client, Place
from tidings import BUSY, Feature, Notification, Policy
from tidings.mailbox import Filter
from tidings.model import Operation, Topic

TOOLS = Feature.TOOLS


class Waiting(RuleBasedStateMachine):
    """Readers that come, go, fall behind and catch up, and a store that is slow: each is told of all that it watches
    and sees, of nothing twice, and of nothing that is not written down."""

    URIS = ("a://1", "a://2", "b://1")

    @initialize(most=st.sampled_from([1, 1000]))
    def begin(self, most: int) -> None:
        self.place = Place(journal_changes=most)
        self.readers: list[Reader] = []
        self.number = 0
        for kind in ("plain", "picky"):
            self.come(kind, {"a://**"})
        self.place.save()

    @rule(kind=st.sampled_from(["plain", "plain", "picky", "paced"]), uris=st.sets(st.sampled_from([*URIS, "a://**"])))
    def come(self, kind: str, uris: set[str]) -> None:
        if len(self.readers) < 5:
            self.number += 1
            self.readers.append(Reader(self.place, str(self.number), kind, sorted(uris)))

    @rule(name=st.sampled_from("abc"), title=st.sampled_from([None, "1", "2"]))
    def change_tool(self, name: str, title: str | None) -> None:
        tools = self.place.catalog.tools
        if title is not None:
            tools.add({"name": name, "title": title}, replace=True)
        elif name in tools:
            tools.remove(name)

    @rule(uri=st.sampled_from(URIS), etag=st.sampled_from(["1", "2", "gone"]))
    def change_content(self, uri: str, etag: str) -> None:
        resources = self.place.catalog.resources
        resources.deleted(uri) if etag == "gone" else resources.updated(uri, etag=etag)

    @rule(topic=st.sampled_from([TOOLS, *URIS]), number=st.integers(0, 4))
    def show(self, topic: Topic, number: int) -> None:
        """One of them looks, and nobody knows which one it was."""
        self.place.hub.news.shown.note(topic, self.place.catalog.version(topic))
        for each in self.readers:
            each.seen.add(topic)
        if number < len(self.readers):
            self.readers[number].look(topic)

    @rule(topic=st.sampled_from([TOOLS, *URIS]), number=st.integers(0, 4), name=st.sampled_from("abc"))
    def come_and_go(self, topic: Topic, number: int, name: str) -> None:
        """Something is another one for a moment, in which one of them looks."""
        if topic is TOOLS:
            before = list(self.place.catalog.tools)
            self.change_tool(name, "passing")
            self.show(topic, number)
            self.place.catalog.tools.replace(before)
        elif isinstance(topic, str):
            for etag in "121":
                self.change_content(topic, etag)
                self.show(topic, number)

    @rule(number=st.integers(0, 4), other=st.integers(0, 5), what=st.sampled_from(["leave", "forget"]))
    def plot(self, number: int, other: int, what: str) -> None:
        """When one of them, or somebody who waits for nothing, is told next, another one ends."""
        if number >= len(self.readers):
            return
        victim = self.readers[number]

        def strike() -> None:
            if what == "forget":
                victim.client.subscriber.unsubscribe("tools", uris=victim.client.subscriber.uris or ())
            elif victim in self.readers:
                victim.client.close()
                self.readers.remove(victim)

        if other < len(self.readers):
            self.readers[other].plot = strike
            return

        def strike_at_once(_: Notification) -> None:
            self.place.hub.unsubscribe(strike_at_once)
            strike()

        self.place.hub.subscribe(strike_at_once, TOOLS, uris=["**"])

    @invariant()
    def nobody_was_told_anything_wrong(self) -> None:
        assert not hasattr(self, "place") or not self.place.hub.failures

    @rule()
    def save(self) -> None:
        self.place.save()

    @rule()
    def release(self) -> None:
        self.place.hub.release()

    @rule(number=st.integers(0, 4), what=st.sampled_from(["stop", "read", "leave", "forget", "watch"]),
          uri=st.sampled_from(URIS))  # fmt: skip
    def act(self, number: int, what: str, uri: str) -> None:
        if number >= len(self.readers):
            return
        reader = self.readers[number]
        match what:
            case "stop":
                reader.client.answer = BUSY
            case "read":
                reader.client.answer = None
                self.place.hub.wake(reader.client.subscriber)
            case "leave":
                reader.client.close()
                assert self.place.hub.owed(reader.client.subscriber) == {}
                self.readers.pop(number)
            case "forget":
                reader.client.subscriber.unsubscribe(uris=[uri])
            case "watch":
                reader.client.subscriber.subscribe(uris=[uri])
                reader.watch(uri)

    @rule()
    def look(self) -> None:
        """When all is written down and read, every reader knows what is true."""
        for reader in self.readers:
            reader.client.answer = None
            self.place.hub.wake(reader.client.subscriber)
        for _ in range(3):
            self.place.now += 1.0
            self.place.save()
            self.place.hub.tick()
        assert not self.place.hub.hold
        for reader in self.readers:
            reader.check()


class Reader:
    """A client that believes what it is told."""

    def __init__(self, place: Place, name: str, kind: str, uris: list[str]) -> None:
        self.place = place
        self.filter = Filter(names=["a", "b"]) if kind == "picky" else None
        options: dict[str, Any] = {"policy": Policy(min_interval=0.5)} if kind == "paced" else {}
        self.items: dict[str, Any] | None = self._truth()
        self.knows: dict[Topic, str] = {}
        self.seen: set[Topic] = set()
        """What somebody has looked at since this one was told of it: it may be the one, and is told in doubt."""
        self.looked: set[Topic] = set()
        self.last: dict[Topic, int] = {}
        self.plot: Callable[[], None] | None = None
        self.client = Client(place, name, *uris, filter=self.filter, **options)
        self.client.subscriber.deliver = self._wrapped(self.client.subscriber.deliver)
        for topic in (TOOLS, *Waiting.URIS):
            self.knows[topic] = place.catalog.version(topic).digest

    def _wrapped(self, deliver: Any) -> Any:
        def deliver_and_believe(notification: Notification) -> object:
            try:
                self._take(notification)
            except AssertionError as error:  # the hub survives it, and this must not
                self.place.hub.failures[f"{notification}: {error}"] += 1
            taken = deliver(notification)
            if self.plot is not None:
                plot, self.plot = self.plot, None
                plot()
            return taken

        return deliver_and_believe

    def _truth(self) -> dict[str, Any]:
        return {
            item.key: item.hash
            for item in self.place.catalog.tools.snapshot()
            if self.filter is None or item.key in ("a", "b")
        }

    def _take(self, notification: Notification) -> None:
        topic, version = notification.topic, notification.version
        assert not self.client.subscriber.is_closed
        assert self.client.subscriber in self.place.hub.subscribers(topic), "it watches that no longer"
        assert version.revision <= self.place.saved, "it would not be known after a crash"
        assert self.knows[topic] != version.digest or topic in self.seen, "it was told so already"
        assert self.last.get(topic, 0) < version.revision
        self.knows[topic], self.last[topic] = version.digest, version.revision
        self.seen.discard(topic)
        if topic is not TOOLS:
            return
        if not notification.complete or topic in self.looked:
            self.looked.discard(topic)
            self.items = self._truth()
            return
        assert notification.changes
        assert self.items is not None
        for change in notification.changes:
            assert self.filter is None or self.filter.passes(change)
            if change.operation is Operation.REMOVED:
                del self.items[change.key]
            else:
                assert (change.key in self.items) == (change.operation is Operation.UPDATED)
                self.items[change.key] = change.item.hash if change.item else None

    def look(self, topic: Topic) -> None:
        self.knows[topic] = self.place.catalog.version(topic).digest
        if topic is TOOLS:
            self.looked.add(topic)
            self.items = self._truth()

    def watch(self, uri: str) -> None:
        subscriber = self.client.subscriber
        if uri not in self.place.hub.owed(subscriber):
            self.knows[uri] = self.place.catalog.version(uri).digest

    def check(self) -> None:
        hub, subscriber = self.place.hub, self.client.subscriber
        assert hub.owed(subscriber) == {} or self.filter or subscriber.policy.paces
        if TOOLS in subscriber.features:
            assert self.items == self._truth()
        if TOOLS in subscriber.features and self.filter is None:
            assert self.knows[TOOLS] == self.place.catalog.version(TOOLS).digest
        for uri in Waiting.URIS:
            if subscriber in hub.subscribers(uri):
                assert self.knows[uri] == self.place.catalog.version(uri).digest


def test_whatever_happens_all_is_told_in_time_and_nothing_too_early() -> None:
    run_state_machine_as_test(Waiting, settings=settings(max_examples=200, stateful_step_count=30))
