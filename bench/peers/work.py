"""What every peer is made to do over HTTP, and what is read off its process meanwhile.

A sitting is one process of one server with one piece of work; `SITTINGS` has them all. It notes one value per figure.
CPU is the server's own, of all its threads.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.programs import Load, Peer, Server, loading, serving

__all__ = ["SITTINGS", "Scale", "Sitting", "sit"]

CONNECTIONS = 32
"""That ask for lists at the same time: enough that a server never waits for the next request."""

BURST = 20
OTHERS = 10_000


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    streams: tuple[int, ...] = (1, 100, 1000, 5000)
    legacy: tuple[int, ...] = (100, 1000)
    herds: tuple[int, ...] = (1000,)
    others: int = OTHERS
    busy: float = 0.5
    """Seconds that the changes of one figure should take together."""
    listing: float = 1.0
    """Seconds in which lists are asked for."""
    most_tools: int = 1000

    @property
    def crowd(self) -> int:
        """The streams of figures that are taken with one number of them only."""
        return 1000 if 1000 in self.streams else max(self.streams)


@dataclass
class Watch:
    """One server under one client: does something and says what it took."""

    server: Server
    load: Load
    notes: dict[str, float]

    def put(self, key: str, value: float) -> None:
        self.notes[key] = value

    def ask(
        self, command: str, first: int = 0, text: str | int = "x", seconds: float = 60
    ) -> tuple[dict[str, Any], float]:
        """The client's answer, and the seconds of CPU that the server used meanwhile."""
        before = self.server.cpu()
        found = self.load.ask(command, first, text, seconds)
        return found, self.server.cpu() - before


def told(watch: Watch, key: str, streams: int, scale: Scale) -> float:
    """Single changes, one after the other, each until the last stream is told. Gives the CPU of one delivery."""
    first, _ = watch.ask("change", 2, 1)
    rounds = max(3, min(200, int(scale.busy / statistics.median(first["times"]))))
    found, cpu = watch.ask("change", rounds, 1, 120)
    deliveries = rounds * streams
    watch.put(f"{key}last/{streams}", 1e3 * statistics.median(found["times"]))
    watch.put(f"{key}delivery/{streams}", 1e6 * cpu / deliveries)
    watch.put(f"{key}client/{streams}", 1e6 * found["cpu"] / deliveries)
    watch.put(f"{key}client-busy/{streams}", 100 * found["cpu"] / sum(found["times"]))
    return cpu / deliveries


def opened(watch: Watch, key: str, command: str, sizes: tuple[int, ...], scale: Scale) -> None:
    """Grow to each number of streams, and tell them."""
    start, before = watch.server.memory(), 0
    for streams in sizes:
        found, cpu = watch.ask(command, streams, "tools", 120)
        number = streams - before
        if number >= 90:
            watch.put(f"{key}opens/{streams}", number / found["times"][0])
            watch.put(f"{key}open/{streams}", 1e6 * cpu / number)
            watch.put(f"{key}memory/{streams}", (watch.server.memory() - start) / streams / 1e3)
        told(watch, key, streams, scale)
        before = streams


def listed(watch: Watch, key: str, tools: int, era: str, scale: Scale) -> None:
    watch.ask("list", 1, era, scale.listing / 5)  # the first answer is made, not kept
    # Of large lists, few are asked for at once: the slowest server takes a tenth of a second for one.
    found, cpu = watch.ask("list", CONNECTIONS if tools < 1000 else 8, era, scale.listing)
    answers, taken = found["answers"], found["times"][0]
    watch.put(f"{key}lists/{tools}", answers / taken)
    watch.put(f"{key}list/{tools}", 1e6 * cpu / answers)
    watch.put(f"{key}list-client/{tools}", 1e6 * found["client"] / answers)
    watch.put(f"{key}list-client-busy/{tools}", 100 * found["client"] / taken)


def herd(watch: Watch, key: str, streams: int, tools: int, era: str) -> None:
    found, cpu = watch.ask("herd", 0, era, 120)
    # A second one where it is cheap: the first has connections to accept.
    if found["times"][0] < 1:
        found, cpu = watch.ask("herd", 0, era, 120)
    watch.put(f"{key}herd-{tools}/{streams}", 1e3 * found["times"][0])
    watch.put(f"{key}herd-{tools}-cpu/{streams}", 1e6 * cpu / streams)
    watch.put(f"{key}herd-{tools}-stale/{streams}", found["stale"])
    watch.put(f"{key}herd-{tools}-client-busy/{streams}", 100 * found["cpu"] / found["times"][0])


# Sittings


