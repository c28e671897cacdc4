"""A notification may not have been read, and a version not written to the store: in doubt it is delivered again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.support.durables import KEY, Client, Place, add
from tidings import BUSY, Feature, Notification, Policy
from tidings.core.model import Operation

TOOLS, PROMPTS = Feature.TOOLS, Feature.PROMPTS
EXAMPLES = 150


@pytest.fixture
def place() -> Place:
    return Place()


def test_what_was_on_its_way_when_the_connection_broke_is_told_again(place: Place) -> None:
    client = Client(place, TOOLS, uris="a://b")
    client.answer = BUSY
    add(place, "a")
    assert place.durables.unsaved.collect()[KEY] is not None
    assert place.durables.unsaved.has_records
    client.leave()

    assert [each.topic for each in Client(place, TOOLS, uris="a://b").heard] == [TOOLS]


def test_a_deletion_that_was_on_its_way_is_told_again_though_it_ended_the_subscription(place: Place) -> None:
    place.catalog.resources.updated("a://b")
    client = Client(place, TOOLS, uris="a://b")
    client.answer = BUSY
    place.catalog.resources.deleted("a://b")
    client.leave()
    kept = place.durables.get(KEY)

    assert kept is not None
    assert kept.uris == ("a://b",)
    assert [each.topic for each in Client(place, TOOLS, uris=kept.uris).heard] == ["a://b"]


def test_what_a_lane_knows_not_to_have_been_read_is_told_again_as_it_was(place: Place) -> None:
    """As a webhook does, which closes its subscriber until it tries again."""
    place.catalog.resources.updated("a://b")
    for expected in ([], [("added", "a"), ("deleted", "a://b")], [("added", "a"), ("deleted", "a://b")]):
        visit = place.durables.connect({"name": "hook"}, None, [TOOLS], ["a://b"], {}, lambda: None)
        assert visit is not None
        heard: list[Any] = []
        subscriber = place.hub.open(lambda notification, heard=heard: heard.append(notification) or BUSY)  # type: ignore[misc]
        visit.attach(subscriber, confirms_reads=True)
        place.hub.subscribe(subscriber, TOOLS, uris=["a://b"], told=visit.told())
        if not expected:
            add(place, "a")
            place.catalog.resources.deleted("a://b")
        while len(heard) < 2 and expected and not subscriber.is_ready:
            place.hub.wake(subscriber)
        assert [(change.operation, change.key) for each in heard for change in each.changes] == (
            expected or [("added", "a")]
        )
        subscriber.pause()
        subscriber.close()


def test_what_was_read_later_counts_as_told(place: Place) -> None:
    client = Client(place)
    client.answer = BUSY
    add(place, "a")
    place.durables.unsaved.collect()
    assert client.subscriber is not None
    client.answer = None
    place.hub.wake(client.subscriber)
    place.settle()
    place.save()
    place.die()

    assert Client(place).heard == []


def test_what_waits_for_a_slow_reader_is_not_told_yet(place: Place) -> None:
    client = Client(place, TOOLS, policy=Policy(min_interval=10))
    add(place, "a")
    add(place, "b")
    assert client.keys == [("added", "a")]
    place.settle()
    client.leave()
    place.save()
    place.die()

    assert Client(place).keys == [("added", "b")]


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize(("tools", "is_told"), [(["a"], True), (["b"], True), ([], None)])
def test_version_that_was_delivered_before_a_crash_is_delivered_again_unless_it_is_unknown(
    place: Place, is_saved: bool, tools: list[str], is_told: bool | None
) -> None:
    """After the restart the content is the same again, another one, or what it was before."""
    client = Client(place)
    place.save()
    add(place, "a")
    assert client.keys == [("added", "a")], "delivered immediately"
    if is_saved:
        place.save()
    place.die()
    place.catalog.tools.replace([{"name": name} for name in tools])

    heard = [(each.topic, each.complete) for each in Client(place).heard]
    # Without a write, the store can't know that the client holds something else than was there before and after.
    assert heard == ([(TOOLS, False)] if is_told or is_saved else [])


def test_client_that_comes_back_with_its_cursor_is_told_whatever_was_written(place: Place) -> None:
    client = Client(place)
    place.save()
    add(place, "a")
    place.die()
    again = Client(place, resume={TOOLS: client.heard[-1].version})

    assert [each.topic for each in again.heard] == [TOOLS], "the tool that it holds is gone"


def test_crash_with_nothing_changed_since_the_last_write_repeats_nothing(place: Place) -> None:
    Client(place, TOOLS, uris="a://1")
    add(place, "a")
    place.catalog.resources.updated("a://1")
    place.settle()
    for _ in range(3):
        place.save()
        place.die()
        assert Client(place, TOOLS, uris="a://1").heard == []


def test_connection_that_a_callback_closes_during_a_delivery_is_told_when_it_comes_back(place: Place) -> None:
    place.hub.subscribe(lambda _: client.leave(), TOOLS)
    client = Client(place)
    add(place, "a")
    assert client.heard == []

    assert [each.topic for each in Client(place).heard] == [TOOLS]


def test_what_was_told_is_written_when_it_is_beyond_doubt_and_not_with_each_batch(place: Place) -> None:
    for number in range(20):
        Client(place, name=str(number))
    place.save()
    written = 0
    for number in range(50):
        add(place, f"t{number}")
        written += len(place.durables.unsaved.collect())
        place.save()
        place.now += 0.05
    assert written == 0
    place.settle()
    assert len(place.durables.unsaved.collect()) == 20
    place.save()
    assert not place.durables.unsaved.has_records
    assert {each.lists[TOOLS] for each in place.durables.all()} == {place.catalog.version(TOOLS)}


def test_under_steady_changes_what_was_told_long_ago_is_written(place: Place) -> None:
    Client(place, TOOLS, uris="a://1")
    place.catalog.resources.updated("a://1")
    for number in range(40):
        add(place, f"t{number}")
        place.save()
        place.now += 2.0
    kept = place.store._state.durables[KEY]
    assert kept.contents == {"a://1": place.catalog.version("a://1")}
    assert kept.lists == {TOOLS: None}


def test_what_was_told_just_before_a_connection_broke_is_told_again(place: Place) -> None:
    """The reader may have vanished long before anybody noticed."""
    client = Client(place, TOOLS, uris="a://{+path}")
    add(place, "a")
    place.catalog.resources.updated("a://1", etag="1")
    place.settle()
    add(place, "b")
    place.catalog.resources.updated("a://1", etag="2")
    place.catalog.resources.updated("a://2")
    place.now += place.policy.write_deadline
    add(place, "c")
    assert place.durables.unsaved.has_records
    client.leave()

    again = Client(place, TOOLS, uris="a://{+path}")
    assert {each.topic for each in again.heard} == {TOOLS, "a://1", "a://2"}
    assert not any(each.complete for each in again.heard), "what it knows is not known"
    place.settle()
    again.leave()
    assert Client(place, TOOLS, uris="a://{+path}").heard == []


def test_what_came_back_to_what_it_was_before_the_doubt_is_told_all_the_same(place: Place) -> None:
    """If it heard of the tool, it must hear that it is gone."""
    client = Client(place)
    add(place, "a")
    client.leave()
    place.catalog.tools.remove("a")
    assert [each.complete for each in Client(place).heard] == [False]


def test_a_lane_that_knows_what_was_read_is_believed(place: Place) -> None:
    visit = place.durables.connect({"name": "hook"}, None, [TOOLS], [], {}, lambda: None)
    assert visit is not None
    heard: list[Notification] = []
    subscriber = place.hub.open(heard.append)
    visit.attach(subscriber, confirms_reads=True)
    place.hub.subscribe(subscriber, TOOLS, told=visit.told())
    add(place, "a")
    subscriber.close()

    assert Client(place, name="hook").heard == []


def test_what_is_settled_is_written_once_more_and_then_no_more(place: Place) -> None:
    Client(place)
    add(place, "a")
    assert place.collect()[KEY] is not None
    assert place.collect() == {}
    assert place.durables.unsaved.has_records
    place.settle()
    settled = place.collect()[KEY]
    assert settled is not None
    assert settled.lists == {TOOLS: place.catalog.version(TOOLS)}
    assert not place.durables.unsaved.has_records


def test_one_that_is_busy_is_told_when_it_is_ready(place: Place) -> None:
    client = Client(place)
    client.answer = BUSY
    add(place, "a")
    place.save()
    add(place, "b")
    place.save()
    assert client.keys == [("added", "a")]
    assert client.subscriber is not None
    place.hub.wake(client.subscriber)
    assert client.keys == [("added", "a"), ("added", "b")]


class Comings(RuleBasedStateMachine):
    """A client that connects and disconnects, and a server that is saved, stopped and killed.

    The client is told of everything, and again only of what it was told after the last write. Its copy of the list,
    kept by deltas, is the list.
    """

    URIS = ("a://1", "a://2", "b://1")

    @initialize(most=st.sampled_from([0, 1, 3, 1000]), uris=st.sampled_from([URIS, ("a://{+path}", "b://1")]))
    def begin(self, most: int, uris: tuple[str, ...]) -> None:
        self.place = Place(journal_changes=most)
        self.uris = uris
        self.is_exact = uris == self.URIS or most == 1000
        """Where patterns meet a journal that is too short, a content that came back to what it was is told."""
        self.client: Client | None = None
        self.knows: dict[Any, str] = {}
        self.lately: dict[Any, str] = {}
        """What it was told of lately, and what it knew of that before."""
        self.may_repeat: set[Any] = set()
        self.items: dict[str, Any] = {}
        self.former_items: dict[str, Any] = {}
        """Those that it had before it was told lately."""
        self.lives = 0
        self.enter()

    def topics(self) -> list[Any]:
        return [TOOLS, *self.URIS]

    def enter(self) -> None:
        self.client = Client(self.place, TOOLS, uris=self.uris)
        assert self.client.visit is not None
        if self.client.visit.ack["isNew"]:  # then it looks at everything itself
            self.knows = {topic: self.place.catalog.version(topic).digest for topic in self.topics()}
            self.lately.clear()
            self.items = self.truth()
        self.hear()

    def truth(self) -> dict[str, Any]:
        return {item.key: item.hash for item in self.place.catalog.tools.snapshot()}

    def hear(self) -> None:
        assert self.client is not None
        for each in self.client.heard:
            if self.is_exact and each.topic not in self.may_repeat:
                assert each.version.digest != self.knows[each.topic], f"told again of {each.topic}"
            self.may_repeat.discard(each.topic)
            if each.topic is TOOLS:
                self.follow(each)
            self.lately.setdefault(each.topic, self.knows[each.topic])
            self.knows[each.topic] = each.version.digest
        self.client.heard.clear()

    def follow(self, notification: Notification) -> None:
        if TOOLS not in self.lately:
            self.former_items = dict(self.items)
        if not notification.complete:
            self.items = self.truth()
        for change in notification.changes:
            if change.item is None or change.operation is Operation.REMOVED:
                del self.items[change.key]
            else:
                self.items[change.key] = change.item.hash

    @rule(name=st.sampled_from("ab"), title=st.sampled_from([None, "1", "2"]))
    def change_tool(self, name: str, title: str | None) -> None:
        tools = self.place.catalog.tools
        if title is not None:
            tools.add({"name": name, "title": title}, replace=True)
        elif name in tools:
            tools.remove(name)

    @rule(uri=st.sampled_from(URIS), etag=st.sampled_from([None, "1", "2"]))
    def change_content(self, uri: str, etag: str | None) -> None:
        self.place.catalog.resources.updated(uri, etag=etag)

    @rule()
    def settle(self) -> None:
        if self.client is not None:
            self.hear()
            self.lately.clear()
        self.place.settle()
        self.place.save()

    @precondition(lambda self: self.client is not None)
    @rule(is_heard=st.booleans())
    def leave(self, is_heard: bool) -> None:
        """Having heard everything, or nothing of what came lately."""
        assert self.client is not None
        self.hear()
        self.may_repeat |= self.lately.keys()
        if not is_heard:
            self.knows |= self.lately
            self.items = self.former_items if TOOLS in self.lately else self.items
        self.client.leave()
        self.client = None

    @precondition(lambda self: self.client is None)
    @rule()
    def come(self) -> None:
        self.enter()

    @rule()
    def take_over(self) -> None:
        if self.client is not None:
            self.hear()
        self.may_repeat |= self.lately.keys()
        self.enter()

    @rule(is_saved=st.booleans(), is_same=st.booleans())
    def end_server(self, is_saved: bool, is_same: bool) -> None:
        """With what was saved a moment ago, or without what happened since. The sources then have the same again, or
        something that never was before."""
        if self.client is not None:
            self.hear()
            assert self.client.subscriber is not None
            mailbox = self.client.subscriber.mailbox
            self.may_repeat |= mailbox.entries.keys() if mailbox else set()  # nobody knows whether that was sent yet
        self.may_repeat |= self.lately.keys()
        if is_saved:
            self.place.save()
        kept = self.place.store._state.durables.get(KEY)
        if kept is not None:
            # It may have been told of what changed after this was written, or have looked at it, for all that the next
            # server knows.
            for topic in self.topics():
                version = self.place.catalog.version(topic)
                if version.revision > kept.as_of or kept.told.get(topic, version) != version:
                    self.may_repeat.add(topic)
        self.client = None
        items = list(self.place.catalog.tools)
        contents = self.place.catalog.resources.contents()
        self.place.die()
        self.lives += 1
        self.place.catalog.tools.replace(items if is_same else [{"name": f"life {self.lives}"}])
        for uri, version in contents.items():
            if self.place.catalog.version(uri).digest != version.digest:
                self.place.catalog.resources.updated(uri, etag=f"again {version}")

    @rule()
    def look(self) -> None:
        """Once everything is saved, it has been told everything."""
        if getattr(self, "client", None) is None:
            return
        self.place.save()
        self.hear()
        self.may_repeat.clear()
        for topic in self.topics():
            assert self.knows[topic] == self.place.catalog.version(topic).digest, f"never told of {topic}"
        assert self.items == self.truth()


def test_whatever_happens_a_name_is_told_of_all_and_never_twice() -> None:
    run_state_machine_as_test(Comings, settings=settings(max_examples=EXAMPLES, stateful_step_count=25))
