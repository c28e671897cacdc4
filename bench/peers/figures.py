"""Compute medians, spreads and ratios of the samples, and compare them with the targets.

A sample is one value of one figure of one peer in one round. A figure has a name and usually a size: `delivery/1000` is
the CPU per delivery with 1,000 streams.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

__all__ = ["GROUPS", "TARGETS", "Figure", "Group", "Samples", "Target", "Verdict", "written"]


@dataclass
class Samples:
    """The values of all rounds, by peer and figure."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, peer: str, notes: dict[str, float]) -> None:
        for key, value in notes.items():
            self.values.setdefault(peer, {}).setdefault(key, []).append(value)

    def median(self, peer: str, key: str) -> float | None:
        found = self.values.get(peer, {}).get(key)
        return statistics.median(found) if found else None

    def spread(self, peer: str, key: str) -> tuple[float, float] | None:
        found = self.values.get(peer, {}).get(key)
        return (min(found), max(found)) if found else None

    def ratio(self, over: tuple[str, str], under: tuple[str, str]) -> float | None:
        top, bottom = self.median(*over), self.median(*under)
        return top / bottom if top is not None and bottom else None

    def ratios(self, over: tuple[str, str], under: tuple[str, str]) -> list[float]:
        """Return the ratio of each round in which both were measured."""
        top, bottom = (self.values.get(peer, {}).get(key, []) for peer, key in (over, under))
        return [first / second for first, second in zip(top, bottom, strict=False) if second]

    def sizes(self, name: str) -> list[int]:
        """Return the sizes at which a figure was measured."""
        keys = {key for notes in self.values.values() for key in notes}
        return sorted(int(key.partition("/")[2]) for key in keys if key.partition("/")[0] == name and "/" in key)


@dataclass(frozen=True)
class Figure:
    name: str
    what: str
    """The description, with `{}` for the size, if it has one."""
    unit: str
    more_is_better: bool = False

    def rows(self, samples: Samples) -> Iterator[tuple[str, str]]:
        """Yield the key and the description for each size."""
        if "{}" not in self.what:
            yield self.name, self.what
            return
        for size in samples.sizes(self.name):
            yield f"{self.name}/{size}", self.what.format(f"{size:,}")


@dataclass(frozen=True)
class Group:
    title: str
    figures: tuple[Figure, ...]


GROUPS = (
    Group(
        "Fan-out to listen streams",
        (
            Figure("last", "last of {} streams notified", "ms"),
            Figure("delivery", "CPU per delivery, {} streams", "µs"),
            Figure("memory", "memory per stream, {} streams", "kB"),
            Figure("opens", "opens/s, to {} streams", "/s", more_is_better=True),
            Figure("open", "CPU per open, to {} streams", "µs"),
            Figure("burst", "20 changes back to back, {} streams, until all have the last", "ms"),
            Figure("burst-cpu", "the same, CPU per change and stream, {} streams", "µs"),
            Figure("burst-told", "the same, notifications to each of {} streams", ""),
            Figure("uri", "one URI of 10,000 subscribed ones", "ms"),
            Figure("uri-cpu", "the same, CPU per change", "µs"),
            Figure("others", "CPU per delivery beside 10,000 other streams, over alone", "×"),
        ),
    ),
    Group(
        "Lists, and many clients that fetch them at once",
        (
            Figure("lists", "tools/list, {} tools", "/s", more_is_better=True),
            Figure("list", "the same, CPU per list, {} tools", "µs"),
            Figure("herd-10", "one change until {} clients have the new list of 10 tools", "ms"),
            Figure("herd-10-cpu", "the same, CPU per client, {} clients", "µs"),
            Figure("herd-10-stale", "the same, responses with the old list, {} clients", ""),
            Figure("herd-10-again", "the same, reconnects, {} clients", ""),
            Figure("herd-100", "one change until {} clients have the new list of 100 tools", "ms"),
            Figure("herd-100-cpu", "the same, CPU per client, {} clients", "µs"),
            Figure("herd-100-stale", "the same, responses with the old list, {} clients", ""),
            Figure("herd-100-again", "the same, reconnects, {} clients", ""),
        ),
    ),
    Group(
        "Legacy sessions",
        (
            Figure("legacy-last", "last of {} GET streams notified", "ms"),
            Figure("legacy-delivery", "CPU per delivery, {} GET streams", "µs"),
            Figure("legacy-memory", "memory per session, {} sessions", "kB"),
            Figure("legacy-opens", "sessions/s, to {}", "/s", more_is_better=True),
            Figure("legacy-open", "CPU per session, to {}", "µs"),
            Figure("legacy-lists", "tools/list, {} tools", "/s", more_is_better=True),
            Figure("legacy-list", "the same, CPU per list, {} tools", "µs"),
            Figure("legacy-herd-10", "one change until {} sessions have the new list of 10 tools", "ms"),
        ),
    ),
    Group(
        "stdio",
        (
            Figure("stdio-lists", "tools/list, 10 tools, 16 in flight", "/s", more_is_better=True),
            Figure("stdio-list", "the same, CPU per list", "µs"),
            Figure("stdio-notifications", "notifications", "/s", more_is_better=True),
            Figure("stdio-notification", "the same, CPU per notification", "µs"),
            Figure("start", "start to the first response", "ms"),
            Figure("heard", "file change to notification", "ms"),
        ),
    ),
    Group(
        "The load client",
        (
            Figure("client", "its CPU per delivery, {} streams", "µs"),
            Figure("client-busy", "its load, fan-out to {} streams", "%"),
            Figure("list-client", "its CPU per list, {} tools", "µs"),
            Figure("list-client-busy", "its load, lists of {} tools", "%"),
            Figure("stdio-client-busy", "its load, lists on stdio", "%"),
            Figure("stdio-told-client-busy", "its load, notifications on stdio", "%"),
        ),
    ),
)


