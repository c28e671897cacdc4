"""The record: which subscribers were told, which were not and why, and which clients fetched in time.

Covers `change.py` and `client.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.readers import Clock, Reader
from tidings import Catalog, Feature, Filter, Hub, Policy, Reason, Subscriber
from tidings.console import record as module
from tidings.console.change import FETCH_TIMEOUT, OutcomeState, PublishedChange
from tidings.console.client import RecordedClient
from tidings.console.record import Record
from tidings.core.subscriber import UNCONFIRMED, ConnectionKind
from tidings.server.client_identity import ClientIdentity

HTTP = ConnectionKind("modern", "http")


class Board:
    """A hub and a record with a clock that the test sets."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.catalog = Catalog(clock=self.clock)
        self.hub = Hub(self.catalog, clock=self.clock)
        self.record = Record(self.hub)
        self.record.start()
        self.catalog.tools.add({"name": "a"})

    def connect(self, name: str = "c", *, deliver: Any = lambda _: None, uris: Any = (), **options: Any) -> Subscriber:
        subscriber = self.hub.open(deliver, kind=options.pop("kind", HTTP), **options)
        self.record.client_connected(subscriber, ClientIdentity(name))
        self.hub.subscribe(subscriber, "tools", uris=uris)
        return subscriber

    def change(self, text: str) -> PublishedChange:
        self.catalog.tools.update("a", description=text)
        return self.newest

    @property
    def newest(self) -> PublishedChange:
        return self.record.changes[-1]

    def client(self, subscriber: Subscriber) -> RecordedClient:
        client = self.record.client_of(subscriber)
        assert client is not None
        return client

    def fetch(self, name: str = "c") -> None:
        revision = self.catalog.tools.version.revision
        self.record.client_fetched(ClientIdentity(name), Feature.TOOLS, revision)

    def not_fetched(self, change: PublishedChange) -> int:
        return change.not_fetched(self.clock.now)


@pytest.fixture
def board() -> Board:
    return Board()


def test_client_that_fetches_in_time_is_counted_once(board: Board) -> None:
    board.connect()
    change = board.change("new")
    for _ in range(3):
        board.clock.now += 1
        board.fetch()
    board.clock.now += FETCH_TIMEOUT
    assert (change.told, change.fetched, board.not_fetched(change)) == (1, 1, 0)


def test_client_counts_as_not_fetching_only_after_its_time(board: Board) -> None:
    board.connect()
    change = board.change("new")
    board.clock.now += FETCH_TIMEOUT - 1
    assert board.not_fetched(change) == 0
    board.clock.now += 1
    assert board.not_fetched(change) == 1
    board.clock.now += 1
    board.fetch()
    assert (change.fetched, board.not_fetched(change)) == (0, 1)


def test_one_fetch_counts_for_all_changes_that_it_contains(board: Board) -> None:
    board.connect()
    changes = [board.change(str(number)) for number in range(3)]
    board.fetch()
    assert [change.fetched for change in changes] == [1, 1, 1]
    assert board.change("later").fetched == 0


def test_fetch_of_one_list_does_not_count_for_another(board: Board) -> None:
    board.connect()
    change = board.change("new")
    board.record.client_fetched(ClientIdentity("c"), Feature.PROMPTS, 99)
    board.record.client_fetched(ClientIdentity("somebody else"), Feature.TOOLS, 99)
    assert change.fetched == 0


def test_several_clients_that_look_the_same_are_counted_by_their_number_of_fetches(board: Board) -> None:
    for _ in range(3):
        board.connect("twin")
    for text in ("one", "two"):
        change = board.change(text)
        board.fetch("twin")
        board.fetch("twin")
        assert (change.told, change.fetched) == (3, 2)
        board.fetch("twin")
        assert change.fetched == 3


def test_time_to_fetch_of_a_client_that_was_told_late_begins_then(board: Board) -> None:
    reader = Reader()
    late = board.connect("late", deliver=reader.take)
    board.connect("early")
    reader.is_slow = True
    board.change("first")
    change = board.change("second")
    assert (change.told, change.counts[OutcomeState.PENDING]) == (1, 1)
    board.clock.now += FETCH_TIMEOUT + 1
    assert board.not_fetched(change) == 1
    reader.is_slow = False
    board.hub.wake(late)
    assert (change.told, change.counts[OutcomeState.PENDING], board.not_fetched(change)) == (2, 0, 1)
    board.clock.now += FETCH_TIMEOUT / 2
    board.fetch("late")
    assert (change.fetched, board.not_fetched(change)) == (1, 1)
    assert change.deliveries[board.client(late).id].latency == FETCH_TIMEOUT + 1


def test_callbacks_are_told_and_not_expected_to_fetch(board: Board) -> None:
    board.hub.subscribe(print_nothing, "tools")
    change = board.change("new")
    board.clock.now += FETCH_TIMEOUT + 1
    assert (change.told, board.not_fetched(change)) == (1, 0)


def print_nothing(notification: object) -> None: ...


