"""The terms of a client over the wire: its own within those of the server, and the acknowledgement of them."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.support.cursors import WATCHED, change_summaries, told
from tests.support.sdk_clients import LEGACY, MARKER, MODERN, listening, open_client, stdio_server
from tests.support.wire_clients import Stream, Wire, Wires
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY, EXTENSION, FILTER_KEY, SUBSCRIPTION_KEY

pytestmark = pytest.mark.anyio

SERVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mcpserver": ("mcpserver", {}),
    "through the SDK": ("mcpserver", {"middleware": True}),
    "strict": (
        "mcpserver",
        {"auth": True, "terms": {"bob": {"operations": ["added"], "names": ["public-*"], "detail": "summary"}}},
    ),
    "broken": ("mcpserver", {"terms": {"*": {"no_such_knob": 1}}}),
}


FILTERS: list[tuple[dict[str, Any], list[str]]] = [
    ({"operations": ["added"]}, ["added ac", "added x://1", "added y://1"]),
    ({"operations": ["removed", "updated"]}, ["updated ab", "removed ab", "removed b"]),
    ({"names": ["a*"]}, ["added ac", "updated ab", "removed ab", "added x://1", "added y://1"]),
    ({"names": [], "uris": ["x:**"]}, ["added x://1"]),
    ({"names": ["*b"], "uris": [], "operations": ["removed"]}, ["removed ab", "removed b"]),
]


@pytest.mark.parametrize("server", ["mcpserver", "through the SDK"])
async def test_client_is_notified_only_of_what_its_filter_passes(wires: Wires, server: str) -> None:
    wire = wires.modern(server)
    await wire.change("add", feature="tools", key="ab")
    await wire.change("add", feature="prompts", key="b")
    async with AsyncExitStack() as stack:
        streams: list[Stream] = []
        for asked, _ in FILTERS:
            streams.append(await stack.enter_async_context(wire.listen(1, WATCHED, {FILTER_KEY: asked})))
            assert (await streams[-1].message())["params"]["_meta"][FILTER_KEY] == asked
        await wire.change("add", feature="tools", key="ac")
        await wire.change("update", feature="tools", key="ab", fields={"description": "New."})
        await wire.change("remove", feature="tools", key="ab")
        await wire.change("remove", feature="prompts", key="b")
        for uri in ("x://1", "y://1"):
            await wire.change("add", feature="resources", key=uri)
        for stream, (asked, expected) in zip(streams, FILTERS, strict=True):
            found = [change for changes, _ in change_summaries(await told(stream, wire)) for change in changes]
            assert sorted(found) == sorted(expected), asked


async def test_acknowledgement_has_the_granted_terms_only(wires: Wires) -> None:
    wire = wires.modern("mcpserver")
    asked = {"operations": ["moved"], "names": ["a*"], "minInterval": -1, "longestWait": 1e9, "detail": "all", "x": 1}
    for given, granted in ((asked, {"names": ["a*"], "longestWait": 3600.0}), (7, {}), ({}, {})):
        async with wire.listen(1, WATCHED, {FILTER_KEY: given}) as stream:
            assert (await stream.message())["params"]["_meta"][FILTER_KEY] == granted


async def test_client_without_options_gets_the_defaults(wires: Wires) -> None:
    wire = wires.modern("mcpserver")
    async with wire.listen(1, WATCHED) as stream:
        assert FILTER_KEY not in (await stream.message())["params"]["_meta"]
        await wire.change("add", feature="tools", key="default")
        await wire.change("remove", feature="tools", key="default")
        found = await told(stream, wire)
    assert change_summaries(found) == [(["added default"], True), (["removed default"], True)]
    assert found[0]["tool"]["name"] == "default"


@pytest.mark.parametrize("detail", ["full", "delta", "summary", "none"])
async def test_client_chooses_the_detail(wires: Wires, detail: str) -> None:
    wire = wires.modern("mcpserver")
    await wire.change("add", feature="tools", key="told")
    async with wire.listen(1, WATCHED, {FILTER_KEY: {"detail": detail}}) as stream:
        await stream.message()
        await wire.change("update", feature="tools", key="told", fields={"description": "New."})
        params = (await stream.message())["params"]
    await wire.change("remove", feature="tools", key="told")

    assert params.keys() == ({"operation", "tool", "_meta"} if detail == "full" else {"_meta"})
    meta = params["_meta"]
    said = meta.get(CHANGE_KEY, {})
    assert meta.keys() == ({SUBSCRIPTION_KEY, CHANGE_KEY, CURSOR_KEY} if detail != "none" else {SUBSCRIPTION_KEY})
    assert said.get("delta") == ({"description": "New."} if detail == "delta" else None)
    assert ("before" in said, "after" in said) == (detail == "delta",) * 2


@pytest.mark.parametrize("detail", ["full", "delta", "summary", "none"])
async def test_client_with_the_extension_chooses_the_detail(wires: Wires, detail: str) -> None:
    """The SDK's own client can send options only in this way."""
    wire = wires.modern("mcpserver")
    settings = {"extensions": {EXTENSION: {"filter": {"detail": detail}}}}
    async with wire.listen(1, WATCHED, **settings) as stream:
        acknowledged = (await stream.message())["params"]["_meta"]
        await wire.change("add", feature="tools", key="chosen")
        said = [(await stream.message())["params"]["_meta"][CHANGE_KEY]]
        await wire.change("update", feature="tools", key="chosen", fields={"description": "New."})
        said.append((await stream.message())["params"]["_meta"][CHANGE_KEY])
    await wire.change("remove", feature="tools", key="chosen")

    is_brief = detail in ("summary", "none")
    assert acknowledged[FILTER_KEY] == {"detail": detail}
    assert [each["operation"] for each in said] == ["added", "updated"]
    assert ["item" in said[0], "delta" in said[1]] == [not is_brief] * 2


