"""Traces and metrics to a collector, where the environment names one and the extra `otlp` is installed.

What is sent where is told by OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `…_HEADERS`, `…_PROTOCOL`,
`OTEL_SERVICE_NAME`, …). A process that has providers already, as under `opentelemetry-instrument`, keeps them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from tidings.cli.startup import made_to_stay

__all__ = ["exported"]

logger = logging.getLogger("tidings.serve")

_ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)
_FAREWELL = 0.3
"""Seconds for what is still to be sent when the server ends: a collector that is away must not keep it."""


@contextmanager
def exported(service: str) -> Iterator[None]:
    """Send traces and metrics meanwhile. `service` is the name under which, unless the environment has another."""
    with made_to_stay():
        shut_down = _set_up(service)
    try:
        yield
    finally:
        # In threads that nobody waits for any longer than that.
        threads = [threading.Thread(target=each, daemon=True) for each in shut_down]
        for thread in threads:
            thread.start()
        end = time.monotonic() + _FAREWELL
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


def _set_up(service: str) -> list[Callable[[], object]]:
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None)
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    try:
        from opentelemetry import metrics, trace
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        package = f"opentelemetry.exporter.otlp.proto.{_protocol()}"
        spans: Any = import_module(f"{package}.trace_exporter").OTLPSpanExporter
        readings: Any = import_module(f"{package}.metric_exporter").OTLPMetricExporter
    except ImportError as error:
        logger.warning("telemetry is not sent to %s: %s; install tidings[otlp]", _place(endpoint), error)
        return []
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        logger.info("telemetry goes where this process already sends it")
        return []
    try:
        resource = Resource.create({} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: service})
        tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        tracer_provider.add_span_processor(BatchSpanProcessor(spans()))
        meter_provider = MeterProvider([PeriodicExportingMetricReader(readings())], resource, shutdown_on_exit=False)
    except Exception as error:  # whatever an exporter dislikes of its settings; the server does not depend on it
        logger.warning("telemetry is not sent to %s: %s", _place(endpoint), error)
        return []
    trace.set_tracer_provider(tracer_provider)
    metrics.set_meter_provider(meter_provider)
    logger.info("telemetry goes to %s", _place(endpoint))
    return [tracer_provider.shutdown, meter_provider.shutdown]


def _protocol() -> str:
    return "grpc" if os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").strip().lower() == "grpc" else "http"


def _place(endpoint: str) -> str:
    """The endpoint without what may be a secret in it."""
    split = urlsplit(endpoint)
    return f"{split.scheme}://{split.netloc.rpartition('@')[2]}" if split.netloc else endpoint.partition("?")[0]
