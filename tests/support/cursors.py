"""The cursor of a client of the board, and the notifications that it gets before a marker."""

from __future__ import annotations

from typing import Any

from tests.support.messages import LISTS
from tests.support.sdk_clients import MARKER
from tests.support.wire_clients import Stream, Wire, read_answer
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY

SPRINT = "board://sprint"
WATCHED = {**LISTS, "resourceSubscriptions": [SPRINT, MARKER]}


async def position(wire: Wire) -> dict[str, Any]:
    """Return the cursor of a client that has just fetched all lists and the sprint."""
    cursor: dict[str, Any] = {"topics": {}, "uris": {}}
    for method, params in (
        *((f"{feature}/list", {}) for feature in ("tools", "prompts", "resources")),
        ("resources/read", {"uri": SPRINT, "name": SPRINT}),
    ):
        params = dict(params)
        headers = {"Mcp-Name": params.pop("name")} if "name" in params else {}
        response = await Wire(wire.url, wire.http, headers).post(method, **params)
        known = read_answer(response.text)["result"]["_meta"][CURSOR_KEY]
        cursor["epoch"] = known["epoch"]
        cursor["topics"] |= known.get("topics", {})
        cursor["uris"] |= known.get("uris", {})
    return cursor


async def told(stream: Stream, wire: Wire) -> list[dict[str, Any]]:
    """Return the params of all notifications before the marker."""
    await wire.change("updated", uri=MARKER)
    found: list[dict[str, Any]] = []
    while (params := (await stream.message())["params"]).get("uri") != MARKER:
        found.append(params)
    return found


def change_summaries(told: list[dict[str, Any]]) -> list[tuple[list[str], bool]]:
    """Return the changes of each notification, and whether it is complete."""
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
