"""Spans of a server in this process: which there are, to which trace they belong, and that they end."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.server.mcpserver import MCPServer
from opentelemetry import trace

from tests.support.sdk_clients import DEADLINE
from tests.support.telemetry import RecordedTelemetry
from tidings import BUSY, Feature, Live, Notification, Policy
from tidings.telemetry import Telemetry, context_of

pytestmark = pytest.mark.anyio

UNSUBSCRIBE = "change_notifier.unsubscribe"


def make_live(recorded: RecordedTelemetry, **options: Any) -> Live:
    telemetry = Telemetry(tracer_provider=recorded.tracer_provider)
    return Live(MCPServer("traced"), **{"telemetry": telemetry, **options})


@pytest.fixture
def recorded() -> RecordedTelemetry:
    return RecordedTelemetry()


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
    [span] = recorded.spans(UNSUBSCRIBE)
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
    at_once, later = recorded.spans(UNSUBSCRIBE)
    expected = {"tidings.outcome": "deleted", "tidings.cleaned": 3, "tidings.uri": ("a://b",)}
    assert at_once["attributes"].items() >= expected.items()
    assert "tidings.client" not in at_once["attributes"]
    assert later["attributes"]["tidings.client"] == "slow"
    [call] = recorded.spans("call")
    [notify] = [each for each in recorded.spans("change_notifier.notify_resource_updated") if each["parent"]]
    assert {(each["trace"], each["parent"]) for each in (at_once, later)} == {(call["trace"], notify["span"])}


# The trace of a notification


@pytest.mark.parametrize(("members", "is_kept"), [(2, True), (30, False)])
def test_long_tracestate_is_dropped(members: int, is_kept: bool) -> None:
    meta = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": ",".join(f"k{number}={'x' * 200}" for number in range(members)),
    }
    context = context_of({"_meta": meta})
    assert context is not None
    assert bool(trace.get_current_span(context).get_span_context().trace_state) is is_kept


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
        live.hub.subscribe(hear, Feature.TOOLS, policy=Policy(quiet_gap=0.05, longest_wait=0.05))
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