@dataclass(frozen=True)
class Verdict:
    value: float
    low: float
    high: float
    is_met: bool


@dataclass(frozen=True)
class Target:
    """A bound on the ratio of two medians, or on one median."""

    requirement: str
    """Its id in tests/requirements.md."""
    what: str
    over: tuple[str, str]
    under: tuple[str, str] | None
    least: float | None = None
    most: float | None = None
    unit: str = "×"

    @property
    def bound(self) -> str:
        number = f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"
        return number + (self.unit if self.unit == "×" else f" {self.unit}")

    def verdict(self, samples: Samples) -> Verdict | None:
        """Return the value and whether it meets the bound; None if it was not measured."""
        if self.under is None:
            value, each = samples.median(*self.over), samples.values.get(self.over[0], {}).get(self.over[1], [])
        else:
            value, each = samples.ratio(self.over, self.under), samples.ratios(self.over, self.under)
        if value is None:
            return None
        each = each or [value]
        return Verdict(value, min(each), max(each), self._is_met(value))

    def _is_met(self, value: float) -> bool:
        return value >= self.least if self.least is not None else value <= (self.most or 0)


def _cheaper(requirement: str, what: str, peer: str, key: str, least: float, than: str = "sdk") -> Target:
    """Require that the cost or time of another peer is at least `least` times that of Tidings."""
    return Target(requirement, what, (than, key), (peer, key), least=least)


def _faster(requirement: str, what: str, peer: str, key: str, least: float, than: str = "sdk") -> Target:
    """Require that the rate of Tidings is at least `least` times that of another peer."""
    return Target(requirement, what, (peer, key), (than, key), least=least)


def _near_bare(requirement: str, tools: int) -> Iterator[Target]:
    """Require that a list takes at most 1.3 times the CPU of an app that only sends the same bytes."""
    key = f"list/{tools}"
    for bare, app in (("bare", "ASGI"), ("starlette", "Starlette")):
        for peer, name in (("asgi", "plain ASGI"), ("own", "own process")):
            what = f"{name}: CPU per list over that of a bare {app} app, {tools:,} tools"
            yield Target(requirement, what, (peer, key), (bare, key), most=1.3)


def _ahead(keys: Iterable[tuple[str, bool]]) -> Iterator[Target]:
    for key, more_is_better in keys:
        make = _faster if more_is_better else _cheaper
        yield make("S36", f"plain ASGI ahead of the TypeScript SDK: {key}", "asgi", key, 1, than="typescript")


