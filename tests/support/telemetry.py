"""The OpenTelemetry SDK with exporters that keep everything in memory, and with parts that raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import Meter, MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, Span, Tracer, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

__all__ = ["BROKEN", "RecordedTelemetry", "install"]


class RecordedTelemetry:
    """Providers whose spans and metrics a test can read."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracer_provider = TracerProvider(shutdown_on_exit=False)
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meter_provider = MeterProvider([self._reader], shutdown_on_exit=False)
        self.tracer = self.tracer_provider.get_tracer("test")

    def spans(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the spans that have ended, or those with one name."""
        return [_span_json(span) for span in self._exporter.get_finished_spans() if name in (None, span.name)]

    def metrics(self) -> dict[str, list[dict[str, Any]]]:
        """Collect, and return the points of every metric."""
        data = self._reader.get_metrics_data()
        return {
            metric.name: [_point_json(metric, point) for point in metric.data.data_points]
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


def _point_json(metric: Any, point: Any) -> dict[str, Any]:
    values = {name: getattr(point, name) for name in ("value", "count", "sum", "bucket_counts") if hasattr(point, name)}
    return {"unit": metric.unit, "kind": type(metric.data).__name__, "labels": dict(point.attributes or {}), **values}


def _span_json(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    return {
        "name": span.name,
        "trace": f"{context.trace_id:032x}",
        "span": f"{context.span_id:016x}",
        "parent": f"{span.parent.span_id:016x}" if span.parent else None,
        "status": span.status.status_code.name,
        "attributes": dict(span.attributes or {}),
        "events": {event.name: dict(event.attributes or {}) for event in span.events},
    }


def install(mode: str) -> RecordedTelemetry:
    """Set the global providers of this process, and break one part of the SDK if `mode` is one of `BROKEN`."""
    recorded = RecordedTelemetry()
    if mode != "memory":
        _break(*BROKEN[mode])
    trace.set_tracer_provider(recorded.tracer_provider)
    metrics.set_meter_provider(recorded.meter_provider)
    return recorded


def _break(owner: type, method: str, name_of: Callable[..., str]) -> None:
    """Let a method raise, but only for Tidings: the MCP SDK does not protect itself against its tracer."""
    original = getattr(owner, method)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if name_of(*args, **kwargs) == "tidings":
            raise RuntimeError("broken on purpose")
        return original(*args, **kwargs)

    setattr(owner, method, broken)


def _argument(self: Any, name: str, *args: Any, **kwargs: Any) -> str:
    return name


def _scope(self: Any, *args: Any, **kwargs: Any) -> str:
    name: str = (getattr(self, "instrumentation_scope", None) or self._instrumentation_scope).name
    return name


def _scope_of_argument(self: Any, first: Any, *args: Any, **kwargs: Any) -> str:
    return _scope(first[0] if isinstance(first, tuple) else first)


BROKEN: dict[str, tuple[type, str, Callable[..., str]]] = {
    "tracer provider": (TracerProvider, "get_tracer", _argument),
    "tracer": (Tracer, "start_span", _scope),
    "span": (Span, "set_attributes", _scope),
    "event of a span": (Span, "add_event", _scope),
    "end of a span": (Span, "end", _scope),
    "span processor": (SimpleSpanProcessor, "on_start", _scope_of_argument),
    "span exporter": (InMemorySpanExporter, "export", _scope_of_argument),
    "meter provider": (MeterProvider, "get_meter", _argument),
    "meter": (Meter, "create_observable_counter", _scope),
}
"""Methods that raise for Tidings, and how to find out who calls them."""
