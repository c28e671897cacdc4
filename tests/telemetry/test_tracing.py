"""Traces, from a client's call into another client's own; metrics; and trouble in either that nobody notices."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import mcp_types as types
import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.sdk_clients import (
    DEADLINE,
    KINDS,
    MARKER,
    MODERN,
    Ear,
    listening,
    open_ear,
    serving,
    serving_all,
    stdio_server,
)
from tests.support.telemetry import BROKEN
from tests.support.wire_clients import LegacyWire, http
from tidings import Catalog, Feature, Hub, Notification
from tidings.frames import Shape, write
from tidings.spans import SPANS
from tidings.telemetry import context_of
from tidings.telemetry.metrics import METRICS
from tidings.telemetry.tracing import ATTRIBUTES

__all__ = ["http"]

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:resources/.*subscribe is removed")]

SERVERS = {kind: (kind, {"telemetry": "memory", "app": {"metrics": "local"}}) for kind in KINDS}
Spans = list[dict[str, Any]]


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    with serving_all(SERVERS) as urls:
        yield urls


class Tracing:
    """The clients' own OpenTelemetry, which knows nothing of the server's."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("client")


@pytest.fixture
def tracing() -> Tracing:
    return Tracing()


def ids(span: trace.Span) -> tuple[str, str]:
    context = span.get_span_context()
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def ancestors(spans: Spans, span: str | None) -> Iterator[dict[str, Any]]:
    """From a span upwards, as far as this server knows them."""
    by_id = {each["span"]: each for each in spans}
    while span in by_id:
        yield by_id[span]
        span = by_id[span]["parent"]


async def spans_of(ear: Ear) -> Spans:
    found: Spans = await ear.change("spans")
    return found


# One trace


@pytest.mark.parametrize("where", ["request", "thread"])
@pytest.mark.parametrize("version", [MODERN, "2025-11-25"])
@pytest.mark.parametrize("kind", KINDS)
async def test_one_trace_runs_from_a_tool_call_into_another_clients_own(
    urls: dict[str, str], tracing: Tracing, kind: str, version: str, where: str
) -> None:
    name = f"traced_{version}_{where}"
    async with open_ear(urls[kind], MODERN) as caller, open_ear(urls[kind], version) as watcher, listening(watcher):
        with tracing.tracer.start_as_current_span("call") as call:
            answer = await caller.change("add", where, feature="tools", key=name)
        assert answer is None
        await watcher.until(lambda: f"tools added {name}" in watcher.gists, name)
        [told] = [each for each in watcher.heard if each.gist == f"tools added {name}"]
        params = types.NotificationParams.model_validate({"_meta": told.meta})
        with tracing.tracer.start_as_current_span("refresh", context=context_of(params)) as refresh:
            pass
        spans = await spans_of(caller)

    trace_id, call_span = ids(call)
    assert ids(refresh)[0] == trace_id
    assert refresh.parent is not None  # type: ignore[attr-defined]  # the SDK's spans know theirs
    chain = list(ancestors(spans, f"{refresh.parent.span_id:016x}"))  # type: ignore[attr-defined]
    names = [each["name"] for each in chain]
    assert {each["trace"] for each in chain} == {trace_id}
    assert names[0] == "change_notifier.notify_list_changed"
    assert "source.run_tool" in names
    assert names[-1].startswith("tools/call")
    assert chain[-1]["parent"] == call_span
    assert ("source.read_list" in names) == (kind != "mcpserver")


