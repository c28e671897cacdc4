"""Spans of a server in this process: which there are, whose trace they are part of, and that they end."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.server.mcpserver import MCPServer
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.sdk_clients import DEADLINE
from tidings import BUSY, Feature, Live, Notification, Policy
from tidings.durable import Durable
from tidings.telemetry import Telemetry, context_of

pytestmark = pytest.mark.anyio


class Traced:
    """A server whose spans are kept."""

    def __init__(self, **options: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")
        self.live = Live(MCPServer("traced"), **{"telemetry": Telemetry(tracer_provider=self.provider), **options})

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def found(self, name: str) -> list[dict[str, Any]]:
        """The attributes of the spans of a name."""
        return [dict(span.attributes or {}) for span in self.spans if span.name == name]


def test_each_batch_that_is_written_to_the_store_has_a_span(tmp_path: Path) -> None:
    traced = Traced(store=tmp_path / "state.db")
    traced.live.catalog.tools.add({"name": "a"})
    traced.live.catalog.tools.add({"name": "b"})
    traced.live.keeper.close()
    written = traced.found("store.write")
    assert sum(span["tidings.changes"] for span in written) == 2
    assert {span["tidings.outcome"] for span in written} == {"ok"}


def watched_spans(**options: Any) -> list[str]:
    """The names of the spans that subscribing, a change and leaving make."""
    traced = Traced(**options)
    subscriber = traced.live.hub.subscribe(lambda notification: None, Feature.TOOLS)
    traced.live.tools.add(print, name="p")
    subscriber.close()
    return [span.name for span in traced.spans]


def test_tracing_can_be_switched_off_for_a_server_and_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched_spans() == [
        "change_notifier.subscribe",
        "tool_list_changed.send",
        "change_notifier.notify_list_changed",
        "change_notifier.cleanup_client",
    ]
    assert watched_spans(telemetry=False) == []
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert watched_spans() == []


# Subscriptions that end though nobody ends them

UNSUBSCRIBE = "change_notifier.unsubscribe"


def test_a_subscription_that_has_run_out_has_a_span_in_nobodys_trace() -> None:
    traced = Traced()
    hub = traced.live.hub
    client = hub.open(lambda notification: None, label="listen 7")
    hub.subscribe(client, Feature.PROMPTS)
    hub.subscribe(client, Feature.TOOLS, uris=["a://b"], ttl=5)
    due = hub.next_due()
    assert due is not None
    with traced.tracer.start_as_current_span("stranger"):
        hub.tick(due)
        hub.tick(due + 5)
    [span] = [each for each in traced.spans if each.name == UNSUBSCRIBE]
    assert span.parent is None
    said = {"tidings.outcome": "expired", "tidings.client": "listen 7", "tidings.cleaned": 2}
    assert dict(span.attributes or {}).items() >= said.items()
    assert dict(span.attributes or {})["tidings.uri"] == ("a://b",)


def test_a_deleted_resource_ends_its_subscriptions_in_one_span_of_the_changes_trace() -> None:
    traced = Traced()
    hub = traced.live.hub
    for number in range(3):
        hub.subscribe(hub.open(lambda notification: None, label=f"listen {number}"), uris=["a://b", "a://c"])
    hub.subscribe(hub.open(lambda notification: None), uris=["a://*"])  # stays, for all that is still to come
    slow = hub.open(lambda notification: BUSY, label="slow")
    hub.subscribe(slow, uris=["a://b"])
    traced.live.catalog.resources.updated("a://b")
    with traced.tracer.start_as_current_span("call") as call:
        traced.live.catalog.resources.deleted("a://b")
    with traced.tracer.start_as_current_span("stranger"):
        hub.wake(slow)  # is told only now
    at_once, later = [each for each in traced.spans if each.name == UNSUBSCRIBE]
    said = {"tidings.outcome": "deleted", "tidings.cleaned": 3, "tidings.uri": ("a://b",)}
    assert dict(at_once.attributes or {}).items() >= said.items()
    assert "tidings.client" not in dict(at_once.attributes or {})
    assert dict(later.attributes or {})["tidings.client"] == "slow"
    [told] = [
        each
        for each in traced.spans
        if each.name == "change_notifier.notify_resource_updated" and each.parent is not None
    ]
    for each in (at_once, later):
        assert each.parent is not None
        assert each.parent.span_id == told.get_span_context().span_id  # type: ignore[union-attr]
        assert each.get_span_context().trace_id == call.get_span_context().trace_id  # type: ignore[union-attr]


def test_ending_what_never_was_is_nothing_to_tell_of() -> None:
    traced = Traced()
    client = traced.live.hub.open(lambda notification: None)
    client.subscribe(Feature.TOOLS)
    client.unsubscribe(Feature.PROMPTS, uris=["a://b"])
    assert traced.found(UNSUBSCRIBE) == []
    client.unsubscribe(Feature.PROMPTS, Feature.TOOLS)
    [span] = traced.found(UNSUBSCRIBE)
    assert span.items() >= {"tidings.feature": ("tools",), "tidings.outcome": "ok", "tidings.cleaned": 1}.items()


def test_a_durable_subscription_that_has_expired_has_a_span() -> None:
    traced = Traced()
    durables = traced.live.durables
    durables.put(Durable(name="laptop", features=(Feature.TOOLS,), expires=traced.live.catalog.now() - 1))
    assert len(durables.collect()) == 0
    [span] = traced.found(UNSUBSCRIBE)
    assert span.items() >= {"tidings.outcome": "expired", "tidings.client": "laptop"}.items()


# Whose trace


def test_a_tracestate_of_any_length_is_not_handed_on() -> None:
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    for members, is_kept in ((2, True), (30, False)):
        state = ",".join(f"k{number}={'x' * 200}" for number in range(members))
        context = context_of({"_meta": parent | {"tracestate": state}})
        assert context is not None
        assert bool(trace.get_current_span(context).get_span_context().trace_state) is is_kept


async def test_who_is_told_later_is_told_in_the_trace_of_the_change_and_of_nobody_else() -> None:
    whose: ContextVar[str] = ContextVar("whose", default="nobody's")
    traced = Traced()
    live = traced.live
    heard: list[tuple[int, str]] = []
    done = anyio.Event()

    def hear(notification: Notification) -> None:
        heard.append((trace.get_current_span().get_span_context().trace_id, whose.get()))
        done.set()

    app = live.http_app()
    async with app.router.lifespan_context(app):
        live.hub.subscribe(hear, Feature.TOOLS, policy=Policy(quiet_gap=0.05, longest_wait=0.05))
        with traced.tracer.start_as_current_span("change") as span:
            live.tools.add(print, name="p")
        # The timer is armed anew by somebody who has nothing to do with it.
        token = whose.set("a stranger's")
        with traced.tracer.start_as_current_span("stranger"):
            live.hub.subscribe(lambda notification: None, Feature.TOOLS, ttl=0.01)
        whose.reset(token)
        with anyio.fail_after(DEADLINE):
            await done.wait()
    assert heard == [(span.get_span_context().trace_id, "nobody's")]


# Trouble


class _Fragile(trace.NonRecordingSpan):
    """A span that can be told nothing; it can end all the same."""

    ended = 0

    def is_recording(self) -> bool:
        return True

    def fail(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no")

    set_attributes = set_attribute = add_event = set_status = fail

    def end(self, end_time: int | None = None) -> None:
        self.ended += 1


class _Fragiles(trace.NoOpTracerProvider, trace.NoOpTracer):
    def __init__(self) -> None:
        self.spans: list[_Fragile] = []

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        return self

    def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
        self.spans.append(_Fragile(trace.INVALID_SPAN_CONTEXT))
        return self.spans[-1]


def test_a_span_ends_whatever_it_could_not_be_told() -> None:
    provider = _Fragiles()
    live = Live(MCPServer("fragile"), telemetry=Telemetry(tracer_provider=provider))
    subscriber = live.hub.subscribe(lambda notification: None, Feature.TOOLS)
    live.tools.add(print, name="p")
    subscriber.close()
    with live.hub.observer.span("workspace.scan", units=1):
        pass
    assert [span.ended for span in provider.spans] == [1] * 5
    assert live.failures["telemetry"] > 0
