"""The export of traces and metrics by `tidings serve`."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path

import httpx2
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.command import DEADLINE, HELLO, SECRET, replace_file, serving
from tests.support.receiver import receiving
from tidings.cli.otlp import endpoint_of, export_telemetry, protocol_of, without_secrets
from tidings.telemetry.metrics import METRICS

pytestmark = pytest.mark.anyio


async def test_traces_and_metrics_of_a_folder_reach_a_collector(board: Path) -> None:
    async with receiving(host=f"user:{SECRET}@127.0.0.1", path="") as collector:
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
            "OTEL_RESOURCE_ATTRIBUTES": "service.name=mine",
        }
        async with serving(board, env=env) as server:
            line = await server.line_with("telemetry is sent to")
            assert "http://" + collector.url.partition("@")[2] in line
            assert SECRET not in line
            replace_file(board / "tools" / "late.py", HELLO.replace("hello()", "late()"))
            spans: dict[str, tuple[bytes, bytes]] = {}
            metrics: set[str] = set()
            services: set[str] = set()
            expected = {metric.name for metric in METRICS} - {"tidings.delivery.latency"}  # nothing was delivered
            while not (spans.keys() >= {"workspace.scan", "tool_list_changed.send"} and metrics >= expected):
                delivery = await collector.next()
                body = delivery.body
                if delivery.path == "/v1/traces":
                    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                        names = [each for each in group.resource.attributes if each.key == "service.name"]
                        services |= {each.value.string_value for each in names}
                        for scope in group.scope_spans:
                            spans |= {span.name: (span.span_id, span.parent_span_id) for span in scope.spans}
                else:
                    for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                        metrics |= {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
            await server.stop()
    assert services == {"mine"}
    assert spans["change_notifier.notify_list_changed"][1] == spans["workspace.scan"][0]


async def test_unreachable_collector_is_logged_once_counted_each_time_and_delays_nothing(board: Path) -> None:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:9/?key={SECRET}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    async with serving(board, env=env) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        failures = number = 0.0
        async with asyncio.timeout(DEADLINE):
            while failures < 2:
                number += 1
                replace_file(board / "tools" / "late.py", HELLO.replace("Say hello.", f"Say {number}."))
                text = (await http.get(server.url.replace("/mcp", "/metrics"))).text
                failures = float(text.partition('tidings_failures_total{what="telemetry"} ')[2].split()[0])
        log = await server.stop()
    assert SECRET not in log
    assert log.count("the collector does not accept telemetry") == 1


async def test_invalid_header_for_the_collector_is_not_logged(board: Path) -> None:
    """Such a header is often a token without a name."""
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://[{SECRET}",  # an invalid URL stops nothing
        "OTEL_EXPORTER_OTLP_HEADERS": f"Bearer {SECRET}",
        "OTEL_TRACES_SAMPLER": "nonsense",
    }
    expected, log = ("a header for the collector is not", "nonsense"), ""
    async with serving(board, "--json", env=env) as server:
        while not all(text in log for text in expected):
            log += await server.line_with("")
        log += await server.stop()
    assert SECRET not in log


def test_nothing_is_exported_if_opentelemetry_is_disabled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    provider = trace.get_tracer_provider()
    with export_telemetry("board", Counter()):
        assert trace.get_tracer_provider() is provider
    assert caplog.records == []


@pytest.mark.parametrize(
    ("env", "protocols"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1"}, {"TRACES": "http", "METRICS": "http"}),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:1"}, {"TRACES": "http"}),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1", "OTEL_METRICS_EXPORTER": "none"}, {"TRACES": "http"}),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1", "OTEL_TRACES_EXPORTER": "none"}, {"METRICS": "http"}),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            {"TRACES": "grpc", "METRICS": "http"},
        ),
    ],
)
def test_each_signal_has_its_own_variables(
    env: dict[str, str], protocols: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = {each: protocol_of(each) for each in ("TRACES", "METRICS") if endpoint_of(each) is not None}
    assert found == protocols


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        (f"https://user:{SECRET}@collector:4318/v1?key={SECRET}", "https://collector:4318"),
        (f"collector:4317?key={SECRET}", "collector:4317"),
        (f"http://[{SECRET}", "an invalid endpoint"),
    ],
)
def test_endpoint_is_logged_without_secrets(endpoint: str, expected: str) -> None:
    assert without_secrets(endpoint) == expected
