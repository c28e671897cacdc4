"""Log lines: the life of a subscription, in words and in parts, without secrets; and `tidings serve` in JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.command import DEADLINE, HELLO, TOKEN, replace_file, serving, start_command
from tests.support.otlp_collector import SECRET, collecting
from tests.support.wire_clients import LegacyWire
from tidings import Catalog, Feature, Hub, Reason
from tidings.cli.logs import TextFormatter
from tidings.cli.otlp import CollectorErrors, build_resource, endpoint_of, protocol_of, without_secrets
from tidings.core.redact import one_line, redact_uri
from tidings.server.authorization import Authorization
from tidings.telemetry.metrics import METRICS

pytestmark = pytest.mark.anyio


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname.lower(), record.getMessage()) for record in caplog.records]


def test_the_life_of_a_subscription_is_logged_at_info_and_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tidings.subscriptions")
    catalog = Catalog()
    hub = Hub(catalog)
    uri = f"https://ada:{SECRET}@example.org/notes/1?token={SECRET}#{SECRET}"
    catalog.tools.add({"name": "lonely", "description": SECRET})
    client = hub.open(lambda notification: None, label="listen 7")
    hub.subscribe(client, Feature.TOOLS, Feature.RESOURCES)
    hub.subscribe(client, uris=[uri])
    catalog.tools.add({"name": "deploy", "description": SECRET})
    catalog.resources.updated(uri, author=SECRET)
    hub.unsubscribe(client, uris=[uri])
    hub.close(client, Reason.DISCONNECTED)

    assert lines(caplog) == [
        ("debug", "nobody to tell: tools added lonely (revision 1)"),
        ("debug", "listen 7 subscribed to tools, resources"),
        ("debug", "listen 7 subscribed to 1 URI"),
        ("info", "told 1 client: tools added deploy (revision 2)"),
        ("debug", "told 1 client: contents updated https://example.org/notes/1 (revision 3)"),
        ("debug", "listen 7 unsubscribed from 1 URI"),
        ("debug", "listen 7 is gone (disconnected): cleaned 2 subscriptions and 0 pending"),
    ]
    parts: list[dict[str, Any]] = [vars(record)["tidings"] for record in caplog.records]
    assert [each["event"] for each in parts] == [
        *("told", "subscribed", "subscribed", "told", "told", "unsubscribed", "gone"),
    ]
    assert parts[1] | {"client": "listen 7", "topics": ["tools", "resources"]} == parts[1]
    assert parts[-1] | {"cleaned": 2, "pending": 0, "reason": "disconnected"} == parts[-1]
    assert SECRET not in caplog.text
    assert SECRET not in str(parts)


def test_subscriptions_that_run_out_or_end_with_their_resource_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tidings.subscriptions")
    catalog = Catalog()
    hub = Hub(catalog)
    clients = [hub.open(lambda notification: None, label=f"listen {number}") for number in range(3)]
    for client in clients:
        client.subscribe(uris=["a://b"])
    clients[0].subscribe("tools", uris=["a://c"], ttl=5)
    caplog.clear()

    due = hub.next_due()
    assert due is not None
    hub.tick(due)
    catalog.resources.deleted("a://b")
    clients[0].unsubscribe("tools", uris=["a://b"])  # is over long ago

    assert lines(caplog) == [
        ("debug", "listen 0 unsubscribed from tools, 1 URI (expired)"),
        ("debug", "told 3 clients: contents deleted a://b (revision 1)"),
        ("debug", "3 clients unsubscribed from 1 URI (deleted)"),
    ]
    expired, _, deleted = [vars(record)["tidings"] for record in caplog.records]
    assert expired.items() >= {"event": "unsubscribed", "reason": "expired", "client": "listen 0"}.items()
    assert deleted.items() >= {"reason": "deleted", "clients": 3, "topics": ["a://b"]}.items()


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("deploy", "deploy"),
        ("db:users?password=hunter2", "db:users"),
        ("//u:p@host/a", "//host/a"),
        ("file:///{path}{?token}", "file:///{path}"),
        ("file:///a/b", "file:///a/b"),
        ("https://u:p@host/a@b?x=1#y", "https://host/a@b"),
        ("https://host?next=a://u@b", "https://host"),
        ("board://x#frag\nment", "board://x"),
    ],
)
def test_what_people_hide_in_a_uri_is_not_shown(uri: str, said: str) -> None:
    assert redact_uri(uri) == said


def test_a_stream_costs_no_line_at_info_unless_it_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tidings.subscriptions")
    hub = Hub(Catalog())
    for reason in (Reason.DISCONNECTED, Reason.SLOW):
        client = hub.open(lambda notification: None)
        hub.subscribe(client, Feature.TOOLS)
        hub.close(client, reason)
    assert lines(caplog) == [("info", "a subscriber is gone (slow): cleaned 1 subscriptions and 0 pending")]


def test_no_client_can_forge_a_line_or_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tidings.subscriptions")
    catalog = Catalog()
    hub = Hub(catalog)
    client = hub.open(lambda notification: None, label="listen x\n12:00:00 error: \u001b[2J\u202e" + "y" * 1_000_000)
    hub.subscribe(client, Feature.TOOLS, uris=["a://b\nc"])
    catalog.tools.add({"name": "z" * 500 + "\n"})
    catalog.resources.updated("a://b\nc" + "d" * 1_000)
    catalog.resources.updated("a://b\nc")
    client.close()
    assert len(client.label) < 200
    for _, line in lines(caplog):
        assert len(line) < 400
        assert line.isprintable()
    assert lines(caplog)[0][1].startswith(r"listen x\n12:00:00 error: \x1b[2J\u202eyyy")


@pytest.mark.parametrize(
    "character",
    [
        "\0",
        "\n",
        "\r",
        "\x1b",
        "\x7f",
        "\x85",
        "\x9b",
        "\u2028",
        "\u2029",
        "\u202a",
        "\u2066",
        "\u2069",
        "\ud800",
    ],
    ids=ascii,
)
def test_no_character_ends_a_line_turns_it_round_or_breaks_its_encoding(character: str) -> None:
    said = one_line(f"a{character}b")
    assert said == f"a{ascii(character)[1:-1]}b"
    assert said.encode() == said.encode("ascii")


def test_a_logged_line_is_one_line_whoever_said_it() -> None:
    record = logging.LogRecord("other", logging.INFO, "", 0, "two\nlines \u001b[2J", (), None)
    assert TextFormatter("%(message)s").format(record) == r"two\nlines \x1b[2J"


def test_no_secret_of_a_uri_is_in_what_is_logged_of_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Of all that the user may hand in and that may fail: a subscriber, a hook, a mute, an authorization."""
    uri = f"db:users?password={SECRET}"

    def fail(*_: object) -> Any:
        raise RuntimeError("no")

    catalog = Catalog()
    hub = Hub(catalog, first=fail, last=fail)
    hub.subscribe(hub.open(fail, label="a"), uris=[uri])
    hub.subscribe(hub.open(print, label="b", is_muted=fail), uris=[uri])
    hub.subscribe(hub.open(fail, label="c"), Feature.RESOURCES)
    catalog.resources.updated(uri)
    catalog.resources.add({"uri": uri, "name": "x"})
    for each in hub:
        each.close()
    gate = Authorization(hub.policy, authorize=fail)
    assert asyncio.run(gate.allowed(None, [uri])) == []
    may = gate.predicate(None)
    assert may is not None
    assert not may(uri)
    assert "db:users" in caplog.text
    said = {record.getMessage() for record in caplog.records}
    assert len(said) >= 5
    assert not [each for each in said if SECRET in each]


