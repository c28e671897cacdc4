"""`Policy.spread`: one change is told to each subscriber at its own time within a window, and only then."""

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


class Herd:
    """Many subscribers of one hub, and when each of them was told what."""

    def __init__(self, count: int, policy: Policy) -> None:
        self.clock = Clock()
        self.catalog = Catalog(policy)
        self.hub = Hub(self.catalog, clock=self.clock)
        self.heard: list[list[tuple[float, Notification]]] = []
        for _ in range(count):
            self.join()

    def join(self) -> None:
        times: list[tuple[float, Notification]] = []
        self.heard.append(times)
        listen: Callable[[Notification], None] = lambda notification: times.append((self.clock.now, notification))  # noqa: E731
        self.hub.open(listen).subscribe("tools", uris=["a://b", "a://urgent"])

    def run(self, until: float) -> None:
        while (due := self.hub.next_due()) is not None and due <= until:
            self.clock.now = max(due, self.clock.now)
            self.hub.tick()
        self.clock.now = until
        self.hub.tick()


def test_notifications_are_spread_evenly_over_the_window() -> None:
    herd = Herd(10_000, Policy(spread=SPREAD))
    add(herd.catalog, "x")
    herd.run(SPREAD)

    assert {len(times) for times in herd.heard} == {1}
    at = [time for [(time, _)] in herd.heard]
    assert 0 <= min(at) <= max(at) < SPREAD
    tenths = Counter(int(time) for time in at)
    assert max(tenths.values()) < 1.05 * 1_000, "each tenth of the window has a tenth of the herd"
    assert len({id(notification) for [(_, notification)] in herd.heard}) == 1, "built once for all"


def test_delay_of_a_subscriber_is_constant() -> None:
    times = []
    for _ in range(2):
        herd = Herd(50, Policy(spread=SPREAD))
        for start in (0.0, 100.0):
            herd.run(start)
            add(herd.catalog, f"x{start}")
        herd.run(200.0)
        times.append([[at for at, _ in each] for each in herd.heard])

    assert times[0] == times[1], "in another run"
    assert all(second == pytest.approx(first + 100.0) for first, second in times[0]), "and for another change"


def test_urgent_changes_are_not_spread() -> None:
    herd = Herd(20, Policy(spread=SPREAD, priorities=(("a://urgent", "urgent"),)))  # type: ignore[arg-type]
    herd.catalog.resources.updated("a://urgent")
    assert [len(times) for times in herd.heard] == [1] * 20

    herd = Herd(20, Policy())
    add(herd.catalog, "x")
    assert [len(times) for times in herd.heard] == [1] * 20
    assert herd.hub.next_due() is None


def test_changes_within_the_window_do_not_postpone_it() -> None:
    herd = Herd(20, Policy(spread=SPREAD))
    for second in range(8):
        herd.run(float(second))
        add(herd.catalog, f"x{second}")
    herd.run(100.0)

    for times in herd.heard:
        assert times[0][0] < SPREAD, "a busy source can't put it off"
        assert [change.key for _, told in times for change in told.changes] == [f"x{second}" for second in range(8)]
    assert max(len(times) for times in herd.heard[10:]) <= 8
    assert min(len(times) for times in herd.heard) == 1, "the last places hear of all at once"


def test_returning_subscriber_is_not_spread() -> None:
    """It asked; and whoever comes back comes at a time of its own."""
    herd = Herd(3, Policy(spread=SPREAD, quiet_gap=1.0))
    known = herd.catalog.version(Feature.TOOLS)
    add(herd.catalog, "x")
    reader = Reader()
    herd.hub.subscribe(reader.take, "tools", told={Feature.TOOLS: known})

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
    herd = Herd(5, policy)
    made: list[float] = []
    for number, pause in enumerate(pauses):
        herd.run(herd.clock.now + pause)
        made.append(herd.clock.now)
        add(herd.catalog, f"x{number}")
    herd.run(herd.clock.now + 100)

    for times in herd.heard:
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