async def test_the_trace_goes_on_over_stdio_and_the_listen_span_does_not_live_as_long_as_its_stream(
    tracing: Tracing,
) -> None:
    for version, kind in itertools.product([MODERN, "2025-06-18"], KINDS):
        async with open_ear(stdio_server(kind, telemetry="memory"), version) as ear:
            with tracing.tracer.start_as_current_span("watch") as watch:
                stack = AsyncExitStack()
                await stack.enter_async_context(listening(ear))
            async with stack:
                with tracing.tracer.start_as_current_span("call") as call:
                    await ear.change("add", feature="prompts", key="traced")
                await ear.until(lambda: "prompts added traced" in ear.gists, "traced")  # called here
                context = context_of({"_meta": ear.heard[-1].meta})
                assert f"{trace.get_current_span(context).get_span_context().trace_id:032x}" == ids(call)[0]
                spans = await spans_of(ear)
                if version == MODERN:
                    # All of it has ended while the stream is open, and is part of its client's trace.
                    subscribed = [each for each in spans if each["name"] == "change_notifier.subscribe"]
                    assert [(each["trace"], each["parent"]) for each in subscribed] == [ids(watch)], kind
        assert "subscriptions/listen" not in {each["name"].split(" ")[0] for each in spans}


async def test_a_listen_over_http_is_part_of_its_clients_trace_and_has_ended_while_the_stream_is_open(
    urls: dict[str, str], tracing: Tracing
) -> None:
    for kind in KINDS:
        async with open_ear(urls[kind], MODERN) as ear:
            with tracing.tracer.start_as_current_span("watch") as watch:
                stack = AsyncExitStack()
                await stack.enter_async_context(ear.listen())
            async with stack:
                spans = await spans_of(ear)
                mine = [each for each in spans if each["trace"] == ids(watch)[0]]
                assert [each["name"] for each in mine] == ["change_notifier.subscribe"]
                assert mine[0]["parent"] == ids(watch)[1]
                assert mine[0]["attributes"]["tidings.feature"] == ["prompts", "resources", "tools"]


async def test_a_legacy_session_is_part_of_the_trace_of_its_handshake_and_what_it_asks_later_is_not(
    urls: dict[str, str], http: httpx2.AsyncClient
) -> None:
    for number, kind in enumerate(KINDS, 1):
        ids = (f"{number:032x}", f"{number:016x}")
        session = LegacyWire(urls[kind], http)
        await session.shake_hands(meta={"traceparent": f"00-{ids[0]}-{ids[1]}-01"})
        await session.post("tools/list")
        async with open_ear(urls[kind], MODERN) as ear:
            mine = [each for each in await spans_of(ear) if each["trace"] == ids[0]]
        await session.end()
        assert [each["name"].split(" ")[0] for each in mine] == ["initialize", "change_notifier.subscribe"], kind
        assert {each["parent"] for each in mine} == {ids[1]}


async def test_a_change_that_nobody_called_for_begins_a_trace_of_its_own(urls: dict[str, str]) -> None:
    async with open_ear(urls["mcpserver"], MODERN) as ear, ear.listen():
        await ear.step("add", "tools added loner", where="outside", feature="tools", key="loner")
        spans = await spans_of(ear)
    [told] = [
        each
        for each in spans
        if each["name"] == "change_notifier.notify_list_changed"
        if each["parent"] is None and each["attributes"]["tidings.feature"] == ["tools"]
    ][-1:]
    assert told["attributes"]["tidings.operation"] == ["added"]


async def test_a_late_notification_carries_the_trace_of_its_newest_change(
    urls: dict[str, str], http: httpx2.AsyncClient, tracing: Tracing
) -> None:
    """A legacy session without its stream is told when it opens it."""
    session = LegacyWire(urls["mcpserver"], http)
    await session.shake_hands()
    async with open_ear(urls["mcpserver"], MODERN) as ear:
        await ear.change("add", feature="tools", key="late_1")
        with tracing.tracer.start_as_current_span("call") as call:
            await ear.change("add", feature="tools", key="late_2")
        async with session.stream() as stream:
            heard = await stream.heard()
    assert heard.gist == "tools added late_1, tools added late_2"
    assert heard.meta["traceparent"].split("-")[1] == ids(call)[0]
    await session.end()


