"""OpenTelemetry instruments: several servers with one provider, collected servers, and exceptions while reading."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer
from opentelemetry.sdk.metrics import Histogram

from tests.support.telemetry import RecordedTelemetry
from tidings import BUSY, Feature, Live
from tidings.telemetry import Telemetry
from tidings.telemetry.metrics import METRICS, render

COUNTERS = {metric.name for metric in METRICS if metric.kind == "counter"}


class Meters:
    """A meter provider, servers that use it, and the values that it exports."""

    def __init__(self) -> None:
        self._recorded = RecordedTelemetry()
        self._telemetry = Telemetry(meter_provider=self._recorded.meter_provider)

    def live(self, name: str = "one") -> Live:
        return Live(MCPServer(name), telemetry=self._telemetry)

    def read(self) -> dict[str, dict[tuple[Any, ...], float]]:
        """Return values, or the count of a histogram, by metric and labels."""
        return {
            name: {tuple(point["labels"].values()): point.get("value", point.get("count", 0)) for point in points}
            for name, points in self._recorded.metrics().items()
        }


@pytest.fixture
def meters() -> Meters:
    return Meters()


def use(live: Live) -> None:
    """Increase several counters: two changes, two notifications, one closed subscriber, one tool run."""
    with live.hub.subscribe(lambda notification: None, Feature.TOOLS):
        for name in ("a", "b"):
            live.tools.add(print, name=name)
    live.hub.counts.runs["ok"] += 1


def test_servers_of_one_provider_are_added_up(meters: Meters) -> None:
    one, two = servers = [meters.live("one"), meters.live("two")]
    for live in servers:
        live.hub.subscribe(lambda notification: BUSY, Feature.TOOLS)
        for name in ("a", "b"):
            live.tools.add(print, name=name)
    one.tools.add(print, name="c")
    assert (one.hub.counts.changes.total(), two.hub.counts.changes.total()) == (3, 2)
    found = meters.read()
    assert found["tidings.changes"]["tools", "added"] == 5
    assert found["tidings.mailbox.depth"] == {(): 2}
    assert found["tidings.mailbox.deepest"] == {(): 1}, "a gauge is not added up"


def test_collected_server_keeps_its_counters_and_loses_its_levels(meters: Meters) -> None:
    stays, goes = meters.live("stays"), weakref.ref(leaves := meters.live("goes"))
    use(stays)
    use(leaves)
    before = meters.read()
    assert before["tidings.changes"]["tools", "added"] == 4
    leaves.tools.remove("a")  # between two collections
    del leaves
    gc.collect()
    assert goes() is None

    for _ in range(2):
        now = meters.read()
        assert now["tidings.changes"]["tools", "removed"] == 1
        for name in COUNTERS | {"tidings.delivery.latency"}:
            assert all(now[name][labels] >= value for labels, value in before[name].items()), name
        assert now["tidings.journal.size"] == {(): len(stays.hub.journal)}
    use(meters.live("comes"))
    assert meters.read()["tidings.changes"]["tools", "added"] == 6


class _Broken:
    """Raises when a metric is read from it."""

    def fail(self, *args: Any) -> Any:
        raise RuntimeError("no")

    keys = __len__ = fail


def test_exception_in_one_metric_is_counted_logged_once_and_does_not_affect_the_others(
    meters: Meters, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    live = meters.live()
    use(live)
    before = meters.read()
    # The first metric, which also records the latencies; one with a label; and one of the present state.
    monkeypatch.setattr(live.hub.counts, "changes", _Broken())
    monkeypatch.setattr(live.hub.counts, "sent", _Broken())
    monkeypatch.setattr(live.hub, "journal", _Broken())
    broken = {"tidings.changes", "tidings.notifications.sent", "tidings.journal.size"}
    for _ in range(2):
        found = meters.read()
        assert found.keys() | broken == before.keys()
        assert not any(found.get(name) for name in broken)
    monkeypatch.undo()
    after = meters.read()
    assert after["tidings.changes"] == before["tidings.changes"]
    assert after["tidings.failures"]["telemetry",] == 6
    assert [record.name for record in caplog.records] == ["tidings.telemetry.instruments"]


def test_exception_in_the_histogram_does_not_affect_the_counters(
    meters: Meters, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no")

    live = meters.live()
    use(live)
    monkeypatch.setattr(Histogram, "record", fail)
    found = meters.read()
    assert found["tidings.changes"]["tools", "added"] == 2
    assert found["tidings.failures"]["telemetry",] == 1


def test_every_counter_starts_at_zero(meters: Meters) -> None:
    live = meters.live()
    found = meters.read()
    operations = {(topic, each) for topic in ("tools", "prompts", "resources") for each in ("added", "removed")}
    assert found["tidings.changes"].keys() >= operations | {("contents", "updated"), ("contents", "deleted")}
    assert 'tidings_changes_total{topic="contents",operation="deleted"} 0' in render(live.metrics).splitlines()
    for name in COUNTERS:
        assert set(found[name].values()) == {0}, name
