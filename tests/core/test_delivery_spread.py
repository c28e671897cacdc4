"""`Policy.spread`: each subscriber is notified of a change at its own time within a window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.client import Client
from mcp.server import CacheHint, MCPServer

from tests.support.readers import Clock, Reader, add
from tidings import Catalog, Hub, Live, Notification, Policy
from tidings.core.model import Feature

SPREAD = 10.0


class Subscribers:
    """Many subscribers of one hub, with the times of their notifications."""

    def __init__(self, count: int, policy: Policy) -> None:
        self.clock = Clock()
        self.catalog = Catalog(policy)
        self.hub = Hub(self.catalog, clock=self.clock)
        self.received: list[list[tuple[float, Notification]]] = []
        for _ in range(count):
            self.join()

    def join(self) -> None:
        times: list[tuple[float, Notification]] = []
        self.received.append(times)
        listen: Callable[[Notification], None] = lambda notification: times.append((self.clock.now, notification))  # noqa: E731
        self.hub.open(listen).subscribe("tools", uris=["a://b", "a://urgent"])

    def run(self, until: float) -> None:
        while (due := self.hub.next_due()) is not None and due <= until:
            self.clock.now = max(due, self.clock.now)
            self.hub.tick()
        self.clock.now = until
        self.hub.tick()


def test_notifications_are_spread_evenly_over_the_window() -> None:
    subscribers = Subscribers(10_000, Policy(spread=SPREAD))
    add(subscribers.catalog, "x")
    subscribers.run(SPREAD)

    assert {len(times) for times in subscribers.received} == {1}
    at = [time for [(time, _)] in subscribers.received]
    assert 0 <= min(at) <= max(at) < SPREAD
    tenths = Counter(int(time) for time in at)
    assert max(tenths.values()) < 1.05 * 1_000, "a tenth of the subscribers in each tenth of the window"
    assert len({id(notification) for [(_, notification)] in subscribers.received}) == 1, "built once for all"


def test_delay_of_a_subscriber_is_constant() -> None:
    times = []
    for _ in range(2):
        subscribers = Subscribers(50, Policy(spread=SPREAD))
        for start in (0.0, 100.0):
            subscribers.run(start)
            add(subscribers.catalog, f"x{start}")
        subscribers.run(200.0)
        times.append([[at for at, _ in each] for each in subscribers.received])

    assert times[0] == times[1], "in another run"
    assert all(second == pytest.approx(first + 100.0) for first, second in times[0]), "and for another change"


def test_urgent_changes_are_not_spread() -> None:
    subscribers = Subscribers(20, Policy(spread=SPREAD, priorities=(("a://urgent", "urgent"),)))  # type: ignore[arg-type]
    subscribers.catalog.resources.updated("a://urgent")
    assert [len(times) for times in subscribers.received] == [1] * 20

    subscribers = Subscribers(20, Policy())
    add(subscribers.catalog, "x")
    assert [len(times) for times in subscribers.received] == [1] * 20
    assert subscribers.hub.next_due() is None


def test_changes_within_the_window_do_not_postpone_it() -> None:
    subscribers = Subscribers(20, Policy(spread=SPREAD))
    for second in range(8):
        subscribers.run(float(second))
        add(subscribers.catalog, f"x{second}")
    subscribers.run(100.0)

    for times in subscribers.received:
        assert times[0][0] < SPREAD, "further changes do not postpone it"
        assert [change.key for _, told in times for change in told.changes] == [f"x{second}" for second in range(8)]
    assert max(len(times) for times in subscribers.received[10:]) <= 8
    assert min(len(times) for times in subscribers.received) == 1, (
        "the last subscribers get all changes in one notification"
    )


def test_returning_subscriber_is_not_spread() -> None:
    """Returning clients come at different times anyway."""
    subscribers = Subscribers(3, Policy(spread=SPREAD, quiet_gap=1.0))
    known = subscribers.catalog.version(Feature.TOOLS)
    add(subscribers.catalog, "x")
    reader = Reader()
    subscribers.hub.subscribe(reader.take, "tools", told={Feature.TOOLS: known})

    assert reader.told() == [["added x"]]


@given(
    st.lists(st.floats(0, 5), min_size=1, max_size=20),
    st.floats(0, 3),
    st.floats(0, 2),
    st.sampled_from([0.0, 0.5]),
)
def test_delay_is_at_most_longest_wait_and_spread(
    pauses: list[float], spread: float, gap: float, interval: float
) -> None:
    policy = Policy(spread=spread, quiet_gap=gap, longest_wait=2.0, min_interval=interval)
    subscribers = Subscribers(5, policy)
    made: list[float] = []
    for number, pause in enumerate(pauses):
        subscribers.run(subscribers.clock.now + pause)
        made.append(subscribers.clock.now)
        add(subscribers.catalog, f"x{number}")
    subscribers.run(subscribers.clock.now + 100)

    for times in subscribers.received:
        told = {change.key: at for at, notification in times for change in notification.changes}
        for number, at in enumerate(made):
            assert told[f"x{number}"] - at <= 2.0 + spread + interval + 1e-6


@pytest.mark.parametrize(
    ("ttl", "spread", "own", "expected"),
    [
        (0, 0, None, 0),
        (5, 0, None, 5000),
        (0, 2.5, None, 2500),
        (5, 2.5, None, 5000),
        (5, 0, 100, 100),
        (5, 2.5, 100, 2500),
        (0, 2.5, 9000, 9000),
        (0, 2.5, 0, 2500),
    ],
)
def test_list_ttl_is_at_least_the_spread(ttl: float, spread: float, own: int | None, expected: int) -> None:
    assert Policy(list_ttl=ttl, spread=spread).ttl_ms(own) == expected


@pytest.mark.anyio
async def test_shorter_ttl_of_the_server_is_raised_to_the_spread() -> None:
    hints: Any = {"tools/list": CacheHint(ttl_ms=100), "prompts/list": CacheHint(ttl_ms=9000)}
    server = MCPServer("hinted", cache_hints=hints)
    Live(server, policy=Policy(spread=2.5), telemetry=False)
    async with Client(server) as client:
        assert (await client.list_tools()).ttl_ms == 2500
        assert (await client.list_prompts()).ttl_ms == 9000
