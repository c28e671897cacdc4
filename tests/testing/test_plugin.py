"""The pytest plugin: clients of both eras connected to a server, and assertions that say what each of them got.

Covers `clients.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer

from tests.support.waiting import DEADLINE
from tidings import Live, TidingsError
from tidings.testing import connect

pytest_plugins = ["pytester"]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import what the tests inside need. They forget what they import, and some modules can't be imported twice."""

    async def scenario() -> None:
        async with connect(Live(MCPServer("first", log_level="CRITICAL"))) as clients:
            await clients.assert_silent()

    asyncio.run(scenario())


HEAD = """
import pytest
from mcp.server.mcpserver import Context, MCPServer
from tidings import Live
from tidings.testing import NotificationError

server = MCPServer("board", log_level="CRITICAL")

@server.tool()
def close() -> str:
    return "closed"

@server.tool()
async def shout(ctx: Context) -> str:
    await ctx.notify_tools_changed()
    return "done"

@server.resource("board://sprint")
def sprint() -> str:
    return "sprint 1"

pytestmark = pytest.mark.anyio

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""


def run(pytester: pytest.Pytester, body: str) -> pytest.RunResult:
    pytester.makepyfile(HEAD + body)
    return pytester.runpytest_inprocess("-p", "tidings.testing.plugin", "-q", "--timeout=60")


@pytest.mark.parametrize("over", ["http", "memory"])
def test_server_that_notifies_passes(pytester: pytest.Pytester, over: str) -> None:
    body = f"""
async def test_it(live_clients):
    async with live_clients(live, over="{over}", uris=["board://sprint"]) as clients:
        assert [client.is_modern for client in clients] == [True, False]
        await clients.assert_silent()
        server.add_tool(lambda: "hi", name="hello")
        await clients.assert_told("tools", added="hello")
        await clients.assert_silent()
        live.tools.remove("hello")
        server.add_tool(lambda: "hi", name="bye")
        await clients.assert_told("tools", removed="hello", added=["bye"])
        live.resources.updated("board://sprint")
        await clients.assert_told("board://sprint")
        await clients.assert_silent()
        assert (await clients.call("close")).content[0].text == "closed"
        assert [frame.is_expected for frame in clients["legacy"].frames] == [True] * 3
        assert all(client.has_marker for client in clients)

live = Live(server)
"""
    run(pytester, body).assert_outcomes(passed=1)


def test_server_that_forgets_fails_and_the_message_says_so(pytester: pytest.Pytester) -> None:
    body = """
async def test_it(live_clients):
    async with live_clients(server) as clients:
        server.add_tool(lambda: "hi", name="hello")
        await clients.assert_told("tools", added="hello", within=0.2)
"""
    result = run(pytester, body)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*NotificationError: not every client was told, within 0.2 s, of tools: added 'hello'",
            "*modern client over http: *tools has changed (added 'hello'), but the server sent no notification",
            "*legacy client over http: *no notification; the server does not announce tools.listChanged either",
            "*modern client over http got no notifications of changes",
        ]
    )


def test_server_that_notifies_without_a_change_fails(pytester: pytest.Pytester) -> None:
    body = """
async def test_it(live_clients):
    async with live_clients(server, eras=["modern"]) as clients:
        await clients.call("shout")
        await clients.assert_silent()
"""
    result = run(pytester, body)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*NotificationError: a client was told of something, and the test expects silence",
            "*modern client over http: it was told of tools, whose list has not changed",
            "*modern client over http got 1 notifications of changes",
            "* s  notifications/tools/list_changed {*",
        ]
    )


def test_wrong_change_and_repeated_notifications_fail(pytester: pytest.Pytester) -> None:
    body = """
async def test_wrong_name(live_clients):
    async with live_clients(server, eras=["modern"]) as clients:
        server.add_tool(lambda: "hi", name="hello")
        await clients.call("shout")
        await clients.assert_told("tools", added="bye", within=0.2)

async def test_twice(live_clients):
    async with live_clients(server, eras=["modern"], over="memory") as clients:
        server.remove_tool("hello")
        await clients.call("shout")
        await clients.call("shout")
        await clients.assert_told("tools", removed="hello")
"""
    result = run(pytester, body)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "*modern client over http: it was told of tools, but its list has: added 'hello'",
            "*modern client over memory: it was told 2 times, and at most 1 is expected",
        ]
    )


def test_report_of_any_other_failure_has_the_notifications(pytester: pytest.Pytester) -> None:
    body = """
async def test_it(live_clients):
    async with live_clients(live, eras=["modern"], over="memory") as clients:
        server.add_tool(lambda: "hi", name="hello")
        await clients.assert_told("tools", added="hello")
        assert False

live = Live(server)
"""
    result = run(pytester, body)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*live clients*", "*notifications/tools/list_changed*(expected)"])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "message"),
    [({"eras": ["modren"]}, "'modren' is no era; give some of modern, legacy"), ({"over": "stdio"}, "over 'stdio'")],
)
async def test_misspelt_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TidingsError, match=message):
        async with connect(MCPServer("board", log_level="CRITICAL"), **options):
            pass


@pytest.mark.anyio
async def test_connecting_to_a_server_that_never_answers_can_be_cancelled() -> None:
    asked = asyncio.Event()

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked.set()
            await asyncio.Event().wait()

    async def use() -> None:
        async with connect(silent):
            pass

    async with asyncio.timeout(DEADLINE):
        connecting = asyncio.create_task(use())
        await asked.wait()
        connecting.cancel()
        await asyncio.wait([connecting])
    assert connecting.cancelled()


def test_loading_the_plugin_does_not_import_the_sdk(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_it(request):
            assert request.config.pluginmanager.has_plugin("tidings.testing.plugin")
            assert not {"mcp", "mcp_types", "uvicorn", "starlette"} & sys.modules.keys()
        """
    )
    pytester.runpytest_subprocess("-p", "tidings.testing.plugin", "-p", "no:logfire").assert_outcomes(passed=1)
