"""Do the same work with each peer over HTTP, and measure its process meanwhile.

A sitting is one server process with one or a few parts of the work; `SITTINGS` has them all. It records one value per
figure. CPU is that of all threads of the server.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.peers.programs import Load, Peer, Server, loading, serving

__all__ = ["SITTINGS", "Part", "Scale", "Sitting", "sit"]

CONNECTIONS = 32
"""Connections that request lists at the same time: enough that a server never waits for the next request."""

ASKERS = 4_500
"""Most connections on which clients refetch a list: with 15,000 streams beside them, a process may not open more."""

LONGEST = 300
"""Seconds that one step may take. The slowest server needs two minutes for 15,000 sessions, and two more to answer each
of them once."""

MANY = 1000
"""Streams. With more, only the fast peers are measured in every round."""

BURST = 20
OTHERS = 10_000


def few(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in sizes if size <= MANY)


@dataclass(frozen=True)
class Scale:
    """The sizes of the work."""

    streams: tuple[int, ...] = (1, 100, 1000)
    legacy: tuple[int, ...] = (100, 1000)
    herds: tuple[int, ...] = (1000,)
    others: int = OTHERS
    busy: float = 0.5
    """Seconds that all changes of one figure should take together."""
    listing: float = 1.0
    """Seconds in which lists are requested."""
    most_tools: int = 1000

    def later(self, peer: Peer) -> Scale:
        """Return the sizes for the rounds after the first: slow work is measured once."""
        streams = few(self.streams) if peer.key == "sdk" else self.streams
        return replace(self, streams=streams, legacy=few(self.legacy), herds=few(self.herds))

    @property
    def crowd(self) -> int:
        """The number of streams for figures that have only one size."""
        return min(MANY, max(self.streams))


@dataclass
class Watch:
    """One server and one client: run a command and measure it."""

    server: Server
    load: Load
    tools: int
    notes: dict[str, float]

    def put(self, key: str, value: float) -> None:
        self.notes[key] = value

    def ask(
        self, command: str, first: int = 0, text: str | int = "x", seconds: float = 60
    ) -> tuple[dict[str, Any], float]:
        """Return the client's result, and the CPU seconds that the server used meanwhile."""
        before = self.server.cpu()
        found = self.load.ask(command, first, text, seconds)
        return found, self.server.cpu() - before


def told(watch: Watch, key: str, streams: int, scale: Scale) -> float:
    """Make single changes, each until the last stream is notified. Return the CPU of one delivery."""
    first, _ = watch.ask("change", 1, 1)
    rounds = max(2, min(200, int(scale.busy / first["times"][0])))
    found, cpu = watch.ask("change", rounds, 1, LONGEST)
    deliveries = rounds * streams
    watch.put(f"{key}last/{streams}", 1e3 * statistics.median(found["times"]))
    watch.put(f"{key}delivery/{streams}", 1e6 * cpu / deliveries)
    watch.put(f"{key}client/{streams}", 1e6 * found["busy"] / deliveries)
    watch.put(f"{key}client-busy/{streams}", 100 * found["busy"] / sum(found["times"]))
    return cpu / deliveries


def grown(watch: Watch, key: str, command: str, streams: int, before: int, start: float) -> None:
    """Open more streams, or sessions with one stream each, until there are `streams`."""
    found, cpu = watch.ask(command, streams, "tools", LONGEST)
    number = streams - before
    if number >= 90:
        watch.put(f"{key}opens/{streams}", number / found["times"][0])
        watch.put(f"{key}open/{streams}", 1e6 * cpu / number)
        watch.put(f"{key}memory/{streams}", (watch.server.memory() - start) / streams / 1e3)


def listed(watch: Watch, key: str, era: str, scale: Scale) -> None:
    tools = watch.tools
    watch.ask("list", 1, era, scale.listing / 5)  # the first response is built, not cached
    # Request few large lists at once: the slowest server takes a tenth of a second for one.
    found, cpu = watch.ask("list", CONNECTIONS if tools < 1000 else 8, era, scale.listing)
    answers, taken = found["answers"], found["times"][0]
    watch.put(f"{key}lists/{tools}", answers / taken)
    watch.put(f"{key}list/{tools}", 1e6 * cpu / answers)
    watch.put(f"{key}list-client/{tools}", 1e6 * found["busy"] / answers)
    watch.put(f"{key}list-client-busy/{tools}", 100 * found["busy"] / taken)


def herd(watch: Watch, key: str, streams: int, era: str) -> None:
    tools = watch.tools
    watch.ask("gather", min(streams, ASKERS), era, LONGEST)
    found, cpu = watch.ask("herd", 0, era, LONGEST)
    watch.put(f"{key}herd-{tools}/{streams}", 1e3 * found["times"][0])
    watch.put(f"{key}herd-{tools}-cpu/{streams}", 1e6 * cpu / streams)
    watch.put(f"{key}herd-{tools}-stale/{streams}", found["stale"])
    watch.put(f"{key}herd-{tools}-again/{streams}", found["again"])
    watch.put(f"{key}herd-{tools}-client-busy/{streams}", 100 * found["busy"] / found["times"][0])


