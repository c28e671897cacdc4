"""What the samples amount to: medians, spreads, ratios, and the targets that they are held against.

A sample is one value of one figure of one peer in one round. Figures have a name and mostly a size: `delivery/1000` is
the CPU of one delivery at 1,000 streams.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

__all__ = ["GROUPS", "TARGETS", "Figure", "Group", "Samples", "Target", "Verdict", "written"]


@dataclass
class Samples:
    """By peer, then by figure: what was measured in each round."""

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
        """Of each round in which both were measured."""
        top, bottom = (self.values.get(peer, {}).get(key, []) for peer, key in (over, under))
        return [first / second for first, second in zip(top, bottom, strict=False) if second]

    def sizes(self, name: str) -> list[int]:
        """The sizes that a figure was taken at."""
        keys = {key for notes in self.values.values() for key in notes}
        return sorted(int(key.partition("/")[2]) for key in keys if key.partition("/")[0] == name and "/" in key)


@dataclass(frozen=True)
class Figure:
    name: str
    what: str
    """With `{}` for the size, if it has one."""
    unit: str
    more_is_better: bool = False

    def rows(self, samples: Samples) -> Iterator[tuple[str, str]]:
        """The key and the wording of each size."""
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
            Figure("last", "last of {} streams told", "ms"),
            Figure("delivery", "CPU per delivery, {} streams", "µs"),
            Figure("memory", "memory per stream, {} streams", "kB"),
            Figure("opens", "opens/s, to {} streams", "/s", more_is_better=True),
            Figure("open", "CPU per open, to {} streams", "µs"),
            Figure("burst", "20 changes back to back, {} streams, until all know the last", "ms"),
            Figure("burst-cpu", "the same, CPU per change and stream, {} streams", "µs"),
            Figure("burst-told", "the same, notifications to each of {} streams", ""),
            Figure("uri", "one URI of 10,000 subscribed ones", "ms"),
            Figure("uri-cpu", "the same, CPU per change", "µs"),
            Figure("others", "CPU per delivery beside 10,000 other streams, over alone", "×"),
        ),
    ),
    Group(
        "Lists, and the herd that asks for them",
        (
            Figure("lists", "tools/list, {} tools", "/s", more_is_better=True),
            Figure("list", "the same, CPU per list, {} tools", "µs"),
            Figure("herd-10", "herd: one change until {} clients hold 10 tools", "ms"),
            Figure("herd-10-cpu", "the same, CPU per client, {} clients", "µs"),
            Figure("herd-10-stale", "the same, answers with the old list, {} clients", ""),
            Figure("herd-10-again", "the same, connections that had to be made anew, {} clients", ""),
            Figure("herd-100", "herd: one change until {} clients hold 100 tools", "ms"),
            Figure("herd-100-cpu", "the same, CPU per client, {} clients", "µs"),
            Figure("herd-100-stale", "the same, answers with the old list, {} clients", ""),
            Figure("herd-100-again", "the same, connections that had to be made anew, {} clients", ""),
        ),
    ),
    Group(
        "Legacy sessions",
        (
            Figure("legacy-last", "last of {} GET streams told", "ms"),
            Figure("legacy-delivery", "CPU per delivery, {} GET streams", "µs"),
            Figure("legacy-memory", "memory per session, {} sessions", "kB"),
            Figure("legacy-opens", "sessions/s, to {}", "/s", more_is_better=True),
            Figure("legacy-open", "CPU per session, to {}", "µs"),
            Figure("legacy-lists", "tools/list, {} tools", "/s", more_is_better=True),
            Figure("legacy-list", "the same, CPU per list, {} tools", "µs"),
            Figure("legacy-herd-10", "herd: one change until {} sessions hold 10 tools", "ms"),
        ),
    ),
    Group(
        "stdio",
        (
            Figure("stdio-lists", "tools/list, 10 tools, 16 in flight", "/s", more_is_better=True),
            Figure("stdio-list", "the same, CPU per list", "µs"),
            Figure("stdio-notifications", "notifications", "/s", more_is_better=True),
            Figure("stdio-notification", "the same, CPU per notification", "µs"),
            Figure("start", "start to the first answer", "ms"),
            Figure("heard", "file change to notification", "ms"),
        ),
    ),
    Group(
        "The load client",
        (
            Figure("client", "it has to do, per delivery, {} streams", "µs"),
            Figure("client-busy", "it has to do, while {} streams are told", "%"),
            Figure("list-client", "it has to do, per list, {} tools", "µs"),
            Figure("list-client-busy", "it has to do, while it lists {} tools", "%"),
            Figure("stdio-client-busy", "it has to do, lists on stdio", "%"),
            Figure("stdio-told-client-busy", "it has to do, notifications on stdio", "%"),
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
    """One median over another, or one alone, and what it has to be."""

    requirement: str
    """Its id in docs/requirements.md."""
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
        """None if something of it was not measured."""
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
    """Another's cost or time over ours."""
    return Target(requirement, what, (than, key), (peer, key), least=least)


