"""Cursors over the wire: every response carries one, and a client that returns is notified of what differs."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from tests.support.cursors import SPRINT, WATCHED, change_summaries, position, told
from tests.support.messages import LISTS
from tests.support.sdk_clients import DEADLINE, KINDS, LEGACY, MARKER, MODERN, open_client, stdio_server
from tests.support.wire_clients import Wires
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY, EXTENSION, FILTER_KEY, REFETCH_KEY, RESUME_KEY, SUBSCRIPTION_KEY

pytestmark = pytest.mark.anyio

GARBAGE: list[Any] = [None, 7, "r7", [], {}, {"epoch": 3}, {"epoch": "e", "topics": []}, {"topics": {"tools": 1}}]
SERVERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in KINDS},
    "other": ("mcpserver", {}),
    "through the SDK": ("mcpserver", {"middleware": True}),
    "forgetful": ("mcpserver", {"policy": {"journal_changes": 2}}),
    "silent": ("mcpserver", {"policy": {"detail": "none"}}),
}


# Cursors in messages


@pytest.mark.parametrize(
    ("kind", "transport"), [*((kind, "http") for kind in KINDS), ("mcpserver", "stdio"), ("lowlevel", "stdio")]
)
@pytest.mark.parametrize("version", [MODERN, LEGACY[-1]])
async def test_list_and_read_results_carry_a_cursor(
    urls: dict[str, str], kind: str, version: str, transport: str
) -> None:
    async with open_client(urls[kind] if transport == "http" else stdio_server(kind), version) as client:
        for method, feature in (
            *((f"{feature}/list", feature) for feature in ("tools", "prompts", "resources")),
            ("resources/templates/list", "resources"),
        ):
            cursor = (await client.request(method))["_meta"][CURSOR_KEY]
            assert cursor["topics"].keys() == {feature}
            assert cursor["topics"][feature].keys() == {"revision", "digest"}
            assert cursor["epoch"]
        first = (await client.request("resources/read", uri=SPRINT))["_meta"][CURSOR_KEY]
        await client.change("updated", uri=SPRINT)
        second = (await client.request("resources/read", uri=SPRINT))["_meta"][CURSOR_KEY]

    assert first.keys() == {"epoch", "uris"}
    assert first["epoch"] == second["epoch"]
    assert first["uris"].keys() == {SPRINT}
    assert second["uris"][SPRINT]["revision"] > first["uris"][SPRINT]["revision"]


@pytest.mark.parametrize("server", ["mcpserver", "through the SDK"])
async def test_acknowledgement_carries_a_cursor_of_all_granted_topics(wires: Wires, server: str) -> None:
    wire = wires.modern(server)
    known = await position(wire)
    async with wire.listen(1, {**LISTS, "resourceSubscriptions": [SPRINT, "board://**"]}) as stream:
        meta = (await stream.message())["params"]["_meta"]

    newest = max(version["revision"] for version in (*known["topics"].values(), *known["uris"].values()))
    assert meta[CURSOR_KEY].pop("asOf") >= newest
    assert meta[CURSOR_KEY] == known
    assert FILTER_KEY not in meta, "nobody asked"
    assert REFETCH_KEY not in meta


async def test_notification_carries_a_cursor_of_its_topic(wires: Wires) -> None:
    wire = wires.modern("mcpserver")
    async with wire.listen(1, WATCHED) as stream:
        await stream.message()
        await wire.change("add", feature="tools", key="noted")
        await wire.change("updated", uri=SPRINT)
        listed, read = await told(stream, wire)
        after = await position(wire)

    for params, member, name in ((listed, "topics", "tools"), (read, "uris", SPRINT)):
        change, cursor = params["_meta"][CHANGE_KEY], params["_meta"][CURSOR_KEY]
        assert cursor == {"epoch": after["epoch"], member: {name: after[member][name]}}
        assert cursor[member][name] == {"revision": change["revision"], "digest": change["digest"]}
    await wire.change("remove", feature="tools", key="noted")


async def test_plain_notifications_have_a_cursor_only_with_the_extension(wires: Wires) -> None:
    wire = wires.modern("silent")
    async with wire.listen(1, WATCHED) as plain, wire.listen(2, WATCHED, extensions={EXTENSION: {}}) as extended:
        await plain.message()
        await extended.message()
        await wire.change("updated", uri=MARKER)

        assert (await plain.message())["params"] == {"uri": MARKER, "_meta": {SUBSCRIPTION_KEY: 1}}
        assert (await extended.message())["params"]["_meta"][CURSOR_KEY]["uris"].keys() == {MARKER}


# Returning with a cursor


@pytest.mark.parametrize("server", [*KINDS, "through the SDK"])
async def test_returning_client_is_notified_exactly_of_what_differs(wires: Wires, server: str) -> None:
    wire = wires.modern(server)
    known = await position(wire)
    await wire.change("add", feature="tools", key="new")
    await wire.change("add", feature="tools", key="short-lived")
    await wire.change("remove", feature="tools", key="short-lived")
    await wire.change("add", feature="prompts", key="gone")
    await wire.change("remove", feature="prompts", key="gone")
    await wire.change("updated", uri=SPRINT, etag="1")
    await wire.change("updated", uri=SPRINT, etag="2", metadata={"by": "me"})

    async with wire.listen(1, WATCHED, {RESUME_KEY: known}) as stream:
        acknowledged = (await stream.message())["params"]["_meta"][CURSOR_KEY]
        found = await told(stream, wire)
        now = await position(wire)
    assert change_summaries(found) == [(["added new"], True), (["updated " + SPRINT], True)]
    assert found[1]["metadata"] == {"by": "me"}
    assert now["topics"]["prompts"] == acknowledged["topics"]["prompts"]
    assert acknowledged["topics"]["tools"] == known["topics"]["tools"], "it has not been told yet: the stream may break"
    assert acknowledged["uris"][SPRINT] == known["uris"][SPRINT]

    async with wire.listen(2, WATCHED, {RESUME_KEY: now}) as stream:
        assert (await stream.message())["params"]["_meta"][CURSOR_KEY]["topics"] == now["topics"]
        assert await told(stream, wire) == [], "nothing differs"
    await wire.change("remove", feature="tools", key="new")
    with anyio.fail_after(DEADLINE):  # the server keeps nothing for a client that has left
        while (state := await wire.change("state"))["subscribers"] or state["pending"]:
            pass


async def test_client_older_than_the_journal_is_told_to_refetch(wires: Wires) -> None:
    wire = wires.modern("forgetful")
    known = await position(wire)
    for number in range(3):
        await wire.change("add", feature="tools", key=f"t{number}")
        await wire.change("updated", uri=SPRINT)
    await wire.change("add", feature="prompts", key="p")

    async with wire.listen(1, WATCHED, {RESUME_KEY: known}) as stream:
        await stream.message()
        found = await told(stream, wire)

    assert change_summaries(found) == [([], False), (["added p"], True), ([], False)]


@pytest.mark.parametrize("server", ["mcpserver", "through the SDK"])
async def test_cursor_of_another_server_causes_a_refetch_unless_the_list_is_equal(wires: Wires, server: str) -> None:
    wire, other = wires.modern(server), wires.modern("other")
    theirs, ours = await position(other), await position(wire)
    assert theirs["topics"]["prompts"]["digest"] == ours["topics"]["prompts"]["digest"], "the same list"
    await wire.change("add", feature="tools", key="only-here")

    async with wire.listen(1, WATCHED, {RESUME_KEY: theirs}) as stream:
        acknowledged = (await stream.message())["params"]["_meta"][CURSOR_KEY]
        found = await told(stream, wire)
    assert change_summaries(found) == [([], False), ([], False)]
    assert "operation" not in found[0]["_meta"][CHANGE_KEY]
    assert found[1]["uri"] == SPRINT
    assert acknowledged["topics"]["tools"] is None, "of this server's tools it knows nothing"
    assert acknowledged["topics"]["prompts"] == ours["topics"]["prompts"]
    await wire.change("remove", feature="tools", key="only-here")


@pytest.mark.parametrize("server", ["mcpserver", "through the SDK"])
async def test_invalid_cursor_causes_a_refetch_and_no_error(wires: Wires, server: str) -> None:
    wire = wires.modern(server)
    for garbage in GARBAGE:
        async with wire.listen(1, WATCHED, {RESUME_KEY: garbage}) as stream:
            assert stream.response.status_code == 200
            assert (await stream.message())["params"]["notifications"] == WATCHED
            methods = [(await stream.message())["method"] for _ in range(5)]
            assert await told(stream, wire) == []
        lists = [f"notifications/{name}/list_changed" for name in ("tools", "prompts", "resources")]
        assert methods == [*lists, *["notifications/resources/updated"] * 2], garbage


@pytest.mark.parametrize("server", [*KINDS, "through the SDK"])
async def test_lone_surrogate_in_a_cursor_counts_as_unknown(wires: Wires, server: str) -> None:
    """Some JSON parsers accept it, but an acknowledgement could not contain it."""
    wire = wires.modern(server)
    half, version = "parts://\ud800", {"revision": 1, "digest": "\ud800"}
    cursor = await position(wire) | {"uris": {half: version, "parts://a": version}}
    async with wire.listen(1, {"resourceSubscriptions": ["parts://*", MARKER]}, {RESUME_KEY: cursor}) as stream:
        acknowledged = (await stream.message())["params"]["_meta"]
        heard = await told(stream, wire)

    assert acknowledged[CURSOR_KEY]["uris"]["parts://a"] is None
    assert [(params["uri"], params["_meta"][CHANGE_KEY]["complete"]) for params in heard] == [("parts://a", False)]


@pytest.mark.parametrize("server", ["mcpserver", "through the SDK"])
@pytest.mark.parametrize("watched", ["parts://*", "parts://{name}", "parts://folder"])
async def test_client_can_resume_patterns_and_folders(wires: Wires, server: str, watched: str) -> None:
    wire = wires.modern(server)
    part = "parts://folder/a" if watched == "parts://folder" else "parts://a"
    wanted = {"resourceSubscriptions": [watched, MARKER]}
    async with wire.listen(1, wanted) as stream:
        known = (await stream.message())["params"]["_meta"][CURSOR_KEY]
    await wire.change("updated", uri=part)
    await wire.change("updated", uri="elsewhere://a")

    async with wire.listen(2, wanted, {RESUME_KEY: known}) as stream:
        acknowledged = (await stream.message())["params"]["_meta"]
        assert change_summaries(await told(stream, wire)) == [([f"updated {part}"], True)]
    assert REFETCH_KEY not in acknowledged
    assert part in acknowledged[CURSOR_KEY]["uris"], "it has not been told yet: the stream may break"
    async with wire.listen(3, wanted, {RESUME_KEY: acknowledged[CURSOR_KEY]}) as stream:
        await stream.message()
        again = [(await stream.message())["params"]["uri"] for _ in range(2)]
        assert sorted(again) == sorted([MARKER, part]), "it did break"

    for lost in ("garbage", known | {"epoch": "of another life"}, known | {"asOf": 1 << 62}):
        async with wire.listen(4, wanted, {RESUME_KEY: lost}) as stream:
            refetch = set((await stream.message())["params"]["_meta"].get(REFETCH_KEY, ()))
            refetch |= {(await stream.message())["params"]["uri"] for uri in wanted["resourceSubscriptions"]
                        if uri not in refetch}  # fmt: skip
            assert refetch == {*wanted["resourceSubscriptions"]}
