"""OpenTelemetry traces and metrics of a live server."""

from tidings.telemetry.tracing import Telemetry

__all__ = ["Telemetry"]
