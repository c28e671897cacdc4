"""OpenTelemetry's instruments: several servers under one provider, servers that go, and readings that fail."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tidings import BUSY, Feature, Live
from tidings.telemetry import Telemetry
from tidings.telemetry.metrics import METRICS, render

COUNTERS = {metric.name for metric in METRICS if metric.kind == "counter"}


class Meters:
    """A provider of its own, and what its reader reads."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.telemetry = Telemetry(meter_provider=MeterProvider([self._reader], shutdown_on_exit=False))

    def live(self, name: str = "one") -> Live:
        return Live(MCPServer(name), telemetry=self.telemetry)

    def read(self) -> dict[str, dict[tuple[Any, ...], float]]:
        """The value of each point, or how often a histogram was told one, by metric and labels."""
        data = self._reader.get_metrics_data()
        return {
            metric.name: {
                tuple((point.attributes or {}).values()): getattr(point, "value", getattr(point, "count", 0))
                for point in metric.data.data_points
            }
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def meters() -> Meters:
    return Meters()


def busy(live: Live) -> None:
    """A life in which every counter that can grows."""
    with live.hub.subscribe(lambda notification: None, Feature.TOOLS):
        for name in ("a", "b"):
            live.tools.add(print, name=name)
    live.hub.counts.runs["ok"] += 1


def test_two_servers_may_share_one_telemetry(meters: Meters) -> None:
    one, two = meters.live("one"), meters.live("two")
    one.hub.subscribe(lambda notification: None, Feature.TOOLS)
    assert (sum(one.hub.counts.open.values()), sum(two.hub.counts.open.values())) == (1, 0)
    one.tools.add(print, name="p")
    assert (one.hub.counts.changes.total(), two.hub.counts.changes.total()) == (1, 0)
    assert meters.read()["tidings.changes"]["tools", "added"] == 1


def test_a_server_that_is_collected_takes_nothing_back_that_was_counted(meters: Meters) -> None:
    stays, goes = meters.live("stays"), weakref.ref(leaves := meters.live("goes"))
    busy(stays)
    busy(leaves)
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
            assert {labels: now[name][labels] >= value for labels, value in before[name].items()} == dict.fromkeys(
                before[name], True
            ), name
        # What is only there while it is there has gone with it.
        assert now["tidings.journal.size"] == {(): len(stays.hub.journal)}
    busy(meters.live("comes"))
    assert meters.read()["tidings.changes"]["tools", "added"] == 6


def test_latencies_are_recorded_of_a_server_that_went_between_two_collections(meters: Meters) -> None:
    live = meters.live()
    meters.read()
    busy(live)
    del live
    gc.collect()
    assert meters.read()["tidings.delivery.latency"] == {(): 2}


def test_the_fullest_mailbox_of_several_servers_is_one_of_them_and_no_sum(meters: Meters) -> None:
    servers = [meters.live(name) for name in ("one", "two")]
    for live in servers:
        live.hub.subscribe(lambda notification: BUSY, Feature.TOOLS)
        for name in ("a", "b"):
            live.tools.add(print, name=name)
    found = meters.read()
    assert found["tidings.mailbox.depth"] == {(): 2}
    assert found["tidings.mailbox.deepest"] == {(): 1}


class _Broken:
    """In place of what a metric is read from."""

    def fail(self, *args: Any) -> Any:
        raise RuntimeError("no")

    keys = __len__ = fail


def test_a_reading_that_fails_takes_no_other_down_and_is_counted_and_said_once(
    meters: Meters, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    live = meters.live()
    busy(live)
    whole = meters.read()
    # The first one, on whose turn the latencies are recorded; one by label; and one that looks at the server itself.
    monkeypatch.setattr(live.hub.counts, "changes", _Broken())
    monkeypatch.setattr(live.hub.counts, "sent", _Broken())
    monkeypatch.setattr(live.hub.news, "journal", _Broken())
    broken = {"tidings.changes", "tidings.notifications.sent", "tidings.journal.size"}
    for _ in range(2):
        found = meters.read()
        assert found.keys() | broken == whole.keys()
        assert not any(found.get(name) for name in broken)
    monkeypatch.undo()
    healed = meters.read()
    assert healed["tidings.changes"] == whole["tidings.changes"]
    assert healed["tidings.failures"]["telemetry",] == 6
    assert [record.getMessage() for record in caplog.records] == [
        "a metric failed; further failures are not logged: RuntimeError('no')"
    ]


def test_a_histogram_that_fails_leaves_the_counters_alone(meters: Meters, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.metrics import Histogram

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no")

    live = meters.live()
    busy(live)
    monkeypatch.setattr(Histogram, "record", fail)
    found = meters.read()
    assert found["tidings.changes"]["tools", "added"] == 2
    assert found["tidings.failures"]["telemetry",] == 1


def test_every_counter_is_there_from_the_start_at_zero(meters: Meters) -> None:
    live = meters.live()
    lines = render(live.metrics).splitlines()
    for topic in ("tools", "prompts", "resources"):
        for operation in ("added", "removed", "updated"):
            assert f'tidings_changes_total{{topic="{topic}",operation="{operation}"}} 0' in lines
    for operation in ("updated", "deleted"):
        assert f'tidings_changes_total{{topic="contents",operation="{operation}"}} 0' in lines
    found = meters.read()
    for name in COUNTERS:
        assert found[name], name
        assert set(found[name].values()) == {0}, name
