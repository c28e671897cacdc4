"""The time and order of notifications: quiet gap, rate limit and priorities."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.support.readers import Clock, Reader, add, lines
from tidings import Catalog, Feature, Hub, Notification, Policy, Priority
from tidings.core.digest import EMPTY

TOOLS, PROMPTS, RESOURCES = Feature


def test_quiet_gap_merges_a_burst(catalog: Catalog, hub: Hub, reader: Reader, clock: Clock) -> None:
    hub.subscribe(reader.take, "tools", settings=Policy(quiet_gap=1, longest_wait=10).delivery)
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


def test_longest_wait_ends_a_burst_without_pauses(catalog: Catalog, hub: Hub, reader: Reader, clock: Clock) -> None:
    hub.subscribe(reader.take, "tools", settings=Policy(quiet_gap=1, longest_wait=3).delivery)
    told_at = []
    for step in range(100):
        clock.now = step / 10
        add(catalog, str(step))
        hub.tick()
        if reader.told():
            told_at.append(clock.now)

    assert told_at == [3.0, 6.1, 9.2]


def test_rate_limit_delays_changes_and_sends_the_last(catalog: Catalog, hub: Hub, reader: Reader, clock: Clock) -> None:
    hub.subscribe(reader.take, "tools", uris=["a://b"], settings=Policy(min_interval=10).delivery)
    for clock.now, name in ((0, "a"), (1, "b"), (9, "c")):
        add(catalog, name)
        hub.tick()
    catalog.resources.updated("a://b")
    assert lines(reader) == ["added a", "updated a://b"], "each topic has its own limit"
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
    assert hub.subscribers("tools")[0].mailbox_size == 0
    clock.now = 31
    add(catalog, "e")
    assert lines(reader) == ["added e"]


def test_suppressed_change_does_not_count_for_the_rate_limit(
    catalog: Catalog, hub: Hub, reader: Reader, clock: Clock
) -> None:
    hub.subscribe(reader.take, "tools", settings=Policy(min_interval=10).delivery)
    add(catalog, "a")
    clock.now = 1
    add(catalog, "passing")
    catalog.tools.remove("passing")
    hub.tick(10)
    clock.now = 11
    add(catalog, "b")

    assert lines(reader) == ["added a", "added b"]


def test_urgent_changes_ignore_gap_and_rate_limit(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    policy = Policy(quiet_gap=1, min_interval=60, priorities=(("alarm://*", Priority.URGENT),))
    hub.subscribe(reader.take, uris=["**"], settings=policy.delivery)
    for uri in ("alarm://fire", "a://b", "alarm://fire"):
        catalog.resources.updated(uri)

    assert lines(reader) == ["updated alarm://fire", "updated alarm://fire"]
    hub.tick(1)
    assert lines(reader) == ["updated a://b"]


def test_lists_come_before_contents_and_contents_by_priority(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    policy = Policy(
        priorities=(("low://*", Priority.LOW), ("high://*", Priority.HIGH), ("urgent://*", Priority.URGENT))
    )
    reader.is_slow = True
    subscriber = hub.subscribe(reader.take, "tools", "prompts", uris=["**"], settings=policy.delivery)
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


def test_timer_change_is_reported_only_if_earlier(catalog: Catalog, clock: Clock) -> None:
    timer_changes: list[float] = []
    hub = Hub(catalog, clock=clock)
    hub.on_timer_change = timer_changes.append
    later, sooner = Policy(quiet_gap=5, longest_wait=5), Policy(quiet_gap=2, longest_wait=2)
    hub.subscribe(lambda notification: None, "tools", settings=later.delivery)
    hub.subscribe(lambda notification: None, "tools", settings=sooner.delivery)
    hub.subscribe(lambda notification: None, "tools", settings=later.delivery)
    add(catalog, "a", "b")

    assert timer_changes == [5, 2]
    assert hub.next_due() == 2
    hub.tick(2)
    assert hub.next_due() == 5
    hub.tick(5)
    assert hub.next_due() is None


@given(st.lists(st.tuples(st.sampled_from([0, 0.125, 0.5, 1.5, 3]), st.sampled_from("ab"), st.booleans()), max_size=30))
def test_last_version_is_told_and_intervals_are_kept(
    steps: list[tuple[float, str, bool]],
) -> None:
    clock, catalog = Clock(), Catalog()
    hub = Hub(catalog, clock=clock)
    received: list[Notification] = []
    times: list[float] = []

    def take(notification: Notification) -> None:
        received.append(notification)
        times.append(clock.now)

    hub.subscribe(take, "tools", settings=Policy(quiet_gap=0.5, longest_wait=2, min_interval=1).delivery)

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

    told = [EMPTY, *(notification.version.digest for notification in received)]
    assert told[-1] == catalog.version(TOOLS).digest
    assert all(later != earlier for earlier, later in pairwise(told))
    assert all(later - earlier >= 1 for earlier, later in pairwise(times))
    assert hub.next_due() is None
