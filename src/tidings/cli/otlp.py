"""Export of traces and metrics to a collector, if the environment names one and the extra `otlp` is installed.

OpenTelemetry's own variables configure each of the two signals (`OTEL_EXPORTER_OTLP_ENDPOINT`, `…_TRACES_ENDPOINT`,
`…_PROTOCOL`, `OTEL_METRICS_EXPORTER`, `OTEL_SERVICE_NAME`, …). A process that already has providers keeps them, for
example under `opentelemetry-instrument`.
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

from tidings.dependencies import missing_extra
from tidings.runtime.shutdown import run_at_exit
from tidings.wire.addresses import origin_of

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

__all__ = ["SHUTDOWN_TIMEOUT", "endpoint_of", "export_telemetry", "protocol_of", "without_secrets"]

logger = logging.getLogger("tidings.serve")

SHUTDOWN_TIMEOUT = 0.3
"""Seconds for the last export when the server stops: an unreachable collector must not delay the exit."""
_OUTAGE = 300.0
"""Seconds without an error after which the next one counts as a new outage and is logged again."""
_EXPORT_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk")
_HEADER_LOGGER = "opentelemetry.util.re"
"""The logger for headers in the environment that can't be parsed. Such a header often contains a token."""


@contextmanager
def export_telemetry(service: str, failures: Counter[str]) -> Iterator[None]:
    """Export traces and metrics in this block. `service` is the service name if the environment has none.

    Errors of the collector are counted in `failures["telemetry"]`.
    """
    log_filter = _LogFilter(failures)
    # Add it to the handlers, because a filter of a logger does not get the records of its children.
    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(log_filter)
    shutdowns = _set_up(service)
    log_filter.is_exporting = bool(shutdowns)
    flush = partial(_shut_down, shutdowns)
    try:
        with run_at_exit(flush):
            yield
    finally:
        flush()
        for handler in handlers:
            handler.removeFilter(log_filter)


def _shut_down(shutdowns: list[Callable[[], object]]) -> None:
    """Export the rest, once. Do it in daemon threads, and do not wait for them after the timeout."""
    threads = [threading.Thread(target=shutdown, daemon=True) for shutdown in shutdowns]
    shutdowns.clear()
    for thread in threads:
        thread.start()
    end = time.monotonic() + SHUTDOWN_TIMEOUT
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


class _LogFilter(logging.Filter):
    """A filter that counts the errors of exporters, and passes only the first error of each outage.

    It replaces the text of a record that can contain secrets: a header, or the endpoint.
    """

    def __init__(self, failures: Counter[str]) -> None:
        super().__init__()
        self._failures = failures
        self._last = -_OUTAGE
        self.is_exporting = False
        """Otherwise the exporters are the user's own, and their errors are logged unchanged."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == _HEADER_LOGGER:
            record.msg = "a header for the collector is not name=value, URL-encoded, and is not sent (OTEL_…_HEADERS)"
            record.args = ()
        if not self.is_exporting or not record.name.startswith(_EXPORT_LOGGERS) or record.levelno < logging.WARNING:
            return True
        self._failures["telemetry"] += 1
        now = time.monotonic()
        is_new, self._last = now - self._last >= _OUTAGE, now
        record.msg = "the collector does not accept telemetry; this is logged once per outage"
        record.args = ()
        record.exc_info = record.exc_text = None
        return is_new


def _set_up(service: str) -> list[Callable[[], object]]:
    """Install the providers, and return the functions that shut them down."""
    from tidings.telemetry import is_disabled

    if is_disabled():
        return []
    endpoints = {signal: endpoint for signal in ("TRACES", "METRICS") if (endpoint := endpoint_of(signal)) is not None}
    if not endpoints:
        return []
    destination = " and ".join(sorted({without_secrets(endpoint) for endpoint in endpoints.values()}))
    try:
        from opentelemetry import metrics, trace
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporters: dict[str, Any] = {signal: _import_exporter(signal) for signal in endpoints}
    except ImportError as error:
        logger.warning("telemetry is not sent to %s (%s): %s", destination, error, missing_extra("OTLP", "otlp"))
        return []
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        logger.info("telemetry uses the providers that this process already has")
        return []
    shutdowns: list[Callable[[], object]] = []
    tracer_provider: TracerProvider | None = None
    meter_provider: MeterProvider | None = None
    try:
        resource = _build_resource(service)
        if "TRACES" in exporters:
            tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            tracer_provider.add_span_processor(BatchSpanProcessor(exporters["TRACES"]()))
            shutdowns.append(tracer_provider.shutdown)
        if "METRICS" in exporters:
            reader = PeriodicExportingMetricReader(exporters["METRICS"]())
            meter_provider = MeterProvider([reader], resource, shutdown_on_exit=False)
            shutdowns.append(meter_provider.shutdown)
    except Exception as error:  # an exporter may reject its settings; the server works without it
        logger.warning("telemetry is not sent to %s: %s", destination, error)
        return shutdowns
    if tracer_provider is not None:
        trace.set_tracer_provider(tracer_provider)
    if meter_provider is not None:
        metrics.set_meter_provider(meter_provider)
    logger.info("telemetry is sent to %s", destination)
    return shutdowns


def _build_resource(service: str) -> Resource:
    """Return the resource of this process, with the service name of the environment or else the server's name."""
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource

    is_named = SERVICE_NAME in OTELResourceDetector().detect().attributes
    return Resource.create({} if is_named else {SERVICE_NAME: service})


def endpoint_of(signal: str) -> str | None:
    """Return the endpoint of a signal, or None if it is not configured or is disabled."""
    if os.environ.get(f"OTEL_{signal}_EXPORTER", "").strip().lower() == "none":
        return None
    return _read_variable(signal, "ENDPOINT") or None


def _import_exporter(signal: str) -> Any:
    module, name = {"TRACES": ("trace", "Span"), "METRICS": ("metric", "Metric")}[signal]
    package = import_module(f"opentelemetry.exporter.otlp.proto.{protocol_of(signal)}.{module}_exporter")
    return getattr(package, f"OTLP{name}Exporter")


def protocol_of(signal: str) -> str:
    """Return "grpc" or "http", which are also the names of the exporters' packages."""
    return "grpc" if _read_variable(signal, "PROTOCOL").strip().lower() == "grpc" else "http"


def _read_variable(signal: str, name: str) -> str:
    """Return the variable for one signal, or else the variable for all signals."""
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_{name}", "")
    return own or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")


def without_secrets(endpoint: str) -> str:
    """Return an endpoint without user, password, path and query."""
    try:
        return origin_of(endpoint) if "//" in endpoint else endpoint.partition("?")[0]
    except ValueError:
        return "an invalid endpoint"
