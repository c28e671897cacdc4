"""The record equals what the subscribers received, after each step of random scenarios."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from tests.support.promises.machine import Machine
from tests.support.stress import sized
from tidings import Hub, Notification, Subscriber, Topic
from tidings.console.change import OutcomeState, PublishedChange
from tidings.console.client import RecordedClient
from tidings.console.record import Record
from tidings.core.observer import Observer

pytestmark = pytest.mark.usefixtures("no_logs")


class Witness(Observer):
    """Counts the notifications of each subscriber, as they arrive."""

    def __init__(self, hub: Hub, record: Record) -> None:
        self._record = record
        self.counts: Counter[int] = Counter()
        self.told: defaultdict[int, set[tuple[Topic, int]]] = defaultdict(set)
        self._clients: dict[Subscriber, int] = {}
        hub.observers.add(self)

    def opened(self, subscriber: Subscriber) -> None:
        client = self._record.client_of(subscriber)
        assert client is not None
        self._clients[subscriber] = client.id
        subscriber.before_delivery(lambda notification: self.note(client.id, notification, 1))

    def failed(self, subscriber: Subscriber, notification: Notification, error: BaseException) -> None:
        self.note(self._clients[subscriber], notification, -1)

    def note(self, client: int, notification: Notification, number: int) -> None:
        self.counts[client] += number
        topic_and_revision = (notification.topic, notification.version.revision)
        if number > 0:
            self.told[client].add(topic_and_revision)
        else:
            self.told[client].discard(topic_and_revision)


def state_of(client: RecordedClient, change: PublishedChange) -> OutcomeState | None:
    """Return the state of a change for a client; None if the client did not watch its topic."""
    delivery = change.deliveries.get(client.id)
    if delivery is not None:
        return delivery.state
    return OutcomeState.TOLD if client.was_watching(change) else None


def check(record: Record, counts: Counter[int], told: dict[int, set[tuple[Topic, int]]]) -> None:
    clients = list(record.clients.values())
    assert {each.id: record.delivered_to(each) for each in clients} == {each.id: counts[each.id] for each in clients}
    for change in record.changes:
        states = {client.id: state_of(client, change) for client in clients}
        topic_and_revision = (change.topic, change.version.revision)
        assert {id for id, state in states.items() if state is OutcomeState.TOLD} == {
            client.id for client in clients if topic_and_revision in told[client.id]
        }
        assert change.told == sum(state is OutcomeState.TOLD for state in states.values())
        assert change.reached == sum(state is not None for state in states.values())
        for client in clients:
            if states[client.id] is OutcomeState.PENDING:
                assert client.subscriber is not None
                mailbox = client.subscriber.mailbox
                assert mailbox is not None
                assert mailbox.is_pending(change.topic)


class RecordedMachine(Machine):
    """The state machine of the core tests, with a record."""

    record: Record
    witness: Witness

    def record_events(self) -> None:
        super().record_events()
        self.record = Record(self.hub)
        self.record.start()
        self.witness = Witness(self.hub, self.record)

    @invariant()
    def record_agrees(self) -> None:
        if hasattr(self, "record"):
            check(self.record, self.witness.counts, self.witness.told)


@pytest.mark.stress
def test_record_agrees_with_what_subscribers_were_told() -> None:
    run_state_machine_as_test(RecordedMachine, settings=settings(max_examples=sized(40, 400), stateful_step_count=40))