async def test_json_lines_tell_the_life_of_a_server_without_a_secret(board: Path) -> None:
    options = ("--log-format", "json", "--log-level", "debug", "--json", "--port", 0)
    env = {"TIDINGS_AUTH_TOKEN": TOKEN}
    (board / "tools" / "secretive.py").write_text(HELLO.replace("Say hello.", SECRET))
    async with asyncio.timeout(DEADLINE), start_command("serve", board, *options, env=env) as process:
        url = json.loads(await process.stdout.readline())["url"]
        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=DEADLINE) as http:
            session = LegacyWire(url, http)
            await session.shake_hands()
            async with session.stream() as stream:
                (board / "tools" / "late.py").write_text(HELLO.replace("hello()", "late()"))
                heard = await stream.heard()
                while "late" not in heard.gist:
                    heard = await stream.heard()
            await session.end()
            assert (await http.get(url.replace("/mcp", "/metrics"))).status_code == 200
            refused = await http.get(url.replace("/mcp", "/metrics"), headers={"Authorization": "none"})
            assert refused.status_code == 401
        process.terminate()
        said = (await process.stderr.read()).decode()
        assert await process.wait() == 0

    found = [json.loads(line) for line in said.splitlines()]
    for each in found:
        assert each.keys() >= {"time", "level", "logger", "message"}
    events = [each["event"] for each in found if "event" in each and each.get("clients") != 0]
    expected = ["serving", "starting", "subscribed", "told", "gone", "stopping"]
    assert sorted(set(expected), key=events.index) == expected
    told = [each for each in found if each.get("event") == "told" and "added late" in each["changes"]]
    assert told[0]["clients"] == 1
    assert told[0]["level"] == "info"
    assert TOKEN not in said
    assert session.session_id not in said
    assert SECRET not in "".join(str(each) for each in found if each["level"] != "debug")


