"""The table of all metrics, and `/metrics` in Prometheus text format.

OpenTelemetry, `/metrics` and docs/telemetry.md use the same table. A metric is read only when it is requested: from the
integers of `tidings.core.counts`, or from the present state of the server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

from tidings.core.counts import BOUNDS, Counts, Latency, SuppressionReason, topic_kind
from tidings.core.hub import Hub
from tidings.core.model import CUT_OFF, Feature, Operation, Reason
from tidings.sdk.source import Source

__all__ = ["LATENCY", "METRICS", "Counters", "Labels", "MeasuredServer", "Metric", "render"]

Labels: TypeAlias = tuple[str, ...]
Values: TypeAlias = Mapping[Labels, float]

_TOPICS = (*(feature.value for feature in Feature), "contents")
_CHANGES = (
    *((feature.value, each) for feature in Feature for each in Operation if each is not Operation.DELETED),
    *(("contents", each) for each in (Operation.UPDATED, Operation.DELETED)),
)
_FAILURES = (
    *("answering", "delivery", "ending", "event", "hook", "items left out", "reading", "store"),
    *("subscriptions left out", "telemetry", "terms", "waking", "webhook"),
)
_EVENTS = ("emitted", "delivered", "failed", "refused", "dropped", "revoked", "verified", "unverified")


class Counters(NamedTuple):
    """The counters of one server. They can outlive the server, because a counter must never decrease."""

    counts: Counts
    rescans: Mapping[str, float]


class MeasuredServer:
    """The objects of one server that metrics are read from."""

    def __init__(self, hub: Hub, source: Source, slow_readers: Callable[[], int]) -> None:
        self.hub = hub
        self.source = source
        self.slow_readers = slow_readers
        self.count_replicas: Callable[[], int] = lambda: 0
        self.count_event_subscriptions: Callable[[], int] = lambda: 0
        self.count_pending_events: Callable[[], int] = lambda: 0
        self.counters = Counters(hub.counts, source.rescans)


Read: TypeAlias = Callable[[Counters, MeasuredServer | None], Values]
"""Returns the values of a metric. The server is None after it was garbage-collected."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    """The name in OpenTelemetry."""
    kind: Literal["counter", "level", "gauge", "histogram"]
    """The values of a level can be added up over processes; those of a gauge can't. Prometheus calls both gauges."""
    unit: str
    help: str
    read: Read
    labels: Labels = ()

    @property
    def prometheus(self) -> str:
        """The name in `/metrics`."""
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        name = self.name.replace(".", "_")
        return f"{name.removesuffix(unit)}{unit}{'_total' if self.kind == 'counter' else ''}"


def _counter(name: str, unit: str, help: str, path: str) -> Metric:
    """Return the metric of a number; `path` is where `Counters` has it."""
    read = attrgetter(path)
    return Metric(name, "counter", unit, help, lambda counters, server: {(): read(counters)})


def _counters(name: str, unit: str, help: str, path: str, label: str, known: Iterable[str]) -> Metric:
    """Return the metric of numbers by label. The known ones exist from the start with the value 0, so that Prometheus
    sees their first increase."""
    read = attrgetter(path)
    # `{**…}` copies the mapping first, because another thread can be counting.
    return Metric(
        name,
        "counter",
        unit,
        help,
        lambda counters, server: {
            (str(key),): value for key, value in {**dict.fromkeys(known, 0), **read(counters)}.items()
        },
        (label,),
    )


def _state(read: Callable[[MeasuredServer], Values]) -> Read:
    return lambda counters, server: {} if server is None else read(server)


def _level(
    name: str,
    unit: str,
    help: str,
    read: Callable[[MeasuredServer], float],
    kind: Literal["level", "gauge"] = "level",
) -> Metric:
    """Return the metric of a number that the server has at the moment."""
    return Metric(name, kind, unit, help, _state(lambda server: {(): read(server)}))


def _changes(counters: Counters, server: MeasuredServer | None) -> Values:
    values: dict[Any, float] = {**dict.fromkeys(_CHANGES, 0), **counters.counts.changes}
    return values


def _subscribers(server: MeasuredServer) -> Values:
    known = {("modern", "http"): 0, ("legacy", "http"): 0}
    return {tuple(kind): number for kind, number in {**known, **server.hub.counts.open}.items()}


def _subscriptions(server: MeasuredServer) -> Values:
    values: Counter[Labels] = Counter({(topic,): 0 for topic in _TOPICS})
    for topic, subscribers in server.hub.count_subscriptions():
        values[topic_kind(topic),] += subscribers
    return values


LATENCY = Metric(
    "tidings.delivery.latency",
    "histogram",
    "s",
    "Seconds from when the policy allows a notification until it is passed to the connection.",
    lambda counters, server: {(): sum(counters.counts.latency.counts)},
)

