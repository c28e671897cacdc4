"""Closed subscribers leave nothing behind, and returning ones get exactly the differences, or must refetch."""

import weakref

import pytest

from tests.support.readers import Clock, Reader, add
from tidings import Catalog, Feature, Hub, Policy, Reason, Topic, Version

TOOLS, PROMPTS, RESOURCES = Feature


# The end of a subscription


def test_closed_subscriber_leaves_no_trace(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    reasons: list[Reason] = []
    reader.is_slow = True
    subscriber = hub.open(reader.take, on_close=reasons.append, settings=Policy(quiet_gap=1).delivery)
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


def test_deletion_ends_the_subscriptions_to_the_uri(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    other = Reader()
    hub.subscribe(reader.take, uris=["a://b"])
    hub.subscribe(other.take, uris=["a://b", "a://*"])
    catalog.resources.deleted("a://b")
    assert reader.told() == other.told() == [["deleted a://b"]]

    catalog.resources.updated("a://b")
    assert reader.told() == []
    assert other.told() == [["updated a://b"]], "still watched through the pattern"
    assert [topic for topic, _ in hub.subscriptions()] == ["a://*"]
    assert len(hub) == 1, "a callback without subscriptions is closed"


def test_busy_subscriber_gets_the_deletion_before_its_subscription_ends(
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


def test_subscription_ends_after_its_ttl(catalog: Catalog, hub: Hub, reader: Reader, clock: Clock) -> None:
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


def test_callback_is_closed_when_its_last_subscription_expires(hub: Hub, reader: Reader) -> None:
    reasons: list[Reason] = []
    hub.subscribe(reader.take, "tools", uris=["a://*"], ttl=1, on_close=reasons.append)
    hub.tick(1)

    assert len(hub) == 0
    assert reasons == [Reason.EXPIRED]


# Returning


@pytest.mark.parametrize("slowly", [False, True])
def test_returning_subscriber_gets_exactly_the_differences(
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

    assert [notification.complete for notification in reader.received] == [True, True]
    assert reader.received[1].changes[-1].metadata == {"author": "ada"}
    assert reader.told() == [["added c", "removed a"], ["updated a://b"]]
    add(catalog, "d")
    if slowly:
        hub.wake(subscriber)
    assert reader.told() == [["added d"]]


@pytest.mark.parametrize("known", [None, Version(999, "in the future"), Version(2, "of another epoch")])
@pytest.mark.parametrize("topic", [TOOLS, "a://b"])
def test_unknown_version_makes_a_returning_subscriber_refetch(
    catalog: Catalog, hub: Hub, reader: Reader, topic: Topic, known: Version | None
) -> None:
    add(catalog, "a")
    for _ in range(3):
        catalog.resources.updated("a://b")
        catalog.tools.update("a", title=str(catalog.revision))

    hub.subscribe(reader.take, "tools", uris=["a://*"], told={topic: known})

    [notification] = reader.received
    assert notification.topic == topic
    assert not notification.complete
    assert notification.version == catalog.version(topic)


def test_version_older_than_the_hub_makes_a_subscriber_refetch(catalog: Catalog, reader: Reader) -> None:
    add(catalog, "a")
    known = catalog.version(TOOLS)
    add(catalog, "b")
    hub = Hub(catalog)
    hub.subscribe(reader.take, "tools", told={TOOLS: known})

    [notification] = reader.received
    assert not notification.complete


def test_update_and_deletion_without_subscribers_do_nothing(catalog: Catalog, hub: Hub) -> None:
    catalog.resources.deleted("a://b")
    catalog.resources.updated("a://c", version=2)

    assert hub.subscriptions() == []
