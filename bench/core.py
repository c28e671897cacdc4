"""Measure the core, as ratios and against its targets: `make bench`.

It measures CPU time of this thread, not wall time, because machines are shared. Both sides of a ratio take turns in
each round, in alternating order, so that slow phases of the machine affect both. A figure is the ratio of the medians;
its spread is the middle half of the rounds. For ratios, the garbage collector is off, as in `timeit`. For rates and
times it is on, as for a user.

This is not a load test: it uses no socket.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `bench` and `tidings`, when run as a script

from bench.measuring import (
    Row,
    Sample,
    Scale,
    compare,
    cpu,
    interleaved,
    machine,
    middle,
    ratio,
    row,
    written,
)
from tidings import BUSY, Catalog, Feature, Filter, Hub, Notification, Policy, Reason, Subscriber
from tidings.core.frames import FrameFormat, encode_frame, encode_tag
from tidings.sdk.uri_templates import read_template

FEATURES = ("tools", "prompts", "resources")
LISTEN = FrameFormat(is_sse=True, is_tagged=True)
"""The form of notifications on a listen stream."""

# Figures


def tool(number: int) -> dict[str, Any]:
    return {
        "name": f"tool_{number}",
        "description": "Finds the tickets of one sprint that mention a text.",
        "inputSchema": {
            "type": "object",
            "properties": {"sprint": {"type": "integer"}, "text": {"type": "string"}},
            "required": ["sprint"],
        },
    }


def callbacks(number: int) -> list[Callable[[Notification], object]]:
    def one() -> Callable[[Notification], object]:
        def callback(notification: Notification) -> None:
            pass

        return callback

    return [one() for _ in range(number)]


def writers(number: int) -> list[Callable[[Notification], object]]:
    """Return callbacks that each write a frame with their own id, as a transport does."""
    wire: deque[bytes] = deque(maxlen=1)

    def one(tag: bytes, send: Callable[[bytes], None] = wire.append) -> Callable[[Notification], object]:
        def callback(notification: Notification) -> None:
            send(encode_frame(notification, LISTEN, tag))

        return callback

    return [one(encode_tag(index)) for index in range(number)]


def add_costs(scale: Scale) -> Iterator[Row]:
    """Measure a catalog of tools with ten subscribers, at two sizes."""
    serial = count(1_000_000)
    catalogs = []
    for size in (100, scale.of(10_000)):
        catalog = Catalog()
        hub = Hub(catalog)
        for callback in callbacks(10):
            hub.subscribe(callback, *FEATURES)
        catalog.tools.replace(tool(number) for number in range(size))
        # Fill the journals of both sides; otherwise only the larger would pay for dropping changes.
        while len(hub.journal) < hub.policy.journal_changes:
            catalog.tools.remove(catalog.tools.add(tool(next(serial)))[0].key)
        catalogs.append(catalog)

    def add(catalog: Catalog, number: int = 20) -> float:
        tools = [tool(next(serial)) for _ in range(number)]
        start = thread_time()
        for definition in tools:
            catalog.tools.add(definition)
        taken = thread_time() - start
        for definition in tools:
            catalog.tools.remove(definition["name"])
        return taken / number

    def add_and_remove(catalog: Catalog, number: int = 200) -> float:
        tools = [tool(next(serial)) for _ in range(number)]
        start = thread_time()
        for definition in tools:
            catalog.tools.add(definition)
            catalog.tools.remove(definition["name"])
        return (thread_time() - start) / number

    few, many = catalogs
    sizes = f"with {len(many.tools):,} items over {len(few.tools)}"
    values, note = compare(scale, lambda: add(few), lambda: add(many))
    yield row("add", f"add, {sizes}", values, note=note, most=1.5)
    values, note = compare(scale, lambda: add_and_remove(few), lambda: add_and_remove(many))
    yield row("add-remove", f"add and remove, {sizes}", values, note=note, most=1.5)


def watched(uris: Iterable[str], uri: str) -> Catalog:
    """Return a catalog with subscriptions to all of `uris`, a thousand per subscriber, and one to `uri`."""
    catalog = Catalog()
    hub = Hub(catalog, templates=read_template)
    names = list(uris)
    chunks = [names[start : start + 1000] for start in range(0, len(names), 1000)]
    for callback, chunk in zip(callbacks(len(chunks)), chunks, strict=True):
        hub.subscribe(callback, uris=chunk)
    hub.subscribe(callbacks(1)[0], uris=[uri])
    return catalog


def update(catalog: Catalog, uri: str, number: int = 100) -> Sample:
    def sample() -> float:
        start = thread_time()
        for _ in range(number):
            catalog.resources.updated(uri)
        return (thread_time() - start) / number

    return sample


FAMILIES = {
    "resource://tenant#/*/data": "resource://tenant/a/data",
    "resource://*/data#": "resource://a/data",
    "file:///logs/app#-*.log": "file:///logs/app-x.log",
    "file:///logs/**/x#.txt": "file:///logs/a/b/x.txt",
    "a://*/x#/*": "a://b/x/c",
    "board://{sprint}/t#": "board://7/t",
    "board://b#/{task}{?page}": "board://b/7?page=1",
    "board://{sprint}/t#{?page}": "board://7/t?page=1",
    "files://{+path}/x#": "files://a/b/x",
    # Literal texts of many lengths, at one end or at both.
    "file:///logs/@-*.log": "file:///logs/nn-x.log",
    "file:///**/@.log": "file:///logs/nn.log",
    "file:///logs/@-*-@.log": "file:///logs/nn-x-nn.log",
    # They differ only between two wildcards.
    "log://*-#-*": "log://a-b-c",
    "log://**/x#/**": "log://a/x/b",
}
"""Patterns, each with a URI that nearly matches them and matches none. `#` stands for a number, `@` for a name of 1 to
30 letters with a number."""


def patterns(family: str, size: int) -> list[str]:
    def name(number: int) -> str:
        return "n" * (number % 30 + 1) + str(number)

    # The second name has another length; otherwise there would be only 30 pairs of lengths.
    return [
        family.replace("#", str(number)).replace("@", name(number), 1).replace("@", name(number // 30))
        for number in range(size)
    ]


def update_costs(scale: Scale) -> Iterator[Row]:
    uri = "resource://tenant/a/data"
    exact = [f"resource://tenant{number}/a/data" for number in range(scale.of(100_000))]
    few, many = watched(exact[:100], uri), watched(exact, uri)
    values, note = compare(scale, update(few, uri), update(many, uri))
    yield row("updated-uris", f"updated, {len(exact):,} exact URIs over 100", values, note=note, most=1.5)
    del many

    size = scale.of(10_000)
    found = {}
    for family, uri in FAMILIES.items():
        few, many = watched(exact[:100], uri), watched(patterns(family, size), uri)
        found[family] = compare(scale, update(few, uri), update(many, uri))
    worst = max(found, key=lambda family: found[family][0][0])
    values, note = found[worst]
    yield row(
        "updated-patterns", f"updated, {size:,} patterns over 100 exact URIs", values, note="the worst of:", most=3
    )
    for family, (values, note) in found.items():
        yield row(f"updated-patterns {family}", f"  {family}", values, note=note)


def subscribe_costs(scale: Scale) -> Iterator[Row]:
    """Measure subscribing and unsubscribing a callback."""

    def subscribe_and_unsubscribe(hub: Hub, number: int = 200) -> Sample:
        newcomers = callbacks(number)

        def sample() -> float:
            start = thread_time()
            for callback in newcomers:
                hub.subscribe(callback, *FEATURES)
            for callback in newcomers:
                hub.unsubscribe(callback)
            return (thread_time() - start) / number

        return sample

    hubs = []
    for size in (100, scale.of(100_000)):
        hub = Hub(Catalog())
        for callback in callbacks(size):
            hub.subscribe(callback, *FEATURES)
        hubs.append(hub)
    few, many = hubs
    values, note = compare(scale, subscribe_and_unsubscribe(few), subscribe_and_unsubscribe(many))
    figure = f"subscribe and unsubscribe, {len(many):,} subscribers over {len(few)}"
    yield row("subscribe", figure, values, note=note, most=1.5)


def subscriber_memory(scale: Scale) -> Iterator[Row]:
    number = scale.of(10_000)

    def traced(build: Callable[[], object]) -> list[float]:
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        kept = build()
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        del kept
        return [taken / number]

    def subscribed(makers: Iterable[Callable[[Notification], object]], change: bool = False, **options: Any) -> Hub:
        catalog = Catalog()
        hub = Hub(catalog)
        for callback in makers:
            hub.subscribe(callback, *FEATURES, **options)
        if change:
            catalog.tools.add(tool(0))
        return hub

    ready = callbacks(number)
    figure = f"memory of one of {number:,} idle subscribers"
    note = "three features; without the callback itself"
    yield row("memory", figure, traced(lambda: subscribed(ready)), "B", note=note, most=1000)
    values = traced(lambda: subscribed(callbacks(number)))
    yield row("memory-callback", "  with its callback, a closure", values, "B", most=1000)
    names = Filter(names=["search_*"])
    values = traced(lambda: subscribed(ready, filter=names))
    yield row("memory-filter", "  with a filter, which they share", values, "B")
    values = traced(lambda: subscribed(ready, change=True, filter=names))
    yield row("memory-told", "  and after a change that it ruled out", values, "B", note="`told` is kept")


def mailbox_memory(scale: Scale) -> Iterator[Row]:
    """Measure the mailbox of a subscriber that takes one notification and no more, while thirteen topics change."""
    total = scale.of(1_000_000)
    catalog = Catalog(Policy(journal_changes=10))  # full before the first measurement, so that it does not grow
    hub = Hub(catalog)
    uris = [f"board://sprint/{number:02}" for number in range(10)]
    subscriber = hub.subscribe(lambda notification: BUSY, *FEATURES, uris=uris)
    features = [(catalog.tools, tool(0)), (catalog.prompts, tool(0)), (catalog.resources, {"uri": "board://all"})]

    def change(first: int, last: int) -> None:
        for number in range(first, last):
            topic = number % 13
            if topic < 10:
                catalog.resources.updated(uris[topic], author="ada")
            else:
                items, definition = features[topic - 10]
                items.add({**definition, "title": f"{number:08}"}, replace=True)

    change(0, 100)
    few, blocks = size_of(subscriber.mailbox), allocated()
    change(100, total)
    many, more = size_of(subscriber.mailbox), allocated()
    figure = f"mailbox never collected, {total:,} changes over 100"
    note = f"{many:,} over {few:,} B, {subscriber.mailbox_size} topics pending"
    yield row("mailbox", figure, [many / few], note=note, most=1.1)
    yield row(
        "mailbox-process", "  memory blocks of the process", [more / blocks], note=f"{more - blocks:+,} of {blocks:,}"
    )


def allocated() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def size_of(root: object) -> int:
    """Return the bytes of an object and everything that it refers to, except the hub, types and modules."""
    seen: dict[int, object] = {}
    waiting: list[object] = [root]
    while waiting:
        found = waiting.pop()
        if id(found) not in seen and not isinstance(found, Hub | Subscriber | Policy | Feature | type):
            seen[id(found)] = found
            waiting += gc.get_referents(found)
    return sum(map(sys.getsizeof, seen.values()))


def fan_out(scale: Scale) -> Iterator[Row]:
    number = scale.of(10_000)
    serial = count()

    def through_hub(called: list[Callable[[Notification], object]], **options: Any) -> Sample:
        catalog = Catalog()
        hub = Hub(catalog)
        for callback in called:
            hub.subscribe(callback, "tools", **options)
        return lambda: cpu(lambda: catalog.tools.add(tool(next(serial))))

    def bare(called: list[Callable[[Notification], object]]) -> Sample:
        said: list[Notification] = []
        catalog = Catalog()
        Hub(catalog).subscribe(said.append, "tools")

        def loop() -> None:
            notification = said.pop()
            for callback in called:
                callback(notification)

        def sample() -> float:
            catalog.tools.add(tool(next(serial)))
            return cpu(loop)

        return sample

    variants = {
        "fan-out-frames": ("a frame each", writers(number)),
        "fan-out-plain": ("nothing else", callbacks(number)),
    }
    for key, (name, called) in variants.items():
        times, base = interleaved(scale.rounds, through_hub(called), bare(called))
        rates = middle([number / taken for taken in times])
        figure = f"fan-out to {number:,} callbacks: {name}"
        note = f"{1e6 / rates[0]:.2f} µs each, all included"
        yield row(key, figure, rates, "/s", note=note, least=500_000)
        yield row(f"{key}-bare", "  over a bare loop that calls the same", ratio(times, base))
    for key, name, pattern in (("passed", "lets it pass", "tool_*"), ("ruled-out", "rules it out", "search_*")):
        (times,) = interleaved(scale.rounds, through_hub(callbacks(number), filter=Filter(names=[pattern])))
        rates = middle([number / taken for taken in times])
        yield row(f"fan-out-{key}", f"  with a filter that {name}", rates, "/s", note=f"{1e6 / rates[0]:.2f} µs each")


def removal(scale: Scale) -> Iterator[Row]:
    number = scale.of(10_000)
    hub = Hub(Catalog())

    def close_all() -> float:
        subscribers = [hub.subscribe(callback, *FEATURES) for callback in callbacks(number)]
        start = thread_time()
        for subscriber in subscribers:
            hub.close(subscriber, Reason.DISCONNECTED)
        return thread_time() - start

    def bare() -> float:
        """Delete the entries of three features and of the list of subscribers: the least that any hub has to do."""
        keys = callbacks(number)
        indexes = [dict.fromkeys(keys) for _ in range(4)]
        start = thread_time()
        for key in keys:
            for index in indexes:
                del index[key]
        return thread_time() - start

    closed, base = interleaved(scale.rounds, close_all, bare)
    assert not len(hub)
    assert not hub.subscriptions()
    yield row(
        "removal-closed",
        f"removing {number:,} dead subscribers",
        middle([1e3 * taken for taken in closed]),
        "ms",
        most=41,
    )
    yield row("removal-closed-bare", "  over bare deletions", ratio(closed, base))


FIGURES = (add_costs, update_costs, subscribe_costs, subscriber_memory, mailbox_memory, fan_out, removal)

# The command


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the core, as ratios and against its targets.")
    parser.add_argument("--rounds", type=int, help="number of rounds (15)")
    parser.add_argument("--quick", action="store_true", help="check that it works; the figures mean nothing")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    scale = Scale(rounds=options.rounds or (3 if options.quick else 15), part=50 if options.quick else 1)

    about = machine() | {"rounds": scale.rounds, "quick": options.quick}
    start = perf_counter()
    rows: list[Row] = []
    if not options.json:
        built = "with PGO" if about["pgo"] else "without PGO"
        print(f"{about['python']} ({built}), {about['system']}, {about['cores']} cores; {scale.rounds} rounds")
        if options.quick:
            print("A quick run: the sizes are smaller than those of the targets.")
        print(f"{'figure':<55} {'median':>13}  {'middle half':<21} target")
    for figure in FIGURES:
        for found in figure(scale):
            rows.append(found)
            if not options.json:
                print(written(found), flush=True)
        gc.collect()
    about["seconds"] = round(perf_counter() - start, 1)
    if options.json:
        print(json.dumps(about | {"rows": [asdict(found) for found in rows]}, ensure_ascii=False, indent=1))
    else:
        missed = sum(found.met is False for found in rows)
        targets = sum(found.met is not None for found in rows)
        print(f"{targets - missed} of {targets} targets met, in {about['seconds']} s")


if __name__ == "__main__":
    main()
