"""`/metrics`, compared with what fifty real clients received, and the counters behind it. Covers `core/counts.py`."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.command import HELLO
from tests.support.readers import Clock
from tests.support.sdk_clients import DEADLINE, MUTED, serving
from tests.support.wire_clients import LegacyWire, Stream, Wire
from tidings import Catalog, Hub, Live, Policy
from tidings.core.counts import BOUNDS, Latency
from tidings.core.filters import Filter
from tidings.core.subscriber import BUSY
from tidings.telemetry.metrics import METRICS, render
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio

MODERN_STREAMS, LEGACY_STREAMS, MUTED_STREAMS, ABSENT = 25, 15, 5, 5
CHANGES = 40
LISTS = {"toolsListChanged": True, "promptsListChanged": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("mcpserver", app={"health": True, "metrics": "local"}) as url:
        yield url


@pytest.fixture
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(timeout=httpx2.Timeout(DEADLINE), limits=limits) as client:
        yield client


class Samples:
    """The values of `/metrics`, read with the parser of Prometheus."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        samples = [sample for family in self.families for sample in family.samples]
        self._values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}

    def __call__(self, name: str, **labels: str) -> float:
        return self._values[f"tidings_{name}", frozenset(labels.items())]


async def scrape(http: httpx2.AsyncClient, url: str) -> Samples:
    response = await http.get(url.replace("/mcp", "/metrics"))
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = Samples(response.text)
    kinds = {"counter": "counter", "histogram": "histogram", "level": "gauge", "gauge": "gauge"}
    expected = {metric.prometheus.removesuffix("_total"): kinds[metric.kind] for metric in METRICS}
    assert {family.name: family.type for family in samples.families} == expected
    assert all(family.documentation for family in samples.families)
    return samples


@dataclass
class Recorded:
    """The notifications of one stream."""

    stream: Stream
    methods: Counter[str] = field(default_factory=Counter)
    size: int = 0
    task: asyncio.Task[None] | None = None

    async def run(self, received: asyncio.Event) -> None:
        while event := await self.stream.event():
            for line in event.split("\r\n"):
                if line.startswith("data: {"):
                    method = json.loads(line[6:]).get("method", "")
                    if method.endswith("list_changed"):
                        self.methods[method.split("/")[1]] += 1
                        self.size += len(event.encode()) + len("\r\n\r\n")
                        received.set()