METRICS = (
    Metric("tidings.changes", "counter", "{change}", "Changes of all topics.", _changes, ("topic", "operation")),
    _counters(
        "tidings.notifications.sent",
        "{notification}",
        "Notifications passed to subscribers.",
        "counts.sent",
        "topic",
        _TOPICS,
    ),
    _counters(
        "tidings.notifications.suppressed",
        "{notification}",
        "Notifications that a subscriber did not get, by reason.",
        "counts.suppressed",
        "reason",
        SuppressionReason,
    ),
    _counter(
        "tidings.notifications.coalesced",
        "{notification}",
        "Notifications merged with a later one because the reader was not ready.",
        "counts.coalesced",
    ),
    _counter("tidings.notifications.bytes", "By", "Bytes of notifications, as written.", "counts.bytes"),
    LATENCY,
    Metric(
        "tidings.subscribers",
        "level",
        "{subscriber}",
        "Open streams, sessions and in-process subscribers.",
        _state(_subscribers),
        ("era", "transport"),
    ),
    _counters(
        "tidings.subscribers.closed",
        "{subscriber}",
        "Closed subscribers, by reason.",
        "counts.closed",
        "reason",
        Reason,
    ),
    Metric(
        "tidings.subscriptions",
        "level",
        "{subscription}",
        "Subscriptions to lists, resource URIs and URI patterns.",
        _state(_subscriptions),
        ("topic",),
    ),
    _level(
        "tidings.mailbox.depth",
        "{topic}",
        "Topics pending in the mailboxes of all subscribers.",
        lambda server: sum(each.pending for each in server.hub),
    ),
    _level(
        "tidings.mailbox.deepest",
        "{topic}",
        "Topics pending in the fullest mailbox.",
        lambda server: max((each.pending for each in server.hub), default=0),
        "gauge",
    ),
    _level(
        "tidings.readers.slow",
        "{stream}",
        "Streams whose client is not reading at the moment.",
        lambda server: server.slow_readers(),
    ),
    _counters(
        "tidings.cutoffs",
        "{stream}",
        "Streams that the server ended because of their reader, by reason.",
        "counts.cut_off",
        "reason",
        sorted(CUT_OFF),
    ),
    _level(
        "tidings.cluster.replicas",
        "{replica}",
        "Replicas of the cluster that are alive; 0 if the server has no cluster or can't reach it.",
        lambda server: server.count_replicas(),
        "gauge",
    ),
    _counters(
        "tidings.events",
        "{event}",
        "MCP Events emitted, and what became of deliveries and of challenges, by outcome.",
        "counts.events",
        "outcome",
        _EVENTS,
    ),
    _level(
        "tidings.events.subscriptions",
        "{subscription}",
        "Subscriptions of MCP Events.",
        lambda server: server.count_event_subscriptions(),
    ),
    _level(
        "tidings.events.pending",
        "{event}",
        "Emitted MCP Events that some subscription still has to get.",
        lambda server: server.count_pending_events(),
    ),
    _level("tidings.journal.size", "{change}", "Changes in the journal.", lambda server: len(server.hub.journal)),
    _counters(
        "tidings.workspace.rescans",
        "{rescan}",
        "Scans of a workspace folder, by outcome.",
        "rescans",
        "outcome",
        ("read", "unchanged", "failed"),
    ),
    _level(
        "tidings.workspace.problems",
        "{file}",
        "Files of a workspace that could not be loaded.",
        lambda server: len(server.source.problems),
    ),
    _counters(
        "tidings.tool.runs", "{run}", "Tool calls, by outcome.", "counts.runs", "outcome", ("ok", "tool_error", "error")
    ),
    _counters(
        "tidings.failures",
        "{failure}",
        "Failures inside Tidings that did not stop the server.",
        "counts.failures",
        "what",
        _FAILURES,
    ),
)


def render(server: MeasuredServer) -> str:
    """Return the body of a response to `/metrics`."""
    return "".join(line + "\n" for metric in METRICS for line in _lines(metric, server))


def _lines(metric: Metric, server: MeasuredServer) -> Iterator[str]:
    name = metric.prometheus
    kind = {"counter": "counter", "histogram": "histogram"}.get(metric.kind, "gauge")
    yield f"# HELP {name} {metric.help}"
    yield f"# TYPE {name} {kind}"
    if metric.kind == "histogram":
        yield from _histogram(name, server.hub.counts.latency)
        return
    for labels, value in sorted(metric.read(server.counters, server).items()):
        pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in zip(metric.labels, labels, strict=True))
        yield f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}"


def _histogram(name: str, latency: Latency) -> Iterator[str]:
    counts = list(accumulate(tuple(latency.counts)))
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), counts, strict=True):
        yield f'{name}_bucket{{le="{bound}"}} {count}'
    yield f"{name}_sum {sum(latency.sums)}"
    yield f"{name}_count {counts[-1]}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
