"""`live.tools`, `live.prompts` and `live.resources`: the items that they accept and refuse. Covers `sdk/components.py`
and `sdk/definitions.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

import mcp_types as types
import pytest
from fastmcp import FastMCP
from fastmcp.prompts import Prompt as FastPrompt
from fastmcp.tools import Tool as FastTool
from mcp.client import Client
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.prompts.base import Prompt
from mcp.server.mcpserver.tools.base import Tool

from tidings import InvalidItem, Live, NotFound, Notification

pytestmark = pytest.mark.anyio

Listed: TypeAlias = dict[str, str | None]


def hello() -> str:
    return "hello"


def brief(topic: str) -> str:
    return topic


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"in": inner}
    return inner


def lowlevel(tools: Listed, resources: Listed | None = None) -> Server[Any]:
    """Return a server that lists the names and descriptions in these dicts."""

    async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
        schema = {"type": "object"}
        return types.ListToolsResult(
            tools=[types.Tool(name=name, description=text, input_schema=schema) for name, text in tools.items()]
        )

    async def list_resources(ctx: Any, params: Any) -> types.ListResourcesResult:
        return types.ListResourcesResult(
            resources=[types.Resource(uri=uri, name=uri, description=text) for uri, text in (resources or {}).items()]
        )

    async def read(ctx: Any, params: Any) -> types.ReadResourceResult:
        return types.ReadResourceResult(contents=[types.TextResourceContents(uri=params.uri, text="its own")])

    return Server("lowlevel", on_list_tools=list_tools, on_list_resources=list_resources, on_read_resource=read)


async def tools_of(client: Client) -> Listed:
    return {tool.name: tool.description for tool in (await client.list_tools(cache_mode="bypass")).tools}


async def uris_of(client: Client) -> list[str]:
    return [each.uri for each in (await client.list_resources(cache_mode="bypass")).resources]


# The low-level server


@pytest.mark.parametrize(
    "definition",
    [
        {"description": 5},
        {"description": object()},
        {"description": "\ud800"},
        {"description": b"\xff"},
        {"inputSchema": "x"},
        {"inputSchema": {"type": "object", "x": nested(250)}},
        {"inputSchema": {"type": "object", "x": nested(500)}},
    ],
    ids=["number", "object", "unpaired surrogate", "bytes", "no schema", "deep", "deeper"],
)
async def test_item_that_would_break_the_list_is_refused(definition: dict[str, Any]) -> None:
    server = lowlevel({"there": None})
    live = Live(server)
    async with Client(server) as client:
        await client.list_tools()
        with pytest.raises(InvalidItem, match=r"^tools: 'bad' would not be valid: "):
            live.tools.add({"name": "bad", **definition}, handler=hello)
        with pytest.raises(InvalidItem, match=r"^tools: 'there' would not be valid: "):
            live.tools.update("there", definition)
        assert await tools_of(client) == {"there": None}


async def test_deep_item_is_refused_or_listed() -> None:
    server = lowlevel({})
    live = Live(server)
    async with Client(server) as client:
        await client.list_tools()
        for depth in range(235, 256):
            try:
                live.tools.add({"name": "deep", "inputSchema": {"type": "object", "x": nested(depth)}}, replace=True)
            except InvalidItem:
                break
            assert await tools_of(client) == {"deep": None}
        else:
            pytest.fail("as deep as nothing can be listed")


@pytest.mark.parametrize("key", ["theirs", "ours"])
@pytest.mark.parametrize("fields", [{"name": "other"}, {"name": None}, {"inputSchema": None}])
async def test_update_can_not_rename_or_remove_required_fields(key: str, fields: dict[str, Any]) -> None:
    server = lowlevel({"theirs": None})
    live = Live(server)
    live.tools.add({"name": "ours"}, handler=hello)
    async with Client(server) as client:
        await client.list_tools()
        with pytest.raises(InvalidItem, match=f"^tools: .*({key}|the name of an item)"):
            live.tools.update(key, fields)
        assert await tools_of(client) == {"theirs": None, "ours": None}


async def test_invalid_template_is_refused_and_others_work() -> None:
    server = lowlevel({}, {"board://a": None})
    live = Live(server)
    async with Client(server) as client:
        await client.list_resources()
        with pytest.raises(InvalidItem, match=r"^resources: 'board://{' would not be valid: "):
            live.resources.add({"uriTemplate": "board://{", "name": "bad"}, handler=hello)
        with pytest.raises(InvalidItem, match=r"^resources: 'board://b' would not be valid: [^$]*name"):
            live.resources.add({"uri": "board://b"}, handler=hello)
        with pytest.raises(InvalidItem, match="the handler of 'board://c' must be a function, not 5"):
            live.resources.add({"uri": "board://c", "name": "c"}, handler=5)
        (content,) = (await client.read_resource("board://a")).contents
        assert isinstance(content, types.TextResourceContents)
        assert content.text == "its own"


async def test_later_changes_of_a_given_definition_have_no_effect() -> None:
    server = lowlevel({})
    live = Live(server)
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    more: dict[str, Any] = {"a": []}
    async with Client(server) as client:
        await client.list_tools()
        live.tools.add({"name": "a", "inputSchema": schema}, handler=hello)
        live.tools.update("a", _meta=more)
        schema["properties"]["x"] = {"type": "string"}
        more["a"].append(1)
        (tool,) = (await client.list_tools(cache_mode="bypass")).tools
        assert tool.input_schema == {"type": "object", "properties": {}}
        assert tool.meta == {"a": []}


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "not read yet"])
async def test_removing_a_replacement_does_not_restore_the_original(is_read: bool) -> None:
    server = lowlevel({"hello": "Theirs"})
    live = Live(server)
    async with Client(server) as client:
        if is_read:
            assert await tools_of(client) == {"hello": "Theirs"}
        live.tools.add({"name": "hello", "description": "Ours"}, handler=hello, replace=True)
        assert await tools_of(client) == {"hello": "Ours"}
        live.tools.remove("hello")
        assert await tools_of(client) == {}
        live.tools.add({"name": "hello", "description": "Again"}, handler=hello)
        assert await tools_of(client) == {"hello": "Again"}


@pytest.mark.parametrize("replace", [False, True])
async def test_added_tool_can_be_removed_and_added_before_the_list_is_read(replace: bool) -> None:
    """The list is not read in between."""
    listed: Listed = {"theirs": None}
    server = lowlevel(listed)
    live = Live(server)
    async with Client(server) as client:
        await live.refresh("tools")
        live.tools.add({"name": "a", "description": "First"}, handler=hello)
        await live.refresh("tools")
        assert "a" in live.tools
        live.tools.remove("a")
        with pytest.raises(NotFound):
            live.tools.remove("a")
        live.tools.add({"name": "a", "description": "Second"}, handler=hello, replace=replace)
        assert await tools_of(client) == {"theirs": None, "a": "Second"}
        live.tools.remove("a")
        assert await tools_of(client) == {"theirs": None}
        listed["a"] = "Theirs"  # not hidden
        await live.refresh("tools")
        assert await tools_of(client) == {"theirs": None, "a": "Theirs"}
        live.tools.remove("a")
        assert await tools_of(client) == {"theirs": None}


async def test_item_added_before_the_first_read_does_not_hide_a_later_one() -> None:
    tools: Listed = {}
    resources: Listed = {}
    server = lowlevel(tools, resources)
    live = Live(server)
    live.tools.add({"name": "a", "description": "Ours"}, handler=hello)
    live.resources.add({"uri": "board://a", "name": "a"}, handler=hello)
    async with Client(server) as client:
        await live.refresh()
        assert await tools_of(client) == {"a": "Ours"}
        assert await uris_of(client) == ["board://a"]
        live.tools.remove("a")
        live.resources.remove("board://a")
        tools["a"], resources["board://a"] = "Theirs", None
        await live.refresh()
        assert await tools_of(client) == {"a": "Theirs"}
        assert await uris_of(client) == ["board://a"]


@pytest.mark.parametrize("feature", ["tools", "prompts", "resources"])
async def test_server_without_handlers_lists_added_items(feature: str) -> None:
    live = Live(Server("bare"))
    getattr(live, feature).add({"name": "ours"} | ({"uri": "board://a"} if feature == "resources" else {}))
    async with Client(live.lowlevel):
        await live.refresh(feature)
    assert [each["name"] for each in getattr(live, feature)] == ["ours"]


async def test_deleted_resource_that_is_listed_again_is_back() -> None:
    listed: Listed = {"board://a": None, "board://b": None}
    server = lowlevel({}, listed)
    live = Live(server)
    told: list[str] = []

    def note(notification: Notification) -> None:
        told.extend(f"{change.operation} {change.key}" for change in notification.changes)

    live.hub.subscribe(note, "resources")
    async with Client(server) as client:
        assert await uris_of(client) == ["board://a", "board://b"]
        await live.refresh("resources")
        told.clear()
        del listed["board://a"]
        live.resources.deleted("board://a")
        await live.refresh("resources")
        assert await uris_of(client) == ["board://b"]
        listed["board://a"] = None
        await live.refresh("resources")
        assert await uris_of(client) == ["board://b", "board://a"]
    assert told == ["removed board://a", "added board://a"]


@pytest.mark.parametrize("is_paged", [False, True], ids=["one page", "pages"])
async def test_deleted_resource_stays_hidden_until_it_was_left_out(is_paged: bool) -> None:
    """For example, because a database commits after the call."""
    listed: Listed = {"board://a": None, "board://b": None}

    async def list_resources(ctx: Any, params: Any) -> types.ListResourcesResult:
        uris = list(listed)
        start, end = (int(params.cursor or 0), int(params.cursor or 0) + 1) if is_paged else (0, len(uris))
        return types.ListResourcesResult(
            resources=[types.Resource(uri=uri, name=uri) for uri in uris[start:end]],
            next_cursor=str(end) if end < len(uris) else None,
        )

    live = Live(Server("lowlevel", on_list_resources=list_resources))
    async with Client(live.lowlevel) as client:

        async def shown() -> list[str]:
            await live.refresh("resources")
            uris, cursor = [], None
            while True:
                page = await client.list_resources(cursor=cursor, cache_mode="bypass")
                uris += [each.uri for each in page.resources]
                if (cursor := page.next_cursor) is None:
                    assert sorted(each["uri"] for each in live.resources) == sorted(uris)
                    return sorted(uris)

        assert await shown() == ["board://a", "board://b"]
        live.resources.deleted("board://a")
        for _ in range(2):
            assert await shown() == ["board://b"]
        del listed["board://a"]
        assert await shown() == ["board://b"]
        listed["board://a"] = None
        assert await shown() == ["board://a", "board://b"]


# The high-level servers


@pytest.mark.parametrize("kind", [MCPServer, FastMCP])
@pytest.mark.parametrize(
    ("feature", "thing", "options", "said"),
    [
        (
            "tools",
            lambda of: types.Tool(name="bad", input_schema={"type": "object"}),
            {},
            "takes a function or a .*Tool",
        ),
        ("tools", lambda of: (Prompt if of is MCPServer else FastPrompt).from_function(brief), {}, "takes a function"),
        ("prompts", lambda of: (Tool if of is MCPServer else FastTool).from_function(hello), {}, "takes a function"),
        ("resources", lambda of: (Tool if of is MCPServer else FastTool).from_function(hello), {}, "takes a function"),
        ("tools", lambda of: {"name": "bad"}, {}, "takes a function or a .*Tool, not {'name': 'bad'}"),
        ("tools", lambda of: (Tool if of is MCPServer else FastTool).from_function(hello), {"title": "x"}, "no title"),
        ("tools", lambda of: hello, {"nonsense": 1}, "hello.* can't be added: .*nonsense"),
        ("tools", lambda of: lambda: "x", {}, "lambda.* can't be added: .*name"),
        ("tools", lambda of: hello, {"meta": {"a": object()}}, "'hello' would not be valid: "),
        ("tools", lambda of: hello, {"description": "\ud800"}, "'hello' would not be valid: "),
        ("resources", lambda of: hello, {"uri": "board://{"}, "can't be added: "),
    ],
    ids=["protocol", "prompt", "tool", "tool too", "dict", "options", "option", "lambda", "object", "half", "template"],
)
async def test_foreign_item_is_refused_and_the_lists_stay(
    kind: type[Any], feature: str, thing: Callable[[type[Any]], Any], options: dict[str, Any], said: str
) -> None:
    server = kind("high")
    server.tool(name="there")(hello)
    server.prompt(name="there")(brief)
    server.resource("board://there")(hello)
    live = Live(server)
    async with Client(live.lowlevel) as client:
        with pytest.raises(InvalidItem, match=f"(?s)^{feature}: .*{said}"):
            getattr(live, feature).add(thing(kind), **options)
        assert list(await tools_of(client)) == ["there"]
        assert [each.name for each in (await client.list_prompts()).prompts] == ["there"]
        assert await uris_of(client) == ["board://there"]


@pytest.mark.parametrize("kind", [MCPServer, FastMCP])
async def test_prompt_arguments_are_updated_as_protocol_mappings(kind: type[Any]) -> None:
    server = kind("high")
    server.prompt(name="brief")(brief)
    live = Live(server)
    live.prompts.update("brief", arguments=[{"name": "topic", "description": "Of what", "required": True}])
    with pytest.raises(InvalidItem, match=r"^prompts: 'brief' would not be valid: "):
        live.prompts.update("brief", arguments=[{"description": "no name"}])
    async with Client(live.lowlevel) as client:
        (prompt,) = (await client.list_prompts()).prompts
        assert prompt.arguments == [types.PromptArgument(name="topic", description="Of what", required=True)]
        got = await client.get_prompt("brief", {"topic": "the sprint"})
        assert "the sprint" in str(got.messages[0].content)


@pytest.mark.parametrize("uri", ["https://Example.com", "board://sprint/a b", "board://ü"])
async def test_fastmcp_resource_can_be_named_by_its_original_uri(uri: str) -> None:
    server = FastMCP("uris")
    server.resource(uri)(hello)
    live = Live(server)
    told: asyncio.Queue[str] = asyncio.Queue()
    async with Client(live.lowlevel) as client:
        (listed,) = await uris_of(client)
        assert listed != uri
        await live.refresh("resources")
        live.hub.subscribe(lambda notification: told.put_nowait(notification.changes[-1].key), uris=[listed])
        live.resources.updated(uri)
        assert await told.get() == listed
        live.resources.update(uri, description="Of this one")
        (resource,) = (await client.list_resources(cache_mode="bypass")).resources
        assert (resource.uri, resource.description) == (listed, "Of this one")
        await live.refresh("resources")
        live.resources.deleted(uri)
        assert await told.get() == listed
        assert await uris_of(client) == []
        live.resources.add(hello, uri=uri)
        live.resources.remove(uri)
        assert await uris_of(client) == []