@pytest.mark.parametrize("options", [(), ("--log-format", "json")], ids=["text", "json"])
async def test_a_change_in_a_served_folder_is_said_once_watched_or_not(board: Path, options: tuple[str, ...]) -> None:
    async with asyncio.timeout(DEADLINE), start_command("serve", board, "--json", "--port", 0, *options) as process:
        url = json.loads(await process.stdout.readline())["url"]
        async with httpx2.AsyncClient(timeout=DEADLINE) as http:
            session = LegacyWire(url, http)
            await session.shake_hands()
            async with session.stream() as stream:
                replace_file(board / "tools" / "watched.py", HELLO.replace("hello()", "watched()"))
                while "watched" not in (await stream.heard()).gist:
                    pass
            await session.end()
        replace_file(board / "tools" / "lonely.py", HELLO.replace("hello()", "lonely()"))
        said: list[str] = []
        while not said or "lonely" not in said[-1]:
            said.append((await process.stderr.readline()).decode())
        process.terminate()
        said += (await process.stderr.read()).decode().splitlines()
        assert await process.wait() == 0

    told = {name: [line for line in said if name in line] for name in ("watched", "lonely")}
    assert [len(found) for found in told.values()] == [1, 1], said
    if options:
        parts = [json.loads(found[0]) for found in told.values()]
        assert [(each["event"], each["level"], each["clients"]) for each in parts] == [
            ("told", "info", 1),
            ("told", "info", 0),
        ]


# Export


async def test_a_served_folder_sends_its_traces_and_metrics_to_a_collector(board: Path) -> None:
    with collecting() as collector:
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
            "OTEL_RESOURCE_ATTRIBUTES": "service.name=mine",
        }
        async with serving(board, env=env) as server:
            line = await server.line_with("telemetry is sent to")
            assert f"http://127.0.0.1:{collector.server_address[1]}" in line
            assert SECRET not in line
            (board / "tools" / "late.py").write_text(HELLO.replace("hello()", "late()"))
            spans: dict[str, tuple[bytes, bytes]] = {}
            metrics: set[str] = set()
            services: set[str] = set()
            wanted = {metric.name for metric in METRICS} - {"tidings.delivery.latency"}  # nobody was told yet
            while not (spans.keys() >= {"workspace.scan", "tool_list_changed.send"} and metrics >= wanted):
                path, body = await asyncio.to_thread(collector.received.get, timeout=DEADLINE)
                if path == "/v1/traces":
                    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                        services |= {
                            each.value.string_value for each in group.resource.attributes if each.key == "service.name"
                        }
                        for scope in group.scope_spans:
                            spans |= {span.name: (span.span_id, span.parent_span_id) for span in scope.spans}
                else:
                    for reading in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                        metrics |= {metric.name for scope in reading.scope_metrics for metric in scope.metrics}
            await server.stop()
    assert services == {"mine"}
    # The change's span lies in that of the look through the folder which found it.
    assert spans["change_notifier.notify_list_changed"][1] == spans["workspace.scan"][0]