# Sittings


def fan_out(watch: Watch, scale: Scale) -> None:
    """Open streams that watch the tools, in growing numbers."""
    start, before = watch.server.memory(), 0
    for streams in scale.streams:
        grown(watch, "", "open", streams, before, start)
        told(watch, "", streams, scale)
        before = streams


def back_to_back(watch: Watch, scale: Scale) -> None:
    """Make many changes in one request, and wait until all clients have the last one."""
    for streams in scale.herds:
        watch.ask("open", streams, "tools", LONGEST)
        found, cpu = watch.ask("burst", BURST, "x", LONGEST)
        watch.put(f"burst/{streams}", 1e3 * found["times"][0])
        watch.put(f"burst-cpu/{streams}", 1e6 * cpu / BURST / streams)
        watch.put(f"burst-told/{streams}", found["notifications"] / streams)


def lists(watch: Watch, scale: Scale) -> None:
    listed(watch, "", "modern", scale)


def legacy_lists(watch: Watch, scale: Scale) -> None:
    listed(watch, "legacy-", "legacy", scale)


def herds(watch: Watch, scale: Scale) -> None:
    for streams in scale.herds:
        watch.ask("open", streams, "tools", LONGEST)
        herd(watch, "", streams, "modern")


def legacy(watch: Watch, scale: Scale) -> None:
    """Open sessions with a GET stream each; then all of them refetch the list."""
    start, before = watch.server.memory(), 0
    for sessions in scale.legacy:
        grown(watch, "legacy-", "session", sessions, before, start)
        told(watch, "legacy-", sessions, scale)
        herd(watch, "legacy-", sessions, "legacy")
        before = sessions


def one_uri(watch: Watch, scale: Scale) -> None:
    """Change the content of one URI of the 10,000 that 100 streams subscribe to."""
    streams = 100
    each = scale.others // streams
    watch.ask("open", streams, f"uris:{each}")
    uri = f"bench://item/{scale.others // 2}"
    watch.ask("touch", 5, uri)
    found, cpu = watch.ask("touch", 200, uri)
    watch.put("uri", 1e3 * statistics.median(found["times"]))
    watch.put("uri-cpu", 1e6 * cpu / 200)


def others(watch: Watch, scale: Scale) -> None:
    """Compare the cost of a delivery with and without many streams that watch something else."""
    streams = scale.crowd
    watch.ask("open", streams, "tools")
    alone = told(watch, "alone-", streams, scale)
    watch.ask("open", streams + scale.others, "prompts", LONGEST)
    beside = told(watch, "beside-", streams, scale)
    watch.put("others", beside / alone)


@dataclass(frozen=True)
class Part:
    key: str
    work: Callable[[Watch, Scale], None]
    needs: str = "listen"
    """The capability that a peer needs for this part."""


@dataclass(frozen=True)
class Sitting:
    tools: int
    parts: tuple[Part, ...]
    """The parts, in an order in which none disturbs the next."""
    is_taken_once: bool = False
    """Measure it in the first round only: it takes long, or its ratios are far from their bounds."""
    only: frozenset[str] = frozenset()
    """The peers that take part; all, if empty."""

    def parts_of(self, peer: Peer, wanted: Container[str]) -> list[Part]:
        if self.only and peer.key not in self.only:
            return []
        return [part for part in self.parts if part.needs in peer.does and part.key in wanted]


LISTS = Part("lists", lists, "lists")
HERD = Part("herd", herds)
LEGACY_LISTS = Part("legacy-lists", legacy_lists, "legacy")

SITTINGS = (
    Sitting(10, (LISTS, Part("fanout", fan_out))),
    Sitting(10, (Part("burst", back_to_back),)),
    Sitting(10, (HERD,)),
    Sitting(100, (LISTS, HERD)),
    Sitting(100, (LEGACY_LISTS,)),
    Sitting(1000, (LISTS,), is_taken_once=True),
    Sitting(10, (Part("legacy", legacy, "legacy"),)),
    Sitting(10, (LEGACY_LISTS,)),
    Sitting(10, (Part("uri", one_uri),), is_taken_once=True, only=frozenset({"own", "asgi", "sdk", "typescript"})),
    Sitting(10, (Part("others", others),), only=frozenset({"own", "asgi", "floor", "raw"})),
)


def sit(sitting: Sitting, parts: list[Part], peer: Peer, scale: Scale, programs: Path, notes: dict[str, float]) -> None:
    """Measure the figures of one sitting once. Figures measured before a failure are kept."""
    with serving(peer, sitting.tools, programs) as server, loading(server, programs) as load:
        watch = Watch(server, load, sitting.tools, notes)
        for part in parts:
            part.work(watch, scale)
