"""OpenTelemetry traces and metrics of a live server.

Tidings uses only the API of OpenTelemetry. Without an SDK in the process, the API does almost nothing. The user chooses
the SDK and the exporters.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidings.telemetry.metrics import MeasuredServer
from tidings.telemetry.tracing import TracingObserver, context_of

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

__all__ = ["MeasuredServer", "Telemetry", "context_of", "is_disabled", "observe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Telemetry:
    """The OpenTelemetry providers of a server.

    `Live(server)` uses the global providers of the process. To use others, pass
    `Live(server, telemetry=Telemetry(tracer_provider=…, meter_provider=…))`. Servers can share one `Telemetry`.
    """

    tracer_provider: TracerProvider | None = None
    meter_provider: MeterProvider | None = None


def is_disabled() -> bool:
    """Return whether the environment switches OpenTelemetry off for the process."""
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def observe(telemetry: bool | Telemetry, server_name: str, server: MeasuredServer) -> None:
    """Trace a server and export its metrics from now on.

    Do nothing if `telemetry` is False, or if `OTEL_SDK_DISABLED` switches OpenTelemetry off for the process.
    """
    if telemetry is False or is_disabled():
        return
    providers = Telemetry() if telemetry is True else telemetry
    observer = TracingObserver(server.hub.counts, server_name)
    server.hub.observers.add(observer)
    server.hub.tracer = observer
    server.hub.catalog.trace = observer.current_trace
    server.source.tracer = observer
    observer.set_providers(server, providers.tracer_provider, providers.meter_provider)
