"""Subscribers get what they subscribed to: once, in order, and nothing else. Covers `notifications.py`."""

import threading

import pytest

from tests.support.readers import Reader, add
from tidings import Catalog, Feature, Filter, Hub, InvalidPattern, LimitReached, Notification, Policy, Reason

TOOLS, PROMPTS, RESOURCES = Feature


# Subscriptions


@pytest.mark.parametrize("feature", Feature)
def test_subscriber_gets_changes_of_its_feature_only(
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
def test_contents_are_watched_by_uri_parent_pattern_and_template(
    catalog: Catalog, hub: Hub, reader: Reader, watched: str, updated: str, is_told: bool
) -> None:
    hub.subscribe(reader.take, uris=[watched])
    catalog.resources.updated(updated)

    assert reader.told() == ([[f"updated {updated}"]] if is_told else [])


def test_subresources_are_covered_only_if_the_policy_says_so(catalog: Catalog, reader: Reader) -> None:
    hub = Hub(catalog, policy=Policy(subresources=False))
    hub.subscribe(reader.take, uris=["a://b"])
    catalog.resources.updated("a://b/c")
    catalog.resources.updated("a://b")

    assert reader.told() == [["updated a://b"]]


def test_several_matching_subscriptions_make_one_notification(catalog: Catalog, hub: Hub, reader: Reader) -> None:
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
    assert hub.subscriptions() == [("a://b", [first])], "one unsubscribe ends it"


def test_unsubscribing_keeps_other_subscriptions(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    subscriber = hub.subscribe(reader.take, "tools", "prompts", uris=["a://b", "a://**"])
    hub.unsubscribe(reader.take, "tools", uris=["a://b"])
    add(catalog, "x")
    catalog.prompts.add({"name": "p"})
    catalog.resources.updated("a://b")

    assert reader.told() == [["added p"], ["updated a://b"]]
    assert subscriber.watched == [PROMPTS, "a://**"]


def test_unsubscribing_and_closing_twice_is_allowed(catalog: Catalog, hub: Hub, reader: Reader) -> None:
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


def test_opened_subscriber_stays_open_without_subscriptions(catalog: Catalog, hub: Hub, reader: Reader) -> None:
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
    ("policy", "uris", "limit"),
    [
        (Policy(max_uris=2), ["a://1", "a://2", "a://3"], r"Policy\.max_uris allows 2"),
        (Policy(max_patterns=1), ["a://1", "a://*", "b://*"], r"Policy\.max_patterns allows 1"),
    ],
)
def test_too_many_subscriptions_are_refused_and_the_limit_is_named(
    catalog: Catalog, reader: Reader, policy: Policy, uris: list[str], limit: str
) -> None:
    hub = Hub(catalog, policy=policy)
    with pytest.raises(LimitReached, match=limit):
        hub.subscribe(reader.take, "tools", uris=uris)
    assert len(hub) == 0

    subscriber = hub.subscribe(reader.take, uris=uris[:2])
    hub.subscribe(reader.take, uris=uris[:2])
    with pytest.raises(LimitReached, match=limit):
        hub.subscribe(reader.take, "tools", uris=uris[1:])
    assert subscriber.watched == uris[:2]


def test_hub_lists_subscribers_and_subscriptions(hub: Hub) -> None:
    one, other = hub.open(print), hub.open(print)
    one.subscribe("tools", uris=["a://b"])
    other.subscribe("tools", uris=["a://*"])

    assert hub.subscribers("tools") == hub.subscribers(TOOLS) == [one, other]
    assert hub.subscribers("a://b") == [one, other]
    assert hub.subscribers("a://c") == [other]
    assert hub.subscribers("prompts") == hub.subscribers("unknown://") == []
    assert hub.subscriptions() == [(TOOLS, [one, other]), ("a://b", [one]), ("a://*", [other])]


def test_invalid_pattern_or_feature_subscribes_nothing(hub: Hub, reader: Reader) -> None:
    for features, uris, error in (
        (["tools"], ["a://ok", "a://{bad"], InvalidPattern),
        (["tools", "tool"], ["a://ok"], ValueError),
    ):
        with pytest.raises(error):
            hub.subscribe(reader.take, *features, uris=uris)

    assert len(hub) == 0
    assert hub.subscriptions() == []


# Many subscribers and threads


def test_subscribers_share_one_notification_object(catalog: Catalog, hub: Hub) -> None:
    readers = [Reader() for _ in range(100)]
    for each in readers:
        hub.subscribe(each.take, "tools", uris=["a://b"])
    add(catalog, "x")
    assert len({id(notification) for reader in readers for notification in reader.received}) == 1

    hub.close(readers[50].take, Reason.DISCONNECTED)
    catalog.resources.updated("a://b")
    gone = readers.pop(50)
    assert gone.told() == [["added x"]]
    assert [reader.told() for reader in readers] == [[["added x"], ["updated a://b"]]] * 99
    assert len(hub.subscribers("a://b")) == 99


def test_hub_can_be_used_from_many_threads(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    workers, each = 10, 50
    hub.subscribe(reader.take, "prompts")
    start = threading.Barrier(workers)
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        mine = Reader()
        try:
            start.wait(timeout=60)
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
    revisions = [notification.version.revision for notification in reader.received]
    assert revisions == sorted(set(revisions))
    names = [f"{worker}-{number}" for worker in range(workers) for number in range(each)]
    assert sorted(reader.told()) == sorted([f"added {name}"] for name in names), "one notification for each"


def test_filtered_notification_is_shared_and_delivered_immediately(catalog: Catalog, hub: Hub) -> None:
    """A filtered notification is built once, and needs no mailbox."""
    received: list[tuple[str, Notification]] = []
    hub.subscribe(lambda told: received.append(("one", told)), "tools")
    hub.subscribe(lambda told: received.append(("two", told)), "tools", filter=Filter(names=["p*"]))
    filtered = [
        hub.open(lambda told: received.append(("filtered", told)), filter=Filter(names=["p*"])) for _ in range(2)
    ]
    for subscriber in filtered:
        subscriber.subscribe("tools")
    catalog.tools.replace([{"name": "p"}, {"name": "q"}])

    assert [name for name, _ in received] == ["one", "two", "filtered", "filtered"]
    assert len({id(told) for name, told in received if name != "one"}) == 1
    assert [change.key for change in received[-1][1].changes] == ["p"]
    assert all(subscriber.mailbox_size == 0 for subscriber in filtered)
    catalog.tools.add({"name": "r"})
    assert len(received) == 5, "only the subscriber without a filter"
    assert all(hub.told(subscriber, Feature.TOOLS) != catalog.version(Feature.TOOLS) for subscriber in filtered)
    catalog.tools.remove("p")
    assert [name for name, _ in received[5:]] == ["one", "two", "filtered", "filtered"]
