"""A change of one item: it is checked, and clients get what a list request returns."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import mcp_types as types
import msgspec
import pytest
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.resources import FunctionResource, ResourceTemplate
from pydantic import BaseModel

from tidings import Live
from tidings.core.catalog import Catalog
from tidings.core.frames import FrameFormat, encode_frame, render
from tidings.core.model import Change, Feature, Item, Notification, Operation, Version
from tidings.errors import InvalidItem
from tidings.policy import Detail
from tidings.sdk.internals import registry_of


def forecast(city: str, days: int = 3) -> str:
    """What the weather will be."""
    return f"{days} days of rain in {city}"


def serve() -> tuple[MCPServer[Any], Live]:
    server: MCPServer[Any] = MCPServer("weather")
    server.add_tool(forecast, title="Forecast", meta={"a": [1, 2.5, None], "ü": "\u2028"})
    server.prompt(description="Asks for a forecast.")(forecast)
    server.add_resource(FunctionResource.from_function(lambda: "rain", "weather://now", name="now"))
    template = ResourceTemplate.from_function(lambda city: "rain", "weather://{city}", name="city")
    server._resource_manager._templates[template.uri_template] = template
    return server, Live(server)


async def listed(server: MCPServer[Any], feature: str) -> list[dict[str, Any]]:
    """Return the items as the SDK encodes them in a list result."""
    results: dict[str, list[BaseModel]] = {
        "tools": [types.ListToolsResult(tools=await server.list_tools())],
        "prompts": [types.ListPromptsResult(prompts=await server.list_prompts())],
        "resources": [
            types.ListResourcesResult(resources=await server.list_resources()),
            types.ListResourceTemplatesResult(resource_templates=await server.list_resource_templates()),
        ],
    }
    written = [json.loads(each.model_dump_json(by_alias=True, exclude_none=True)) for each in results[feature]]
    members = ("tools", "prompts", "resources", "resourceTemplates")
    return [item for result in written for member in members for item in result.get(member, [])]


def descriptions(told: list[Notification]) -> list[str]:
    return [note.changes[0].item.definition["description"] for note in told if note.changes[0].item]


@pytest.mark.parametrize(
    ("feature", "key"),
    [("tools", "forecast"), ("prompts", "forecast"), ("resources", "weather://now"), ("resources", "weather://{city}")],
)
@pytest.mark.anyio
async def test_updated_item_equals_the_listed_one(feature: str, key: str) -> None:
    server, live = serve()
    getattr(live, feature).update(key, description="Zürich \u2028 1e16", title="Other")
    known = live.catalog.items(feature)
    assert sorted(await listed(server, feature), key=key_in) == sorted(known, key=key_in)
    assert (found := known.get(key)) is not None
    assert (found["description"], found["title"]) == ("Zürich \u2028 1e16", "Other")
    # Reading the whole list finds the same item.
    version = known.version
    live.list_reader.wake(Feature(feature))
    assert known.version == version


def test_item_changed_in_place_after_an_update_is_read_again() -> None:
    server, live = serve()
    told: list[Notification] = []
    live.hub.subscribe(told.append, "tools")
    live.tools.update("forecast", description="once")
    tool = registry_of(server, "tools")["forecast"]
    tool.description = "in place"
    registry_of(server, "tools")["forecast"] = tool
    tool.description = "in place again"
    live.list_reader.wake(Feature.TOOLS, "forecast")
    assert descriptions(told) == ["once", "in place", "in place again"]


@pytest.mark.anyio
async def test_concurrent_updates_of_one_item_are_all_kept() -> None:
    server, live = serve()
    told: list[Notification] = []
    live.hub.subscribe(told.append, "tools")

    def update(field: str) -> None:
        for number in range(1000, 1500):
            live.tools.update("forecast", {field: f"{field} {number}"})

    fields = ("title", "description")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # switch threads often
    try:
        with ThreadPoolExecutor(len(fields)) as threads:
            list(threads.map(update, fields))
    finally:
        sys.setswitchinterval(interval)
    items = [note.changes[0].item.definition for note in told if note.changes[0].item]
    assert len(items) == 1000
    for field in fields:
        said = [item[field] for item in items if item[field].startswith(field)]
        assert said == sorted(said), "what one thread changed was taken back by another"
    assert await listed(server, "tools") == list(live.tools)


@pytest.mark.anyio
async def test_failed_update_changes_nothing() -> None:
    server, live = serve()
    before = registry_of(server, "tools")["forecast"]
    for fields, said in (
        ({"description": 5}, "would not be valid"),
        ({"meta": {"x": object()}}, "would not be valid"),
        ({"description": "\ud800"}, "would not be valid"),
        ({"name": "other"}, "can't rename"),
        ({"fn": forecast}, "no field fn"),
        ({"inputSchema": {"type": "array"}}, "inputSchema of type object"),
        ({"inputSchema": "x"}, "would not be valid"),
    ):
        with pytest.raises(InvalidItem, match=said):
            live.tools.update("forecast", fields)
    assert registry_of(server, "tools")["forecast"] is before
    assert await listed(server, "tools") == list(live.catalog.tools)


@pytest.mark.parametrize("is_there_before", [False, True])
@pytest.mark.parametrize("value", [object(), b"\xff"], ids=["object", "bytes"])
def test_item_without_a_json_form_is_left_out_alone(value: object, is_there_before: bool) -> None:
    server: MCPServer[Any] = MCPServer("weather")
    server.add_tool(forecast)
    if is_there_before:
        server.add_tool(forecast, name="broken", meta={"x": value})
        live = Live(server)
    else:
        live = Live(server)
        server.add_tool(forecast, name="broken", meta={"x": value})
    told: list[Notification] = []
    live.hub.subscribe(told.append, "tools")
    server.add_tool(forecast, name="fine")
    assert [each["name"] for each in live.tools] == ["fine", "forecast"]
    live.list_reader.wake(Feature.TOOLS)  # reads the whole list
    assert live.list_reader.is_current(Feature.TOOLS)
    server.add_tool(forecast, name="later")
    server.remove_tool("fine")
    live.list_reader.wake(Feature.TOOLS)
    assert [each["name"] for each in live.tools] == ["forecast", "later"]
    said = [(change.operation.value, change.key) for note in told for change in note.changes]
    assert said == [("added", "fine"), ("added", "later"), ("removed", "fine")]
    assert live.list_reader.is_current(Feature.TOOLS)
    assert live.failures["reading"] == 0
    assert live.failures["items left out"] >= 1
    # A repaired item is added.
    registry_of(server, "tools")["broken"].meta = None
    live.list_reader.wake(Feature.TOOLS)
    assert "broken" in live.tools


@pytest.mark.parametrize("is_read_whole", [False, True])
def test_item_that_loses_its_json_form_is_removed(is_read_whole: bool) -> None:
    """A client that is notified then requests the list."""
    server, live = serve()
    told: list[Notification] = []
    live.hub.subscribe(told.append, "tools")
    registry_of(server, "tools")["forecast"].meta = {"x": object()}
    live.list_reader.wake(Feature.TOOLS, None if is_read_whole else "forecast")
    assert "forecast" not in live.tools
    assert [note.changes[0].operation for note in told] == [Operation.REMOVED]


def test_item_from_json_equals_one_from_a_mapping() -> None:
    one, other = Catalog(), Catalog()
    definition = {"name": "a", "inputSchema": {"z": 1.0, "b": [1, "ü"], "a": None}}
    one.tools.add(definition)
    other.tools.put(json.dumps(definition, indent=1).encode())
    assert one.tools.version == other.tools.version
    assert not one.tools.put(json.dumps(definition).encode())
    with pytest.raises(InvalidItem, match="the name of an item"):
        one.tools.put(b'{"title":"a"}')


def key_in(definition: dict[str, Any]) -> str:
    return str(definition.get("uri") or definition.get("uriTemplate") or definition["name"])


DETAILS: tuple[Detail, ...] = ("full", "summary", "delta", "none")
SHAPES = [
    FrameFormat(*each) for each in product(DETAILS, (1, 64), (False, True), (False, True), (False, True), ("", "e1"))
]


def test_frame_from_a_template_equals_an_encoded_one() -> None:
    """With a trace, a frame is encoded without a template; apart from the trace, it must be equal."""
    version = Version(1 << 40, "0" * 31 + "f")
    operations = (Operation.ADDED, Operation.REMOVED, Operation.UPDATED)
    for shape, feature, operation in product(SHAPES, Feature, operations):
        key = 'a "ü" \u2028 \\u0001'
        text = msgspec.json.encode({feature.key_field: key, "description": "\u2029 \x01 %s %d"})
        after, before = Item(feature, key, text, b"1" * 32), Item(feature, key, text[:-2] + b'!"}', b"2" * 32)
        change = Change(
            feature,
            operation,
            key,
            version,
            Version(1, "a"),
            0.0,
            None if operation is Operation.REMOVED else after,
            None if operation is Operation.ADDED else before,
        )
        filled, written = (Notification(feature, version, (change,), since=1) for _ in range(2))
        written.trace = {"traceparent": "x"}
        tail = b',"traceparent":"x"' if shape.is_tagged or not shape.is_standard else b""
        plain = encode_frame(written, shape, b"7")
        if tail:
            plain = plain.replace(tail, b"")
        else:
            plain = plain.replace(b'"_meta":{"traceparent":"x"}', b"").replace(b",}", b"}")
        assert encode_frame(filled, shape, b"7") == plain, shape
        assert bool(render(filled, shape)[1]) == shape.is_tagged


def test_change_without_an_item_is_encoded() -> None:
    version = Version(5, "d")
    change = Change(Feature.TOOLS, Operation.REMOVED, "a", version, Version(4, "c"), 0.0)
    notification = Notification(Feature.TOOLS, version, (change,), since=4)
    for shape in SHAPES:
        frame = encode_frame(notification, shape, b"7" if shape.is_tagged else b"")
        said = json.loads(frame.decode().partition("data: ")[2] if shape.is_sse else frame)["params"]
        assert "tool" not in said, shape
        assert said.get("operation") == ("removed" if shape.detail == "full" else None), shape
