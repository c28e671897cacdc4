"""Lists of several kinds of servers, in their own processes: cursor, cache hints, and when the SDK responds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.support.board_actions import UNNOTICED
from tests.support.sdk_clients import serving_all
from tests.support.wire_clients import EVERYTHING, Wire, http, read_answer
from tidings.core.frames import CURSOR_KEY

__all__ = ["http"]

pytestmark = pytest.mark.anyio

REMEMBERING = {"list_max_age": 3600.0}
"""Longer than any test."""


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    servers: dict[str, tuple[str, dict[str, Any]]] = {
        "mcpserver": ("mcpserver", {"policy": {**REMEMBERING, "list_ttl": 5}}),
        "fastmcp": ("fastmcp", {"policy": REMEMBERING}),
        "pages": ("lowlevel", {"policy": REMEMBERING, "shared_lists": True, "page": 1}),
    }
    with serving_all(servers) as urls:
        yield urls


async def names(wire: Wire, request_id: str | int = 1, **params: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the tools with their descriptions, and the whole response."""
    answer = read_answer((await wire.post("tools/list", request_id, **params)).text)
    return {tool["name"]: tool.get("description", "") for tool in answer["result"]["tools"]}, answer


@pytest.mark.parametrize("method", ["tools/list", "prompts/list", "resources/list", "resources/templates/list"])
@pytest.mark.parametrize("name", ["mcpserver", "fastmcp"])
async def test_list_results_carry_cursor_and_cache_hints(
    urls: dict[str, str], http: httpx2.AsyncClient, method: str, name: str
) -> None:
    wire = Wire(urls[name], http)
    answers = [read_answer((await wire.post(method, request_id)).text) for request_id in (1, "zwei", 3)]

    assert [answer["id"] for answer in answers] == [1, "zwei", 3]
    assert answers[0]["result"] == answers[1]["result"] == answers[2]["result"]
    result = answers[0]["result"]
    assert result["ttlMs"] == (5000 if name == "mcpserver" else 0)
    assert result["cacheScope"] in ("public", "private")
    version = result["_meta"][CURSOR_KEY]["topics"][method.partition("/")[0]]
    assert version["revision"] > 0
    assert version["digest"]


ONE_OF_EACH = {
    "tools": ("tools/list", "bytes"),
    "prompts": ("prompts/list", "bytes"),
    "resources": ("resources/list", "board://bytes"),
    "templates": ("resources/templates/list", "board://bytes/{number}"),
}


@pytest.mark.parametrize("feature", list(ONE_OF_EACH))
async def test_list_comes_from_the_cache_until_its_revision_changes(
    urls: dict[str, str], http: httpx2.AsyncClient, feature: str
) -> None:
    """A change in place, which Tidings does not notice, shows whether the cache or the SDK responds."""
    method, key = ONE_OF_EACH[feature]
    wire = Wire(urls["mcpserver"], http)

    async def ask(request_id: str | int, **params: Any) -> str:
        return (await wire.post(method, request_id, **params)).text

    await wire.change("add", feature=feature, key=key)
    first = read_answer(await ask(1))
    await wire.change("quietly", feature=feature, key=key)
    assert read_answer(await ask("two")) == {**first, "id": "two"}

    # The SDK responds to a request with a cursor.
    assert UNNOTICED in await ask(3, cursor="")

    await wire.change("refresh")
    anew = await ask(4)
    assert UNNOTICED in anew
    assert read_answer(anew)["result"]["_meta"][CURSOR_KEY] != first["result"]["_meta"][CURSOR_KEY]
    await wire.change("remove", feature=feature, key=key)
    assert key not in await ask(5)


async def test_discovery_comes_from_the_cache_until_the_offer_changes(
    urls: dict[str, str], http: httpx2.AsyncClient
) -> None:
    wire = Wire(urls["mcpserver"], http)
    first = read_answer((await wire.post("server/discover", 1)).text)
    await wire.change("present", extensions={"dev.tidings/changes": {}, "dev.example/unnoticed": {}})
    assert read_answer((await wire.post("server/discover", "two")).text) == {**first, "id": "two"}

    await wire.change("present", instructions="Read the board first.")
    anew = (await wire.post("server/discover", 3)).text
    assert "Read the board first." in anew
    assert "dev.example/unnoticed" in anew
    await wire.change("present", extensions={"dev.tidings/changes": {}}, instructions=None)


async def test_pages_come_from_the_sdk_and_changes_on_any_page_notify(
    urls: dict[str, str], http: httpx2.AsyncClient
) -> None:
    wire = Wire(urls["pages"], http)
    first, answer = await names(wire)
    second, _ = await names(wire, 2, cursor=answer["result"]["nextCursor"])
    assert [*first, *second] == ["change", "steady"]
    again, _ = await names(wire, 3)
    assert again == first

    async with wire.listen(1, EVERYTHING) as stream:
        await stream.message()
        item = {"name": "third", "inputSchema": {"type": "object"}}
        await wire.change("own_set_and_refresh", feature="tools", key="third", item=item)
        assert (await stream.received()).summary == "tools added third"
        await wire.change("own_set_and_refresh", feature="tools", key="third", item=None)
        assert (await stream.received()).summary == "tools removed third"