def _faster(requirement: str, what: str, peer: str, key: str, least: float, than: str = "sdk") -> Target:
    """Our rate over another's."""
    return Target(requirement, what, (peer, key), (than, key), least=least)


def _near_bare(requirement: str, tools: int) -> Iterator[Target]:
    """Our CPU per list over that of an ASGI app that only sends the same bytes."""
    key = f"list/{tools}"
    for peer, name in (("asgi", "plain ASGI"), ("own", "own process")):
        what = f"{name}: CPU per list, {tools} tools, over a bare ASGI app's"
        yield Target(requirement, what, (peer, key), ("bare", key), most=1.3)


def _ahead(keys: Iterable[tuple[str, bool]]) -> Iterator[Target]:
    for key, more_is_better in keys:
        make = _faster if more_is_better else _cheaper
        yield make("S36", f"plain ASGI ahead of the TypeScript SDK: {key}", "asgi", key, 1, than="typescript")


TARGETS = (
    _cheaper("S23", "plain ASGI: last of 1,000 sooner than the SDK's", "asgi", "last/1000", 7),
    _cheaper("S24", "plain ASGI: CPU per delivery, the SDK's over ours, 1,000 streams", "asgi", "delivery/1000", 8),
    Target("S25", "plain ASGI: CPU per delivery over the floor's", ("asgi", "delivery/1000"),
           ("floor", "delivery/1000"), most=1.8),
    _cheaper("S26", "plain ASGI: the same, the SDK's over ours, 5,000 streams", "asgi", "delivery/5000", 18),
    _cheaper("S27", "plain ASGI: memory per stream, the SDK's over ours", "asgi", "memory/1000", 3),
    _cheaper("S28", "plain ASGI: CPU per open, the SDK's over ours", "asgi", "open/1000", 5),
    _cheaper("S29", "plain ASGI: legacy, CPU per delivery, the SDK's over ours", "asgi", "legacy-delivery/1000", 6),
    _cheaper("S30", "plain ASGI: CPU per list, 10 tools, the SDK's over ours", "asgi", "list/10", 15),
    _cheaper("S31", "plain ASGI: CPU per list, 100 tools, the SDK's over ours", "asgi", "list/100", 100),
    _cheaper("S32", "plain ASGI: CPU per list, 1,000 tools, the SDK's over ours", "asgi", "list/1000", 400),
    _faster("S33", "plain ASGI: legacy tools/list rate, 10 tools", "asgi", "legacy-lists/10", 3),
    _faster("S33", "plain ASGI: legacy tools/list rate, 100 tools", "asgi", "legacy-lists/100", 3),
    _cheaper("S34", "plain ASGI: the herd of 1,000, 10 tools", "asgi", "herd-10/1000", 15),
    _cheaper("S35", "plain ASGI: the herd of 1,000, 100 tools", "asgi", "herd-100/1000", 50),
    _cheaper("S41", "own process: last of 1,000 sooner than the SDK's", "own", "last/1000", 9),
    _cheaper("S42", "own process: the floor's time for the last of 1,000 over ours", "own", "last/1000", 0.75, "floor"),
    _cheaper("S42", "own process: the floor's CPU per delivery over ours", "own", "delivery/1000", 0.75, "floor"),
    _cheaper("S44", "own process: the same, 15,000 streams", "own", "delivery/15000", 0.75, "floor"),
    Target("S43", "own process: memory of a parked stream", ("own", "memory/5000"), None, most=4, unit="kB"),
    _cheaper("S45", "own process: CPU per open, the SDK's over ours", "own", "open/1000", 5),
    *_near_bare("S51", 10),
    *_near_bare("S52", 100),
    _cheaper("S53", "own process: the herd of 1,000, 10 tools", "own", "herd-10/1000", 15),
    _cheaper("S54", "own process: the herd of 1,000, 100 tools", "own", "herd-100/1000", 50),
    _faster("S55", "stdio: notifications/s", "own", "stdio-notifications", 10),
    _faster("S56", "stdio: lists/s", "own", "stdio-lists", 3),
    Target("S57", "own process: CPU per delivery, 5,000 streams over 1,000", ("own", "delivery/5000"),
           ("own", "delivery/1000"), most=1.25),
    Target("S58", "plain ASGI: CPU per delivery beside 10,000 other streams, over alone", ("asgi", "others"),
           None, most=1.2),
    Target("S58", "own process: the same", ("own", "others"), None, most=1.2),
    _cheaper("S59", "start to the first answer on stdio, the bare SDK's over ours", "own", "start", 1),
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
    """Three digits that count, and the unit."""
    if value is None:
        return ""
    if value >= 100:
        text = f"{value:,.0f}"
    elif value >= 10:
        text = f"{value:.1f}"
    else:
        text = f"{value:.2f}"
    return f"{text} {unit}" if unit and unit != "×" else f"{text}{unit}"
