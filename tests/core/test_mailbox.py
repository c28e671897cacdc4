"""A mailbox is a set of topics, not a queue of events."""

from tests.support.readers import Reader, add, lines
from tidings import Catalog, Feature, Hub, Journal, Notification, Policy, Reason, Version

TOOLS, PROMPTS, RESOURCES = Feature


def test_told_is_kept_per_subscriber_and_topic(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    add(catalog, "known")
    slow, fast = hub.open(reader.take), hub.open(print)
    reader.is_slow = True
    slow.subscribe("tools", uris=["a://b"])
    fast.subscribe("tools")
    came_with = catalog.version(TOOLS)
    assert hub.told(slow, TOOLS) == came_with

    add(catalog, "x")
    first = catalog.version(TOOLS)
    add(catalog, "y")
    catalog.resources.updated("a://b")

    assert hub.told(slow, TOOLS) == first
    assert hub.told(slow, "a://b") == Version(0, "")
    assert hub.told(fast, TOOLS) == catalog.version(TOOLS)
    assert slow.mailbox_size == 2
    reader.is_slow = False
    hub.wake(slow)
    assert hub.told(slow, TOOLS) == catalog.version(TOOLS)
    assert hub.told(slow, "a://b") == catalog.version("a://b")
    assert slow.mailbox_size == 0


def test_busy_subscriber_gets_net_changes_in_one_notification(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    reader.is_slow = True
    subscriber = hub.subscribe(reader.take, "tools", uris=["a://b"])
    add(catalog, "first", "kept", "passing")
    catalog.tools.remove("passing")
    catalog.tools.update("kept", title="Kept")
    catalog.tools.remove("first")
    for version in (1, 2, 3):
        catalog.resources.updated("a://b", version=version)
    assert reader.told() == [["added first"]]
    assert subscriber.mailbox_size == 2, "topics, not events"

    hub.wake(subscriber)
    assert reader.told() == [["added kept", "removed first"]]
    hub.wake(subscriber)
    [notification] = reader.received
    assert [change.metadata for change in notification.changes] == [{"version": 3}]
    assert notification.complete


def test_change_to_an_unknown_content_is_told_once_without_details(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    """Also to a subscriber that sees no difference between the lists before and after."""
    add(catalog, "known")
    prompt = list[Notification]()
    hub.subscribe(prompt.append, "tools")
    reader.is_slow = True
    slow = hub.subscribe(reader.take, "tools")
    add(catalog, "first")
    reader.told()

    catalog.tools.mark_changed()
    catalog.tools.mark_changed()
    add(catalog, "x")
    catalog.tools.remove("x")
    assert [(len(each.changes), each.complete) for each in prompt[1:]] == [(0, False)] * 2 + [(1, True)] * 2
    assert len({each.version.digest for each in prompt}) == 4
    hub.wake(slow)
    [missed] = reader.received
    assert (missed.changes, missed.complete, missed.version) == ((), False, catalog.version(TOOLS))
    reader.told()
    hub.wake(slow)
    add(catalog, "last")
    assert reader.told() == [["added last"]], "the journal knows what follows"


def test_content_equal_to_told_makes_no_notification(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    reader.is_slow = True
    subscriber = hub.subscribe(reader.take, "tools", uris=["a://b"])
    catalog.resources.updated("a://b", etag="1")
    catalog.resources.updated("a://b", etag="2")
    catalog.resources.updated("a://b", etag="1")
    add(catalog, "x")
    catalog.tools.remove("x")
    reader.told()

    hub.wake(subscriber)
    assert reader.told() == []
    assert subscriber.mailbox_size == 0
    add(catalog, "y")
    assert reader.told() == [["added y"]]


def test_subscriber_that_missed_more_than_the_journal_must_refetch(catalog: Catalog, reader: Reader) -> None:
    hub = Hub(catalog, journal=Journal(Policy(journal_changes=2)))
    reader.is_slow = True
    subscriber = hub.subscribe(reader.take, "tools")
    add(catalog, "a", "b", "c", "d")
    hub.wake(subscriber)

    first, second = reader.received
    assert first.complete
    assert not second.complete
    assert second.changes == ()
    assert second.version == catalog.version(TOOLS)


def test_too_many_pending_topics_close_a_subscriber(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    reasons: list[Reason] = []
    reader.is_slow = True
    subscriber = hub.open(reader.take, settings=Policy(max_pending=2).delivery, on_close=reasons.append)
    subscriber.subscribe(uris=["a://**"])
    for uri in ("a://1", "a://2", "a://3", "a://2", "a://3"):
        catalog.resources.updated(uri)
    assert (reasons, subscriber.mailbox_size) == ([], 2)

    catalog.resources.updated("a://4")
    assert reasons == [Reason.OVERFLOW]
    assert len(hub) == 0


def test_rate_limited_subscriber_that_keeps_up_is_not_closed(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    subscriber = hub.open(reader.take, settings=Policy(max_pending=2, min_interval=60).delivery)
    subscriber.subscribe(uris=["a://**"])
    for number in range(5):
        catalog.resources.updated(f"a://{number}")

    assert reader.told() == [[f"updated a://{number}"] for number in range(5)]
    assert not subscriber.is_closed


def test_mailbox_is_no_larger_than_the_watched_topics(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    reader.is_slow = True
    subscriber = hub.subscribe(reader.take, "tools", uris=["a://b"])
    for number in range(1000):
        catalog.tools.add({"name": "x", "title": str(number)}, replace=True)
        catalog.resources.updated("a://b")
        assert subscriber.mailbox_size <= 2
    reader.told()

    hub.wake(subscriber)
    hub.wake(subscriber)
    assert lines(reader) == ["updated x", "updated a://b"]


def test_overflowing_session_is_told_to_refetch_instead_of_closed(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    reader.is_slow = True
    subscriber = hub.open(reader.take, settings=Policy(max_pending=3).delivery)
    subscriber.merges_on_overflow = True
    subscriber.subscribe("resources", uris=["a://**"])
    for number in range(20):
        catalog.resources.updated(f"a://{number}")
    assert subscriber.mailbox_size <= 3
    hub.wake(subscriber)

    assert not subscriber.is_closed
    assert [(told.topic, told.complete) for told in reader.received] == [("a://0", True), (RESOURCES, False)]
