"""The table of metrics, and the same in Prometheus's text format.

Each is read when somebody asks, from the integers that `tidings.counts` keeps and from what is there at that moment.
One table for OpenTelemetry, for `/metrics` and for the documents.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tidings.counts import BOUNDS, Counts, Latency, Why, kind_of
from tidings.model import Feature, Operation, Reason
from tidings.observer import CUT_OFF

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["CONTENT_TYPE", "LATENCY", "METRICS", "Labels", "Metric", "Seen", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels: TypeAlias = tuple[str, ...]
Values: TypeAlias = Mapping[Labels, float]

_KINDS = (*(feature.value for feature in Feature), "contents")
_CHANGES = (
    *((feature.value, each) for feature in Feature for each in Operation if each is not Operation.DELETED),
    *(("contents", each) for each in (Operation.UPDATED, Operation.DELETED)),
)
_FAILURES = (*("answering", "delivery", "hook", "items left out", "reading", "store", "telemetry", "terms", "webhook"),)


class Seen:
    """What is read of one server. Its counts outlive it: what a process has counted once never goes back."""

    def __init__(self, live: Live) -> None:
        self._live = weakref.ref(live)
        self.counts: Counts = live.hub.counts
        self.rescans: Mapping[str, float] = getattr(live.source, "rescans", {})

    @property
    def live(self) -> Live | None:
        """None once it is gone, and with it all that there was of it at one moment."""
        return self._live()


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    """OpenTelemetry's."""
    kind: Literal["counter", "level", "gauge", "histogram"]
    """A level can be added up over processes, a gauge can't; Prometheus calls both gauges."""
    unit: str
    help: str
    labels: Labels
    read: Callable[[Seen], Values]

    @property
    def prometheus(self) -> str:
        """Its name in `/metrics`."""
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        name = self.name.replace(".", "_")
        return f"{name.removesuffix(unit)}{unit}{'_total' if self.kind == 'counter' else ''}"


def _one(read: Callable[[Seen], float]) -> Callable[[Seen], Values]:
    return lambda seen: {(): read(seen)}


def _each(read: Callable[[Seen], Mapping[Any, float]], *known: str) -> Callable[[Seen], Values]:
    """By one label. What is known beforehand is there from the start, at 0, so that its growth can be seen."""
    # Copied before anything else: somebody may be counting meanwhile.
    return lambda seen: {(str(key),): value for key, value in {**dict.fromkeys(known, 0), **read(seen)}.items()}


def _now(read: Callable[[Live], Values]) -> Callable[[Seen], Values]:
    """How things are, and not how often something was."""
    return lambda seen: {} if (live := seen.live) is None else read(live)


def _number(read: Callable[[Live], float]) -> Callable[[Seen], Values]:
    return _now(lambda live: {(): read(live)})


def _changes(seen: Seen) -> Values:
    found: dict[Any, float] = {**dict.fromkeys(_CHANGES, 0), **seen.counts.changes}
    return found


def _open(live: Live) -> Values:
    known = {("modern", "http"): 0, ("legacy", "http"): 0}
    return {tuple(kind): number for kind, number in {**known, **live.hub.counts.open}.items()}


def _subscriptions(live: Live) -> Values:
    found: Counter[Labels] = Counter({(kind,): 0 for kind in _KINDS})
    for topic, watchers in live.hub.watching():
        found[kind_of(topic),] += watchers
    return found


def _problems(live: Live) -> int:
    return len(getattr(live.source, "problems", ()))


LATENCY = Metric(
    "tidings.delivery.latency",
    "histogram",
    "s",
    "Seconds from when a change could be told, as its policy has it, until its notification was handed over.",
    (),
    _one(lambda seen: sum(seen.counts.latency.counts)),
)

