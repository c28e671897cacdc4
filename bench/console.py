"""Compare the cost of a delivery with and without the console: `python bench/console.py`.

Four servers run in one process, with the same number of listen streams whose bytes go through real TCP sockets, as in
`bench/telemetry.py`. One of them is there twice; the ratio of the two shows the precision.

* *without*: no console; twice;
* *recorded*: with a console that no page has open;
* *open*: with a page that is open and idle: it reads the stream of events, and requests nothing.

Each round makes changes for a fixed time, so that the page's turns, four per second, take their part. The figure is the
CPU time of this thread per change: the change itself, its delivery, and everything else that the event loop does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `bench` and `tidings`, when run as a script

from bench.measuring import Row, Scale, machine, middle, no_collections, ratio, row, written
from bench.telemetry import ORDERS, Seen

SIZES = (1, 100, 1_000)
"""Listen streams."""


_REST = 0.3
"""Seconds after each round in which the page gets the rest. The other servers have the same, with nothing to do."""


class Page:
    """An open page: it reads the stream of events as fast as it comes."""

    def __init__(self, app: Any) -> None:
        self.received = 0
        self._app = app
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/console/api/events",
            "raw_path": b"/console/api/events",
            "query_string": b"",
            "root_path": "",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "headers": [(b"host", b"127.0.0.1:80")],
        }

        async def receive() -> Any:
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            self.received += len(message.get("body", b""))

        await self._app(scope, receive, send)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def measure_window(server: Seen, seconds: float) -> float:
    """Return the CPU time per change while changes are made for some time."""
    taken, number, end = 0.0, 0, perf_counter() + seconds
    while perf_counter() < end or not number:
        taken += server.sample()  # this does not count the clients, which read their sockets
        start = thread_time()
        await asyncio.sleep(0)
        taken += thread_time() - start
        number += 1
    start = thread_time()
    await asyncio.sleep(_REST)
    return (taken + thread_time() - start) / number


async def measure(scale: Scale, seconds: float, sizes: list[int]) -> list[Row]:
    rows: list[Row] = []
    for size in sizes:
        streams = max(1, scale.of(size))
        consoles = (False, True, True, False)
        servers = [Seen(False) for _ in consoles]
        try:
            for server, console in zip(servers, consoles, strict=True):
                await server.open(streams, console=console)
            page = Page(servers[2].app)
            times: list[list[float]] = [[] for _ in servers]
            with no_collections():
                for turn in range(-1, scale.rounds):
                    for index in ORDERS[turn % len(ORDERS)]:
                        taken = await measure_window(servers[index], seconds)
                        if turn >= 0:
                            times[index].append(taken)
            await page.close()
            assert page.received
        finally:
            for server in reversed(servers):  # the lifespans are nested
                await server.close()
        without, recorded, opened, again = times
        name = f"{streams:,} stream" + ("s" if streams > 1 else "")
        rows.append(row(f"change-{size}", f"a change without, {name}", middle([1e6 * each for each in without]), "µs"))
        rows.append(row(f"control-{size}", "  the same, over that", ratio(again, without)))
        # A change has a fixed cost too, which is most of the cost with one stream.
        targets: list[dict[str, Any]] = [{"most": 1.02}, {"most": 1.05}] if size > 1 else [{}, {}]
        rows.append(row(f"recorded-{size}", "  recorded, over that", ratio(recorded, without), **targets[0]))
        rows.append(row(f"open-{size}", "  with an open page, over that", ratio(opened, without), **targets[1]))
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What the console adds to the cost of a delivery.")
    parser.add_argument("--rounds", type=int, default=0, help="number of rounds, a multiple of four (24)")
    parser.add_argument("--seconds", type=float, default=0.0, help="seconds of each round and server (0.5)")
    parser.add_argument("--streams", help="numbers of streams, separated by commas (1,100,1000)")
    parser.add_argument("--quick", action="store_true", help="check that it works; the figures mean nothing")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args(arguments)
    scale = Scale(rounds=options.rounds or (2 if options.quick else 24), part=50 if options.quick else 1)
    sizes = list(map(int, options.streams.split(","))) if options.streams else list(SIZES)
    rows = asyncio.run(measure(scale, options.seconds or (0.01 if options.quick else 0.5), sizes))
    about = machine() | {"rounds": scale.rounds, "quick": options.quick}
    if options.json:
        print(json.dumps(about | {"rows": [asdict(found) for found in rows]}, ensure_ascii=False, indent=1))
    else:
        for found in rows:
            print(written(found))


if __name__ == "__main__":
    main()
