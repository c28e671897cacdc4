"""`Live` without a transport: reading lists, event loops, and failures that it survives."""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mcp_types as types
import pytest
from mcp.server import Server, ServerRequestContext
from mcp.server.mcpserver import MCPServer

from tidings import AlreadyExists, InvalidItem, NotFound, Notification, Policy, TidingsError, Topic
from tidings.live import Live

WHO: ContextVar[str] = ContextVar("WHO", default="nobody")


def hello() -> str:
    return "hello"


def tool(name: str) -> types.Tool:
    return types.Tool(name=name, input_schema={"type": "object"})


def lowlevel(*names: str) -> Server[Any]:
    async def list_tools(
        ctx: ServerRequestContext[Any, Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool(name) for name in (*names, WHO.get())])

    return Server("lowlevel", on_list_tools=list_tools)


def keys(live: Live) -> list[str]:
    return [item["name"] for item in live.tools]


def test_lists_are_read_without_the_context_of_a_caller() -> None:
    live = Live(lowlevel("shown"))

    async def scenario() -> None:
        await live.list_reader.ensure_loaded({})
        WHO.set("admin")
        await live.refresh()
        assert keys(live) == ["nobody", "shown"]
        live.list_reader.wake(next(iter(type(live.catalog.tools.feature))))
        await live.refresh()
        assert keys(live) == ["nobody", "shown"]

    asyncio.run(scenario())


def test_too_large_item_is_left_out_alone(caplog: pytest.LogCaptureFixture) -> None:
    mcp = MCPServer("big", log_level="ERROR")
    live = Live(mcp, policy=Policy(max_item_bytes=500))
    with caplog.at_level(logging.ERROR):
        mcp.add_tool(hello, name="large", description="x" * 1000)
        mcp.add_tool(hello, name="small")
    assert keys(live) == ["small"]
    assert "'large' has" in caplog.text
    assert live.failures["items left out"] == 1


def test_lowlevel_items_can_be_changed_before_the_first_read() -> None:
    live = Live(lowlevel("hello"))
    live.tools.update("hello", description="Says hello")
    live.tools.remove("hello")
    with pytest.raises(NotFound):
        live.tools.remove("hello")
    live.tools.add({"name": "hello", "description": "Ours"}, handler=hello)
    with pytest.raises(AlreadyExists):
        live.tools.add({"name": "hello"}, handler=hello)

    async def scenario() -> None:
        await live.list_reader.ensure_loaded({})
        assert [item["description"] for item in live.tools if item["name"] == "hello"] == ["Ours"]

    asyncio.run(scenario())


def test_refused_server_does_not_keep_the_store_open(tmp_path: Path) -> None:
    """A server can be made live once, and has to be of a supported kind."""
    path = tmp_path / "state.db"
    with pytest.raises(TidingsError, match=r"not builtins\.str"):
        Live("board", store=path)  # type: ignore[arg-type]
    mcp = MCPServer("board")
    Live(mcp)
    with pytest.raises(TidingsError, match="is live already"):
        Live(mcp, store=path)
    live = Live(MCPServer("board"), store=path)
    assert live.writer.problem is None
    live.close()


def test_mistakes_that_type_checkers_find_raise_errors_too() -> None:
    """mypy checks this file: if it no longer rejects one of these lines, it reports an unused `ignore`."""
    live = Live(MCPServer("board"))
    with pytest.raises(TidingsError, match="takes an MCPServer"):
        Live(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidItem, match="takes a function"):
        live.tools.add(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="nonsense"):
        live.http_app(nonsense=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="nonsense"):
        live.run("http", nonsense=1)  # type: ignore[call-arg]


def test_other_event_loop_than_that_of_asyncio_is_refused() -> None:
    """On trio, no loop of asyncio runs in the thread, as here."""
    live = Live(MCPServer("trio"))
    request = SimpleNamespace(request_id=1, lifespan_context={}, method="tools/list")
    middleware: Any = live.lowlevel.middleware[0]
    for coroutine in (live.refresh(), middleware(request, None)):
        with pytest.raises(TidingsError, match=r"needs an event loop of asyncio.*such as trio's"):
            coroutine.send(None)


def test_unknown_options_of_stdio_are_refused() -> None:
    with pytest.raises(TidingsError, match="stdio has no option port; leave it out, or run http"):
        Live(MCPServer("board")).run("stdio", port=8000)


def test_change_without_an_event_loop_is_kept() -> None:
    mcp = MCPServer("loops", log_level="ERROR")
    live = Live(mcp)
    told: list[object] = []

    async def scenario() -> None:
        await live.list_reader.ensure_loaded({})

    asyncio.run(scenario())
    mcp.add_tool(hello, name="between")

    async def again() -> None:
        live.hub.subscribe(told.append, "tools")
        await live.list_reader.ensure_loaded({})
        assert keys(live) == ["between"]
        assert told == []

    asyncio.run(again())


def test_failures_are_counted_by_kind_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    mcp = MCPServer("counted", log_level="ERROR")
    told: list[object] = []

    def broken_hook(topic: Topic) -> None:
        raise RuntimeError("broken")

    live = Live(mcp, on_watched=broken_hook)

    def broken(notification: Notification) -> None:
        raise RuntimeError("broken")

    live.hub.subscribe(broken, "tools")
    live.hub.subscribe(told.append, "tools")
    with caplog.at_level(logging.CRITICAL):
        mcp.add_tool(hello, name="a")
        mcp.add_tool(hello, name="b")
    assert len(told) == 2
    assert live.failures == {"hook": 1, "delivery": 2}


@pytest.mark.parametrize("name", ["policy", "telemetry", "authorize", "terms", "on_watched", "on_unwatched", "store"])
def test_option_of_a_wrong_type_is_named_in_the_error(name: str) -> None:
    server = MCPServer("typed")
    options: dict[str, Any] = {name: {"detail": "full"}}
    with pytest.raises(TidingsError, match=rf"^Live\({name}=…\) must be "):
        Live(server, **options)
    Live(server)  # the server is not live after the error


@pytest.mark.parametrize("caller", [None, "ada"])
def test_streams_of_something_else_than_a_principal_are_refused(caller: Any) -> None:
    with pytest.raises(TidingsError, match=r"^end_streams\(\) takes the Principal that `authorize` gets, not "):
        Live(MCPServer("typed")).end_streams(caller)
