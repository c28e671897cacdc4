"""Log lines: the events of subscriptions, JSON lines of `tidings serve`, no secrets, and no forged lines.

Covers `cli/logs.py` and `core/event_log.py`.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from rich.console import Console

from tests.support.command import DEADLINE, HELLO, SECRET, TOKEN, replace_file, serving
from tests.support.wire_clients import LegacyWire
from tidings import Catalog, Feature, Hub, Live, Reason
from tidings.cli.logs import TextFormatter
from tidings.cli.status import Panel
from tidings.core.redact import one_line, redact_uri
from tidings.server.authorization import Authorization, Principal
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio

TITLE = "\x1b]0;forged\x07"
"""Sets the title of a terminal."""
JSON_LOG = ("--log-format", "json", "--json")


def events(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the fields of each line, with its level."""
    return [{"level": record.levelname.lower(), **vars(record)["tidings"]} for record in caplog.records]


def check_events(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [each["event"] for each in found] == [each["event"] for each in expected]
    for fields, known in zip(found, expected, strict=True):
        assert fields | known == fields


# Events of subscriptions


def test_events_of_a_subscription_are_logged_at_info_and_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tidings.subscriptions")
    catalog = Catalog()
    hub = Hub(catalog)
    uri = f"https://ada:{SECRET}@example.org/notes/1?token={SECRET}#{SECRET}"
    shown = "https://example.org/notes/1"
    catalog.tools.add({"name": "lonely", "description": SECRET})
    client = hub.open(lambda notification: None, label="listen 7")
    hub.subscribe(client, Feature.TOOLS, Feature.RESOURCES)
    hub.subscribe(client, uris=[uri])
    catalog.tools.add({"name": "deploy", "description": SECRET})
    catalog.resources.updated(uri, author=SECRET)
    hub.unsubscribe(client, uris=[uri])
    hub.close(client, Reason.DISCONNECTED)

    check_events(
        events(caplog),
        [
            {"event": "told", "level": "debug", "clients": 0, "changes": ["added lonely"], "revision": 1},
            {"event": "subscribed", "level": "debug", "client": "listen 7", "topics": ["tools", "resources"]},
            {"event": "subscribed", "level": "debug", "client": "listen 7", "topics": [shown]},
            {"event": "told", "level": "info", "clients": 1, "topics": ["tools"], "changes": ["added deploy"]},
            {"event": "told", "level": "debug", "clients": 1, "topics": [shown], "changes": [f"updated {shown}"]},
            {"event": "unsubscribed", "level": "debug", "client": "listen 7", "topics": [shown]},
            {"event": "gone", "level": "debug", "client": "listen 7", "reason": "disconnected", "cleaned": 2},
        ],
    )
    assert SECRET not in caplog.text + str(events(caplog))


def test_expired_and_deleted_subscriptions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    catalog = Catalog()
    hub = Hub(catalog)
    clients = [hub.open(lambda notification: None, label=f"listen {number}") for number in range(3)]
    for client in clients:
        client.subscribe(uris=["a://b"])
    clients[0].subscribe("tools", uris=["a://c"], ttl=5)
    caplog.set_level(logging.DEBUG, "tidings.subscriptions")

    due = hub.next_due()
    assert due is not None
    hub.tick(due)
    catalog.resources.deleted("a://b")
    clients[0].unsubscribe("tools", uris=["a://b"])  # has ended already

    check_events(
        events(caplog),
        [
            {"event": "unsubscribed", "client": "listen 0", "reason": "expired", "topics": ["tools", "a://c"]},
            {"event": "told", "clients": 3, "changes": ["deleted a://b"]},
            {"event": "unsubscribed", "clients": 3, "reason": "deleted", "topics": ["a://b"]},
        ],
    )


def test_closed_stream_is_logged_at_info_only_if_the_server_cut_it_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tidings.subscriptions")
    hub = Hub(Catalog())
    for reason in (Reason.DISCONNECTED, Reason.SLOW):
        client = hub.open(lambda notification: None)
        hub.subscribe(client, Feature.TOOLS)
        hub.close(client, reason)
    check_events(events(caplog), [{"event": "gone", "level": "info", "reason": "slow", "cleaned": 1, "pending": 0}])


# Secrets and forged lines


@pytest.mark.parametrize(
    ("uri", "expected"),
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
def test_uri_is_logged_without_user_query_and_fragment(uri: str, expected: str) -> None:
    assert redact_uri(uri) == expected


def test_client_can_not_forge_a_line_or_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
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
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if len(line) >= 400 or not line.isprintable()] == []
    assert lines[0].startswith(r"listen x\n12:00:00 error: \x1b[2J\u202eyyy")


@pytest.mark.parametrize("character", "\0\n\r\x1b\x7f\x85\x9b\u2028\u2029\u202a\u2066\u2069\ud800", ids=ascii)
def test_control_characters_are_escaped(character: str) -> None:
    text = one_line(f"a{character}b")
    assert text == f"a{ascii(character)[1:-1]}b"
    assert text.encode() == text.encode("ascii")


def test_each_message_is_one_line_and_a_traceback_is_indented() -> None:
    """An exception of a tool can contain text of a client."""
    try:
        raise ValueError(f"no such name: {TITLE}\n12:00:00 all is well")
    except ValueError:
        record = logging.LogRecord("other", logging.ERROR, "", 0, "two\nlines \u001b[2J", (), sys.exc_info())
    first, *rest = TextFormatter("%(asctime)s %(message)s", "%H:%M:%S").format(record).split("\n")
    assert first.endswith(r"error: two\nlines \x1b[2J")
    assert rest[-2:] == [r"  ValueError: no such name: \x1b]0;forged\x07", "  12:00:00 all is well"]
    assert all(line.startswith("  ") for line in rest)


def test_problem_of_a_file_can_not_control_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "bad.py").write_text(f"raise ValueError({TITLE!r})")
    workspace = Workspace(tmp_path, poll=0)
    terminal = io.StringIO()
    with Panel(Live(workspace), workspace, Console(file=terminal, force_terminal=True, width=120), "board").run():
        pass
    assert r"\x1b]0;forged" in terminal.getvalue()
    assert TITLE[:-1] not in terminal.getvalue()


