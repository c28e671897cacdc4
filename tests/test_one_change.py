"""One change of one item: it is checked and written as JSON once, and nobody can tell by what they are told."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import msgspec
import pytest
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.resources import FunctionResource, ResourceTemplate

from tidings import Live
from tidings.catalog import Catalog
from tidings.errors import InvalidItem
from tidings.frames import Shape, render, write
from tidings.model import Change, Feature, Item, Notification, Operation, Version
from tidings.policy import Detail
from tidings.seams import registries_of


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


def listed(live: Live) -> dict[Feature, list[dict[str, Any]]]:
    """What the server itself lists."""
    return {feature: live.source.list_now(feature) or [] for feature in Feature}


@pytest.mark.parametrize(
    ("feature", "key"),
    [("tools", "forecast"), ("prompts", "forecast"), ("resources", "weather://now"), ("resources", "weather://{city}")],
)
def test_an_updated_item_is_what_the_server_lists(feature: str, key: str) -> None:
    _, live = serve()
    getattr(live, feature).update(key, description="Zürich \u2028 1e16", title="Other")
    known = live.catalog.items(feature)
    assert known.get(key) in listed(live)[Feature(feature)]
    assert (found := known.get(key)) is not None
    assert (found["description"], found["title"]) == ("Zürich \u2028 1e16", "Other")
    # Read as a whole, it is the same item: nobody would be told again.
    version = known.version
    live.wake(Feature(feature))
    assert known.version == version


def test_an_item_that_is_changed_in_place_after_an_update_is_told_as_it_is_then() -> None:
    server, live = serve()
    told: list[Notification] = []
    live.hub.subscribe(told.append, "tools")
    live.tools.update("forecast", description="once")
    tool = registries_of(server)["tools"]["forecast"]
    tool.description = "in place"
    registries_of(server)["tools"]["forecast"] = tool
    tool.description = "in place again"
    live.wake(Feature.TOOLS, "forecast")
    said = [note.changes[0].item.definition["description"] for note in told if note.changes[0].item]
    assert said == ["once", "in place", "in place again"]


def test_an_update_that_fails_leaves_nothing_behind() -> None:
    server, live = serve()
    before = registries_of(server)["tools"]["forecast"]
    for fields, said in (
        ({"description": 5}, "would not be valid"),
        ({"meta": {"x": object()}}, "would not be valid"),
        ({"description": "\ud800"}, "would not be valid"),
        ({"name": "other"}, "can't rename"),
        ({"fn": forecast}, "no field fn"),
        ({"inputSchema": {"type": "array"}}, "inputSchema of type object"),
    ):
        with pytest.raises(InvalidItem, match=said):
            live.tools.update("forecast", fields)
    assert registries_of(server)["tools"]["forecast"] is before
    assert listed(live)[Feature.TOOLS] == list(live.catalog.tools)


def test_an_item_without_a_json_form_silences_no_other() -> None:
    server, live = serve()
    server.add_tool(forecast, name="broken", meta={"x": object()})
    server.add_tool(forecast, name="fine")
    assert "broken" not in live.tools
    assert "fine" in live.tools
    assert live.knows(Feature.TOOLS)
    assert live.failures["items left out"] == 1


def test_an_item_put_in_as_json_is_the_same_as_one_of_a_mapping() -> None:
    one, other = Catalog(), Catalog()
    definition = {"name": "a", "inputSchema": {"z": 1.0, "b": [1, "ü"], "a": None}}
    one.tools.add(definition)
    other.tools.put(json.dumps(definition, indent=1).encode())
    assert one.tools.version == other.tools.version
    assert not one.tools.put(json.dumps(definition).encode())
    with pytest.raises(InvalidItem, match="needs a name"):
        one.tools.put(b'{"title":"a"}')


DETAILS: tuple[Detail, ...] = ("full", "summary", "delta", "none")
SHAPES = [Shape(*each) for each in product(DETAILS, (1, 64), (False, True), (False, True), (False, True), ("", "e1"))]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_frame_that_was_filled_in_says_what_one_that_was_written_says(shape: Shape) -> None:
    """A trace has every frame written anew: but for that, it must be the same."""
    version = Version(1 << 40, "0" * 31 + "f")
    for feature, operation in product(Feature, (Operation.ADDED, Operation.REMOVED, Operation.UPDATED)):
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
            "local",
            None if operation is Operation.REMOVED else after,
            None if operation is Operation.ADDED else before,
        )
        filled, written = (Notification(feature, version, (change,), since=1) for _ in range(2))
        written.trace = {"traceparent": "x"}
        tail = b',"traceparent":"x"' if shape.is_tagged or not shape.is_bare else b""
        plain = write(written, shape, b"7")
        if tail:
            plain = plain.replace(tail, b"")
        else:
            plain = plain.replace(b'"_meta":{"traceparent":"x"}', b"").replace(b",}", b"}")
        assert write(filled, shape, b"7") == plain
        assert bool(render(filled, shape)[1]) == shape.is_tagged
