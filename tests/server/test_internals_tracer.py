"""The private part of OpenTelemetry that `tidings.server.internals` touches is where it looks for it."""

from __future__ import annotations

import subprocess
import sys

LATE = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from mcp.server.mcpserver import MCPServer
from tidings import Live
from tidings.server import internals as seams

live = Live(MCPServer("late"))
live.resources.updated("x://before")
assert not seams.has_tracer()
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
assert seams.has_tracer()
live.resources.updated("x://after")
told = [span.attributes for span in exporter.get_finished_spans() if "x://" in str(span.attributes)]
assert len(told) == 1 and "x://after" in str(told[0]), told
"""


MOVED = """
del trace._TRACER_PROVIDER
live.resources.updated("x://moved")
told = [span.attributes for span in exporter.get_finished_spans() if "x://" in str(span.attributes)]
assert "x://moved" in str(told[-1]), told
"""


def test_tracer_provider_set_later_is_used() -> None:
    """A process sets its own only once, so this is one of its own."""
    run(LATE)


def test_spans_are_made_if_the_private_attribute_is_missing() -> None:
    run(LATE + MOVED)


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