def test_principal_is_shown_without_the_claims_of_its_token() -> None:
    principal = Principal("client", "subject", ("read",), {"session": SECRET})
    assert "client" in repr(principal)
    assert SECRET not in repr(principal)


def test_failures_of_user_functions_are_logged_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    uri = f"db:users?password={SECRET}"

    def fail(*_: object) -> Any:
        raise RuntimeError("no")

    catalog = Catalog()
    hub = Hub(catalog, on_watched=fail, on_unwatched=fail)
    hub.subscribe(hub.open(fail, label="a"), uris=[uri])
    hub.subscribe(hub.open(print, label="b", is_muted=fail), uris=[uri])
    hub.subscribe(hub.open(fail, label="c"), Feature.RESOURCES)
    catalog.resources.updated(uri)
    catalog.resources.add({"uri": uri, "name": "x"})
    for each in hub:
        each.close()
    authorization = Authorization(fail)
    assert asyncio.run(authorization.filter(None, [uri])) == []
    may = authorization.predicate(None)
    assert may is not None
    assert not may(uri)
    messages = {record.getMessage() for record in caplog.records}
    assert len(messages) >= 5
    assert "db:users" in caplog.text
    assert not [message for message in messages if SECRET in message]


# `tidings serve`


async def add_tool(url: str, http: httpx2.AsyncClient, board: Path, name: str) -> str:
    """Add a tool to a folder, wait until a client is notified of it, and return the id of the client's session."""
    session = LegacyWire(url, http)
    await session.shake_hands()
    async with session.stream() as stream:
        replace_file(board / "tools" / f"{name}.py", HELLO.replace("hello()", f"{name}()"))
        while name not in (await stream.received()).summary:
            pass
    await session.end()
    return session.session_id