METRICS = (
    Metric("tidings.changes", "counter", "{change}", "Changes of all topics.", ("topic", "operation"), _changes),
    Metric(
        "tidings.notifications.sent",
        "counter",
        "{notification}",
        "Notifications handed to subscribers.",
        ("topic",),
        _each(lambda seen: seen.counts.sent, *_KINDS),
    ),
    Metric(
        "tidings.notifications.suppressed",
        "counter",
        "{notification}",
        "Notifications that a subscriber did not get, and why.",
        ("reason",),
        _each(lambda seen: seen.counts.suppressed, *Why),
    ),
    Metric(
        "tidings.notifications.coalesced",
        "counter",
        "{notification}",
        "Notifications that became one with a later one, because their reader was not ready.",
        (),
        _one(lambda seen: seen.counts.coalesced),
    ),
    Metric(
        "tidings.notifications.bytes",
        "counter",
        "By",
        "Bytes of notifications, as they were written.",
        (),
        _one(lambda seen: seen.counts.bytes),
    ),
    LATENCY,
    Metric(
        "tidings.subscribers",
        "level",
        "{subscriber}",
        "Open streams, sessions and in-process subscribers.",
        ("era", "transport"),
        _now(_open),
    ),
    Metric(
        "tidings.subscribers.closed",
        "counter",
        "{subscriber}",
        "Subscribers that are gone, and why.",
        ("reason",),
        _each(lambda seen: seen.counts.closed, *Reason),
    ),
    Metric(
        "tidings.subscriptions",
        "level",
        "{subscription}",
        "What subscribers watch: lists, and URIs and patterns of contents.",
        ("topic",),
        _now(_subscriptions),
    ),
    Metric(
        "tidings.mailbox.depth",
        "level",
        "{topic}",
        "Topics that wait in mailboxes, over all subscribers.",
        (),
        _number(lambda live: sum(each.waiting for each in live.hub)),
    ),
    Metric(
        "tidings.mailbox.deepest",
        "gauge",
        "{topic}",
        "Topics that wait in the fullest mailbox.",
        (),
        _number(lambda live: max((each.waiting for each in live.hub), default=0)),
    ),
    Metric(
        "tidings.readers.slow",
        "level",
        "{stream}",
        "Streams whose reader does not read just now.",
        (),
        _number(lambda live: live.listen.slow + live.splice.slow),
    ),
    Metric(
        "tidings.cutoffs",
        "counter",
        "{stream}",
        "Streams that were ended because of their reader, and why.",
        ("reason",),
        _each(lambda seen: seen.counts.cut_off, *sorted(CUT_OFF)),
    ),
    Metric(
        "tidings.journal.size",
        "level",
        "{change}",
        "Changes in the journal.",
        (),
        _number(lambda live: len(live.hub.journal)),
    ),
    Metric(
        "tidings.workspace.rescans",
        "counter",
        "{rescan}",
        "Looks through the folder of a workspace, and whether files were read anew.",
        ("outcome",),
        _each(lambda seen: seen.rescans, "read", "unchanged", "failed"),
    ),
    Metric(
        "tidings.workspace.problems",
        "level",
        "{file}",
        "Files of a workspace that could not be loaded.",
        (),
        _number(_problems),
    ),
    Metric(
        "tidings.tool.runs",
        "counter",
        "{run}",
        "Calls of tools, and how they ended.",
        ("outcome",),
        _each(lambda seen: seen.counts.runs, "ok", "tool_error", "error"),
    ),
    Metric(
        "tidings.failures",
        "counter",
        "{failure}",
        "What failed inside Tidings, and was survived.",
        ("what",),
        _each(lambda seen: seen.counts.failures, *_FAILURES),
    ),
)


def render(live: Live) -> str:
    """What `/metrics` answers."""
    seen = Seen(live)
    return "".join(line + "\n" for metric in METRICS for line in _lines(metric, seen))


def _lines(metric: Metric, seen: Seen) -> Iterator[str]:
    name = metric.prometheus
    kind = {"counter": "counter", "histogram": "histogram"}.get(metric.kind, "gauge")
    yield f"# HELP {name} {metric.help}"
    yield f"# TYPE {name} {kind}"
    if metric.kind == "histogram":
        yield from _histogram(name, seen.counts.latency)
        return
    for labels, value in sorted(metric.read(seen).items()):
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