async def test_counters_match_what_fifty_clients_received(url: str, http: httpx2.AsyncClient) -> None:
    wire = Wire(url, http)
    before = await scrape(http, url)

    def grown(now: Samples, name: str, **labels: str) -> float:
        return now(name, **labels) - before(name, **labels)

    async with AsyncExitStack() as stack:
        recorded: list[Recorded] = []
        received = asyncio.Event()

        async def record(stream: Stream) -> None:
            each = Recorded(stream)
            each.task = asyncio.create_task(each.run(received))
            stack.callback(each.task.cancel)
            recorded.append(each)

        for number in range(MODERN_STREAMS):
            stream = await stack.enter_async_context(wire.listen(number, LISTS))
            assert (await stream.message())["method"] == "notifications/subscriptions/acknowledged"
            await record(stream)
        for number in range(LEGACY_STREAMS + MUTED_STREAMS):
            session = LegacyWire(url, http, MUTED if number < MUTED_STREAMS else "2025-11-25")
            await session.shake_hands()
            await record(await stack.enter_async_context(session.stream()))
        absent = [LegacyWire(url, http) for _ in range(ABSENT)]
        for session in absent:
            await session.shake_hands()
        await wire.change("subscribe_callback", name="filtered", filter={"operations": ["removed"]})
        await wire.change("subscribe_callback", name="paced", policy={"min_interval": 3600})

        for number in range(CHANGES // 2):
            await wire.change("add", feature="tools", key=f"t{number}")
            await wire.change("remove", feature="tools", key=f"t{number}")
        await wire.change("add", feature="tools", key="last")
        await wire.change("remove", feature="tools", key="steady")
        await wire.change("add", feature="prompts", key="come")
        await wire.change("remove", feature="prompts", key="come")  # no net change
        made = CHANGES + 2

        now = await scrape(http, url)
        assert grown(now, "subscribers", era="modern", transport="http") == MODERN_STREAMS
        assert grown(now, "subscribers", era="legacy", transport="http") == LEGACY_STREAMS + MUTED_STREAMS + ABSENT
        assert now("subscribers", era="none", transport="process") == 2
        # Each session without a stream has two pending lists, the subscriber with a rate limit has one.
        assert grown(now, "mailbox_depth") == 2 * ABSENT + 1

        await absent[0].end()
        for session in absent[1:]:
            await record(await stack.enter_async_context(session.stream()))

        told = MODERN_STREAMS + LEGACY_STREAMS
        expected = {"tools": told * made + ABSENT - 1, "prompts": told * 2}

        def all_methods() -> Counter[str]:
            return sum((each.methods for each in recorded), Counter())

        async with asyncio.timeout(DEADLINE):
            while all_methods() != expected:
                await received.wait()
                received.clear()
        inside = await wire.change("callback_counts")
        # The filter passes only removals. A tool that was added and removed again is no net change.
        assert inside == {"filtered": 1, "paced": 1}

        now = await scrape(http, url)
        assert grown(now, "notifications_sent_total", topic="tools") == all_methods()["tools"] + sum(inside.values())
        assert grown(now, "notifications_sent_total", topic="prompts") == all_methods()["prompts"]
        assert grown(now, "notifications_bytes_total") == sum(each.size for each in recorded)
        assert grown(now, "notifications_coalesced_total") == ABSENT * (made - 1 + 1)
        suppressed = {
            "filtered": made // 2,
            "rate": made - 2,
            "muted": MUTED_STREAMS * (made + 2),
            "same_digest": ABSENT - 1 + CHANGES // 2,
            "unsubscribed": 2,
        }
        for reason, count in suppressed.items():
            assert grown(now, "notifications_suppressed_total", reason=reason) == count, reason
        for operation in ("added", "removed"):
            assert now("changes_total", topic="tools", operation=operation) >= made // 2
        total = sum(grown(now, "notifications_sent_total", topic=topic) for topic in ("tools", "prompts"))
        assert grown(now, "delivery_latency_seconds_count") == total
        assert grown(now, "delivery_latency_seconds_bucket", le="+Inf") == total
        assert grown(now, "delivery_latency_seconds_bucket", le="60.0") == total
        assert grown(now, "subscribers_closed_total", reason="disconnected") == 1
        assert grown(now, "tool_runs_total", outcome="ok") == made + 2 + 2 + 1
        assert now("journal_size") >= made


async def test_slow_reader_and_its_cutoff_are_counted(http: httpx2.AsyncClient) -> None:
    # The write deadline leaves time to scrape before the cutoff.
    with serving("mcpserver", app={"metrics": "local"}, policy={"write_deadline": 4.0}) as url:
        wire = Wire(url, http)
        async with wire.listen(1, LISTS) as stream, asyncio.timeout(DEADLINE):
            await stream.message()  # the acknowledgement; the client reads nothing after it
            number = 0
            while not (samples := await scrape(http, url))("readers_slow"):
                assert not samples("cutoffs_total", reason="slow")
                number += 1
                text = "x" * 500_000 + str(number)
                await wire.change("add", feature="tools", key="big", description=text, replace=True)
            while not samples("cutoffs_total", reason="slow") or samples("readers_slow"):
                samples = await scrape(http, url)
        assert samples("cutoffs_total", reason="slow") == 1
        assert samples("subscribers_closed_total", reason="slow") == 1
        assert samples("subscribers", era="modern", transport="http") == 0


async def test_tool_calls_are_counted_by_outcome(url: str, http: httpx2.AsyncClient) -> None:
    wire = Wire(url, http)
    before = await scrape(http, url)
    await wire.change("state")
    await wire.post("tools/call", name="change", arguments={"what": []})  # an invalid argument
    await wire.post("tools/call", name="unknown", arguments={})
    now = await scrape(http, url)
    ok, tool_error, error = [
        now("tool_runs_total", outcome=outcome) - before("tool_runs_total", outcome=outcome)
        for outcome in ("ok", "tool_error", "error")
    ]
    assert (ok, tool_error + error) == (1, 2)


def test_workspace_scans_and_problems_are_counted(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "hello.py").write_text(HELLO)
    workspace = Workspace(tmp_path, poll=0)
    live = Live(workspace)

    def check(*, problems: int, **scans: int) -> None:
        samples = Samples(render(live.metrics))
        assert samples("workspace_problems") == problems
        for outcome, number in scans.items():
            assert samples("workspace_rescans_total", outcome=outcome) == number

    check(problems=0, failed=0, read=1, unchanged=0)
    (tools / "broken.py").write_text("def broken(")
    workspace.rescan()
    workspace.rescan()
    check(problems=1)
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    workspace.rescan()
    check(problems=1, failed=1, read=2, unchanged=1)  # the file is gone, and the folder serves nothing


# Latency


def make_hub() -> tuple[Clock, Catalog, Hub]:
    clock = Clock()
    clock.now = 100.0
    catalog = Catalog(clock=clock)
    return clock, catalog, Hub(catalog, clock=clock)


@pytest.mark.parametrize("options", [{}, {"is_muted": lambda topic: False}], ids=["all", "can be muted"])
def test_time_of_the_delivery_counts_as_latency(options: dict[str, Any]) -> None:
    clock, catalog, hub = make_hub()

    def deliver(notification: Any) -> None:
        clock.now += 0.3

    hub.subscribe(deliver, "tools", **options)
    catalog.tools.add({"name": "a"})
    assert sum(hub.counts.latency.sums) == pytest.approx(0.3)


def test_absence_of_a_client_does_not_count_as_latency() -> None:
    """Otherwise the alert LateNotifications would fire for each legacy client that was offline."""
    clock, catalog, hub = make_hub()
    subscriber = hub.open(lambda notification: None)
    subscriber.subscribe("tools")
    subscriber.pause()
    catalog.tools.add({"name": "a"})
    clock.now += 50
    hub.wake(subscriber, was_absent=True)
    assert sum(hub.counts.latency.counts) == 1
    assert sum(hub.counts.latency.sums) == 0


@pytest.mark.parametrize("policy", [{"min_interval": 5.0}, {"quiet_gap": 5.0, "longest_wait": 8.0}])
def test_delay_set_by_the_policy_does_not_count_as_latency(policy: dict[str, Any]) -> None:
    """Otherwise the alert LateNotifications would fire for each server with a rate limit."""
    clock, catalog, hub = make_hub()
    heard: list[float] = []
    for _ in range(2):
        subscriber = hub.open(lambda notification: heard.append(clock.now), settings=Policy(**policy).delivery)
        subscriber.subscribe("tools")
    for name in ("a", "b", "c"):
        catalog.tools.add({"name": name})
        clock.now += 1
    while (due := hub.next_due()) is not None:
        clock.now = due + 0.2
        hub.tick()
    assert max(heard) > 104
    late = sum(seconds > 103 for seconds in heard)
    assert sum(hub.counts.latency.sums) == pytest.approx(0.2 * late)


def test_latency_belongs_to_the_bucket_that_ends_at_it_and_is_never_negative() -> None:
    latency = Latency()
    latency.add(BOUNDS[3], 5)
    latency.add(-1.0)
    latency.add(1e9, 2)
    assert (latency.counts[3], latency.counts[0], latency.counts[-1]) == (5, 1, 2)
    assert sum(latency.sums) == pytest.approx(5 * BOUNDS[3] + 2e9)


def test_deliveries_are_timed_in_batches_and_failed_ones_are_not_counted() -> None:
    times = iter((100.0, 100.002, 100.02, 100.2))
    catalog = Catalog(clock=lambda: next(times))
    hub = Hub(catalog)
    told: list[int] = []

    def deliver_to(number: int) -> Callable[[object], None]:
        def deliver(notification: object) -> None:
            if number % 50 == 0:
                raise OSError("can't")
            told.append(number)

        return deliver

    for number in range(150):
        hub.subscribe(hub.open(deliver_to(number)), "tools")
    catalog.tools.add({"name": "a"})
    assert hub.counts.sent["tools"] == len(told) == 147
    latency = hub.counts.latency.counts
    assert (latency[4], latency[7], latency[10]) == (62, 63, 22), "each batch has the time after its last delivery"
    assert sum(latency) == 147


# Sent, suppressed, coalesced


def fail(notification: Any) -> None:
    raise RuntimeError("no")


def busy(notification: Any) -> object:
    return BUSY


def accept(notification: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("deliver", "options", "steps", "expected"),
    [
        (accept, {}, "+a +b", {"sent": 2}),
        (busy, {}, "+a +b +c", {"sent": 1, "coalesced": 1, "pending": 1}),
        (busy, {}, "+a +b +c wake", {"sent": 2, "coalesced": 1}),
        (busy, {}, "+a +b -b wake", {"sent": 1, "coalesced": 1, "same_digest": 1}),
        (busy, {}, "+a +b leave", {"sent": 1, "unsubscribed": 1}),
        (busy, {}, "+a +b !1 !2 close", {"sent": 1, "unsubscribed": 3}),
        (accept, {"filter": Filter(names=["a*"])}, "+a +b +a2", {"sent": 2, "filtered": 1}),
        (busy, {"filter": Filter(names=["a*"])}, "+a +b +a2 +b2", {"sent": 1, "filtered": 2, "pending": 1}),
        (busy, {"filter": Filter(names=["a*"])}, "+a +b +a2 -a2 wake", {"sent": 1, "filtered": 2, "coalesced": 1}),
        (busy, {"is_muted": lambda topic: True}, "+a +b !1", {"muted": 3}),
        (accept, {"settings": Policy(min_interval=10).delivery}, "+a +b +c", {"sent": 1, "rate": 1, "pending": 1}),
        (accept, {"settings": Policy(min_interval=10).delivery}, "+a +b +c pass", {"sent": 2, "rate": 1}),
        (
            accept,
            {"settings": Policy(min_interval=10).delivery},
            "+a +b -b pass",
            {"sent": 1, "rate": 1, "same_digest": 1},
        ),
        (fail, {}, "+a !1", {"failed": 2}),
        (fail, {"is_muted": lambda topic: False}, "+a !1", {"failed": 2}),
        (busy, {"settings": Policy(max_pending=2).delivery}, "+a +b !1 !2", {"sent": 1, "unsubscribed": 3}),
        (busy, {"settings": Policy(max_pending=2).delivery, "merges_on_overflow": True}, "+a +b !1 !2",
         {"sent": 1, "coalesced": 1, "pending": 2}),
    ],
)  # fmt: skip
def test_each_commit_is_sent_suppressed_coalesced_failed_or_pending(
    deliver: Callable[[Any], object], options: dict[str, Any], steps: str, expected: dict[str, int]
) -> None:
    """`+a` adds a tool, `-a` removes it, `!1` updates a content."""
    clock, catalog, hub = make_hub()
    subscriber = hub.open(deliver, **{name: value for name, value in options.items() if name != "merges_on_overflow"})
    subscriber.merges_on_overflow = "merges_on_overflow" in options
    subscriber.subscribe("tools", "resources", uris=["x://*"])
    commits = 0
    found: dict[str, int] = {}
    for step in steps.split():
        commits += step[0] in "+-!"
        match step[0], step[1:]:
            case "+", name:
                catalog.tools.add({"name": name})
            case "-", name:
                catalog.tools.remove(name)
            case "!", number:
                catalog.resources.updated(f"x://{number}")
            case _ if step == "pass":
                clock.now += 10
                hub.tick()
            case _:
                {"wake": hub.wake, "leave": hub.unsubscribe, "close": hub.close}[step](subscriber)  # type: ignore[operator]
        counts = hub.counts
        found = {"sent": counts.sent.total(), "coalesced": counts.coalesced, "failed": counts.failures["delivery"]}
        found |= {"pending": subscriber.pending, **{why.value: number for why, number in counts.suppressed.items()}}
        assert sum(found.values()) == commits, step
    assert {what: number for what, number in found.items() if number} == expected
