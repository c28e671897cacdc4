"""`dev.tidings/subscriptions/list`, `put` and `remove`: the durable subscriptions of the caller alone."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError

from tests.support.messages import modern_headers, modern_message
from tests.support.receiver import receiving, verify
from tests.support.sdk_clients import MODERN, RecordingClient, open_client, stdio_server
from tests.support.wire_clients import Wires, read_answer

pytestmark = pytest.mark.anyio

LEGACY = "2025-11-25"
METHOD = "dev.tidings/subscriptions"
TOOLS = {"toolsListChanged": True}
URL = "https://receiver.example/hook"
LOCAL = {"webhook_private": True, "webhook_backoff": 0.01}


DENY = {"bob": ["tools", "board://secret"]}
LIMITED = {"policy": {"max_durables_per_principal": 3}}
SERVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "open": ("mcpserver", {}),
    "guarded": (
        "mcpserver",
        {"auth": True, "deny": DENY, "asks": "async", **LIMITED},
    ),
    "local": ("mcpserver", {"auth": True, "policy": LOCAL}),
    "anyone": ("fastmcp", {"policy": {**LOCAL, "webhooks": "anyone"}}),
    "none": ("lowlevel", {"auth": True, "policy": {"webhooks": "none"}}),
}


async def listed(client: RecordingClient) -> dict[str, dict[str, Any]]:
    found = (await client.request(f"{METHOD}/list"))["subscriptions"]
    return {each["name"]: each for each in found}


async def refused(client: RecordingClient, method: str = "put", **params: Any) -> str:
    with pytest.raises(MCPError) as error:
        await client.request(f"{METHOD}/{method}", **params)
    assert error.value.code == -32602
    message: str = error.value.message
    return message


@pytest.mark.parametrize("version", [MODERN, LEGACY])
async def test_caller_lists_and_removes_only_its_own_subscriptions(urls: dict[str, str], version: str) -> None:
    url = urls["guarded"]
    async with open_client(url, version, token="alice") as alice, open_client(url, version, token="bob") as bob:
        watched = {"toolsListChanged": True, "promptsListChanged": True, "resourceSubscriptions": ["board://secret"]}
        hook = {"url": URL}
        put = await alice.request(f"{METHOD}/put", name="mine", notifications=watched, webhook=hook, ttl=60)
        assert put["isNew"]
        assert put["secret"].startswith("whsec_")
        assert put["subscription"]["notifications"] == watched
        assert put["subscription"]["ttl"] == 60
        theirs = await bob.request(f"{METHOD}/put", name="mine", notifications=watched, webhook=hook)
        assert theirs["isNew"]
        # Topics that he may not watch are not granted.
        assert theirs["subscription"]["notifications"] == {"promptsListChanged": True}

        mine = (await listed(alice))["mine"]
        assert mine["webhook"] == {"url": URL, "state": "active", "attempts": 0}
        assert put["secret"] not in json.dumps(mine)
        assert await bob.request(f"{METHOD}/remove", name="mine") == await alice.request(
            f"{METHOD}/remove", name="mine"
        )
        assert (await listed(alice), await listed(bob)) == ({}, {})
        assert (await alice.request(f"{METHOD}/remove", name="mine"))["removed"] is False


async def test_put_keeps_omitted_members_and_returns_a_new_secret_once(urls: dict[str, str]) -> None:
    async with open_client(urls["guarded"], MODERN, token="alice") as alice:
        first = await alice.request(
            f"{METHOD}/put", name="kept", notifications=TOOLS, webhook={"url": URL}, filter={"operations": ["added"]}
        )
        second = await alice.request(f"{METHOD}/put", name="kept", webhook={"url": f"{URL}/2"})
        assert (second["isNew"], "secret" in second) == (False, False)
        third = await alice.request(f"{METHOD}/put", name="kept", notifications={"promptsListChanged": True})
        assert third["subscription"]["webhook"]["url"] == f"{URL}/2"
        assert third["subscription"]["notifications"] == {"promptsListChanged": True}
        assert third["subscription"]["filter"] == first["subscription"]["filter"] == {"operations": ["added"]}
        assert third["subscription"]["created"] == first["subscription"]["created"]
        await alice.request(f"{METHOD}/remove", name="kept")


async def test_webhook_of_a_client_receives_changes(urls: dict[str, str]) -> None:
    async with receiving() as receiver, open_client(urls["local"], MODERN, token="alice") as alice:
        hook = {"url": receiver.url}
        put = await alice.request(f"{METHOD}/put", name="hook", notifications=TOOLS, webhook=hook)
        await alice.change("add", feature="tools", key="new")
        delivery = await receiver.next()
        assert delivery.summary == "tools.list_changed added new"
        verify(delivery, put["secret"], now=time.time())
        while (webhook := (await listed(alice))["hook"]["webhook"])[
            "state"
        ] != "active" or "lastSuccess" not in webhook:
            pass
        assert (await listed(alice))["hook"]["connected"] is True
        await alice.request(f"{METHOD}/remove", name="hook")


async def test_invalid_subscriptions_are_refused_with_the_reason(urls: dict[str, str]) -> None:
    async with open_client(urls["guarded"], MODERN, token="alice") as alice:
        hook = {"url": URL}
        assert "notifications" in await refused(alice, name="new", webhook=hook)
        assert "may watch none of the requested topics" in await refused(
            alice, name="new", notifications={}, webhook=hook
        )
        assert "own machine" in await refused(alice, name="n", notifications=TOOLS, webhook={"url": "http://[::1]/"})
        assert "private network" in await refused(
            alice, name="n", notifications=TOOLS, webhook={"url": "https://10.0.0.1"}
        )
        assert "https" in await refused(alice, name="n", notifications=TOOLS, webhook={"url": "http://a.example/"})
        assert "whsec_" in await refused(alice, name="n", notifications=TOOLS, webhook={"url": URL, "secret": "guess"})
        assert "4 secrets" in await refused(alice, name="n", notifications=TOOLS, webhook={"url": URL, "secret": ""})
        assert "name" in await refused(alice, name="", notifications=TOOLS)
        assert "name" in await refused(alice, name="x" * 257, notifications=TOOLS)
        assert "ttl" in await refused(alice, name="n", notifications=TOOLS, ttl=-1)
        assert "hook" in await refused(alice, name="n", notifications=TOOLS, hook={})
        assert "name" in await refused(alice, "remove")
        for number in range(3):
            await alice.request(f"{METHOD}/put", name=f"n{number}", notifications=TOOLS)
        assert "max_durables_per_principal" in await refused(alice, name="n3", notifications=TOOLS)
        for number in range(3):
            await alice.request(f"{METHOD}/remove", name=f"n{number}")
        assert await listed(alice) == {}


async def test_lone_surrogate_is_refused_and_the_store_continues(wires: Wires) -> None:
    """JSON can contain it, but the store can't save it."""
    wire = wires.modern("open")
    for name, requested in (("\ud800", TOOLS), ("n", {"resourceSubscriptions": ["a://\ud800"]})):
        message = modern_message(f"{METHOD}/put", 1, {"name": name, "notifications": requested})
        headers = modern_headers(f"{METHOD}/put")
        answer = await wire.http.post(wire.url, content=json.dumps(message), headers=headers)
        assert read_answer(answer.text)["error"]["code"] == -32602
    listed = await wire.post(f"{METHOD}/list")
    assert read_answer(listed.text)["result"]["subscriptions"] == []
    page = await wire.post("dev.tidings/history")
    cursor = f"{read_answer(page.text)['result']['epoch']}.{'9' * 5000}"
    page = await wire.post("dev.tidings/history", cursor=cursor)
    assert read_answer(page.text)["error"]["code"] == -32602


