"""`tidings check` finds nothing on servers of Tidings, and only true defects on the servers of others.

`transcripts/` has the findings on the servers of others, with their frames, and without the values that differ from run
to run. `TIDINGS_RECORD=1` records them again. For each finding, a test shows the same defect without the checker.

Covers `report.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.server.mcpserver import Context, MCPServer

from tests.support.command import TIDINGS
from tests.support.command import serving as serving_folder
from tests.support.forking import forked_command
from tests.support.messages import ACCEPT_BOTH, initialize, modern_headers, modern_message
from tests.support.mirrored_servers import NodeServer
from tests.support.sdk_clients import serving, stdio_server
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE, free_port, until_served
from tests.support.wire_clients import read_answer
from tests.typescript.node import MODULES, needs_node, node
from tidings.check.checks import check_target
from tidings.check.report import Report
from tidings.check.run import CheckOptions

pytestmark = pytest.mark.anyio

TRANSCRIPTS = Path(__file__).with_name("transcripts")
TIMEOUT = 20.0
"""Seconds for an answer, also on a busy machine."""
MISSING = 5.0
"""The same where a notification is missing, and the check waits for it in vain."""
ADD_TO_BOARD = 'change {"what": "add", "where": "request", "args": {"feature": "tools", "key": "added"}}'
GZIP = 'gzip-file-as-resource {"name": "a.gz", "data": "data:text/plain,hello"}'
EVERYTHING = MODULES / "@modelcontextprotocol" / "server-everything" / "dist" / "index.js"
TOLD = {"told", "told-once", "tool-callable"}
DIFFERENT = {"id", "version", "lastModified"}
"""Members whose value is another in each run, or with each version of the server."""


def normalize(content: Any) -> Any:
    """Replace what differs from run to run."""
    if isinstance(content, dict):
        return {key: "…" if key in DIFFERENT else normalize(value) for key, value in content.items()}
    if isinstance(content, list):
        return [normalize(value) for value in content]
    if isinstance(content, str):
        return re.sub(r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}|\b\d+ ms", "…", content)
    return content


def compare(report: Report, name: str) -> None:
    """Compare the findings with the recorded ones."""
    found = [
        {
            "rule": finding.rule.id,
            "message": normalize(finding.message),
            "frames": [[frame.channel, frame.direction, normalize(frame.content)] for frame in finding.evidence],
        }
        for finding in report.findings
    ]
    path = TRANSCRIPTS / f"{name}.json"
    if os.environ.get("TIDINGS_RECORD"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    assert found == json.loads(path.read_text())


def check_clean(report: Report, *passed: str) -> None:
    assert [(finding.rule.id, finding.message, finding.evidence) for finding in report.findings] == []
    assert report.problems == []
    assert set(passed) <= set(report.passed), report.skipped


async def check(target: Any, trigger: str | None = None, wait: float = TIMEOUT, *uris: str) -> Report:
    options = CheckOptions(target=target, name="server", trigger=trigger, timeout=wait, quiet_time=1.0, uris=uris)
    return await check_target(options)


# Servers of Tidings


@pytest.mark.parametrize(
    "kind", ["mcpserver", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("lowlevel", "fastmcp"))]
)
async def test_a_live_server_is_clean_over_http(kind: str) -> None:
    with serving(kind) as url:
        report = await check(url, ADD_TO_BOARD)
    check_clean(report, *TOLD, "unchanged", "slow-reader", "unknown-session", "get-stream", "frame-tag")
    assert report.protocols == ["2026-07-28", "2025-11-25"]
    assert set(report.latencies) == {"modern", "legacy"}


@pytest.mark.slow
async def test_a_live_server_is_clean_on_stdio() -> None:
    server = stdio_server("mcpserver")
    words = ["env", *(f"{name}={value}" for name, value in (server.env or {}).items()), server.command, *server.args]
    report = await check(tuple(words), ADD_TO_BOARD)
    check_clean(report, *TOLD, "unchanged", "slow-reader", "sigterm", "graceful-end", "frame-tag")


def changing(folder: Path) -> str:
    """Return a command that adds a tool and changes a resource of a workspace."""
    lines = (
        "name=t$(date +%s%N)",
        "printf 'def %s() -> str:\\n    return \"\"\\n' $name > .new.py && mv .new.py tools/$name.py",
        "echo $name > .new.md && mv .new.md resources/sprint.md",
    )
    (script := folder / ".change.sh").write_text("\n".join(("set -e", f"cd {shlex.quote(str(folder))}", *lines)))
    return f"sh {script}"


@pytest.mark.slow
async def test_a_workspace_is_clean_over_http(board: Path) -> None:
    async with serving_folder(board) as server:
        report = await check(server.url, changing(board), TIMEOUT, "workspace:///sprint.md")
    check_clean(report, *TOLD, "unsubscribe", "unchanged", "slow-reader", "unknown-session")


async def test_a_workspace_is_clean_on_stdio(board: Path) -> None:
    target = tuple(forked_command(TIDINGS, "serve", board, "--stdio", "-q"))
    report = await check(target, changing(board), TIMEOUT, "workspace:///sprint.md")
    check_clean(report, *TOLD, "unsubscribe", "unchanged", "slow-reader", "sigterm", "graceful-end")


# The SDK alone


@asynccontextmanager
async def serving_sdk() -> AsyncIterator[str]:
    mcp = MCPServer("plain", log_level="WARNING")

    @mcp.tool()
    def add() -> str:
        def added() -> str:
            return "called"

        mcp.add_tool(added)
        return "added"

    @mcp.tool()
    async def mark(ctx: Context[Any, Any]) -> str:
        await ctx.notify_prompts_changed()
        return "marked"

    @mcp.resource("text://note")
    def note() -> str:
        return "text"

    async with run_uvicorn(mcp.streamable_http_app(), http="h11") as server:
        yield f"http://127.0.0.1:{address_of(server)[1]}/mcp"


async def test_the_sdk_advertises_changes_of_tools_and_does_not_tell_them() -> None:
    async with serving_sdk() as url:
        report = await check(url, "add", MISSING)
    assert report.failed == {"told"}
    compare(report, "python-sdk")


async def test_a_client_of_the_sdk_alone_is_not_told_of_an_added_tool() -> None:
    """Confirm the finding: of two changes, the stream gets only the notification of the second, `mark`."""
    async with asyncio.timeout(DEADLINE), serving_sdk() as url, Client(url) as client:
        capabilities = client.server_capabilities
        assert capabilities.tools is not None
        assert capabilities.tools.list_changed
        async with client.listen(tools_list_changed=True, prompts_list_changed=True) as stream:
            assert stream.honored.tools_list_changed
            await client.call_tool("add")
            assert "added" in [tool.name for tool in (await client.list_tools()).tools]
            await client.call_tool("mark")
            assert type(await anext(aiter(stream))).__name__ == "PromptsListChanged"


# FastMCP


@asynccontextmanager
async def serving_fastmcp() -> AsyncIterator[str]:
    fastmcp = pytest.importorskip("fastmcp")
    mcp: Any = fastmcp.FastMCP("fast")

    def add() -> str:
        def added() -> str:
            return "called"

        mcp.tool(added)
        return "added"

    mcp.tool(add)
    async with run_uvicorn(mcp.http_app(), http="h11") as server:
        yield f"http://127.0.0.1:{address_of(server)[1]}/mcp"


@pytest.mark.slow  # importing FastMCP takes seconds
async def test_fastmcp_advertises_changes_to_legacy_sessions_and_does_not_tell_them() -> None:
    async with serving_fastmcp() as url:
        report = await check(url, "add", MISSING)
    assert report.failed == {"told"}
    assert "the server refuses subscriptions/listen" in report.skipped.values()
    compare(report, "fastmcp")


@pytest.mark.slow
async def test_a_legacy_session_of_fastmcp_is_not_told_of_an_added_tool() -> None:
    """Confirm the finding, and that listen streams are refused and not advertised."""
    received: list[Any] = []

    async def receive(message: Any) -> None:
        received.append(message)

    async with asyncio.timeout(DEADLINE), serving_fastmcp() as url:
        async with Client(url, mode="legacy", message_handler=receive) as client:
            assert client.server_capabilities.tools is not None
            assert client.server_capabilities.tools.list_changed
            async with Client(url, mode="legacy") as other:
                await other.call_tool("add")
            assert "added" in [tool.name for tool in (await client.list_tools()).tools]
            await client.session.send_ping()
        assert received == []
        async with httpx2.AsyncClient(verify=False) as http:
            for method in ("server/discover", "subscriptions/listen"):
                message = modern_message(method, 1, {"notifications": {"toolsListChanged": True}})
                answer = await http.post(url, json=message, headers=modern_headers(method))
                if method == "server/discover":
                    capabilities = read_answer(answer.text)["result"]["capabilities"]
                    assert not capabilities["tools"].get("listChanged")
                else:
                    assert read_answer(answer.text)["error"]["code"] == -32601


# Node


@asynccontextmanager
async def serving_typescript() -> AsyncIterator[NodeServer]:
    server = NodeServer()
    server.lists["tools"] = {"b": "", "a": ""}
    server.lists["resources"] = {"text://note": ""}
    async with server.serving():
        yield server


@pytest.mark.node
@needs_node
async def test_a_typescript_server_is_clean_over_http(tmp_path: Path) -> None:
    async with serving_typescript() as server:
        address = f"http://127.0.0.1:{server.port}"
        lists = json.dumps(server.lists | {"tools": {"b": "", "a": "", "c": ""}})
        (script := tmp_path / "change.py").write_text(
            "import urllib.request as u\n"
            f"for path, body in (('lists', {lists!r}), ('notify/tools', '')):\n"
            f"    u.urlopen(u.Request(f'{address}/{{path}}', body.encode(), method='POST'))\n"
        )
        report = await check(server.url(None), f"python3 {script}")
    check_clean(report, *TOLD, "unchanged", "slow-reader", "capability-granted", "cache-hints")
    assert report.protocols == ["2026-07-28", "2025-11-25"]


@pytest.mark.node
@needs_node
async def test_the_everything_server_is_clean_on_stdio() -> None:
    report = await check((node() or "", str(EVERYTHING), "stdio"), GZIP)
    check_clean(report, "told", "told-once", "unchanged", "slow-reader", "sigterm", "subscribe-served")
    assert report.protocols == ["2025-11-25"]


@asynccontextmanager
async def serving_everything() -> AsyncIterator[str]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(node() or "", str(EVERYTHING), "streamableHttp"),
        env={**os.environ, "PORT": str(port)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await until_served(port)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        await process.wait()


@pytest.mark.node
@needs_node
async def test_the_everything_server_answers_an_unknown_session_with_400() -> None:
    async with serving_everything() as url:
        report = await check(url, GZIP)
        assert report.failed == {"unknown-session"}
        assert {"told", "told-once", "unchanged", "slow-reader", "get-stream"} <= set(report.passed)
        compare(report, "server-everything")
        # Confirm it, with an id that the server never gave and with one that it has deleted.
        async with httpx2.AsyncClient(verify=False) as http:
            opened = await http.post(url, json=initialize(), headers=ACCEPT_BOTH)
            session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
            assert (await http.delete(url, headers=ACCEPT_BOTH | session)).is_success
            ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
            for headers in (session, {"Mcp-Session-Id": "unknown"}):
                assert (await http.post(url, json=ping, headers=ACCEPT_BOTH | headers)).status_code == 400
                assert (await http.get(url, headers=ACCEPT_BOTH | headers)).status_code == 400