async def add_in_a_row(wire: Wire, *keys: str) -> float:
    """Add tools one by one; return the seconds that it took."""
    start = time.monotonic()
    for key in keys:
        await wire.change("add", feature="tools", key=key)
    return time.monotonic() - start


async def remove_all(wire: Wire, *keys: str) -> None:
    for key in keys:
        await wire.change("remove", feature="tools", key=key)


async def test_changes_within_the_quiet_gap_are_one_notification(wires: Wires) -> None:
    wire = wires.modern("mcpserver")
    # The gap is longer than the changes take; the longest wait ends it.
    wait = 0.75
    keys = [f"batch-{number}" for number in range(5)]
    is_in_time = False
    while not is_in_time:  # the machine may be so slow that the wait ends before the last change
        wait *= 2
        async with wire.listen(1, WATCHED, {FILTER_KEY: {"quietGap": wait, "longestWait": wait}}) as stream:
            await stream.message()
            start = time.monotonic()
            is_in_time = await add_in_a_row(wire, *keys) < wait
            found = change_summaries([(await stream.message())["params"]])
        assert time.monotonic() - start >= wait
        await remove_all(wire, *keys)
        assert not is_in_time or found == [([f"added {key}" for key in keys], True)]


async def test_min_interval_limits_notifications_and_keeps_the_last_change(wires: Wires) -> None:
    wire = wires.modern("mcpserver")
    interval = 0.5
    keys = [f"often-{number}" for number in range(3)]
    is_in_time = False
    while not is_in_time:  # as above
        interval *= 2
        async with wire.listen(1, WATCHED, {FILTER_KEY: {"minInterval": interval}}) as stream:
            await stream.message()
            start = time.monotonic()
            is_in_time = await add_in_a_row(wire, *keys) < interval
            first, last = [change_summaries([(await stream.message())["params"]]) for _ in range(2)]
        assert time.monotonic() - start >= interval
        await remove_all(wire, *keys)
        assert first == [(["added often-0"], True)]
        assert not is_in_time or last == [(["added often-1", "added often-2"], True)]


async def test_urgent_topic_is_not_delayed(wires: Wires) -> None:
    wire = wires.modern("mcpserver")
    terms = {"quietGap": 3600, "priorities": {"board://mark*": "urgent"}}
    async with wire.listen(1, WATCHED, {FILTER_KEY: terms}) as stream:
        await stream.message()
        await wire.change("updated", uri="board://sprint")
        assert await told(stream, wire) == [], "the marker overtook it"


async def test_client_terms_apply_within_the_server_terms(wires: Wires) -> None:
    bob = wires.modern("strict", "bob")
    alice = wires.modern("strict", "alice")
    asked = {"names": ["*-a"], "detail": "full", "operations": ["added", "removed"]}
    async with (
        bob.listen(1, WATCHED, {FILTER_KEY: asked}) as picky,
        bob.listen(2, WATCHED) as plain,
        alice.listen(3, WATCHED) as free,
    ):
        within, set_by_server, unset = [
            (await stream.message())["params"]["_meta"].get(FILTER_KEY) for stream in (picky, plain, free)
        ]
        for key in ("public-a", "public-b", "private-a"):
            await alice.change("add", feature="tools", key=key)
            await alice.change("remove", feature="tools", key=key)
        found = {name: await told(stream, alice) for name, stream in (("picky", picky), ("plain", plain))}
        everything = await told(free, alice)

    assert within == {"operations": ["added"], "names": ["*-a"], "detail": "summary"}
    assert set_by_server == {"operations": ["added"], "names": ["public-*"], "detail": "summary"}
    assert unset is None
    assert change_summaries(found["picky"]) == [(["added public-a"], True)]
    assert [changes for changes, _ in change_summaries(found["plain"])[:2]] == [["added public-a"], ["added public-b"]]
    assert "tool" not in found["picky"][0]
    assert len(everything) >= 6


async def test_failing_terms_function_has_no_effect(wires: Wires) -> None:
    wire = wires.modern("broken")
    async with wire.listen(1, WATCHED) as stream:
        await stream.message()
        await wire.change("add", feature="tools", key="fine")
        assert change_summaries(await told(stream, wire)) == [(["added fine"], True)]


@pytest.mark.parametrize("where", ["_meta", "extensions"])
async def test_legacy_client_has_terms(wires: Wires, where: str) -> None:
    wire, legacy = wires.modern("mcpserver"), wires.legacy("mcpserver")
    terms = {"operations": ["removed"], "detail": "summary"}
    settings = {where: {EXTENSION: {"filter": terms}}} if where != "_meta" else {}
    await wire.change("add", feature="tools", key="legacy")
    result = await legacy.shake_hands({FILTER_KEY: terms} if where == "_meta" else None, **settings)
    async with legacy.stream() as stream:
        await legacy.post("resources/subscribe", uri=MARKER)
        await wire.change("update", feature="tools", key="legacy", fields={"description": "New."})
        await wire.change("remove", feature="tools", key="legacy")
        found = await told(stream, wire)
    await legacy.end()

    assert result["_meta"][FILTER_KEY] == terms
    assert change_summaries(found) == [(["removed legacy"], True)]
    assert found[0].keys() == {"_meta"}


@pytest.mark.parametrize("version", [MODERN, LEGACY[-1]])
async def test_terms_apply_on_stdio(version: str) -> None:
    settings = {"filter": {"operations": ["removed"]}}
    server = stdio_server("mcpserver")
    async with open_client(server, version, extended="extensions", settings=settings) as client, listening(client):
        await client.step("add", feature="tools", key="a")
        await client.step("remove", "tools removed steady", feature="tools", key="steady")
