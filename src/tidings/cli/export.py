"""Traces and metrics to a collector, where the environment names one and the extra `otlp` is installed.

What is sent where is told by OpenTelemetry's own variables, for each of the two signals by itself
(`OTEL_EXPORTER_OTLP_ENDPOINT`, `…_TRACES_ENDPOINT`, `…_PROTOCOL`, `OTEL_METRICS_EXPORTER`, `OTEL_SERVICE_NAME`, …). A
process that has providers already, as under `opentelemetry-instrument`, keeps them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tidings.cli.startup import made_to_stay
from tidings.stdio.process_exit import meanwhile

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

__all__ = ["exported"]

logger = logging.getLogger("tidings.serve")

_FAREWELL = 0.3
"""Seconds for what is still to be sent when the server ends: a collector that is away must not keep it."""
_OUTAGE = 300.0
"""Seconds after which a failure to send counts as a new outage, and is mentioned again."""
_EXPORTERS = ("opentelemetry.exporter", "opentelemetry.sdk")
_HEADERS = "opentelemetry.util.re"
"""Reads the headers that the environment has, and shows one that it can't read: as often as not, a token."""


@contextmanager
def exported(service: str, failures: Counter[str] | None = None) -> Iterator[None]:
    """Send traces and metrics meanwhile. `service` is the name under which, unless the environment has another."""
    # A filter of a logger is not asked for what its children say, but that of a handler is.
    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(_hide_header)
    with made_to_stay():
        shut_down = _set_up(service)
    complaints = _Complaints(Counter() if failures is None else failures)
    for handler in handlers:
        handler.removeFilter(_hide_header)
        if shut_down:  # else those who complain are the user's own
            handler.addFilter(complaints)
    farewell = partial(_say_farewell, shut_down)
    try:
        with meanwhile(farewell):
            yield
    finally:
        farewell()
        for handler in handlers:
            handler.removeFilter(complaints)


def _say_farewell(shut_down: list[Callable[[], object]]) -> None:
    """Send what is still to be sent, once, in threads that nobody waits for any longer than that."""
    threads = [threading.Thread(target=each, daemon=True) for each in shut_down]
    shut_down.clear()
    for thread in threads:
        thread.start()
    end = time.monotonic() + _FAREWELL
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _hide_header(record: logging.LogRecord) -> bool:
    if record.name == _HEADERS:
        record.msg = "a header for the collector is not name=value, URL-encoded, and is not sent (OTEL_…_HEADERS)"
        record.args = ()
    return True


class _Complaints(logging.Filter):
    """What exporters have to say of a collector that does not take what it is sent: counted, and said once, without
    their own words, which hold the endpoint with all that is secret in it."""

    def __init__(self, failures: Counter[str]) -> None:
        super().__init__()
        self._failures = failures
        self._last = -_OUTAGE

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(_EXPORTERS) or record.levelno < logging.WARNING:
            return True
        self._failures["telemetry"] += 1
        now = time.monotonic()
        is_new, self._last = now - self._last >= _OUTAGE, now
        record.msg = "the collector does not take what it is sent; this is not said again while it goes on"
        record.args = ()
        record.exc_info = record.exc_text = None
        return is_new


def _set_up(service: str) -> list[Callable[[], object]]:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    places = {signal: place for signal in ("TRACES", "METRICS") if (place := _endpoint(signal)) is not None}
    if not places:
        return []
    said = " and ".join(sorted({_place(place) for place in places.values()}))
    try:
        from opentelemetry import metrics, trace
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporters: dict[str, Any] = {signal: _exporter(signal) for signal in places}
    except ImportError as error:
        logger.warning("telemetry is not sent to %s: %s; install tidings[otlp]", said, error)
        return []
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        logger.info("telemetry goes where this process already sends it")
        return []
    shut_down: list[Callable[[], object]] = []
    tracers: TracerProvider | None = None
    meters: MeterProvider | None = None
    try:
        resource = _resource(service)
        if "TRACES" in exporters:
            tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
            tracers.add_span_processor(BatchSpanProcessor(exporters["TRACES"]()))
            shut_down.append(tracers.shutdown)
        if "METRICS" in exporters:
            reader = PeriodicExportingMetricReader(exporters["METRICS"]())
            meters = MeterProvider([reader], resource, shutdown_on_exit=False)
            shut_down.append(meters.shutdown)
    except Exception as error:  # whatever an exporter dislikes of its settings; the server does not depend on it
        logger.warning("telemetry is not sent to %s: %s", said, error)
        return shut_down
    if tracers is not None:
        trace.set_tracer_provider(tracers)
    if meters is not None:
        metrics.set_meter_provider(meters)
    logger.info("telemetry goes to %s", said)
    return shut_down


def _resource(service: str) -> Resource:
    """Who sends: by the name of the server, unless the environment has one."""
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource

    is_named = SERVICE_NAME in OTELResourceDetector().detect().attributes
    return Resource.create({} if is_named else {SERVICE_NAME: service})


def _endpoint(signal: str) -> str | None:
    """Where a signal goes; None if nobody said, or said that it goes nowhere."""
    if os.environ.get(f"OTEL_{signal}_EXPORTER", "").strip().lower() == "none":
        return None
    return _variable(signal, "ENDPOINT") or None


def _exporter(signal: str) -> Any:
    module, name = {"TRACES": ("trace", "Span"), "METRICS": ("metric", "Metric")}[signal]
    found = import_module(f"opentelemetry.exporter.otlp.proto.{_package(signal)}.{module}_exporter")
    return getattr(found, f"OTLP{name}Exporter")


def _package(signal: str) -> str:
    return "grpc" if _variable(signal, "PROTOCOL").strip().lower() == "grpc" else "http"


def _variable(signal: str, name: str) -> str:
    """A setting of one signal, or of both."""
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_{name}", "")
    return own or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")


def _place(endpoint: str) -> str:
    """The endpoint without what may be a secret in it."""
    try:
        split = urlsplit(endpoint)
    except ValueError:
        return "an endpoint that is no URL"
    return f"{split.scheme}://{split.netloc.rpartition('@')[2]}" if split.netloc else endpoint.partition("?")[0]