def fan_out(watch: Watch, scale: Scale) -> None:
    """Streams of tools, in growing numbers."""
    opened(watch, "", "open", scale.streams, scale)


def back_to_back(watch: Watch, scale: Scale) -> None:
    """Many changes in one request: how long until all know the last one."""
    watch.ask("open", scale.crowd, "tools")
    found, cpu = watch.ask("burst", BURST, "x", 120)
    watch.put(f"burst/{scale.crowd}", 1e3 * found["times"][0])
    watch.put(f"burst-cpu/{scale.crowd}", 1e6 * cpu / BURST / scale.crowd)
    watch.put(f"burst-told/{scale.crowd}", found["notifications"] / scale.crowd)


def lists_10(watch: Watch, scale: Scale) -> None:
    listed(watch, "", 10, "modern", scale)


def lists_100(watch: Watch, scale: Scale) -> None:
    listed(watch, "", 100, "modern", scale)


def lists_1000(watch: Watch, scale: Scale) -> None:
    listed(watch, "", 1000, "modern", scale)


def herds(tools: int, watch: Watch, scale: Scale) -> None:
    for streams in scale.herds:
        watch.ask("open", streams, "tools", 120)
        herd(watch, "", streams, tools, "modern")


def herd_10(watch: Watch, scale: Scale) -> None:
    herds(10, watch, scale)


def herd_100(watch: Watch, scale: Scale) -> None:
    herds(100, watch, scale)


def legacy(watch: Watch, scale: Scale) -> None:
    """Sessions with a standing GET stream, and a herd of them."""
    opened(watch, "legacy-", "session", scale.legacy, scale)
    herd(watch, "legacy-", scale.legacy[-1], 10, "legacy")


def legacy_10(watch: Watch, scale: Scale) -> None:
    listed(watch, "legacy-", 10, "legacy", scale)


def legacy_100(watch: Watch, scale: Scale) -> None:
    listed(watch, "legacy-", 100, "legacy", scale)


def one_uri(watch: Watch, scale: Scale) -> None:
    """The content of one URI changes, of 10,000 that are subscribed to, by 100 streams."""
    streams = 100
    each = scale.others // streams
    watch.ask("open", streams, f"uris:{each}")
    uri = f"bench://item/{scale.others // 2}"
    watch.ask("touch", 5, uri)
    found, cpu = watch.ask("touch", 200, uri)
    watch.put("uri", 1e3 * statistics.median(found["times"]))
    watch.put("uri-cpu", 1e6 * cpu / 200)


def others(watch: Watch, scale: Scale) -> None:
    """What a delivery costs with many streams that watch something else, over what it costs without."""
    streams = scale.crowd
    watch.ask("open", streams, "tools")
    alone = told(watch, "alone-", streams, scale)
    watch.ask("open", streams + scale.others, "prompts", 120)
    beside = told(watch, "beside-", streams, scale)
    watch.put("others", beside / alone)


Work = Callable[[Watch, Scale], None]


@dataclass(frozen=True)
class Sitting:
    key: str
    tools: int
    work: Work
    needs: str
    """What a peer must do to take part."""
    only: frozenset[str] = frozenset()
    """Of these peers; of all, if empty."""

    def takes(self, peer: Peer) -> bool:
        return bool({self.needs, *(("listen",) if self.needs == "lists" else ())} & peer.does) and (
            not self.only or peer.key in self.only
        )


SITTINGS = (
    Sitting("fanout", 10, fan_out, "listen"),
    Sitting("burst", 10, back_to_back, "listen"),
    Sitting("lists", 10, lists_10, "lists"),
    Sitting("lists", 100, lists_100, "lists"),
    Sitting("lists", 1000, lists_1000, "lists"),
    Sitting("herd", 10, herd_10, "listen"),
    Sitting("herd", 100, herd_100, "listen"),
    Sitting("legacy", 10, legacy, "legacy"),
    Sitting("legacy-lists", 10, legacy_10, "legacy"),
    Sitting("legacy-lists", 100, legacy_100, "legacy"),
    Sitting("uri", 10, one_uri, "listen", frozenset({"own", "asgi", "sdk", "typescript"})),
    Sitting("others", 10, others, "listen", frozenset({"own", "asgi", "sdk"})),
)


def sit(sitting: Sitting, peer: Peer, scale: Scale, programs: Path, notes: dict[str, float]) -> None:
    """Take the figures of one sitting once; what came before a failure is kept."""
    with serving(peer, sitting.tools, programs) as server, loading(server, programs) as load:
        sitting.work(Watch(server, load, notes), scale)
