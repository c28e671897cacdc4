"""Compare a change with and without the store, and measure the file over a million changes.

    python bench/store.py [--quick] [--changes N] [--json]

It measures CPU of the whole process, including the writer thread. The sides take turns. A round ends when its last
batch is written. Each row has the ratio, with its spread over the rounds.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any

from mcp.server import MCPServer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `bench` and `tidings`, when run as a script

from bench.measuring import Row, middle, no_collections, ratio, row
from tidings import Feature, Notification, Policy
from tidings.core.frames import FrameFormat, render
from tidings.live import Live
from tidings.store import Batch, Store
from tidings.store.sqlite import SQLiteStore, peek

TARGET = 1.3
DURABLES = 300
"""Number of durable subscribers, for their figures."""
MOST_EACH = 3.0
"""Microseconds that each of them may add to a change."""
SHAPE = FrameFormat(is_sse=True, is_tagged=True)

Times = list[tuple[float, float]]


def definition(number: int, edition: int) -> dict[str, Any]:
    return {
        "name": f"tool_{number}",
        "description": f"Finds the tickets of one sprint that mention a text (edition {edition}).",
        "inputSchema": {
            "type": "object",
            "properties": {"sprint": {"type": "integer"}, "text": {"type": "string"}},
            "required": ["sprint"],
        },
    }


class Side:
    """A live server with subscribers, durable or not, and with or without a store."""

    def __init__(self, store: Store | Path | None, readers: int, *, is_durable: bool = False, **policy: Any) -> None:
        self.live = Live(MCPServer("bench", log_level="ERROR"), store=store, policy=Policy(**policy))
        self._edition = count()
        for number in range(readers):
            self._listen(number, is_durable)
        with self.live.catalog.batch():
            for number in range(200):
                self.live.catalog.tools.add(definition(number, -1))
        self.write()

    def write(self) -> None:
        self.live.writer.flush(60)

    def _listen(self, number: int, is_durable: bool) -> None:
        live, uris = self.live, ["file:///{+path}"]
        subscriber = live.hub.open(self._deliver)
        told = None
        if is_durable:
            connection = live.durables.connect(
                {"name": f"reader {number}"}, None, [Feature.TOOLS], uris, {}, lambda: None
            )
            assert connection is not None
            connection.attach(subscriber)
            told = connection.told()
        live.hub.subscribe(subscriber, "tools", uris=uris, told=told)

    @staticmethod
    def _deliver(notification: Notification) -> object:
        return notification.frames.get(SHAPE) or render(notification, SHAPE)

    def change_tools(self, changes: int) -> None:
        tools, edition = self.live.catalog.tools, self._edition
        for number in range(changes):
            tools.add(definition(number % 200, next(edition)), replace=True)

    def change_in_commits(self, changes: int) -> None:
        for start in range(0, changes, 50):
            with self.live.catalog.batch():
                self.change_tools(min(50, changes - start))

    def change_contents(self, changes: int) -> None:
        resources, edition = self.live.catalog.resources, self._edition
        for number in range(changes):
            resources.updated(f"file:///notes/{number % 1000}.md", etag=str(next(edition)))

    def timed(self, work: Callable[[int], None], changes: int, batch: int | None = None) -> tuple[float, float]:
        """Return the CPU seconds of the process and of this thread, per change. At most `batch` changes are written at
        a time; the writer thread may write earlier."""
        start, here = process_time(), 0.0
        for done in range(0, changes, batch or changes):
            began = thread_time()
            work(min(batch or changes, changes - done))
            here += thread_time() - began
            self.write()
        return (process_time() - start) / changes, here / changes


def in_turns(sides: list[Side], name: str, rounds: int, changes: int, batch: int | None = None) -> list[Times]:
    """Return the CPU of one change in each round, for each side."""
    works = [getattr(side, f"change_{name}") for side in sides]
    times: list[Times] = [[] for _ in sides]
    with no_collections():
        for turn in range(-1, rounds):
            order = range(len(sides))
            for index in order if turn % 2 else reversed(order):
                taken = sides[index].timed(works[index], changes, batch)
                if turn >= 0:
                    times[index].append(taken)
    return times


def compare(folder: Path, name: str, readers: int, rounds: int, changes: int) -> list[Row]:
    sides = [Side(store, readers) for store in (None, folder / f"{name}-{readers}.db")]
    times = in_turns(sides, name, rounds, changes)
    for side in sides:
        side.live.close()
    rows = []
    for at, where in enumerate(("in all", "in the thread that makes it")):
        without, with_store = ([each[at] for each in side] for side in times)
        rows.append(
            row(
                f"store_{name}_{readers}_{'process' if at == 0 else 'thread'}",
                f"a change of {name}, {readers} reader{'' if readers == 1 else 's'}, store on over off, {where}",
                ratio(with_store, without),
                "×",
                note=_over(with_store, without),
                most=TARGET,
            )
        )
    return rows


def compare_durable(folder: Path, name: str, rounds: int) -> list[Row]:
    """Compare durable readers with others: each change written by itself, and 100 changes at once."""
    files = [folder / f"{name}-{kind}.db" for kind in ("direct", "durable")]
    sides = [Side(None, DURABLES), *(Side(file, DURABLES, is_durable=file is files[1]) for file in files)]
    rows = []
    for key, batch, how in (("lone", 1, "one by one"), ("storm", 100, "100 at once")):
        without, direct, durable = ([each[0] for each in side] for side in in_turns(sides, name, rounds, 100, batch))
        label = f"a change of {name}, {how}, {DURABLES} durable readers"
        each = [1e6 * (one - other) / DURABLES for one, other in zip(durable, direct, strict=True)]
        rows += [
            row(f"store_{name}_{key}_durable", f"{label} over others", ratio(durable, direct),
                note=_over(durable, direct)),
            row(f"store_{name}_{key}_durable_off", f"{label} over others, store off", ratio(durable, without),
                note=_over(durable, without)),
            row(f"store_{name}_{key}_durable_each", f"{label}, more for each", middle(each), "µs", most=MOST_EACH),
        ]  # fmt: skip
    for side in sides:
        side.live.close()
    return rows


def _over(times: list[float], base: list[float]) -> str:
    return f"{1e6 * statistics.median(times):.1f} over {1e6 * statistics.median(base):.1f} µs"


class MeasuredStore(SQLiteStore):
    """A store that notes the size of its files after each batch."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.sizes: list[int] = []
        self._files = [path.with_name(path.name + end) for end in ("", "-wal", "-shm")]

    def write(self, batch: Batch) -> None:
        super().write(batch)
        self.sizes.append(sum(file.stat().st_size for file in self._files if file.exists()))