@pytest.mark.parametrize("where", ["open", "stdio"])
async def test_anonymous_caller_has_and_sees_no_webhooks(urls: dict[str, str], where: str) -> None:
    server = urls["open"] if where == "open" else stdio_server("mcpserver")
    async with open_client(server, MODERN) as client:
        said = await refused(client, name="hook", notifications=TOOLS, webhook={"url": URL})
        assert "Policy.webhooks" in said
        # A webhook of the server itself can't be listed, changed or removed.
        await client.change("hook", name="own", url=URL)
        assert await listed(client) == {}
        assert (await client.request(f"{METHOD}/remove", name="own"))["removed"] is False
        assert (await client.request(f"{METHOD}/put", name="own", notifications=TOOLS))["isNew"]
        assert "webhook" not in (await listed(client))["own"]
        assert (await client.request(f"{METHOD}/remove", name="own"))["removed"] is True
        assert await client.change("hooks") == ["own"]
        assert (await client.request(f"{METHOD}/put", name="plain", notifications=TOOLS))["isNew"]
        assert list(await listed(client)) == ["plain"]
        assert (await client.request(f"{METHOD}/remove", name="plain"))["removed"] is True


async def test_policy_allows_webhooks_for_anyone_or_for_no_client(urls: dict[str, str]) -> None:
    async with receiving() as receiver, open_client(urls["anyone"], LEGACY) as client:
        await client.request(f"{METHOD}/put", name="hook", notifications=TOOLS, webhook={"url": receiver.url})
        await client.change("add", feature="tools", key="new")
        assert (await receiver.next()).summary == "tools.list_changed added new"
        assert list(await listed(client)) == ["hook"]
    async with open_client(urls["none"], MODERN, token="alice") as alice:
        assert "Policy.webhooks" in await refused(alice, name="h", notifications=TOOLS, webhook={"url": URL})