async def test_json_log_has_the_events_of_a_server_and_no_secrets(board: Path) -> None:
    (board / "tools" / "secretive.py").write_text(HELLO.replace("Say hello.", SECRET))
    async with serving(board, "--log-level", "debug", *JSON_LOG, env={"TIDINGS_AUTH_TOKEN": TOKEN}) as server:
        metrics = server.url.replace("/mcp", "/metrics")
        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=DEADLINE) as http:
            session_id = await add_tool(server.url, http, board, "late")
            assert (await http.get(metrics)).status_code == 200
            assert (await http.get(metrics, headers={"Authorization": "none"})).status_code == 401
        log = await server.stop()

    lines = [json.loads(line) for line in log.splitlines()]
    assert all(line.keys() >= {"time", "level", "logger", "message"} for line in lines)
    found = [line["event"] for line in lines if "event" in line and line.get("clients") != 0]
    expected = ["serving", "starting", "subscribed", "told", "gone", "stopping"]
    assert sorted(set(expected), key=found.index) == expected
    told = [line for line in lines if line.get("event") == "told" and "added late" in line["changes"]]
    assert (told[0]["clients"], told[0]["level"]) == (1, "info")
    assert TOKEN not in log
    assert session_id not in log
    assert SECRET not in "".join(str(line) for line in lines if line["level"] != "debug")


@pytest.mark.parametrize("options", [("--json",), JSON_LOG], ids=["text", "json"])
async def test_change_in_a_folder_is_logged_once_with_and_without_subscribers_and_without_secrets(
    board: Path, options: tuple[str, ...]
) -> None:
    uri = f"https://me:{SECRET}@host/lonely?token={SECRET}"
    async with serving(board, *options) as server:
        async with httpx2.AsyncClient(timeout=DEADLINE) as http:
            await add_tool(server.url, http, board, "watched")
        replace_file(board / "resources" / "lonely.meta.json", json.dumps({"uri": uri}))
        replace_file(board / "resources" / "lonely.md", "first")
        log: list[str] = []
        while not [line for line in log if "https://host/lonely" in line and "added" in line]:
            log.append(await server.line_with(""))
        log += (await server.stop()).splitlines()

    assert SECRET not in "".join(log)
    found = [[line for line in log if name in line and "added" in line] for name in ("watched", "https://host/lonely")]
    assert [len(lines) for lines in found] == [1, 1], log
    if options == JSON_LOG:
        fields = [json.loads(lines[0]) for lines in found]
        assert [(each["event"], each["level"], each["clients"]) for each in fields] == [
            ("told", "info", 1),
            ("told", "info", 0),
        ]


async def test_warnings_thread_exceptions_and_hanging_calls_of_a_tool_are_json(board: Path) -> None:
    careless = (
        "import threading, time, warnings",
        "def careless() -> None:",
        "    warnings.warn('two\\nlines')",
        "    threading.Thread(target=int, args=['x']).start()",
        "    time.sleep(600)",
    )
    (board / "tools" / "careless.py").write_text("\n".join(careless))
    async with serving(board, *JSON_LOG) as server, Client(server.url) as client:
        call = asyncio.create_task(client.call_tool("careless"))
        lines = [json.loads(await server.line_with(""))]
        while "exception" not in lines[-1]:
            lines.append(json.loads(await server.line_with("")))
        assert lines[-1]["exception"].endswith("invalid literal for int() with base 10: 'x'")
        lines += map(json.loads, (await server.stop()).splitlines())
        call.cancel()
    for text in ("two\nlines", "calls still run"):
        assert [line["level"] for line in lines if text in line["message"]] == ["warning"]