def test_later_change_supersedes_a_pending_one(board: Board) -> None:
    reader = Reader()
    subscriber = board.connect(deliver=reader.take)
    reader.is_slow = True
    told, superseded, pending = (board.change(text) for text in "123")
    client = board.client(subscriber).id
    assert client not in told.deliveries
    assert superseded.deliveries[client].state is OutcomeState.SUPERSEDED
    assert pending.deliveries[client].state is OutcomeState.PENDING
    subscriber.close(Reason.SLOW)
    assert (pending.deliveries[client].state, pending.deliveries[client].reason) == (OutcomeState.CLOSED, "slow")
    assert (superseded.told, pending.told) == (0, 0)


def test_reasons_of_changes_that_are_not_told(board: Board) -> None:
    subscribers = {
        "filter": board.connect("1", filter=Filter(["removed"])),
        "muted": board.connect("2", is_muted=lambda topic: True),
        "failed": board.connect("3", deliver=raise_error),
    }
    delayed = board.client(board.connect("4", settings=Policy(quiet_gap=1).delivery)).id
    change = board.change("new")
    for reason, subscriber in subscribers.items():
        delivery = change.deliveries[board.client(subscriber).id]
        assert (delivery.state, delivery.reason) == (OutcomeState.SUPPRESSED, reason)
    assert change.deliveries[delayed].state is OutcomeState.PENDING
    assert change.told == 0

    board.catalog.tools.update("a", description=None)
    assert change.deliveries[delayed].state is OutcomeState.SUPERSEDED
    board.clock.now += 1
    board.hub.tick()
    assert board.newest.deliveries[delayed].reason == "same version"


def raise_error(notification: object) -> None:
    raise RuntimeError("a subscriber that fails")


def test_change_is_pending_until_a_receiver_has_confirmed_it(board: Board) -> None:
    sent: list[Any] = []

    def post(notification: Any) -> object:
        sent.append(notification)
        return UNCONFIRMED

    hook = board.connect("hook", deliver=post, kind=ConnectionKind("none", "webhook"))
    first = board.change("first")
    second = board.change("second")
    assert [change.counts[OutcomeState.PENDING] for change in (first, second)] == [1, 1]
    board.hub.observers.delivered(hook, sent[0], 0.5)
    assert (first.told, first.max_latency, second.told) == (1, 0.5, 0)
    hook.mark_ready()
    board.hub.wake(hook)
    board.hub.observers.delivered(hook, sent[1], 0.25)
    assert (first.told, second.told) == (1, 1)


def test_client_that_returns_is_told_of_the_last_change(board: Board) -> None:
    known = board.catalog.tools.version
    change = board.change("missed")
    subscriber = board.hub.open(lambda _: None, kind=HTTP)
    board.hub.subscribe(subscriber, "tools", told={Feature.TOOLS: known})
    assert (change.told, change.deliveries[board.client(subscriber).id].state) == (1, OutcomeState.TOLD)


def test_counts_of_a_client_include_patterns_and_ended_subscriptions(board: Board) -> None:
    subscriber = board.connect(uris=["a://x/*", "a://x/1", "a://y"])
    for uri in ("a://x/1", "a://x/2", "a://y", "a://z"):
        board.catalog.resources.updated(uri, etag="1")
    assert board.record.delivered_to(board.client(subscriber)) == 3
    board.hub.unsubscribe(subscriber, uris=["a://x/1", "a://y"])
    for uri in ("a://x/1", "a://y"):
        board.catalog.resources.updated(uri, etag="2")
    client = board.client(subscriber)
    assert board.record.delivered_to(client) == 4
    subscriber.close()
    assert board.record.delivered_to(client) == 4
    assert client.closed == "unsubscribed"


@contextmanager
def limits(monkeypatch: pytest.MonkeyPatch, **values: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name, value in values.items():
            patch.setattr(module, name, value)
        yield


def test_record_is_bounded(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    with limits(monkeypatch, _MAX_CHANGES=10, _MAX_DELIVERIES=20, _MAX_CLOSED=5, _MAX_ITEMS=3):
        pending = [board.connect(str(number), is_muted=lambda topic: True) for number in range(6)]
        for number in range(30):
            board.change(str(number))
        record = board.record
        assert [change.id for change in record.changes] == list(range(22, 32))
        assert sum(len(change.deliveries) for change in record.changes) <= 20
        assert record.changes[0].is_truncated
        assert not record.changes[-1].is_truncated
        assert all(change.counts[OutcomeState.SUPPRESSED] == 6 for change in record.changes)
        for subscriber in pending:
            subscriber.close()
        assert len(record.clients) == 5
        with board.catalog.batch():
            for number in range(5):
                board.catalog.tools.add({"name": f"many {number}"})
        assert (len(board.newest.changes), board.newest.is_truncated) == (3, True)


def test_definitions_in_the_record_are_bounded(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    with limits(monkeypatch, _MAX_BYTES=10_000):
        for number in range(50):
            board.change(f"{number} {'x' * 1000}")
        assert 1 < len(board.record.changes) < 10