def many(folder: Path, changes: int, durables: int = 0) -> list[Row]:
    """Measure journal and file over very many changes. With durable subscribers, what they were told is written every
    tenth of a second instead of every half minute."""
    path = folder / f"many-{durables}.db"
    store = MeasuredStore(path)
    side = Side(store, durables, is_durable=True, journal_changes=2_000, write_deadline=0.05, keep_alive=0.05)
    live = side.live
    halves: list[int] = []
    longest = 0
    start = perf_counter()
    for _ in range(2):
        for _ in range(50):
            if durables:
                side.change_in_commits(changes // 100)
            else:
                side.change_tools(changes // 200)
                side.change_contents(changes // 200)
            side.write()
            longest = max(longest, len(live.hub.journal))
        halves.append(max(store.sizes))
        store.sizes.clear()
    took = perf_counter() - start
    live.close()
    kept = len(peek(path).journal)
    rate = f"{changes:,} changes in {took:.1f} s"
    largest, growth = max(halves), halves[1] / halves[0]
    is_telling = changes >= (100_000 if durables else 200_000)  # with fewer, the log is not full in the first half
    key, label = (
        ("store_durable", f"{changes:,} changes, {durables} durable readers")
        if durables
        else ("store", f"{changes:,} changes")
    )
    in_file = f"{kept} in the file, {path.stat().st_size / 2**20:.1f} MiB when closed"
    most = 2_000 if durables else 4_000  # of tools; and as many of contents
    return [
        Row(f"{key}_file", f"the file, its log and its index at their largest, {label}", largest / 2**20,
            min(halves) / 2**20, largest / 2**20, "MiB", "≤ 32", largest <= 32 << 20, rate),
        Row(f"{key}_grows", "the same, the second half's largest over the first half's", growth, growth, growth, "×",
            "≤ 1.1", growth <= 1.1 if is_telling else None, "" if is_telling else "too few changes to say"),
        Row(f"{key}_journal", "changes in the journal at most, the file's included", max(longest, kept), kept, longest,
            "", f"≤ {most:,}", max(longest, kept) <= most, in_file),
    ]  # fmt: skip


def lone(folder: Path, times: int) -> Row:
    """Measure one change alone, which is one transaction."""
    side = Side(folder / "lone.db", 0)
    side.live.writer.flush(60)
    taken = [side.timed(side.change_tools, 1)[0] for _ in range(times)]
    side.live.close()
    cost = middle([1e6 * value for value in taken])
    return row("store_lone", "one change alone, written at once", cost, "µs", note="CPU, in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and 40,000 changes instead of a million")
    parser.add_argument("--changes", type=int, help="number of changes for the size of the file (1,000,000)")
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # otherwise the SDK sets up its own handler, which is slow
    rounds, changes = (5, 4_000) if options.quick else (15, 10_000)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = []
        for readers in (0, 1, 100):
            for name in ("tools", "contents"):
                rows += compare(folder, name, readers, rounds, max(200, changes // (1 + readers // 10)))
        for name in ("tools", "contents"):
            rows += compare_durable(folder, name, 5 if options.quick else 15)
        rows.append(lone(folder, 20 if options.quick else 200))
        changes = options.changes or (40_000 if options.quick else 1_000_000)
        rows += many(folder, changes)
        rows += many(folder, changes // 5, DURABLES)
    if options.as_json:
        print(json.dumps([asdict(each) for each in rows], indent=2))
    else:
        print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores")
        for each in rows:
            met = {True: "met", False: "NOT MET", None: ""}[each.met]
            spread = f"{each.low:,.2f} … {each.high:,.2f}"
            print(f"{each.figure:75} {each.value:10,.2f} {each.unit:4} ({spread}) {each.target:8} {met:8} {each.note}")


if __name__ == "__main__":
    main()