TARGETS = (
    _cheaper("S23", "plain ASGI: time until the last of 1,000, the SDK's over ours", "asgi", "last/1000", 7),
    _cheaper("S24", "plain ASGI: CPU per delivery, the SDK's over ours, 1,000 streams", "asgi", "delivery/1000", 8),
    Target("S25", "plain ASGI: CPU per delivery over the floor's", ("asgi", "delivery/1000"),
           ("floor", "delivery/1000"), most=1.8),
    _cheaper("S26", "plain ASGI: CPU per delivery, the SDK's over ours, 5,000 streams", "asgi", "delivery/5000", 18),
    _cheaper("S27", "plain ASGI: memory per stream, the SDK's over ours", "asgi", "memory/1000", 3),
    _cheaper("S28", "plain ASGI: CPU per open, the SDK's over ours", "asgi", "open/1000", 5),
    _cheaper("S29", "plain ASGI: legacy, CPU per delivery, the SDK's over ours", "asgi", "legacy-delivery/1000", 6),
    _cheaper("S30", "plain ASGI: CPU per list, the SDK's over ours, 10 tools", "asgi", "list/10", 15),
    _cheaper("S31", "plain ASGI: CPU per list, the SDK's over ours, 100 tools", "asgi", "list/100", 100),
    _cheaper("S32", "plain ASGI: CPU per list, the SDK's over ours, 1,000 tools", "asgi", "list/1000", 400),
    _faster("S33", "plain ASGI: legacy tools/list rate, 10 tools", "asgi", "legacy-lists/10", 3),
    _faster("S33", "plain ASGI: legacy tools/list rate, 100 tools", "asgi", "legacy-lists/100", 3),
    _cheaper("S34", "plain ASGI: 1,000 clients fetch 10 tools, the SDK's time over ours", "asgi", "herd-10/1000", 15),
    _cheaper("S35", "plain ASGI: 1,000 clients fetch 100 tools, the SDK's time over ours", "asgi", "herd-100/1000", 50),
    _cheaper("S41", "own process: time until the last of 1,000, the SDK's over ours", "own", "last/1000", 9),
    _cheaper("S42", "own process: the same, the floor's over ours", "own", "last/1000", 0.75, "floor"),
    _cheaper("S42", "own process: CPU per delivery, the floor's over ours", "own", "delivery/1000", 0.75, "floor"),
    _cheaper("S44", "own process: the same, 15,000 streams", "own", "delivery/15000", 0.75, "floor"),
    Target("S43", "own process: memory of a parked stream", ("own", "memory/5000"), None, most=4, unit="kB"),
    _cheaper("S45", "own process: CPU per open, the SDK's over ours", "own", "open/1000", 5),
    *_near_bare("S51", 10),
    *_near_bare("S52", 100),
    _cheaper("S53", "own process: 1,000 clients fetch 10 tools, the SDK's time over ours", "own", "herd-10/1000", 15),
    _cheaper("S54", "own process: 1,000 clients fetch 100 tools, the SDK's time over ours", "own", "herd-100/1000", 50),
    _faster("S55", "stdio: notifications/s", "own", "stdio-notifications", 10),
    _faster("S56", "stdio: lists/s", "own", "stdio-lists", 3),
    Target("S57", "own process: CPU per delivery, 5,000 streams over 1,000", ("own", "delivery/5000"),
           ("own", "delivery/1000"), most=1.25),
    Target("S58", "plain ASGI: CPU per delivery beside 10,000 other streams, over alone", ("asgi", "others"),
           None, most=1.2),
    Target("S58", "own process: the same", ("own", "others"), None, most=1.2),
    _cheaper("S59", "stdio: start to the first response, the bare SDK's over ours", "own", "start", 1),
    *_near_bare("S62", 1000),
    *_ahead(
        (
            ("last/1000", False),
            ("delivery/1000", False),
            ("delivery/5000", False),
            ("memory/1000", False),
            ("open/1000", False),
            ("legacy-delivery/1000", False),
            ("lists/10", True),
            ("lists/100", True),
            ("lists/1000", True),
            ("legacy-lists/10", True),
            ("legacy-lists/100", True),
            ("herd-10/1000", False),
            ("herd-100/1000", False),
        )
    ),
)  # fmt: skip


def written(value: float | None, unit: str = "") -> str:
    """Format a value with three significant digits and its unit."""
    if value is None:
        return ""
    if value >= 100:
        text = f"{value:,.0f}"
    elif value >= 10:
        text = f"{value:.1f}"
    else:
        text = f"{value:.2f}"
    return f"{text} {unit}" if unit and unit != "×" else f"{text}{unit}"
