"""OpenTelemetry's own SDK in the process of a board, with exporters that keep everything, and ways to break it.

`set_up(mode)` comes before the server is made: `memory` works, each other mode fails at another place.
"""

from __future__ import annotations

from collections.abc import Sequence
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

__all__ = ["BROKEN", "Watched", "set_up"]

BROKEN = ("provider", "tracer", "spans", "processor", "exporter", "meter", "instruments", "histogram", "readings")


class Watched:
    """What an exporter has seen."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()

    def install(self) -> None:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        trace.set_tracer_provider(provider)
        metrics.set_meter_provider(MeterProvider([self._reader], shutdown_on_exit=False))

    def spans(self) -> list[dict[str, Any]]:
        """Those that have ended."""
        return [_described(span) for span in self._exporter.get_finished_spans()]

    def readings(self) -> dict[str, list[dict[str, Any]]]:
        """The points of every metric."""
        data = self._reader.get_metrics_data()
        found: dict[str, list[dict[str, Any]]] = {}
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        said: dict[str, Any] = {
                            "unit": metric.unit,
                            "kind": type(metric.data).__name__,
                            "labels": dict(point.attributes or {}),
                        }
                        for name in ("value", "count", "sum", "bucket_counts", "explicit_bounds"):
                            if hasattr(point, name):
                                value = getattr(point, name)
                                said[name] = list(value) if isinstance(value, Sequence) else value
                        found.setdefault(metric.name, []).append(said)
        return found


def _described(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    return {
        "name": span.name,
        "kind": span.kind.name,
        "trace": f"{context.trace_id:032x}",
        "span": f"{context.span_id:016x}",
        "parent": f"{span.parent.span_id:016x}" if span.parent else None,
        "status": span.status.status_code.name,
        "attributes": dict(span.attributes or {}),
        "events": {event.name: dict(event.attributes or {}) for event in span.events},
    }


def set_up(mode: str) -> Watched:
    watched = Watched()
    if mode == "memory":
        watched.install()
    elif mode == "provider":
        trace.set_tracer_provider(_BrokenProvider())
    elif mode == "tracer":
        trace.set_tracer_provider(_Provider(_BrokenTracer()))
    elif mode == "spans":
        trace.set_tracer_provider(_Provider(_TracerOfBrokenSpans()))
    elif mode in ("processor", "exporter"):
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(
            _BrokenProcessor() if mode == "processor" else SimpleSpanProcessor(_BrokenExporter())
        )
        trace.set_tracer_provider(provider)
    elif mode == "meter":
        metrics.set_meter_provider(_BrokenMeters())
    elif mode == "instruments":
        metrics.set_meter_provider(_BrokenInstruments())
    elif mode in ("histogram", "readings"):
        exporter = _BrokenReadings() if mode == "readings" else _Readings()
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=20)
        meters = MeterProvider([reader], shutdown_on_exit=False)
        if mode == "histogram":
            _break_record(meters)
        metrics.set_meter_provider(meters)
    else:
        raise ValueError(mode)
    return watched


class Broke(Exception):
    pass


def _is_ours(name: str) -> bool:
    """The SDK of the protocol does not guard itself against its tracer; only what Tidings asks for fails."""
    return name == "tidings"


class _BrokenProvider(trace.TracerProvider):
    def get_tracer(self, instrumenting_module_name: str, *args: Any, **kwargs: Any) -> trace.Tracer:
        if _is_ours(instrumenting_module_name):
            raise Broke("no tracer")
        return trace.NoOpTracer()


class _Provider(trace.TracerProvider):
    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def get_tracer(self, instrumenting_module_name: str, *args: Any, **kwargs: Any) -> trace.Tracer:
        return self._tracer if _is_ours(instrumenting_module_name) else trace.NoOpTracer()


class _BrokenTracer(trace.NoOpTracer):
    def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
        raise Broke("no span")


class _BrokenSpan(trace.NonRecordingSpan):
    def is_recording(self) -> bool:
        return True

    def set_attributes(self, attributes: Any) -> None:
        raise Broke("no attributes")

    def set_attribute(self, key: str, value: Any) -> None:
        raise Broke("no attribute")

    def add_event(self, *args: Any, **kwargs: Any) -> None:
        raise Broke("no event")

    def set_status(self, *args: Any, **kwargs: Any) -> None:
        raise Broke("no status")

    def end(self, end_time: int | None = None) -> None:
        raise Broke("no end")


class _TracerOfBrokenSpans(trace.NoOpTracer):
    def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
        return _BrokenSpan(trace.INVALID_SPAN_CONTEXT)


class _BrokenProcessor(SpanProcessor):
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if _is_ours(span.instrumentation_scope.name):
            raise Broke("not started")

    def on_end(self, span: ReadableSpan) -> None:
        if span.instrumentation_scope is not None and _is_ours(span.instrumentation_scope.name):
            raise Broke("not ended")


class _BrokenExporter(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise Broke("not exported")


class _Readings(MetricExporter):
    """One that takes everything, and keeps nothing."""

    def export(self, metrics_data: Any, timeout_millis: float = 0, **kwargs: Any) -> MetricExportResult:
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 0, **kwargs: Any) -> None:
        pass


class _BrokenReadings(_Readings):
    def export(self, metrics_data: Any, timeout_millis: float = 0, **kwargs: Any) -> MetricExportResult:
        raise Broke("no readings")


class _BrokenInstruments(metrics.NoOpMeterProvider):
    def get_meter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return _BrokenMeter(name) if _is_ours(name) else metrics.NoOpMeter(name)


class _BrokenMeter(metrics.NoOpMeter):
    def create_observable_counter(self, *args: Any, **kwargs: Any) -> Any:
        raise Broke("no counter")


def _break_record(provider: MeterProvider) -> None:
    """Let its histograms fail when they are told something, which is in the midst of a collection."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise Broke("not recorded")

    get_meter = provider.get_meter

    def get(name: str, *args: Any, **kwargs: Any) -> Any:
        meter = get_meter(name, *args, **kwargs)
        if _is_ours(name):
            create = meter.create_histogram

            def create_histogram(*args: Any, **kwargs: Any) -> Any:
                histogram = create(*args, **kwargs)
                histogram.record = fail  # type: ignore[method-assign]
                return histogram

            meter.create_histogram = create_histogram  # type: ignore[method-assign]
        return meter

    provider.get_meter = get  # type: ignore[method-assign]


class _BrokenMeters(metrics.NoOpMeterProvider):
    def get_meter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        raise Broke("no meter")