async def test_a_collector_that_is_away_keeps_nobody(board: Path) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    async with serving(board, env=env) as server:
        await server.line_with("telemetry is sent to")
        (board / "tools" / "late.py").write_text(HELLO.replace("hello()", "late()"))
        await server.line_with("tool late added")
        await server.stop()


async def test_a_collector_that_is_away_is_mentioned_once_and_counted_each_time(board: Path) -> None:
    env = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:9/v1/traces?key={SECRET}",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "1",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    async with serving(board, env=env) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        failed = number = 0.0
        async with asyncio.timeout(DEADLINE):
            while failed < 2:
                number += 1
                (board / "tools" / "late.py").write_text(HELLO.replace("Say hello.", f"Say {number}."))
                text = (await http.get(server.url.replace("/mcp", "/metrics"))).text
                failed = float(text.partition('tidings_failures_total{what="telemetry"} ')[2].split()[0])
        said = await server.stop()
    assert SECRET not in said
    assert said.count("the collector does not accept telemetry") == 1


@pytest.mark.parametrize(
    ("env", "sent"),
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
def test_each_signal_goes_where_its_own_variables_say(
    env: dict[str, str], sent: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert {each: protocol_of(each) for each in ("TRACES", "METRICS") if endpoint_of(each) is not None} == sent


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, "board"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "host.name=here"}, "board"),
    ],
)
def test_a_server_goes_by_its_own_name_unless_the_environment_has_one(
    env: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    assert build_resource("board").attributes["service.name"] == name


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        (f"https://user:{SECRET}@collector:4318/v1?key={SECRET}", "https://collector:4318"),
        (f"collector:4317?key={SECRET}", "collector:4317"),
        (f"http://[{SECRET}", "an invalid endpoint"),
    ],
)
def test_no_secret_of_an_endpoint_is_said(endpoint: str, said: str) -> None:
    assert without_secrets(endpoint) == said


def test_what_an_exporter_raised_is_not_said_in_its_own_words() -> None:
    failures: Counter[str] = Counter()
    errors = CollectorErrors(failures)
    try:
        raise RuntimeError(SECRET)
    except RuntimeError:
        raised = sys.exc_info()

    def said(name: str, level: int) -> str | None:
        record = logging.LogRecord(name, level, "", 0, "failed: %s", (SECRET,), raised)
        return logging.Formatter().format(record) if errors.filter(record) else None

    ours = "the collector does not accept telemetry; this is logged once per outage"
    assert said("opentelemetry.exporter.otlp", logging.ERROR) == ours
    assert said("opentelemetry.sdk.trace.export", logging.WARNING) is None
    assert failures == {"telemetry": 2}
    assert SECRET in (said("opentelemetry.exporter.otlp", logging.INFO) or "")  # no complaint
    assert SECRET in (said("somebody.else", logging.ERROR) or "")
    assert failures == {"telemetry": 2}


async def test_the_switch_of_opentelemetry_is_honoured(board: Path) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}
    async with serving(board, env=env) as server:
        (board / "tools" / "late.py").write_text(HELLO.replace("hello()", "late()"))
        assert server.process.stderr is not None
        said = [server.greeting]
        while "tool late added" not in said[-1]:
            said.append((await server.process.stderr.readline()).decode())
        assert not [line for line in said if "telemetry" in line]
