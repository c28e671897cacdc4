"""A notification counts as received only when it is confirmed. Unconfirmed notifications are repeated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.support.durables import KEY, Client, record_of
from tests.support.memory_store import MemoryStore
from tests.support.stores import StoredServer
from tidings import BUSY, Feature, Notification, Policy
from tidings.core.model import Operation

TOOLS = Feature.TOOLS


def test_notification_that_was_being_sent_when_the_connection_broke_is_repeated(server: StoredServer) -> None:
    client = Client(server, TOOLS, uris="a://b")
    client.result = BUSY
    server.add_tools("a")
    assert server.durables.collect_unsaved()[KEY] is not None
    assert server.durables.has_unsaved
    client.disconnect()

    assert [each.topic for each in Client(server, TOOLS, uris="a://b").received] == [TOOLS]


def test_unconfirmed_deletion_is_repeated_though_it_ended_the_subscription(server: StoredServer) -> None:
    server.catalog.resources.updated("a://b")
    client = Client(server, TOOLS, uris="a://b")
    client.result = BUSY
    server.catalog.resources.deleted("a://b")
    client.disconnect()

    uris = record_of(server).uris
    assert uris == ("a://b",)
    assert [each.topic for each in Client(server, TOOLS, uris=uris).received] == ["a://b"]


def test_notification_is_unconfirmed_until_the_period_after_its_own_is_over(server: StoredServer) -> None:
    period = server.policy.write_deadline + server.policy.keep_alive
    client = Client(server, TOOLS, uris="a://1")
    server.now += period - 1
    server.catalog.resources.updated("a://1")
    server.now += 2
    server.add_tools("a")  # starts the next period
    client.disconnect()

    assert set(Client(server, TOOLS, uris="a://1").topics) == {(TOOLS, False), ("a://1", False)}


def test_notification_that_a_busy_client_read_later_counts_as_told(server: StoredServer) -> None:
    client = Client(server)
    client.result = BUSY
    server.add_tools("a")
    server.write()
    server.add_tools("b")
    server.write()
    assert client.changes == [("added", "a")]
    client.result = None
    server.hub.wake(client.subscriber)
    assert client.changes == [("added", "a"), ("added", "b")]
    server.confirm_all()
    server.write()
    server.kill()

    assert Client(server).received == []


def test_pending_notification_is_not_told_yet(server: StoredServer) -> None:
    client = Client(server, settings=Policy(min_interval=10).delivery)
    server.add_tools("a")
    server.add_tools("b")
    assert client.changes == [("added", "a")]
    server.confirm_all()
    client.disconnect()
    server.write()
    server.kill()

    assert Client(server).changes == [("added", "b")]


def test_connection_that_a_callback_closes_during_a_delivery_is_told_when_it_returns(server: StoredServer) -> None:
    server.hub.subscribe(lambda _: client.disconnect(), TOOLS)
    client = Client(server)
    server.add_tools("a")
    assert client.received == []

    assert [each.topic for each in Client(server).received] == [TOOLS]


# Transports that know what their client has read, such as webhooks


def test_notification_that_a_transport_knows_to_be_unread_is_repeated_unchanged(server: StoredServer) -> None:
    """A webhook closes its subscriber until its next attempt."""
    server.catalog.resources.updated("a://b")
    for attempt in range(3):
        client = Client(server, TOOLS, uris="a://b", confirms_receipt=True, result=BUSY)
        expected = [("added", "a"), ("deleted", "a://b")]
        if attempt == 0:
            server.add_tools("a")
            server.catalog.resources.deleted("a://b")
            expected.pop()
        while len(client.received) < len(expected):
            server.hub.wake(client.subscriber)
        assert client.changes == expected
        client.subscriber.pause()
        client.disconnect()


def test_notification_that_a_transport_knows_to_be_read_is_not_repeated(server: StoredServer) -> None:
    client = Client(server, confirms_receipt=True)
    server.write()
    server.add_tools("a")
    client.connection.save()
    server.write()
    server.kill()

    assert Client(server).received == []


# Kills


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("tools", [["a"], ["b"], []], ids=["same", "other", "previous"])
def test_version_that_was_delivered_before_a_kill_is_delivered_again_unless_it_is_unknown(
    server: StoredServer, is_saved: bool, tools: list[str]
) -> None:
    """After the restart the content is the same, another one, or the previous one."""
    client = Client(server)
    server.write()
    server.add_tools("a")
    assert client.changes == [("added", "a")], "delivered immediately"
    if is_saved:
        server.write()
    server.kill()
    server.catalog.tools.replace([{"name": name} for name in tools])

    # Without a write, the store does not know that the client has another version than the previous one.
    assert Client(server).topics == ([(TOOLS, False)] if tools or is_saved else [])


def test_client_that_returns_with_its_cursor_after_a_kill_is_told_whatever_was_written(server: StoredServer) -> None:
    client = Client(server)
    server.write()
    server.add_tools("a")
    server.kill()
    client = Client(server, resume={TOOLS: client.received[-1].version})

    assert [each.topic for each in client.received] == [TOOLS], "its tool does not exist any more"


class DurableClientMachine(RuleBasedStateMachine):
    """A client that connects and disconnects, and a server that is written, stopped and killed.

    The client is told of everything, and again only of what it was told after the last write. Its copy of the list,
    updated by deltas, is equal to the list.
    """

    URIS = ("a://1", "a://2", "b://1")
    TOPICS = (TOOLS, *URIS)

    @initialize(journal=st.sampled_from([0, 1, 3, 1000]), uris=st.sampled_from([URIS, ("a://{+path}", "b://1")]))
    def start(self, journal: int, uris: tuple[str, ...]) -> None:
        self.store = MemoryStore()
        self.server = StoredServer(self.store, journal_changes=journal)
        self.uris = uris
        self.is_exact = uris == self.URIS or journal == 1000
        """With patterns and a journal that is too short, a content that changed back is notified."""
        self.client: Client | None = None
        self.known: dict[Any, str] = {}
        """By topic, the digest that the client knows."""
        self.unconfirmed: dict[Any, str] = {}
        """By topic with an unconfirmed notification, the digest that the client knew before it."""
        self.may_repeat: set[Any] = set()
        self.items: dict[str, Any] = {}
        """The client's copy of the list of tools."""
        self.confirmed_items: dict[str, Any] = {}
        """Its copy before the unconfirmed notifications."""
        self.restarts = 0
        self.connect()

    def connect(self) -> None:
        self.client = Client(self.server, TOOLS, uris=self.uris)
        if self.client.is_new:  # then the client fetches everything
            self.known = {topic: self.server.catalog.version(topic).digest for topic in self.TOPICS}
            self.unconfirmed.clear()
            self.items = self.current_items()
        self.receive()

    def current_items(self) -> dict[str, Any]:
        return {item.key: item.hash for item in self.server.catalog.tools.snapshot()}

    def receive(self) -> None:
        assert self.client is not None
        for each in self.client.received:
            if self.is_exact and each.topic not in self.may_repeat:
                assert each.version.digest != self.known[each.topic], f"told again of {each.topic}"
            self.may_repeat.discard(each.topic)
            if each.topic is TOOLS:
                self.update_items(each)
            self.unconfirmed.setdefault(each.topic, self.known[each.topic])
            self.known[each.topic] = each.version.digest
        self.client.received.clear()

    def update_items(self, notification: Notification) -> None:
        if TOOLS not in self.unconfirmed:
            self.confirmed_items = dict(self.items)
        if not notification.complete:
            self.items = self.current_items()
        for change in notification.changes:
            if change.item is None or change.operation is Operation.REMOVED:
                del self.items[change.key]
            else:
                self.items[change.key] = change.item.hash

    @rule(name=st.sampled_from("ab"), title=st.sampled_from([None, "1", "2"]))
    def change_tool(self, name: str, title: str | None) -> None:
        tools = self.server.catalog.tools
        if title is not None:
            tools.add({"name": name, "title": title}, replace=True)
        elif name in tools:
            tools.remove(name)

    @rule(uri=st.sampled_from(URIS), etag=st.sampled_from([None, "1", "2"]))
    def change_content(self, uri: str, etag: str | None) -> None:
        self.server.catalog.resources.updated(uri, etag=etag)

    @rule()
    def confirm_all(self) -> None:
        if self.client is not None:
            self.receive()
            self.unconfirmed.clear()
        self.server.confirm_all()
        self.server.write()

    @precondition(lambda self: self.client is not None)
    @rule(is_received=st.booleans())
    def disconnect(self, is_received: bool) -> None:
        """The client has received everything, or none of the unconfirmed notifications."""
        assert self.client is not None
        self.receive()
        self.may_repeat |= self.unconfirmed.keys()
        if not is_received:
            self.known |= self.unconfirmed
            self.items = self.confirmed_items if TOOLS in self.unconfirmed else self.items
        self.client.disconnect()
        self.client = None

    @rule()
    def connect_again(self) -> None:
        """Also if an older connection exists."""
        if self.client is not None:
            self.receive()
            self.may_repeat |= self.unconfirmed.keys()
        self.connect()

    @rule(is_saved=st.booleans(), is_same=st.booleans())
    def restart_server(self, is_saved: bool, is_same: bool) -> None:
        """With or without a last write. The tools are then the same, or others that never existed before."""
        if self.client is not None:
            self.receive()
            mailbox = self.client.subscriber.mailbox
            self.may_repeat |= mailbox.entries.keys() if mailbox else set()
        self.may_repeat |= self.unconfirmed.keys()
        if is_saved:
            self.server.write()
        record = self.store.peek().durables.get(KEY)
        if record is not None:
            # The next server cannot know whether the client was told of, or fetched, what changed after this write.
            for topic in self.TOPICS:
                version = self.server.catalog.version(topic)
                if version.revision > record.as_of or record.told.get(topic, version) != version:
                    self.may_repeat.add(topic)
        self.client = None
        items = list(self.server.catalog.tools)
        contents = self.server.catalog.resources.contents()
        self.server.kill()
        self.restarts += 1
        self.server.catalog.tools.replace(items if is_same else [{"name": f"restart {self.restarts}"}])
        for uri, version in contents.items():
            if self.server.catalog.version(uri).digest != version.digest:
                self.server.catalog.resources.updated(uri, etag=f"again {version}")

    @precondition(lambda self: self.client is not None)
    @rule()
    def check(self) -> None:
        """After a write, the client has been told everything."""
        self.server.write()
        self.receive()
        self.may_repeat.clear()
        for topic in self.TOPICS:
            assert self.known[topic] == self.server.catalog.version(topic).digest, f"never told of {topic}"
        assert self.items == self.current_items()


def test_durable_client_is_told_of_everything_and_again_only_of_what_is_unconfirmed() -> None:
    run_state_machine_as_test(DurableClientMachine, settings=settings(max_examples=150, stateful_step_count=25))