async def test_without_a_trace_there_is_no_traceparent() -> None:
    with serving("mcpserver", telemetry=False) as url:
        async with open_ear(url, MODERN) as ear, ear.listen():
            with Tracing().tracer.start_as_current_span("call"):
                await ear.step("add", "tools added plain", feature="tools", key="plain")
                await ear.change("add", feature="tools", key="another")
                await ear.until(lambda: bool(ear.heard), "another")
    assert "traceparent" not in ear.heard[0].meta


async def test_a_trace_is_passed_on_even_where_no_sdk_of_opentelemetry_is(tracing: Tracing) -> None:
    with serving("mcpserver") as url:
        async with open_ear(url, MODERN) as ear, ear.listen():
            with tracing.tracer.start_as_current_span("call") as call:
                await ear.change("add", feature="tools", key="passed")
            await ear.until(lambda: bool(ear.heard), "passed")
            assert ear.heard[0].meta["traceparent"].split("-")[1:3] == [*ids(call)]
            await ear.change("add", "outside", feature="tools", key="no_trace")
            await ear.until(lambda: len(ear.heard) > 1, "no_trace")
            assert "traceparent" not in ear.heard[1].meta


@pytest.mark.parametrize(
    "meta",
    [
        None,
        {},
        {"traceparent": 7},
        {"traceparent": "00-zz-1-01"},
        {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
    ],
)
def test_what_is_no_trace_is_none(meta: Any) -> None:
    assert context_of({"_meta": meta}) is None
    assert context_of(types.NotificationParams()) is None
    assert context_of(None) is None


def test_a_frame_carries_the_trace_in_every_detail_and_belongs_to_the_notification() -> None:
    catalog = Catalog()
    trace_of = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "tracestate": "vendor=x"}
    catalog.trace = lambda: trace_of
    told: list[Notification] = []
    Hub(catalog).subscribe(told.append, Feature.TOOLS)
    catalog.tools.add({"name": "a"})
    for shape in (Shape(), Shape("none"), Shape(is_tagged=True), Shape("none", is_tagged=True), Shape("summary")):
        frame = write(told[0], shape, b"1" if shape.is_tagged else b"")
        assert b'"traceparent":"00-' + b"1" * 32 in frame
        assert b'"tracestate":"vendor=x"' in frame
        meta = msgspec.json.decode(frame)["params"]["_meta"]
        assert trace_of.items() <= meta.items()


# Every span and every metric


async def test_an_exporter_sees_every_span_of_the_table_with_its_attributes(
    urls: dict[str, str],
) -> None:
    url = urls["lowlevel"]
    async with open_ear(url, MODERN) as caller, open_ear(url, "2025-06-18") as legacy:
        await legacy.subscribe("board://watched")
        async with caller.listen():
            await caller.change("add", feature="tools", key="spanned")
            await caller.change("add", feature="prompts", key="spanned")
            await caller.change("add", feature="resources", key="board://spanned")
            await caller.change("updated", uri="board://watched?token=hidden")
            await caller.change("updated", uri="board://watched")
            await legacy.unsubscribe("board://watched")
            await caller.mark()
        await caller.until_state(watched=[])
        seen = await spans_of(caller)
    found = {each["name"]: each for each in seen}
    expected = SPANS - {"workspace.scan", "store.write"}
    assert expected <= found.keys()

    notify = found["change_notifier.notify_list_changed"]
    assert (
        notify["attributes"]
        | {
            "tidings.operation": ["added"],
            "tidings.outcome": "ok",
            "tidings.server": "board",
            "mcp.method.name": "notifications/resources/list_changed",
            "tidings.feature": ["resources"],
            "tidings.subscribers": 2,
        }
        == notify["attributes"]
    )
    assert {"tidings.revision", "tidings.digest"} <= notify["attributes"].keys()
    assert notify["events"] == {"fan-out": {"tidings.subscribers": 2, "tidings.sent": 2}}
    send = found["resource_list_changed.send"]
    assert send["parent"] == notify["span"]
    assert send["status"] == notify["status"] == "OK"
    assert send["attributes"]["mcp.method.name"] == "notifications/resources/list_changed"
    assert send["attributes"]["tidings.server"] == "board"

    cleanup = found["change_notifier.cleanup_client"]
    assert cleanup["attributes"]["tidings.outcome"] == "disconnected"
    assert cleanup["attributes"]["tidings.cleaned"] == 4
    assert cleanup["attributes"]["tidings.era"] == "modern"
    unsubscribe = found["change_notifier.unsubscribe"]
    assert unsubscribe["attributes"]["tidings.uri"] == ["board://watched"]
    assert unsubscribe["attributes"]["tidings.client"].startswith("session ")
    assert [each["name"] for each in ancestors(seen, unsubscribe["parent"])] == ["resources/unsubscribe"]
    content = [each for each in seen if each["name"] == "change_notifier.notify_resource_updated"]
    assert {each["attributes"]["tidings.uri"][0] for each in content} >= {"board://watched", MARKER}
    assert not [each for each in seen if "hidden" in str(each)]
    assert found["source.run_tool"]["attributes"]["gen_ai.tool.name"] == "change"
    ours = {key for each in seen if each["name"] in SPANS for key in each["attributes"]}
    assert ours <= ATTRIBUTES
    # One span for each change, however many are told of it.
    told = [each for each in seen if "tidings.revision" in each["attributes"]]
    assert set(Counter((each["name"], each["attributes"]["tidings.revision"]) for each in told).values()) == {1}


