"""Listen streams over HTTP, on plain ASGI and parked: frames, ids, keep-alives, limits and refusals.

Covers `server/subscribe.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import anyio
import httpx2
import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError

from tests.support.sdk_clients import DEADLINE, KINDS, MODERN, open_client, serving, serving_all, stdio_server
from tests.support.wire_clients import EVERYTHING, LegacyWire, Wire, http, read_answer
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY, SUBSCRIPTION_KEY

__all__ = ["http"]

pytestmark = pytest.mark.anyio

LONG = 3600.0
"""Seconds: longer than any test."""
SERVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mcpserver": (
        "mcpserver",
        {"policy": {"keep_alive": 0.5, "list_max_age": LONG, "max_changes_per_frame": 3}},
    ),
    "lowlevel": ("lowlevel", {"policy": {"detail": "summary", "list_max_age": LONG}, "only": ["tools"]}),
    "fastmcp": (
        "fastmcp",
        # FastMCP checks Host and Origin only with this option.
        {"policy": {"detail": "none", "list_max_age": LONG}, "app": {"host_origin_protection": True}},
    ),
    "contents": ("lowlevel", {"only": ["tools", "contents"]}),
    "few streams": ("lowlevel", {"policy": {"max_streams": 2, "max_uris": 3, "max_patterns": 1}}),
    "few per address": ("lowlevel", {"policy": {"max_streams_per_address": 1}}),
}
PARKING = ("mcpserver", "lowlevel", "fastmcp", "few streams")
"""Servers that also run in a process of Tidings, which parks the streams."""


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    parking = {f"{name}, own": (SERVERS[name][0], {**SERVERS[name][1], "own": True}) for name in PARKING}
    parking["mcpserver, uvicorn"] = (SERVERS["mcpserver"][0], {**SERVERS["mcpserver"][1], "parser": "httptools"})
    with serving_all(SERVERS | parking) as urls:
        yield urls


@pytest.fixture(params=["asgi", "own"])
def fronts(request: pytest.FixtureRequest, urls: dict[str, str]) -> dict[str, str]:
    """The URLs of the servers on plain ASGI, or in processes of Tidings."""
    return urls if request.param == "asgi" else {name: urls[f"{name}, own"] for name in PARKING}


# Frames


async def test_acknowledgement_is_first_and_names_the_granted_topics(
    fronts: dict[str, str], http: httpx2.AsyncClient
) -> None:
    wire = Wire(fronts["mcpserver"], http)
    async with wire.listen(7, EVERYTHING) as stream:
        assert stream.response.status_code == 200
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        acknowledged = await stream.message()

    assert acknowledged["method"] == "notifications/subscriptions/acknowledged"
    assert "id" not in acknowledged
    assert acknowledged["params"]["notifications"] == EVERYTHING
    meta = acknowledged["params"]["_meta"]
    assert meta[SUBSCRIPTION_KEY] == 7
    assert meta[CURSOR_KEY]["topics"].keys() == {"tools", "prompts", "resources"}


async def test_acknowledgement_omits_topics_the_server_cannot_send(
    fronts: dict[str, str], http: httpx2.AsyncClient
) -> None:
    """The server has only tools."""
    wire = Wire(fronts["lowlevel"], http)
    async with wire.listen(1, EVERYTHING) as stream:
        acknowledged = (await stream.message())["params"]
        assert acknowledged["notifications"] == {"toolsListChanged": True}
        await wire.change("updated", uri="board://sprint")
        await wire.change("add", feature="tools", key="only")
        told = await stream.received()
        assert told.summary == "tools added only"
        await wire.change("remove", feature="tools", key="only")

    capabilities = (read_answer((await wire.post("server/discover")).text))["result"]["capabilities"]
    assert capabilities["tools"]["listChanged"] is True
    assert "prompts" not in capabilities
    assert "resources" not in capabilities

    session = LegacyWire(fronts["lowlevel"], http)
    info = {"name": "wire", "version": "1"}
    shaken = await session.post("initialize", protocolVersion=session.version, capabilities={}, clientInfo=info)
    assert shaken["result"]["capabilities"]["tools"]["listChanged"] is True
    assert "prompts" not in shaken["result"]["capabilities"]
    assert "resources" not in shaken["result"]["capabilities"]
    await session.end()

    async with wire.listen("nothing", {"promptsListChanged": True}) as stream:
        assert (await stream.message())["params"]["notifications"] == {}
        result = await stream.message()
        assert (result["id"], result["result"]["resultType"]) == ("nothing", "complete")
        assert result["result"]["_meta"][SUBSCRIPTION_KEY] == "nothing"
        assert await stream.event() == ""


async def test_server_that_reads_resources_and_lists_none_has_subscriptions_to_uris(
    urls: dict[str, str], http: httpx2.AsyncClient
) -> None:
    wire = Wire(urls["contents"], http)
    expected = {"subscribe": True, "listChanged": False}
    discovered = read_answer((await wire.post("server/discover")).text)["result"]
    assert discovered["capabilities"]["resources"] == expected
    async with wire.listen(1, EVERYTHING) as stream:
        acknowledged = (await stream.message())["params"]["notifications"]
        assert acknowledged == {"toolsListChanged": True, "resourceSubscriptions": ["board://sprint"]}
        await wire.change("updated", uri="board://sprint")
        assert (await stream.received()).summary == "content updated board://sprint"

    session = LegacyWire(urls["contents"], http)
    assert (await session.shake_hands())["capabilities"]["resources"] == expected
    assert (await session.post("resources/subscribe", uri="board://sprint"))["result"] == {}
    async with session.stream() as legacy:
        await wire.change("updated", uri="board://sprint")
        assert (await legacy.received()).summary == "content updated board://sprint"
    await session.end()


async def test_full_detail_has_operation_and_item_in_params_and_a_summary_in_meta(
    fronts: dict[str, str], http: httpx2.AsyncClient
) -> None:
    wire = Wire(fronts["mcpserver"], http)
    async with wire.listen("s", EVERYTHING) as stream:
        await stream.message()
        await wire.change("add", feature="prompts", key="grüße")
        message = await stream.message()
        params, meta = message["params"], message["params"]["_meta"]
        assert (message["jsonrpc"], message["method"]) == ("2.0", "notifications/prompts/list_changed")
        assert "id" not in message
        assert params["operation"] == "added"
        assert params["prompt"] == {
            "name": "grüße",
            "description": "Unchanging.",
            "arguments": [{"name": "name", "required": True}],
        }
        assert meta[SUBSCRIPTION_KEY] == "s"
        assert meta[CHANGE_KEY].keys() == {"operation", "name", "revision", "digest", "complete"}

        await wire.change("remove", feature="prompts", key="grüße")
        params = (await stream.message())["params"]
        assert (params["operation"], params["prompt"]["name"]) == ("removed", "grüße")

        await wire.change("add", feature="resources", key="board://r")
        params = (await stream.message())["params"]
        assert (params["operation"], params["uri"], params["resource"]["uri"]) == ("added", "board://r", "board://r")
        assert params["_meta"][CHANGE_KEY]["uri"] == "board://r"
        await wire.change("remove", feature="resources", key="board://r")
        await stream.message()

        await wire.change("updated", uri="board://sprint", metadata={"version": 2, "author": "me"})
        params = (await stream.message())["params"]
        assert (params["uri"], params["metadata"]) == ("board://sprint", {"version": 2, "author": "me"})


async def test_several_changes_are_listed_up_to_the_limit(fronts: dict[str, str], http: httpx2.AsyncClient) -> None:
    wire = Wire(fronts["mcpserver"], http)
    async with wire.listen(1, EVERYTHING) as stream:
        await stream.message()
        for count, is_truncated in ((3, False), (4, True)):
            for what, operation in (("add", "added"), ("remove", "removed")):
                steps = [{"what": what, "args": {"feature": "tools", "key": f"m{number}"}} for number in range(count)]
                await wire.change("many", steps=steps)
                params = (await stream.message())["params"]
                changed = [(each["operation"], each["tool"]["name"]) for each in params["changes"]]
                assert changed == [(operation, f"m{number}") for number in range(3)]
                assert params.get("truncated", False) == is_truncated
                summary = params["_meta"][CHANGE_KEY]
                assert [each["name"] for each in summary["changes"]] == ["m0", "m1", "m2"]
                assert summary.get("truncated", False) == is_truncated


async def test_without_detail_notifications_are_the_specified_ones(
    fronts: dict[str, str], http: httpx2.AsyncClient
) -> None:
    url = fronts["fastmcp"]
    wire = Wire(url, http)
    session = LegacyWire(url, http)
    await session.shake_hands()
    await session.post("resources/subscribe", uri="board://sprint")
    async with wire.listen(1, EVERYTHING) as stream, session.stream() as legacy:
        await stream.message()
        await wire.change("add", feature="tools", key="plain")
        assert (await stream.message())["params"] == {"_meta": {SUBSCRIPTION_KEY: 1}}
        assert (await legacy.message())["params"] == {}
        await wire.change("updated", uri="board://sprint", metadata={"version": 2})
        assert (await stream.message())["params"] == {"uri": "board://sprint", "_meta": {SUBSCRIPTION_KEY: 1}}
        assert (await legacy.message())["params"] == {"uri": "board://sprint"}
        await wire.change("remove", feature="tools", key="plain")
    await session.end()


async def test_each_client_gets_its_own_subscription_id(fronts: dict[str, str]) -> None:
    """Two clients use the same id, and a third one the same digits as text."""
    ids: list[str | int] = [1, 1, "1", "a\u2028b"]
    async with AsyncExitStack() as stack:
        clients = [httpx2.AsyncClient(timeout=httpx2.Timeout(DEADLINE)) for _ in ids]
        wires = [Wire(fronts["mcpserver"], await stack.enter_async_context(client)) for client in clients]
        streams = [
            await stack.enter_async_context(wire.listen(request_id, {"toolsListChanged": True}))
            for wire, request_id in zip(wires, ids, strict=True)
        ]
        acknowledged = [await stream.received() for stream in streams]
        assert [each.subscription for each in acknowledged] == ids
        await wires[0].change("add", feature="tools", key="id")
        told = [await stream.received() for stream in streams]
        assert [(each.summary, each.subscription) for each in told] == [("tools added id", each) for each in ids]
        await wires[0].change("remove", feature="tools", key="id")


async def test_idle_stream_gets_keep_alive_comments(fronts: dict[str, str], http: httpx2.AsyncClient) -> None:
    async with Wire(fronts["mcpserver"], http).listen(1, {"toolsListChanged": True}) as stream:
        await stream.message()
        with anyio.fail_after(12):  # by default, they come every 15 s
            for _ in range(2):
                assert (await stream.event()).startswith(":")


@pytest.mark.parametrize("transport", ["stdio", "http", "own"])
@pytest.mark.parametrize("kind", KINDS)
async def test_stream_that_the_server_ends_gets_its_result(kind: str, transport: str) -> None:
    with ExitStack() as stack:
        server: Any = stdio_server(kind)
        if transport != "stdio":
            server = stack.enter_context(serving(kind, own=transport == "own"))
        async with open_client(server, MODERN) as client:
            async with client.listen("board://sprint") as subscription:
                await client.settle()
                await client.change("stop")
                with anyio.fail_after(DEADLINE):
                    # Without the result, the loop would raise SubscriptionLost instead of ending.
                    events = [event async for event in subscription]
            assert len(events) <= 1  # that of the marker, which was not read yet
            await client.until_state(subscribers=0, streams=0, watched=[])


async def test_streams_are_parked_under_uvicorn_with_httptools(urls: dict[str, str], http: httpx2.AsyncClient) -> None:
    for name, parked in (("mcpserver", 0), ("mcpserver, uvicorn", 1), ("mcpserver, own", 1), ("fastmcp, own", 1)):
        wire = Wire(urls[name], http)
        async with wire.listen(1, EVERYTHING) as stream:
            await stream.message()
            assert (await wire.change("state"))["parked"] == parked
        await until_free(wire)


@pytest.mark.parametrize("kind", KINDS)
async def test_client_that_only_listens_is_not_notified_of_old_items(kind: str, http: httpx2.AsyncClient) -> None:
    """The first request to a server may be a listen request."""
    with serving(kind) as url:
        wire = Wire(url, http)
        async with wire.listen(1, EVERYTHING) as stream:
            await stream.message()
            await wire.change("add", feature="tools", key="first")
            assert (await stream.received()).summary == "tools added first"


# Limits


async def refusal(wire: Wire, wanted: dict[str, Any]) -> str:
    """Return the message of the error that refuses a listen request."""
    async with wire.listen(9, wanted) as stream:
        with anyio.fail_after(DEADLINE):
            body = await stream.response.aread()
    answer = read_answer(body.decode())
    assert answer["id"] == 9
    assert "result" not in answer
    return str(answer["error"]["message"])


async def test_error_names_the_limit_of_streams(fronts: dict[str, str], http: httpx2.AsyncClient) -> None:
    wanted = {"toolsListChanged": True}
    for name, limit, most in (
        ("few streams", "max_streams", 2),
        ("few per address", "max_streams_per_address", 1),
    ):
        if name not in fronts:
            continue
        wire = Wire(fronts[name], http)
        async with AsyncExitStack() as stack:
            for number in range(most):
                stream = await stack.enter_async_context(wire.listen(number, wanted))
                await stream.message()
            assert f"Policy.{limit} allows {most}" in await refusal(wire, wanted)
            async with open_client(fronts[name], MODERN) as client:
                with pytest.raises(MCPError, match=f"Policy.{limit} allows {most}"):
                    await client.listen().__aenter__()
        # A closed stream no longer counts.
        await until_free(wire)
        async with wire.listen(1, wanted) as stream:
            assert (await stream.received()).method == "notifications/subscriptions/acknowledged"
        await until_free(wire)


async def until_free(wire: Wire) -> None:
    with anyio.fail_after(DEADLINE):
        while (await wire.change("state"))["streams"]:
            pass


async def test_error_names_the_limit_of_uris(fronts: dict[str, str], http: httpx2.AsyncClient) -> None:
    wire = Wire(fronts["few streams"], http)
    uris = [f"board://{number}" for number in range(4)]
    assert "Policy.max_uris" in await refusal(wire, {"resourceSubscriptions": uris})
    assert "Policy.max_patterns" in await refusal(wire, {"resourceSubscriptions": ["board://a/*", "board://b/*"]})
    assert (await wire.change("state"))["streams"] == 0

    session = LegacyWire(fronts["few streams"], http)
    await session.shake_hands()
    for uri in uris[:3]:
        assert (await session.post("resources/subscribe", uri=uri))["result"] == {}
    error = (await session.post("resources/subscribe", uri=uris[3]))["error"]
    assert error["code"] == types.INVALID_PARAMS
    assert "Policy.max_uris" in error["message"]
    await session.end()


# Refused requests


@pytest.mark.parametrize("kind", KINDS)
async def test_wrong_host_or_origin_is_refused(fronts: dict[str, str], http: httpx2.AsyncClient, kind: str) -> None:
    url = fronts[kind]
    await Wire(url, http).post("tools/list")  # so that a cached response exists
    session = LegacyWire(url, http)
    await session.shake_hands()
    for header, value, status in (("Host", "evil.example", 421), ("Origin", "http://evil.example", 403)):
        wire = Wire(url, http, {header: value})
        for response in (
            await wire.post("subscriptions/listen", notifications=EVERYTHING),
            await wire.post("tools/list"),
            await wire.post("server/discover"),
            await http.get(url, headers={**session.headers, header: value}),
        ):
            assert response.status_code == status
            assert "result" not in response.text
    await session.end()
