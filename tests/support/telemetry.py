"""The OpenTelemetry SDK with exporters that keep everything in memory, and with parts that raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
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
    """Set the global providers of this process: `memory`, or one of `BROKEN`."""
    recorded = RecordedTelemetry()
    if mode == "memory":
        trace.set_tracer_provider(recorded.tracer_provider)
        metrics.set_meter_provider(recorded.meter_provider)
    else:
        provider = BROKEN[mode]()
        if isinstance(provider, trace.TracerProvider):
            trace.set_tracer_provider(provider)
        else:
            metrics.set_meter_provider(provider)
    return recorded


# Parts that raise, but only for Tidings: the MCP SDK does not protect itself against its tracer.


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("broken on purpose")


class _BrokenSpan(trace.NonRecordingSpan):
    def is_recording(self) -> bool:
        return True

    set_attributes = set_attribute = add_event = set_status = end = _fail


class _Tracer(trace.NoOpTracer):
    def __init__(self, start_span: Callable[..., trace.Span]) -> None:
        self.start_span = start_span  # type: ignore[method-assign]


class _TracerProvider(trace.TracerProvider):
    def __init__(self, create: Callable[[], trace.Tracer]) -> None:
        self._create = create

    def get_tracer(self, instrumenting_module_name: str, *args: Any, **kwargs: Any) -> trace.Tracer:
        return self._create() if instrumenting_module_name == "tidings" else trace.NoOpTracer()


class _BrokenProcessor(SpanProcessor):
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if span.instrumentation_scope.name == "tidings":
            _fail()

    on_end = on_start


class _BrokenSpanExporter(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return _fail()  # type: ignore[no-any-return]


class _MetricExporter(MetricExporter):
    def __init__(self, export: Callable[..., MetricExportResult]) -> None:
        super().__init__()
        self._export = export

    def export(self, *args: Any, **kwargs: Any) -> MetricExportResult:
        return self._export()

    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 0, **kwargs: Any) -> None:
        pass


class _MeterProvider(metrics.NoOpMeterProvider):
    def __init__(self, create: Callable[[str], Any]) -> None:
        self._create = create

    def get_meter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._create(name) if name == "tidings" else metrics.NoOpMeter(name)


class _BrokenMeter(metrics.NoOpMeter):
    create_observable_counter = _fail


def _sdk_tracers(processor: SpanProcessor) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


def _sdk_meters(export: Callable[..., MetricExportResult] = lambda: MetricExportResult.SUCCESS) -> Any:
    reader = PeriodicExportingMetricReader(_MetricExporter(export), export_interval_millis=20)
    return MeterProvider([reader], shutdown_on_exit=False)


def _meters_with_broken_histogram() -> Any:
    """Histograms that raise when they record, which is in the middle of a collection."""
    provider = _sdk_meters()
    meter = provider.get_meter("tidings")
    create = meter.create_histogram

    def create_histogram(*args: Any, **kwargs: Any) -> Any:
        histogram = create(*args, **kwargs)
        histogram.record = _fail
        return histogram

    meter.create_histogram = create_histogram
    return _MeterProvider(lambda name: meter)


BROKEN: dict[str, Callable[[], Any]] = {
    "tracer provider": lambda: _TracerProvider(_fail),
    "tracer": lambda: _TracerProvider(lambda: _Tracer(_fail)),
    "span": lambda: _TracerProvider(lambda: _Tracer(lambda *a, **k: _BrokenSpan(trace.INVALID_SPAN_CONTEXT))),
    "span processor": lambda: _sdk_tracers(_BrokenProcessor()),
    "span exporter": lambda: _sdk_tracers(SimpleSpanProcessor(_BrokenSpanExporter())),
    "meter provider": lambda: _MeterProvider(_fail),
    "meter": lambda: _MeterProvider(_BrokenMeter),
    "histogram": _meters_with_broken_histogram,
    "metric exporter": lambda: _sdk_meters(_fail),
}
"""Providers in which one part raises, by that part."""