async def test_an_exporter_sees_every_metric_of_the_table(urls: dict[str, str], http: httpx2.AsyncClient) -> None:
    async with open_ear(urls["mcpserver"], MODERN) as ear, ear.listen():
        await ear.step("add", "tools added metered", feature="tools", key="metered")
        readings = await ear.change("readings")
        text = (await http.get(urls["mcpserver"].replace("/mcp", "/metrics"))).text
    kinds = {"counter": "Sum", "level": "Sum", "gauge": "Gauge", "histogram": "Histogram"}
    for metric in METRICS:
        points = readings[metric.name]
        assert {point["unit"] for point in points} == {metric.unit}
        assert {point["kind"] for point in points} == {kinds[metric.kind]}
        assert {tuple(sorted(point["labels"])) for point in points} == {tuple(sorted(metric.labels))}
        assert f"# TYPE {metric.prometheus} " in text
    [latency] = readings["tidings.delivery.latency"]
    sent = sum(point["value"] for point in readings["tidings.notifications.sent"])
    assert latency["count"] == sent > 0
    assert 0 < latency["sum"] < DEADLINE * sent
    assert sum(latency["bucket_counts"]) == sent


# Trouble


@pytest.mark.parametrize("mode", BROKEN)
async def test_trouble_in_tracing_changes_nothing_that_a_client_sees(mode: str) -> None:
    async def life(url: str) -> list[Any]:
        async with open_ear(url, MODERN) as modern, open_ear(url, "2025-11-25") as legacy:
            async with listening(modern, "board://x"), listening(legacy, "board://x"):
                for feature, key in (("tools", "a"), ("prompts", "b"), ("resources", "board://c")):
                    await modern.change("add", feature=feature, key=key)
                await modern.change("updated", uri="board://x", etag="1")
                await legacy.unsubscribe("board://x")
                await modern.change("updated", uri="board://x", etag="2")
                for ear in (modern, legacy):
                    await ear.mark()
                names = await modern.names("tools")
            await legacy.until_state(subscribers=1)
            seen = [(ear.gists, [_change_of(each.meta) for each in ear.heard]) for ear in (modern, legacy)]
            return [names, seen]

    servers = {name: ("mcpserver", {"telemetry": option}) for name, option in (("broken", mode), ("none", False))}
    with serving_all(servers) as urls:
        assert await life(urls["broken"]) == await life(urls["none"])


def _change_of(meta: dict[str, Any]) -> dict[str, Any]:
    """Without the digest: that of a content which has no etag is another one in each life of a server."""
    return {key: value for key, value in meta.get("dev.tidings/change", {}).items() if key != "digest"}
