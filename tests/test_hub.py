"""Who is told what: once, in order, only what it asked for, and whatever the others do."""

import random
import threading
import weakref
from collections.abc import Callable

import pytest

from tests.readers import Clock, Reader, add
from tidings import (
    Catalog,
    Feature,
    Filter,
    Hub,
    InvalidPattern,
    LimitReached,
    Notification,
    Policy,
    Reason,
    Subscriber,
    Topic,
    Version,
)
from tidings.lanes.templates import read_template

TOOLS, PROMPTS, RESOURCES = Feature


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
def hub(catalog: Catalog, clock: Clock) -> Hub:
    return Hub(catalog, templates=read_template, clock=clock)


@pytest.fixture
def reader() -> Reader:
    return Reader()


# Who watches what


@pytest.mark.parametrize("feature", Feature)
def test_a_subscriber_of_one_feature_is_told_of_its_changes_and_of_no_others(
    catalog: Catalog, hub: Hub, reader: Reader, feature: Feature
) -> None:
    hub.subscribe(reader.take, feature.value)
    for other in Feature:
        catalog.items(other).add({"name": other.value, "uri": other.value})
    catalog.resources.updated("a://b")

    assert reader.told() == [[f"added {feature.value}"]]


@pytest.mark.parametrize(
    ("watched", "updated", "is_told"),
    [
        ("a://b", "a://b", True),
        ("a://b", "a://bc", False),
        ("a://b", "a://b/c/d", True),
        ("a://b/", "a://b/c", True),
        ("a://b/c", "a://b", False),
        ("a://", "a://b", False),
        ("tools", "tools", True),
        ("resource://*/data", "resource://x/data", True),
        ("resource://*/data", "resource://x/y/data", False),
        ("file:///logs/**", "file:///logs/2026/07.log", True),
        ("board://{sprint}/tasks", "board://7/tasks", True),
        ("board://{sprint}/tasks", "board://7/notes", False),
        ("file:///{+path}", "file:///a/b/c", True),
        ("", "", True),
        ("ünï://\U0001f98a", "ünï://\U0001f98a", True),
        ("half \ud800", "a://b", False),
    ],
)
def test_contents_are_watched_by_uri_by_what_holds_them_by_pattern_and_by_template(
    catalog: Catalog, hub: Hub, reader: Reader, watched: str, updated: str, is_told: bool
) -> None:
    hub.subscribe(reader.take, uris=[watched])
    catalog.resources.updated(updated)

    assert reader.told() == ([[f"updated {updated}"]] if is_told else [])


def test_parts_of_a_resource_are_told_only_where_the_policy_says_so(catalog: Catalog, reader: Reader) -> None:
    hub = Hub(catalog, policy=Policy(subresources=False))
    hub.subscribe(reader.take, uris=["a://b"])
    catalog.resources.updated("a://b/c")
    catalog.resources.updated("a://b")

    assert reader.told() == [["updated a://b"]]


