"""Traces and metrics: of real servers with real clients, of a server in this process, and with a broken SDK.

Covers `core/observer.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mcp_types as types
import msgspec
import pytest
from mcp.server.mcpserver import MCPServer
from opentelemetry import trace

from tests.support.sdk_clients import (
    DEADLINE,
    KINDS,
    MARKER,
    MODERN,
    listening,
    open_client,
    serving,
    serving_all,
    stdio_server,
)
from tests.support.telemetry import BROKEN, RecordedTelemetry
from tests.support.wire_clients import LegacyWire, http
from tidings import BUSY, Catalog, Feature, Hub, Live, Notification, Policy
from tidings.core.frames import FrameFormat, encode_frame
from tidings.core.tracer import SPANS
from tidings.telemetry import Telemetry, context_of
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


@pytest.fixture
def recorded() -> RecordedTelemetry:
    return RecordedTelemetry()


@pytest.fixture
def tracer(recorded: RecordedTelemetry) -> trace.Tracer:
    """The tracer of the clients, which shares nothing with a server in another process."""
    return recorded.tracer


def make_live(recorded: RecordedTelemetry, **options: Any) -> Live:
    telemetry = Telemetry(tracer_provider=recorded.tracer_provider)
    return Live(MCPServer("traced"), **{"telemetry": telemetry, **options})


def ids(span: trace.Span | None) -> tuple[str, str]:
    assert span is not None
    context = span.get_span_context()
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def ancestors(spans: Spans, span: str | None) -> Iterator[dict[str, Any]]:
    """Return a span of the server and its ancestors in the server."""
    by_id = {each["span"]: each for each in spans}
    while span in by_id:
        yield by_id[span]
        span = by_id[span]["parent"]


# One trace


@pytest.mark.parametrize("where", ["request", "thread"])
@pytest.mark.parametrize("kind", KINDS)
async def test_one_trace_leads_from_a_tool_call_to_the_reaction_of_another_client(
    urls: dict[str, str], tracer: trace.Tracer, kind: str, where: str
) -> None:
    name = f"traced_{where}"
    async with (
        open_client(urls[kind], MODERN) as caller,
        open_client(urls[kind], MODERN) as modern,
        open_client(urls[kind], "2025-11-25") as legacy,
        listening(modern),
        listening(legacy),
    ):
        with tracer.start_as_current_span("call") as call:
            await caller.change("add", where, feature="tools", key=name)
        for watcher in (modern, legacy):
            await watcher.until(lambda watcher=watcher: watcher.summaries == [f"tools added {name}"], name)  # type: ignore[misc]
        spans = await caller.change("spans")

    for watcher in (modern, legacy):
        [told] = watcher.received
        params = types.NotificationParams.model_validate({"_meta": told.meta})
        with tracer.start_as_current_span("refresh", context=context_of(params)) as refresh:
            pass
        assert ids(refresh)[0] == ids(call)[0]
        chain = list(ancestors(spans, told.meta["traceparent"].split("-")[2]))
        names = [each["name"] for each in chain]
        assert {each["trace"] for each in chain} == {ids(call)[0]}
        assert names[0] == "change_notifier.notify_list_changed"
        assert "source.run_tool" in names
        assert names[-1].startswith("tools/call")
        assert chain[-1]["parent"] == ids(call)[1]
        assert ("source.read_list" in names) == (kind != "mcpserver")


@pytest.mark.parametrize(("kind", "version"), [*((kind, MODERN) for kind in KINDS), ("mcpserver", "2025-06-18")])
async def test_notification_over_stdio_carries_the_trace_of_the_call(
    tracer: trace.Tracer, kind: str, version: str
) -> None:
    async with open_client(stdio_server(kind, telemetry="memory"), version) as client, AsyncExitStack() as stack:
        with tracer.start_as_current_span("watch") as watch:
            await stack.enter_async_context(listening(client))
        with tracer.start_as_current_span("call") as call:
            await client.change("add", feature="prompts", key="traced")
        await client.until(lambda: "prompts added traced" in client.summaries, "traced")
        context = context_of({"_meta": client.received[-1].meta})
        assert ids(trace.get_current_span(context))[0] == ids(call)[0]
        if version == MODERN:
            check_listen_span(await client.change("spans"), watch)


@pytest.mark.parametrize("kind", KINDS)
async def test_listen_span_is_in_the_trace_of_its_client_and_ends_before_the_stream(
    urls: dict[str, str], tracer: trace.Tracer, kind: str
) -> None:
    async with open_client(urls[kind], MODERN) as client, AsyncExitStack() as stack:
        with tracer.start_as_current_span("watch") as watch:
            await stack.enter_async_context(client.listen())
        check_listen_span(await client.change("spans"), watch)


def check_listen_span(spans: Spans, watch: trace.Span) -> None:
    """Check the spans that have ended while the stream is open."""
    [subscribed] = [each for each in spans if each["trace"] == ids(watch)[0]]
    assert subscribed["name"] == "change_notifier.subscribe"
    assert subscribed["parent"] == ids(watch)[1]
    assert subscribed["attributes"]["tidings.feature"] == ["prompts", "resources", "tools"]


@pytest.mark.parametrize("kind", KINDS)
async def test_legacy_session_is_in_the_trace_of_its_handshake_and_later_requests_are_not(
    urls: dict[str, str], http: httpx2.AsyncClient, kind: str
) -> None:
    number = KINDS.index(kind) + 1
    trace_id, parent = f"{number:032x}", f"{number:016x}"
    session = LegacyWire(urls[kind], http)
    await session.shake_hands(meta={"traceparent": f"00-{trace_id}-{parent}-01"})
    await session.post("tools/list")
    async with open_client(urls[kind], MODERN) as client:
        spans = [each for each in await client.change("spans") if each["trace"] == trace_id]
    await session.end()
    assert [each["name"].split(" ")[0] for each in spans] == ["initialize", "change_notifier.subscribe"]
    assert {each["parent"] for each in spans} == {parent}


async def test_change_without_a_caller_starts_its_own_trace(urls: dict[str, str]) -> None:
    async with open_client(urls["mcpserver"], MODERN) as client, client.listen():
        await client.step("add", "tools added loner", where="outside", feature="tools", key="loner")
        spans = await client.change("spans")
    notify = [each for each in spans if each["name"] == "change_notifier.notify_list_changed"][-1]
    assert notify["parent"] is None
    assert notify["attributes"]["tidings.operation"] == ["added"]


async def test_late_notification_carries_the_trace_of_its_newest_change(
    urls: dict[str, str], http: httpx2.AsyncClient, tracer: trace.Tracer
) -> None:
    """A legacy session without a stream gets its notifications when it opens one."""
    session = LegacyWire(urls["mcpserver"], http)
    await session.shake_hands()
    async with open_client(urls["mcpserver"], MODERN) as client:
        await client.change("add", feature="tools", key="late_1")
        with tracer.start_as_current_span("call") as call:
            await client.change("add", feature="tools", key="late_2")
        async with session.stream() as stream:
            heard = await stream.received()
    assert heard.summary == "tools added late_1, tools added late_2"
    assert heard.meta["traceparent"].split("-")[1] == ids(call)[0]
    await session.end()


async def test_delayed_notification_runs_in_the_trace_of_its_change_and_in_no_other_context(
    recorded: RecordedTelemetry,
) -> None:
    caller: ContextVar[str] = ContextVar("caller", default="none")
    live = make_live(recorded)
    heard: list[tuple[int, str]] = []
    done = anyio.Event()

    def hear(notification: Notification) -> None:
        heard.append((trace.get_current_span().get_span_context().trace_id, caller.get()))
        done.set()

    app = live.http_app()
    async with app.router.lifespan_context(app):
        live.hub.subscribe(hear, Feature.TOOLS, settings=Policy(quiet_gap=0.05, longest_wait=0.05).delivery)
        with recorded.tracer.start_as_current_span("change") as span:
            live.tools.add(print, name="p")
        # An unrelated caller resets the timer.
        token = caller.set("unrelated")
        with recorded.tracer.start_as_current_span("unrelated"):
            live.hub.subscribe(lambda notification: None, Feature.TOOLS, ttl=0.01)
        caller.reset(token)
        with anyio.fail_after(DEADLINE):
            await done.wait()
    assert heard == [(span.get_span_context().trace_id, "none")]


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
async def test_server_without_an_sdk_passes_the_trace_on_unless_telemetry_is_off(
    tracer: trace.Tracer, is_on: bool
) -> None:
    with serving("mcpserver", **({} if is_on else {"telemetry": False})) as url:
        async with open_client(url, MODERN) as client, client.listen():
            with tracer.start_as_current_span("call") as call:
                await client.change("add", feature="tools", key="in_a_trace")
            await client.change("add", "outside", feature="tools", key="in_no_trace")
            await client.until(lambda: len(client.received) == 2, "both")
    first, second = [each.meta.get("traceparent", "").split("-")[1:3] for each in client.received]
    assert first == ([*ids(call)] if is_on else [])
    assert second == []


@pytest.mark.parametrize(
    "params",
    [
        None,
        types.NotificationParams(),
        {},
        {"_meta": None},
        {"_meta": {}},
        {"_meta": {"traceparent": 7}},
        {"_meta": {"traceparent": "00-zz-1-01"}},
        {"_meta": {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"}},
    ],
    ids=str,
)
def test_params_without_a_valid_trace_have_no_context(params: Any) -> None:
    assert context_of(params) is None


@pytest.mark.parametrize(("members", "is_kept"), [(2, True), (30, False)])
def test_long_tracestate_is_dropped(members: int, is_kept: bool) -> None:
    meta = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": ",".join(f"k{number}={'x' * 200}" for number in range(members)),
    }
    context = context_of({"_meta": meta})
    assert context is not None
    assert bool(trace.get_current_span(context).get_span_context().trace_state) is is_kept


def test_notification_carries_the_trace_with_every_detail_setting() -> None:
    catalog = Catalog()
    trace_of = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "tracestate": "vendor=x"}
    catalog.trace = lambda: trace_of
    told: list[Notification] = []
    Hub(catalog).subscribe(told.append, Feature.TOOLS)
    catalog.tools.add({"name": "a"})
    for shape in (
        FrameFormat(),
        FrameFormat("none"),
        FrameFormat(is_tagged=True),
        FrameFormat("none", is_tagged=True),
        FrameFormat("summary"),
    ):
        frame = encode_frame(told[0], shape, b"1" if shape.is_tagged else b"")
        assert trace_of.items() <= msgspec.json.decode(frame)["params"]["_meta"].items()


# Every span and every metric


async def test_exporter_gets_every_span_with_its_attributes_and_one_span_per_change(urls: dict[str, str]) -> None:
    url = urls["lowlevel"]
    async with open_client(url, MODERN) as caller, open_client(url, "2025-06-18") as legacy:
        await legacy.subscribe("board://watched")
        async with caller.listen():
            for feature, key in (("tools", "spanned"), ("prompts", "spanned"), ("resources", "board://spanned")):
                await caller.change("add", feature=feature, key=key)
            await caller.change("updated", uri="board://watched?token=hidden")
            await caller.change("updated", uri="board://watched")
            await legacy.unsubscribe("board://watched")
            await caller.mark()
        await caller.until_state(watched=[])
        spans = await caller.change("spans")
    found = {each["name"]: each for each in spans}
    assert found.keys() >= SPANS - {"workspace.scan", "store.write", "events.deliver"}

    notify = found["change_notifier.notify_list_changed"]
    send = found["resource_list_changed.send"]
    assert send["parent"] == notify["span"]
    assert notify["events"] == {"fan-out": {"tidings.subscribers": 2, "tidings.sent": 2}}
    expected = {
        "tidings.operation": ["added"],
        "tidings.outcome": "ok",
        "tidings.server": "board",
        "mcp.method.name": "notifications/resources/list_changed",
        "tidings.feature": ["resources"],
        "tidings.subscribers": 2,
    }
    for each in (notify, send):
        assert each["status"] == "OK"
        assert each["attributes"] | expected == each["attributes"]
        assert {"tidings.revision", "tidings.digest"} <= each["attributes"].keys()

    cleanup = found["change_notifier.cleanup_client"]["attributes"]
    assert cleanup | {"tidings.outcome": "disconnected", "tidings.cleaned": 4, "tidings.era": "modern"} == cleanup
    unsubscribe = found["change_notifier.unsubscribe"]
    assert unsubscribe["attributes"]["tidings.uri"] == ["board://watched"]
    assert unsubscribe["attributes"]["tidings.client"].startswith("session ")
    assert [each["name"] for each in ancestors(spans, unsubscribe["parent"])] == ["resources/unsubscribe"]
    contents = [each for each in spans if each["name"] == "change_notifier.notify_resource_updated"]
    assert {each["attributes"]["tidings.uri"][0] for each in contents} >= {"board://watched", MARKER}
    assert not [each for each in spans if "hidden" in str(each)]
    assert found["source.run_tool"]["attributes"]["gen_ai.tool.name"] == "change"
    assert {key for each in spans if each["name"] in SPANS for key in each["attributes"]} <= ATTRIBUTES
    changes = [each for each in spans if "tidings.revision" in each["attributes"]]
    assert set(Counter((each["name"], each["attributes"]["tidings.revision"]) for each in changes).values()) == {1}


def test_each_batch_written_to_the_store_has_a_span(recorded: RecordedTelemetry, tmp_path: Path) -> None:
    live = make_live(recorded, store=tmp_path / "state.db")
    live.catalog.tools.add({"name": "a"})
    live.catalog.tools.add({"name": "b"})
    live.close()
    written = [span["attributes"] for span in recorded.spans("store.write")]
    assert sum(each["tidings.changes"] for each in written) == 2
    assert {each["tidings.outcome"] for each in written} == {"ok"}


@pytest.mark.parametrize(
    ("options", "disabled", "is_traced"), [({}, "", True), ({"telemetry": False}, "", False), ({}, "true", False)]
)
def test_tracing_can_be_switched_off_for_a_server_and_for_the_process(
    recorded: RecordedTelemetry,
    options: dict[str, Any],
    disabled: str,
    is_traced: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", disabled)
    live = make_live(recorded, **options)
    subscriber = live.hub.subscribe(lambda notification: None, Feature.TOOLS)
    live.tools.add(print, name="p")
    subscriber.close()
    names = [
        "change_notifier.subscribe",
        "tool_list_changed.send",
        "change_notifier.notify_list_changed",
        "change_notifier.cleanup_client",
    ]
    assert [span["name"] for span in recorded.spans()] == (names if is_traced else [])


async def test_exporter_gets_every_metric(urls: dict[str, str], http: httpx2.AsyncClient) -> None:
    async with open_client(urls["mcpserver"], MODERN) as client, client.listen():
        await client.step("add", "tools added metered", feature="tools", key="metered")
        exported = await client.change("metrics")
        text = (await http.get(urls["mcpserver"].replace("/mcp", "/metrics"))).text
    kinds = {"counter": "Sum", "level": "Sum", "gauge": "Gauge", "histogram": "Histogram"}
    for metric in METRICS:
        found = {(point["unit"], point["kind"], *sorted(point["labels"])) for point in exported[metric.name]}
        assert found == {(metric.unit, kinds[metric.kind], *sorted(metric.labels))}
        assert f"# TYPE {metric.prometheus} " in text
    [latency] = exported["tidings.delivery.latency"]
    sent = sum(point["value"] for point in exported["tidings.notifications.sent"])
    assert latency["count"] == sum(latency["bucket_counts"]) == sent > 0
    assert 0 < latency["sum"] < DEADLINE * sent


# Subscriptions that end without a request of the client


def test_expired_subscription_has_a_span_outside_of_any_trace(recorded: RecordedTelemetry) -> None:
    hub = make_live(recorded).hub
    client = hub.open(lambda notification: None, label="listen 7")
    hub.subscribe(client, Feature.PROMPTS)
    hub.subscribe(client, Feature.TOOLS, uris=["a://b"], ttl=5)
    due = hub.next_due()
    assert due is not None
    with recorded.tracer.start_as_current_span("unrelated"):
        hub.tick(due)
        hub.tick(due + 5)
    [span] = recorded.spans("change_notifier.unsubscribe")
    assert span["parent"] is None
    expected = {"tidings.outcome": "expired", "tidings.client": "listen 7", "tidings.cleaned": 2}
    assert span["attributes"].items() >= expected.items() | {("tidings.uri", ("a://b",))}


def test_deleted_resource_ends_its_subscriptions_with_one_span_in_the_trace_of_the_change(
    recorded: RecordedTelemetry,
) -> None:
    live = make_live(recorded)
    hub = live.hub
    for number in range(3):
        hub.subscribe(hub.open(lambda notification: None, label=f"listen {number}"), uris=["a://b", "a://c"])
    hub.subscribe(hub.open(lambda notification: None), uris=["a://*"])  # continues for other resources
    slow = hub.open(lambda notification: BUSY, label="slow")
    hub.subscribe(slow, uris=["a://b"])
    live.catalog.resources.updated("a://b")
    with recorded.tracer.start_as_current_span("call"):
        live.catalog.resources.deleted("a://b")
    with recorded.tracer.start_as_current_span("unrelated"):
        hub.wake(slow)  # gets its notification only now
    at_once, later = recorded.spans("change_notifier.unsubscribe")
    expected = {"tidings.outcome": "deleted", "tidings.cleaned": 3, "tidings.uri": ("a://b",)}
    assert at_once["attributes"].items() >= expected.items()
    assert "tidings.client" not in at_once["attributes"]
    assert later["attributes"]["tidings.client"] == "slow"
    [call] = recorded.spans("call")
    [notify] = [each for each in recorded.spans("change_notifier.notify_resource_updated") if each["parent"]]
    assert {(each["trace"], each["parent"]) for each in (at_once, later)} == {(call["trace"], notify["span"])}


# Errors


SLOW = ("tracer provider", "event of a span", "span processor", "meter provider")
PARTS = [pytest.param(part, marks=pytest.mark.slow if part in SLOW else ()) for part in BROKEN]


@pytest.mark.parametrize("part", PARTS)
async def test_clients_notice_no_exception_in_opentelemetry(part: str) -> None:
    added = {"tools": "a", "prompts": "b", "resources": "board://c"}
    lists = [f"{feature} added {key}" for feature, key in added.items()]
    x, marker = "content updated board://x", f"content updated {MARKER}"
    with serving("mcpserver", telemetry=part) as url:
        async with open_client(url, MODERN) as modern, open_client(url, "2025-11-25") as legacy:
            async with listening(modern, "board://x"), listening(legacy, "board://x"):
                for feature, key in added.items():
                    await modern.change("add", feature=feature, key=key)
                await modern.change("updated", uri="board://x", etag="1")
                await legacy.until(lambda: x in legacy.summaries, x)
                await legacy.unsubscribe("board://x")
                await modern.change("updated", uri="board://x", etag="2")
                await modern.mark()
                await legacy.until(lambda: marker in legacy.summaries, "the marker")
                assert "a" in await modern.names("tools")
            await legacy.until_state(subscribers=1)
    assert modern.summaries == [*lists, x, x, marker]
    assert legacy.summaries == [*lists, x, marker]
    for client in (modern, legacy):
        revisions = [each.change["revision"] for each in client.received]
        assert revisions == sorted(set(revisions))
        assert all(each.change["complete"] for each in client.received)
