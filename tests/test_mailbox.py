"""What waits for a subscriber: a set of topics, told when their time has come, in the order of what matters."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.readers import Clock, Reader, add
from tidings import (
    Catalog,
    Change,
    Feature,
    Filter,
    Hub,
    InvalidPattern,
    Journal,
    Notification,
    Policy,
    Priority,
    Reason,
    Topic,
    Version,
)
from tidings.digest import EMPTY

TOOLS, PROMPTS, RESOURCES = Feature


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
def hub(catalog: Catalog, clock: Clock) -> Hub:
    return Hub(catalog, clock=clock)


@pytest.fixture
def reader() -> Reader:
    return Reader()


# Told, and what was missed


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
    assert slow.pending == 2
    reader.is_slow = False
    hub.wake(slow)
    assert hub.told(slow, TOOLS) == catalog.version(TOOLS)
    assert hub.told(slow, "a://b") == catalog.version("a://b")
    assert slow.pending == 0


def test_a_slow_reader_is_told_the_net_of_what_it_missed_in_one(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    reader.is_slow = True
    subscriber = hub.subscribe(reader.take, "tools", uris=["a://b"])
    add(catalog, "first", "kept", "passing")
    catalog.tools.remove("passing")
    catalog.tools.update("kept", title="Kept")
    catalog.tools.remove("first")
    for version in (1, 2, 3):
        catalog.resources.updated("a://b", version=version)
    assert reader.told() == [["added first"]]
    assert subscriber.pending == 2, "topics, not events"

    hub.wake(subscriber)
    assert reader.told() == [["added kept", "removed first"]]
    hub.wake(subscriber)
    [notification] = reader.heard
    assert [change.metadata for change in notification.changes] == [{"version": 3}]
    assert notification.complete


def test_what_came_back_to_what_was_told_is_not_told(catalog: Catalog, hub: Hub, reader: Reader) -> None:
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
    assert subscriber.pending == 0
    add(catalog, "y")
    assert reader.told() == [["added y"]]


def test_those_who_missed_the_same_share_one_notification(catalog: Catalog, hub: Hub) -> None:
    readers = [Reader() for _ in range(3)]
    subscribers = [hub.subscribe(reader.take, "tools") for reader in readers]
    for reader in readers:
        reader.is_slow = True
    add(catalog, "a", "b", "c")
    for subscriber in subscribers:
        hub.wake(subscriber)

    for first, *others in zip(*(reader.heard for reader in readers), strict=True):
        assert all(other is first for other in others)
    assert [reader.told() for reader in readers] == [[["added a"], ["added b", "added c"]]] * 3


def test_who_missed_more_than_the_journal_knows_is_told_to_refetch(catalog: Catalog, reader: Reader) -> None:
    hub = Hub(catalog, journal=Journal(Policy(journal_changes=2)))
    reader.is_slow = True
    subscriber = hub.subscribe(reader.take, "tools")
    add(catalog, "a", "b", "c", "d")
    hub.wake(subscriber)

    first, second = reader.heard
    assert first.complete
    assert not second.complete
    assert second.changes == ()
    assert second.version == catalog.version(TOOLS)


def test_more_topics_than_allowed_close_a_reader_that_does_not_read(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    reasons: list[Reason] = []
    reader.is_slow = True
    subscriber = hub.open(reader.take, policy=Policy(max_pending=2), on_close=reasons.append)
    subscriber.subscribe(uris=["a://**"])
    for uri in ("a://1", "a://2", "a://3", "a://2", "a://3"):
        catalog.resources.updated(uri)
    assert (reasons, subscriber.pending) == ([], 2)

    catalog.resources.updated("a://4")
    assert reasons == [Reason.OVERFLOW]
    assert len(hub) == 0


def test_a_reader_that_keeps_up_is_never_closed_however_many_topics_the_rate_limit_holds(
    catalog: Catalog, hub: Hub, reader: Reader
) -> None:
    subscriber = hub.open(reader.take, policy=Policy(max_pending=2, min_interval=60))
    subscriber.subscribe(uris=["a://**"])
    for number in range(5):
        catalog.resources.updated(f"a://{number}")

    assert reader.told() == [[f"updated a://{number}"] for number in range(5)]
    assert not subscriber.is_closed


# When it is told


def lines(reader: Reader) -> list[str]:
    return [" + ".join(told) for told in reader.told()]


def test_a_quiet_gap_makes_one_notification_of_a_burst(
    catalog: Catalog, hub: Hub, reader: Reader, clock: Clock
) -> None:
    hub.subscribe(reader.take, "tools", policy=Policy(quiet_gap=1, longest_wait=10))
    for clock.now, name in ((0, "a"), (0.5, "b"), (1.4, "c")):
        add(catalog, name)
        hub.tick()
    assert lines(reader) == []
    assert hub.next_due() is not None

    hub.tick(2.3)
    assert lines(reader) == []
    hub.tick(2.4)
    assert lines(reader) == ["added a + added b + added c"]
    assert hub.next_due() is None


def test_the_longest_wait_ends_a_burst_that_never_pauses(
    catalog: Catalog, hub: Hub, reader: Reader, clock: Clock
) -> None:
    hub.subscribe(reader.take, "tools", policy=Policy(quiet_gap=1, longest_wait=3))
    told_at = []
    for step in range(100):
        clock.now = step / 10
        add(catalog, str(step))
        hub.tick()
        if reader.told():
            told_at.append(clock.now)

    assert told_at == [3.0, 6.1, 9.2]


def test_a_rate_limit_tells_the_first_at_once_and_the_last_in_the_end(
    catalog: Catalog, hub: Hub, reader: Reader, clock: Clock
) -> None:
    hub.subscribe(reader.take, "tools", uris=["a://b"], policy=Policy(min_interval=10))
    for clock.now, name in ((0, "a"), (1, "b"), (9, "c")):
        add(catalog, name)
        hub.tick()
    catalog.resources.updated("a://b")
    assert lines(reader) == ["added a", "updated a://b"], "each topic has a limit of its own"
    assert hub.next_due() == 10

    hub.tick(10)
    assert lines(reader) == ["added b + added c"]
    clock.now = 19
    add(catalog, "d")
    assert lines(reader) == []
    hub.tick(20)
    assert lines(reader) == ["added d"]
    hub.tick(30)
    assert hub.next_due() is None
    assert hub.subscribers("tools")[0].pending == 0
    clock.now = 31
    add(catalog, "e")
    assert lines(reader) == ["added e"]


def test_what_was_not_told_does_not_count_for_the_rate_limit(
    catalog: Catalog, hub: Hub, reader: Reader, clock: Clock
) -> None:
    hub.subscribe(reader.take, "tools", policy=Policy(min_interval=10))
    add(catalog, "a")
    clock.now = 1
    add(catalog, "passing")
    catalog.tools.remove("passing")
    hub.tick(10)
    clock.now = 11
    add(catalog, "b")

    assert lines(reader) == ["added a", "added b"]


def test_urgent_changes_pass_the_gap_and_the_rate_limit(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    policy = Policy(quiet_gap=1, min_interval=60, priorities=(("alarm://*", Priority.URGENT),))
    hub.subscribe(reader.take, uris=["**"], policy=policy)
    for uri in ("alarm://fire", "a://b", "alarm://fire"):
        catalog.resources.updated(uri)

    assert lines(reader) == ["updated alarm://fire", "updated alarm://fire"]
    hub.tick(1)
    assert lines(reader) == ["updated a://b"]


def test_lists_go_before_contents_and_contents_by_their_priority(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    policy = Policy(
        priorities=(("low://*", Priority.LOW), ("high://*", Priority.HIGH), ("urgent://*", Priority.URGENT))
    )
    reader.is_slow = True
    subscriber = hub.subscribe(reader.take, "tools", "prompts", uris=["**"], policy=policy)
    catalog.prompts.add({"name": "keeps it busy"})
    for uri in ("low://1", "a://2", "a://1", "high://1", "urgent://1", "a://2"):
        catalog.resources.updated(uri)
    add(catalog, "x")
    reader.told()
    reader.is_slow = False
    hub.wake(subscriber)

    assert lines(reader) == [
        "updated urgent://1",
        "updated high://1",
        "added x",
        "updated a://2",
        "updated a://1",
        "updated low://1",
    ]


def test_a_list_is_told_before_contents_that_waited_longer(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    reader.is_slow = True
    subscriber = hub.subscribe(reader.take, "tools", uris=["a://*"])
    catalog.resources.updated("a://1")
    catalog.resources.updated("a://2")
    add(catalog, "x")
    reader.told()
    reader.is_slow = False
    hub.wake(subscriber)

    assert lines(reader) == ["added x", "updated a://2"]


def test_a_mute_suppresses_without_moving_told(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    muted: set[Topic] = {TOOLS}
    subscriber = hub.subscribe(reader.take, "tools", "prompts", uris=["a://b"], is_muted=muted.__contains__)
    knew = catalog.version(TOOLS)
    add(catalog, "a", "b")
    catalog.tools.remove("a")
    catalog.prompts.add({"name": "p"})
    catalog.resources.updated("a://b")
    hub.tick(1000)

    assert lines(reader) == ["added p", "updated a://b"]
    assert hub.told(subscriber, TOOLS) == knew
    assert hub.next_due() is None, "nothing to wake up for"
    muted.clear()
    hub.wake(subscriber)
    assert lines(reader) == ["added b"]
    assert hub.told(subscriber, TOOLS) == catalog.version(TOOLS)


def test_a_mute_of_one_subscriber_leaves_the_others_their_notification(
    catalog: Catalog, hub: Hub, reader: Reader
) -> None:
    silent = Reader()
    hub.subscribe(silent.take, "tools", is_muted=lambda topic: isinstance(topic, Feature))
    hub.subscribe(reader.take, "tools")
    add(catalog, "a")

    assert (lines(silent), lines(reader)) == ([], ["added a"])


# Filters


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (Filter(operations=["added"]), ["added a", "added b"]),
        (Filter(operations=["removed", "updated"]), ["updated a", "removed a"]),
        (Filter(operations=[]), []),
        (Filter(names=["b*", "c"]), ["added b"]),
        (Filter(names=["?"]), []),
        (Filter(operations=["updated"], names=["a"]), ["updated a"]),
        (Filter(), ["added a", "updated a", "added b", "removed a"]),
    ],
)
def test_a_filter_lets_through_what_it_names_and_does_not_apply_to_contents(
    catalog: Catalog, hub: Hub, reader: Reader, filter: Filter, expected: list[str]
) -> None:
    hub.subscribe(reader.take, "tools", uris=["a"], filter=filter)
    add(catalog, "a")
    catalog.tools.update("a", title="A")
    add(catalog, "b")
    catalog.tools.remove("a")
    catalog.resources.updated("a")

    assert lines(reader) == [*expected, "updated a"]


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (Filter(names=["a*"]), ["added ab", "added x://1", "added y://1"]),
        (Filter(uris=["x:**"]), ["added ab", "added b", "added x://1"]),
        (Filter(names=[], uris=["y://*"]), ["added y://1"]),
        (Filter(names=["a*"], also=Filter(names=["*b"], uris=[])), ["added ab"]),
        (Filter(["removed"]).narrowed(Filter(["added"])), []),
        (Filter(names=["b"]).narrowed(None), ["added b", "added x://1", "added y://1"]),
    ],
)
def test_names_are_of_tools_and_prompts_and_uris_of_resources_and_two_filters_both_count(
    catalog: Catalog, hub: Hub, reader: Reader, filter: Filter, expected: list[str]
) -> None:
    hub.subscribe(reader.take, "tools", "prompts", "resources", filter=filter)
    catalog.tools.add({"name": "ab"})
    catalog.prompts.add({"name": "b"})
    catalog.resources.add({"uri": "x://1", "name": "r"})
    catalog.resources.add({"uri": "y://1", "name": "r"})

    assert lines(reader) == expected


def test_what_a_filter_suppresses_does_not_move_told(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    subscriber = hub.subscribe(reader.take, "tools", filter=Filter(operations=["removed"]))
    knew = hub.told(subscriber, TOOLS)
    add(catalog, "a", "b")
    assert lines(reader) == []
    assert hub.told(subscriber, TOOLS) == knew

    catalog.tools.remove("a")
    assert lines(reader) == ["removed a"]
    assert hub.told(subscriber, TOOLS) == catalog.version(TOOLS)


def test_a_filter_sees_the_net_of_what_a_slow_reader_missed(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    reader.is_slow = True
    subscriber = hub.subscribe(reader.take, "tools", filter=Filter(operations=["added"], names=["x*"]))
    add(catalog, "x0", "x1", "x2", "y")
    catalog.tools.update("x1", title="X")
    catalog.tools.remove("x2")
    reader.told()

    hub.wake(subscriber)
    assert lines(reader) == ["added x1"]


def test_who_comes_back_with_a_filter_is_told_only_what_passes(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    knew = catalog.version(TOOLS)
    add(catalog, "a", "b")
    hub.subscribe(reader.take, "tools", filter=Filter(names=["b"]), told={TOOLS: knew})

    assert lines(reader) == ["added b"]


def test_filters_are_the_same_when_they_say_the_same() -> None:
    one, same, other = Filter(["added"], ["a*"]), Filter(["added"], ["a*"]), Filter(["added"])

    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != one.narrowed(other)
    assert one.narrowed(other) == same.narrowed(other)
    with pytest.raises(ValueError, match="moved"):
        Filter(operations=["moved"])
    with pytest.raises(InvalidPattern):
        Filter(names=["{x}"])


def test_a_filter_that_leaves_nothing_of_what_was_missed_says_nothing(
    catalog: Catalog, hub: Hub, reader: Reader
) -> None:
    reader.is_slow = True
    subscriber = hub.subscribe(reader.take, "tools", filter=Filter(names=["x*"]))
    add(catalog, "x0")
    knew = catalog.version(TOOLS)
    add(catalog, "x1", "y")
    catalog.tools.remove("x1")
    reader.told()

    hub.wake(subscriber)
    assert lines(reader) == []
    assert hub.told(subscriber, TOOLS) == knew


# Bounds and alarms


def test_what_is_no_longer_watched_is_no_longer_pending(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    reader.is_slow = True
    subscriber = hub.open(reader.take)
    subscriber.subscribe("tools", "prompts", uris=["a://b", "a://*"])
    catalog.prompts.add({"name": "keeps it busy"})
    add(catalog, "x")
    catalog.resources.updated("a://b")
    subscriber.unsubscribe("tools", uris=["a://b"])
    assert subscriber.pending == 1, "a://b is watched through the pattern still"
    reader.told()

    reader.is_slow = False
    hub.wake(subscriber)
    assert lines(reader) == ["updated a://b"]


def test_a_reader_that_never_reads_costs_no_more_than_the_topics_it_watches(
    catalog: Catalog, hub: Hub, reader: Reader
) -> None:
    reader.is_slow = True
    subscriber = hub.subscribe(reader.take, "tools", uris=["a://b"])
    for number in range(1000):
        catalog.tools.add({"name": "x", "title": str(number)}, replace=True)
        catalog.resources.updated("a://b")
        assert subscriber.pending <= 2
    reader.told()

    hub.wake(subscriber)
    hub.wake(subscriber)
    assert lines(reader) == ["updated x", "updated a://b"]


def test_the_alarm_rings_only_when_tick_is_needed_earlier_than_before(catalog: Catalog, clock: Clock) -> None:
    alarms: list[float] = []
    hub = Hub(catalog, clock=clock, alarm=alarms.append)
    later, sooner = Policy(quiet_gap=5, longest_wait=5), Policy(quiet_gap=2, longest_wait=2)
    hub.subscribe(lambda notification: None, "tools", policy=later)
    hub.subscribe(lambda notification: None, "tools", policy=sooner)
    hub.subscribe(lambda notification: None, "tools", policy=later)
    add(catalog, "a", "b")

    assert alarms == [5, 2]
    assert hub.next_due() == 2
    hub.tick(2)
    assert hub.next_due() == 5
    hub.tick(5)
    assert hub.next_due() is None


@given(st.lists(st.tuples(st.sampled_from([0, 0.125, 0.5, 1.5, 3]), st.sampled_from("ab"), st.booleans()), max_size=30))
def test_whatever_the_pace_the_last_version_is_told_in_the_end_and_no_interval_is_broken(
    steps: list[tuple[float, str, bool]],
) -> None:
    clock, catalog = Clock(), Catalog()
    hub = Hub(catalog, clock=clock)
    heard: list[Notification] = []
    times: list[float] = []

    def take(notification: Notification) -> None:
        heard.append(notification)
        times.append(clock.now)

    hub.subscribe(take, "tools", policy=Policy(quiet_gap=0.5, longest_wait=2, min_interval=1))

    def wait_until(end: float) -> None:
        while (due := hub.next_due()) is not None and due <= end:
            clock.now = max(clock.now, due)
            hub.tick()
        clock.now = end

    for pause, name, there in steps:
        wait_until(clock.now + pause)
        if there:
            catalog.tools.add({"name": name, "title": str(clock.now)}, replace=True)
        elif name in catalog.tools:
            catalog.tools.remove(name)
    wait_until(clock.now + 10)

    told = [EMPTY, *(notification.version.digest for notification in heard)]
    assert told[-1] == catalog.version(TOOLS).digest
    assert all(later != earlier for earlier, later in pairwise(told))
    assert all(later - earlier >= 1 for earlier, later in pairwise(times))
    assert hub.next_due() is None


def test_a_session_with_too_much_pending_is_told_to_refetch_in_place_of_being_closed(
    catalog: Catalog, hub: Hub, reader: Reader
) -> None:
    reader.is_slow = True
    subscriber = hub.open(reader.take, policy=Policy(max_pending=3))
    subscriber.collapses = True
    subscriber.subscribe("resources", uris=["a://**"])
    for number in range(20):
        catalog.resources.updated(f"a://{number}")
    assert subscriber.pending <= 3
    hub.wake(subscriber)

    assert not subscriber.is_closed
    assert [(told.topic, told.complete) for told in reader.heard] == [("a://0", True), (RESOURCES, False)]


def test_who_must_refetch_is_told_so_though_its_filter_rules_out_what_changed() -> None:
    """Its cursor is from the future, so it may know what is yet to be published; when that is out, it does not."""
    catalog = Catalog()
    unpublished: list[tuple[Change, ...]] = []
    catalog.follow(unpublished.append)
    hub = Hub(catalog, follow=False)
    heard: list[Notification] = []
    catalog.tools.add({"name": "other"})
    subscriber = hub.open(heard.append, filter=Filter(names=["mine"]))

    hub.subscribe(subscriber, "tools", told={Feature.TOOLS: Version(7, "of another life")})
    for changes in unpublished:
        hub.publish(changes)

    assert [(told.topic, told.complete) for told in heard] == [(Feature.TOOLS, False)]