def test_one_who_matches_in_several_ways_is_told_once(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    hub.subscribe(reader.take, "resources", uris=["a://b/c", "a://b", "a://*/c", "a://**", "a://{x}/c"])
    catalog.resources.updated("a://b/c")

    assert reader.told() == [["updated a://b/c"]]
    assert len(hub.subscribers("a://b/c")) == 1


def test_subscribing_twice_is_one_subscription(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    first = hub.subscribe(reader.take, "tools", uris=["a://b"])
    assert hub.subscribe(reader.take, "tools", "tools", uris=["a://b", "a://b"]) is first
    add(catalog, "x")
    catalog.resources.updated("a://b")

    assert reader.told() == [["added x"], ["updated a://b"]]
    assert hub.subscriptions() == [(TOOLS, [first]), ("a://b", [first])]
    hub.unsubscribe(reader.take, "tools")
    assert hub.subscriptions() == [("a://b", [first])], "and one end of it is enough"


def test_ending_some_subscriptions_leaves_the_others(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    subscriber = hub.subscribe(reader.take, "tools", "prompts", uris=["a://b", "a://**"])
    hub.unsubscribe(reader.take, "tools", uris=["a://b"])
    add(catalog, "x")
    catalog.prompts.add({"name": "p"})
    catalog.resources.updated("a://b")

    assert reader.told() == [["added p"], ["updated a://b"]]
    assert subscriber.watched == [PROMPTS, "a://**"]


def test_ending_what_never_was_or_twice_is_fine(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    hub.unsubscribe(reader.take, "tools")
    hub.close(reader.take)
    hub.subscribe(reader.take, "tools")
    for _ in range(2):
        hub.unsubscribe(reader.take, "prompts", uris=["a://never", "a://*"])
    add(catalog, "x")
    assert reader.told() == [["added x"]]

    for _ in range(2):
        hub.unsubscribe(reader.take)
        hub.close(reader.take)
    add(catalog, "y")
    assert reader.told() == []
    assert len(hub) == 0


def test_a_lane_s_subscriber_stays_open_while_it_watches_nothing(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    subscriber = hub.open(reader.take, label="session 7")
    subscriber.subscribe("tools", uris="a://b")
    subscriber.unsubscribe()
    assert subscriber.is_idle
    assert not subscriber.is_closed
    subscriber.subscribe("tools")
    add(catalog, "x")

    assert reader.told() == [["added x"]]
    assert repr(subscriber) == "<Subscriber session 7 of tools>"


@pytest.mark.parametrize(
    ("policy", "uris", "knob"),
    [
        (Policy(max_uris=2), ["a://1", "a://2", "a://3"], r"Policy\.max_uris allows 2"),
        (Policy(max_patterns=1), ["a://1", "a://*", "b://*"], r"Policy\.max_patterns allows 1"),
    ],
)
def test_a_callback_that_asks_for_too_much_leaves_no_trace(
    catalog: Catalog, reader: Reader, policy: Policy, uris: list[str], knob: str
) -> None:
    hub = Hub(catalog, policy=policy)
    with pytest.raises(LimitReached, match=knob):
        hub.subscribe(reader.take, "tools", uris=uris)

    assert len(hub) == 0


def test_the_hub_lists_who_is_told_of_a_topic_and_who_watches_what(hub: Hub) -> None:
    one, other = hub.open(print), hub.open(print)
    one.subscribe("tools", uris=["a://b"])
    other.subscribe("tools", uris=["a://*"])

    assert hub.subscribers("tools") == hub.subscribers(TOOLS) == [one, other]
    assert hub.subscribers("a://b") == [one, other]
    assert hub.subscribers("a://c") == [other]
    assert hub.subscribers("prompts") == hub.subscribers("unknown://") == []
    assert hub.subscriptions() == [(TOOLS, [one, other]), ("a://b", [one]), ("a://*", [other])]


def test_a_bad_pattern_or_feature_leaves_nothing_half_done(hub: Hub, reader: Reader) -> None:
    for features, uris, error in (
        (["tools"], ["a://ok", "a://{bad"], InvalidPattern),
        (["tools", "tool"], ["a://ok"], ValueError),
    ):
        with pytest.raises(error):
            hub.subscribe(reader.take, *features, uris=uris)

    assert len(hub) == 0
    assert hub.subscriptions() == []


def test_too_many_uris_are_refused_whole_and_the_message_names_the_knob(catalog: Catalog, reader: Reader) -> None:
    hub = Hub(catalog, policy=Policy(max_uris=2))
    subscriber = hub.open(reader.take)
    subscriber.subscribe(uris=["a://1", "a://2"])
    subscriber.subscribe(uris=["a://1", "a://2"])
    with pytest.raises(LimitReached, match=r"Policy\.max_uris allows 2"):
        subscriber.subscribe("tools", uris=["a://2", "a://3"])
    assert subscriber.watched == ["a://1", "a://2"]


# The end of a subscription


def test_closing_removes_every_trace_and_says_why_once(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    reasons: list[Reason] = []
    reader.is_slow = True
    subscriber = hub.open(reader.take, on_close=reasons.append, policy=Policy(quiet_gap=1))
    hub.subscribe(subscriber, "tools", "prompts", uris=["a://b", "a://*", "a://{x}"], ttl=60)
    add(catalog, "x")
    trace = weakref.ref(subscriber)

    for _ in range(2):
        hub.close(subscriber, Reason.SLOW)
    subscriber.subscribe("tools")
    hub.wake(subscriber)
    hub.tick(1000)

    assert reasons == [Reason.SLOW]
    assert reader.told() == []
    assert subscriber.watched == []
    assert (len(hub), hub.subscriptions(), hub.next_due()) == (0, [], None)
    assert repr(subscriber).endswith("of nothing, closed>")
    del subscriber
    assert trace() is None


def test_after_100_000_random_cycles_nothing_is_left(catalog: Catalog, hub: Hub) -> None:
    chance = random.Random(7)
    topics = ["a://1", "a://1/2", "a://*", "b://**", "c://{x}/y"]
    alive: weakref.WeakSet[Subscriber] = weakref.WeakSet()
    unfinished: list[Subscriber] = []
    slow, paced = Reader(), Policy(quiet_gap=0.5, min_interval=1)
    slow.is_slow = True
    subscriber = None
    for cycle in range(100_000):
        subscriber = hub.open(slow.take if cycle % 3 else print, policy=paced if cycle % 5 == 0 else None)
        alive.add(subscriber)
        uris = chance.sample(topics, cycle % 3)
        hub.subscribe(subscriber, "tools", uris=uris, ttl=10 if cycle % 7 == 0 else None)
        unfinished.append(subscriber)
        if cycle % 100 == 0:
            catalog.tools.add({"name": "x", "title": str(cycle)}, replace=True)
            catalog.resources.updated("a://1/2")
            slow.heard.clear()
        while len(unfinished) > chance.randrange(8):
            unfinished.pop(chance.randrange(len(unfinished))).close(Reason.DISCONNECTED)
    while unfinished:
        unfinished.pop().close()
    del subscriber

    assert (len(hub), hub.subscriptions(), hub.next_due()) == (0, [], None)
    assert len(alive) == 0
    assert (len(hub._agenda), len(hub._index.patterns), len(hub._callbacks)) == (0, 0, 0)


def test_a_deletion_is_told_and_then_ends_the_subscriptions_to_just_that_uri(
    catalog: Catalog, hub: Hub, reader: Reader
) -> None:
    other = Reader()
    hub.subscribe(reader.take, uris=["a://b"])
    hub.subscribe(other.take, uris=["a://b", "a://*"])
    catalog.resources.deleted("a://b")
    assert reader.told() == other.told() == [["deleted a://b"]]

    catalog.resources.updated("a://b")
    assert reader.told() == []
    assert other.told() == [["updated a://b"]], "through the pattern, which is still watched"
    assert [topic for topic, _ in hub.subscriptions()] == ["a://*"]
    assert len(hub) == 1, "a callback that watches nothing any more is gone"


def test_a_slow_reader_is_told_of_the_deletion_before_its_subscription_ends(
    catalog: Catalog, hub: Hub, reader: Reader
) -> None:
    reader.is_slow = True
    subscriber = hub.open(reader.take)
    subscriber.subscribe(uris=["a://b"])
    catalog.resources.updated("a://b")
    catalog.resources.deleted("a://b")
    assert reader.told() == [["updated a://b"]]
    assert hub.subscribers("a://b") == [subscriber]

    hub.wake(subscriber)
    assert reader.told() == [["deleted a://b"]]
    assert hub.subscribers("a://b") == []


def test_a_deletion_nobody_watches_is_fine(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    catalog.resources.deleted("a://b")
    catalog.resources.updated("a://c", version=2)

    assert hub.subscriptions() == []


def test_a_subscription_ends_when_its_time_is_over_and_not_before(
    catalog: Catalog, hub: Hub, reader: Reader, clock: Clock
) -> None:
    hub.subscribe(reader.take, "tools")
    hub.subscribe(reader.take, uris=["a://b"], ttl=10)
    hub.subscribe(reader.take, uris=["a://c"], ttl=20)
    assert hub.next_due() == 10

    clock.now = 9.9
    hub.tick()
    assert hub.subscribers("a://b")
    hub.subscribe(reader.take, uris=["a://b"], ttl=5)  # renewed, until 14.9
    clock.now = 10.0
    hub.tick()
    assert hub.next_due() == 14.9
    hub.tick(14.9)
    assert [topic for topic, _ in hub.subscriptions()] == [TOOLS, "a://c"]
    assert hub.next_due() == 20
    hub.tick(20)
    assert [topic for topic, _ in hub.subscriptions()] == [TOOLS]
    assert hub.next_due() is None


def test_a_callback_whose_last_subscription_expires_is_gone(hub: Hub, reader: Reader) -> None:
    reasons: list[Reason] = []
    hub.subscribe(reader.take, "tools", uris=["a://*"], ttl=1, on_close=reasons.append)
    hub.tick(1)

    assert len(hub) == 0
    assert reasons == [Reason.EXPIRED]


# Coming back


@pytest.mark.parametrize("slowly", [False, True])
def test_who_comes_back_with_a_version_is_told_exactly_what_differs(
    catalog: Catalog, hub: Hub, reader: Reader, slowly: bool
) -> None:
    add(catalog, "a", "b")
    catalog.resources.updated("a://b", etag="1")
    known: dict[Topic, Version | None] = {topic: catalog.version(topic) for topic in (TOOLS, PROMPTS, "a://b")}
    add(catalog, "c", "passing")
    catalog.tools.remove("a")
    catalog.tools.remove("passing")
    catalog.resources.updated("a://b", etag="2", author="ada")

    reader.is_slow = slowly
    subscriber = hub.subscribe(reader.take, "tools", "prompts", uris=["a://b"], told=known)
    if slowly:
        hub.wake(subscriber)

    assert [notification.complete for notification in reader.heard] == [True, True]
    assert reader.heard[1].changes[-1].metadata == {"author": "ada"}
    assert reader.told() == [["added c", "removed a"], ["updated a://b"]]
    add(catalog, "d")
    if slowly:
        hub.wake(subscriber)
    assert reader.told() == [["added d"]]


def test_who_comes_back_knowing_the_newest_is_told_nothing(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    add(catalog, "a")
    known = catalog.version(TOOLS)
    add(catalog, "b")
    catalog.tools.remove("b")

    hub.subscribe(reader.take, "tools", told={TOOLS: known})
    assert reader.told() == []


def _never(catalog: Catalog) -> Version | None:
    return None


def _from_the_future(catalog: Catalog) -> Version | None:
    return Version(999, "0" * 32)


def _from_another_life(catalog: Catalog) -> Version | None:
    return Version(2, "0" * 32)


@pytest.mark.parametrize("knows", [_never, _from_the_future, _from_another_life])
@pytest.mark.parametrize("topic", [TOOLS, "a://b"])
def test_who_comes_back_with_a_version_nobody_knows_is_told_to_refetch(
    catalog: Catalog, hub: Hub, reader: Reader, topic: Topic, knows: Callable[[Catalog], Version | None]
) -> None:
    add(catalog, "a")
    for _ in range(3):
        catalog.resources.updated("a://b")
        catalog.tools.update("a", title=str(catalog.revision))

    hub.subscribe(reader.take, "tools", uris=["a://*"], told={topic: knows(catalog)})

    [notification] = reader.heard
    assert notification.topic == topic
    assert not notification.complete
    assert notification.version == catalog.version(topic)


def test_who_comes_back_to_a_journal_that_is_too_short_is_told_to_refetch(catalog: Catalog, reader: Reader) -> None:
    hub = Hub(catalog, policy=Policy(journal_changes=1))
    add(catalog, "a")
    known = catalog.version(TOOLS)
    add(catalog, "b", "c")
    hub.subscribe(reader.take, "tools", told={TOOLS: known})

    [notification] = reader.heard
    assert (notification.complete, notification.changes) == (False, ())


def test_who_comes_back_to_a_hub_younger_than_its_version_is_told_to_refetch(catalog: Catalog, reader: Reader) -> None:
    add(catalog, "a")
    known = catalog.version(TOOLS)
    add(catalog, "b")
    hub = Hub(catalog)
    hub.subscribe(reader.take, "tools", told={TOOLS: known})

    [notification] = reader.heard
    assert not notification.complete


def test_a_version_of_what_is_not_watched_is_ignored(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    add(catalog, "a")
    hub.subscribe(reader.take, "prompts", told={TOOLS: None, "a://b": None})

    assert reader.told() == []


# Many at once


def test_a_hub_that_does_not_follow_its_catalog_tells_what_is_published_to_it(catalog: Catalog, reader: Reader) -> None:
    hub = Hub(catalog, follow=False)
    other = Reader()

    def publisher(notification: Notification) -> None:
        if notification.version.revision == 1:
            hub.publish(tuple(catalog.tools.add({"name": "y"})))

    for callback in (reader.take, publisher, other.take):
        hub.subscribe(callback, "tools")
    changes = tuple(catalog.tools.add({"name": "x"}))
    assert reader.told() == []

    hub.publish(changes)
    assert reader.told() == other.told() == [["added x"], ["added y"]]


def test_a_hundred_subscribers_hear_the_same_object_and_the_rest_go_on_when_one_leaves(
    catalog: Catalog, hub: Hub
) -> None:
    readers = [Reader() for _ in range(100)]
    for reader in readers:
        hub.subscribe(reader.take, "tools", uris=["a://b"])
    add(catalog, "x")
    assert len({id(notification) for reader in readers for notification in reader.heard}) == 1

    hub.close(readers[50].take, Reason.DISCONNECTED)
    catalog.resources.updated("a://b")
    gone = readers.pop(50)
    assert gone.told() == [["added x"]]
    assert [reader.told() for reader in readers] == [[["added x"], ["updated a://b"]]] * 99
    assert len(hub.subscribers("a://b")) == 99


def test_threads_may_subscribe_publish_and_leave_at_the_same_time(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    workers, each = 10, 50
    hub.subscribe(reader.take, "prompts")
    start = threading.Barrier(workers)
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        mine = Reader()
        try:
            start.wait(timeout=10)
            for number in range(each):
                with hub.subscribe(mine.take, "tools", uris=[f"a://{worker}", "a://*"]):
                    catalog.prompts.add({"name": f"{worker}-{number}"})
                    catalog.resources.updated(f"a://{worker}")
            told = [line for told in mine.told() for line in told]
            assert told.count(f"updated a://{worker}") == each
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)

    assert failures == []
    assert len(hub) == 1
    revisions = [notification.version.revision for notification in reader.heard]
    assert revisions == sorted(set(revisions))
    names = [f"{worker}-{number}" for worker in range(workers) for number in range(each)]
    assert sorted(reader.told()) == sorted([f"added {name}"] for name in names), "one notification for each"


def test_the_picky_share_what_passes_and_hear_of_it_in_their_turn(catalog: Catalog, hub: Hub) -> None:
    """As fast as anybody: what passes a filter is made once, and goes through no mailbox."""
    heard: list[tuple[str, Notification]] = []
    hub.subscribe(lambda told: heard.append(("one", told)), "tools")
    hub.subscribe(lambda told: heard.append(("two", told)), "tools", filter=Filter(names=["p*"]))
    picky = [hub.open(lambda told: heard.append(("picky", told)), filter=Filter(names=["p*"])) for _ in range(2)]
    for subscriber in picky:
        subscriber.subscribe("tools")
    catalog.tools.replace([{"name": "p"}, {"name": "q"}])

    assert [who for who, _ in heard] == ["one", "two", "picky", "picky"]
    assert len({id(told) for who, told in heard if who != "one"}) == 1
    assert [change.key for change in heard[-1][1].changes] == ["p"]
    assert all(subscriber.pending == 0 for subscriber in picky)
    catalog.tools.add({"name": "r"})
    assert len(heard) == 5, "only the one that asked for all"
    assert all(hub.told(subscriber, Feature.TOOLS) != catalog.version(Feature.TOOLS) for subscriber in picky)
    catalog.tools.remove("p")
    assert [who for who, _ in heard[5:]] == ["one", "two", "picky", "picky"]
