"""Where a client of the board stands, and what it is told: up to a marker, and in short."""

from __future__ import annotations

from typing import Any

from tests.support.sdk_clients import MARKER
from tests.support.wire_clients import Stream, Wire, read_answer
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY

SPRINT = "board://sprint"
LISTS = {"toolsListChanged": True, "promptsListChanged": True, "resourcesListChanged": True}
WATCHED = {**LISTS, "resourceSubscriptions": [SPRINT, MARKER]}


async def position(wire: Wire) -> dict[str, Any]:
    """The cursor of a client that has just read all lists and the sprint."""
    cursor: dict[str, Any] = {"topics": {}, "uris": {}}
    for method, params in (
        *((f"{feature}/list", {}) for feature in ("tools", "prompts", "resources")),
        ("resources/read", {"uri": SPRINT, "name": SPRINT}),
    ):
        params = dict(params)
        headers = {"Mcp-Name": params.pop("name")} if "name" in params else {}
        response = await Wire(wire.url, wire.http, headers).post(method, **params)
        said = read_answer(response.text)["result"]["_meta"][CURSOR_KEY]
        cursor["epoch"] = said["epoch"]
        cursor["topics"] |= said.get("topics", {})
        cursor["uris"] |= said.get("uris", {})
    return cursor


async def told(stream: Stream, wire: Wire) -> list[dict[str, Any]]:
    """The params of all that is told before the marker."""
    await wire.change("updated", uri=MARKER)
    found: list[dict[str, Any]] = []
    while (params := (await stream.message())["params"]).get("uri") != MARKER:
        found.append(params)
    return found


def gists(told: list[dict[str, Any]]) -> list[tuple[list[str], bool]]:
    """What changed, and whether that is all."""
    summaries = [params["_meta"][CHANGE_KEY] for params in told]
    return [
        (
            [
                f"{change['operation']} {change.get('name', change.get('uri'))}"
                for change in summary.get("changes", [summary])
                if "operation" in change
            ],
            summary["complete"],
        )
        for summary in summaries
    ]
