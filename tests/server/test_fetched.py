"""Real clients that fetch an intermediate version (A, B, A) are notified, and hold the present version in the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters

from tests.support.sdk_clients import (
    MODERN,
    Received,
    RecordingClient,
    listening,
    open_client,
    serving,
    stdio_server,
)
from tests.support.wire_clients import LegacyWire
from tidings import Live
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY
from tidings.core.model import Notification
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio

LEGACY = "2025-11-25"
SPRINT = "board://sprint"
PATIENT = {"policy": {"quiet_gap": 0.8, "longest_wait": 6.0, "list_max_age": 3600.0}}
"""Longer than a step takes, so that notifications follow it."""
SERVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "asgi": ("mcpserver", PATIENT),
    "own": ("mcpserver", {**PATIENT, "own": True}),
    "through the SDK": ("lowlevel", PATIENT),
}


@pytest.fixture(params=[MODERN, LEGACY])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[*SERVERS, "stdio"])
async def client(request: pytest.FixtureRequest, version: str, urls: dict[str, str]) -> AsyncIterator[RecordingClient]:
    server: str | StdioServerParameters
    server = stdio_server("mcpserver", **PATIENT) if request.param == "stdio" else urls[request.param]
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(open_client(server, version))
        await stack.enter_async_context(listening(client, SPRINT))
        yield client


def told(client: RecordingClient, method: str, revision: int) -> list[Received]:
    return [each for each in client.received if each.method == method and each.change.get("revision") == revision]


async def test_client_that_fetched_an_intermediate_list_is_notified_of_the_revert(client: RecordingClient) -> None:
    await client.listed("tools")
    before, version = await client.listed("tools")  # from the cache, which is renewed in advance
    await client.change("add", feature="tools", key="passing")
    held, _ = await client.listed("tools")
    assert len(held) == len(before) + 1
    await client.change("remove", feature="tools", key="passing")
    after, version_after = await client.listed("tools")
    assert after == before
    assert version_after["digest"] == version["digest"]
    assert version_after["revision"] > version["revision"]
    method, revision = "notifications/tools/list_changed", version_after["revision"]

    await client.until(lambda: bool(told(client, method, revision)), "that the list is as it was")

    assert len(told(client, method, revision)) == 1


async def test_client_that_read_an_intermediate_content_is_notified_of_the_revert(client: RecordingClient) -> None:
    usual, passing = f"A for {client.version}", f"B for {client.version}"
    await client.change("updated", uri=SPRINT, etag=usual)
    await client.until(lambda: any(each.uri == SPRINT for each in client.received), "the first content")
    await client.change("updated", uri=SPRINT, etag=passing)
    held = await client.request("resources/read", uri=SPRINT)
    await client.change("updated", uri=SPRINT, etag=usual)
    now = await client.request("resources/read", uri=SPRINT)
    was, version = (each["_meta"][CURSOR_KEY]["uris"][SPRINT] for each in (held, now))
    assert was["digest"] != version["digest"]
    method, revision = "notifications/resources/updated", version["revision"]

    await client.until(lambda: bool(told(client, method, revision)), "that the content is as it was")

    assert len(told(client, method, revision)) == 1


async def test_session_that_fetched_without_a_stream_is_notified_of_the_revert(http: httpx2.AsyncClient) -> None:
    with serving("mcpserver") as url:
        wire = LegacyWire(url, http)
        await wire.shake_hands()
        async with open_client(url, MODERN) as other:
            async with wire.stream() as stream:
                await other.change("add", feature="tools", key="first")
                assert await stream.event() == "id: tidings-0\r\ndata: "
                event = await stream.event()
                await other.change("add", feature="tools", key="passing")
                listed = await wire.post("tools/list")
                await other.change("remove", feature="tools", key="passing")
            await other.until_state(legacy_streams=0)  # a session has one stream at a time
        assert "passing" in [tool["name"] for tool in listed["result"]["tools"]]
        (read,) = [line for line in event.splitlines() if line.startswith("id: ")]
        async with wire.stream(read.removeprefix("id: ")) as stream:
            told = await stream.message()

    assert told["method"] == "notifications/tools/list_changed"
    change_of = told["params"]["_meta"][CHANGE_KEY]
    assert (change_of["revision"], change_of["complete"]) == (
        listed["result"]["_meta"][CURSOR_KEY]["topics"]["tools"]["revision"] + 1,
        False,
    )


# A file that is read before the watcher has seen its change


class Unwatched(Workspace):
    async def run(self) -> None:
        """Its watcher never scans."""


@pytest.mark.parametrize("is_seen", [True, False])
async def test_reading_a_file_notifies_no_client_and_has_the_watched_version(tmp_path: Path, is_seen: bool) -> None:
    """A client that reads after each notification must not be notified because of that."""
    file = tmp_path / "resources" / "notes.txt"
    file.parent.mkdir()
    file.write_text("A")
    live = Live(Unwatched(tmp_path))
    uri = "workspace:///notes.txt"
    heard: list[Notification] = []
    live.hub.subscribe(heard.append, uris=[uri])
    known = live.catalog.version(uri)
    if not is_seen:
        file.write_text("B")

    async with Client(live.server) as client:
        results = [await client.read_resource(uri) for _ in range(3)]
    live.hub.delivery.publish_queued()

    assert [getattr(each.contents[0], "text", None) for each in results] == ["A" if is_seen else "B"] * 3
    cursors = [(each.meta or {})[CURSOR_KEY]["uris"][uri] for each in results]
    assert cursors == [{"revision": known.revision, "digest": known.digest}] * 3
    assert live.catalog.version(uri) == known
    assert heard == []
