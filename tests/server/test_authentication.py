"""Authentication by the server, the `authorize` function, and the limit of streams of one caller, over the wire."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import anyio
import httpx2
import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError

from tests.support.messages import LISTS, initialize
from tests.support.sdk_clients import (
    DEADLINE,
    KINDS,
    MARKER,
    MODERN,
    RecordingClient,
    listening,
    open_client,
    stdio_server,
)
from tests.support.wire_clients import LegacyWire, Wire, read_answer

pytestmark = pytest.mark.anyio

VERSION = "2025-11-25"
EVERYTHING = {**LISTS, "resourceSubscriptions": ["board://secret", "board://sprint", "board://hidden/*"]}
DENY = {"*": ["prompts", "board://secret"], "bob": ["tools", "board://secret", "board://hidden/*"]}
"""By the name of the caller; None for a caller without authentication."""
ASKS = {"mcpserver": "sync", "lowlevel": "async", "fastmcp": "async"}


OPTIONS = {"auth": True, "deny": DENY, "policy": {"max_streams_per_principal": 2}}
SERVERS = {
    **{kind: (kind, {**OPTIONS, "asks": ASKS[kind]}) for kind in KINDS},
    # Also with parked streams.
    **{f"{kind}, own": (kind, {**OPTIONS, "asks": ASKS[kind], "own": True}) for kind in ("mcpserver", "fastmcp")},
}


@pytest.fixture(scope="module", params=SERVERS)
def url(request: pytest.FixtureRequest, urls: dict[str, str]) -> str:
    return urls[request.param]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_request_without_a_valid_token_is_refused(url: str, http: httpx2.AsyncClient) -> None:
    lists = ["tools/list", "prompts/list", "resources/list", "resources/templates/list"]
    for method in ("subscriptions/listen", *lists, "server/discover"):
        params = {"notifications": EVERYTHING} if method == "subscriptions/listen" else {}
        if not params:
            # An authenticated caller has just listed it, so the response is cached.
            served = await Wire(url, http, bearer("alice")).post(method)
            assert served.status_code == 200
            assert "result" in read_answer(served.text)

        # FastMCP's verifier treats a token without the scope as no token.
        for headers, statuses in (({}, {401}), (bearer("mallory"), {401}), (bearer("weak"), {401, 403})):
            response = await Wire(url, http, headers).post(method, 1, **params)
            assert response.status_code in statuses, method
            assert "result" not in response.text
            assert "acknowledged" not in response.text


async def test_legacy_session_and_stream_need_a_token(url: str, http: httpx2.AsyncClient) -> None:
    refused = await http.post(url, json=initialize(VERSION), headers=LegacyWire(url, http).headers)
    assert refused.status_code == 401

    # No TLS, as in the fixture `http`.
    async with httpx2.AsyncClient(headers=bearer("alice"), timeout=DEADLINE, verify=False) as alice:
        session = LegacyWire(url, alice)
        await session.shake_hands()
        for headers in ({}, bearer("mallory")):
            response = await http.get(url, headers={**session.headers, **headers})
            assert response.status_code == 401
        # The session belongs to another caller.
        response = await http.get(url, headers={**session.headers, **bearer("bob")})
        assert response.status_code in (403, 404)
        async with session.stream() as stream:
            assert stream.response.status_code == 200
        await session.end()


async def test_clients_with_a_token_are_notified_in_every_era(url: str) -> None:
    async with (
        open_client(url, VERSION, token="alice") as legacy,
        open_client(url, MODERN, token="alice") as modern,
        listening(legacy, "board://sprint"),
        listening(modern, "board://sprint"),
    ):
        await legacy.change("add", feature="tools", key="seen")
        await legacy.settle("tools added seen", among=[modern])
        await legacy.change("updated", uri="board://sprint")
        await legacy.settle("content updated board://sprint", among=[modern])
        await legacy.change("remove", feature="tools", key="seen")
        await legacy.settle("tools removed seen", among=[modern])
    await until_left(url)


async def until_left(url: str) -> None:
    async with open_client(url, MODERN, token="alice") as client:
        await client.until_state(streams=0, subscribers=0)


async def test_acknowledgement_names_only_authorized_topics(url: str) -> None:
    async with open_client(url, MODERN, token="bob") as client:
        before = len((await client.change("state"))["asked"])
        async with client.listen("board://secret", "board://sprint", "board://hidden/*") as subscription:
            asked = (await client.change("state"))["asked"][before:]
            wanted = ["tools", "prompts", "resources", "board://secret", "board://sprint", "board://hidden/*", MARKER]
            # An async function can't be asked when a resource changes, so patterns are refused.
            assert [topic for _, topic in asked] in (wanted, [topic for topic in wanted if "*" not in topic])
            assert {who for who, _ in asked} == {"bob"}
            honoured = subscription.honored
            assert honoured.tools_list_changed is None
            assert honoured.prompts_list_changed is True
            assert honoured.resource_subscriptions == ["board://sprint", MARKER]
            await check_denied(client)
    await until_left(url)


async def test_legacy_session_is_notified_only_of_authorized_topics(url: str) -> None:
    async with open_client(url, VERSION, token="bob") as client, listening(client, "board://sprint"):
        # The response does not depend on whether the resource exists.
        await client.change("add", feature="resources", key="board://secret")
        there = await refusal(client, "board://secret")
        await client.change("remove", feature="resources", key="board://secret")
        gone = await refusal(client, "board://secret")
        assert there == gone
        assert there.code == types.INVALID_PARAMS
        await client.mark()  # the notifications of the list have arrived before it
        client.received.clear()
        await client.settle()
        await check_denied(client)
    await until_left(url)


async def refusal(client: RecordingClient, uri: str) -> Any:
    with pytest.raises(MCPError) as refused:
        await client.subscribe(uri)
    return refused.value.error


async def check_denied(client: RecordingClient) -> None:
    await client.step("add", feature="tools", key="withheld")
    await client.step("remove", feature="tools", key="withheld")
    await client.step("updated", uri="board://secret")
    await client.step("updated", uri="board://hidden/x")
    await client.step("updated", "content updated board://sprint", uri="board://sprint")
    await client.step("add", "prompts added shown", feature="prompts", key="shown")
    await client.step("remove", "prompts removed shown", feature="prompts", key="shown")


@pytest.mark.parametrize(("kind", "version"), [("mcpserver", VERSION), ("lowlevel", MODERN)])
async def test_authorize_gets_no_principal_on_stdio(kind: str, version: str) -> None:
    async with open_client(stdio_server(kind, asks=ASKS[kind], deny=DENY), version) as client:
        if client.is_modern:
            async with client.listen("board://secret") as subscription:
                assert subscription.honored.prompts_list_changed is None
                assert subscription.honored.resource_subscriptions == [MARKER]
                await check_nobody(client)
        else:
            await refusal(client, "board://secret")
            await client.subscribe(MARKER)
            await check_nobody(client)


async def check_nobody(client: RecordingClient) -> None:
    assert {who for who, _ in (await client.change("state"))["asked"]} == {None}
    await client.step("add", feature="prompts", key="withheld")
    await client.step("updated", uri="board://secret")
    await client.step("add", "tools added shown", feature="tools", key="shown")


async def test_streams_of_one_caller_are_limited_with_an_error(url: str, http: httpx2.AsyncClient) -> None:
    wanted = {"promptsListChanged": True}
    async with AsyncExitStack() as stack:
        alice = Wire(url, http, bearer("alice"))
        for number in range(2):
            stream = await stack.enter_async_context(alice.listen(number, wanted))
            await stream.message()
        async with alice.listen(3, wanted) as stream:
            with anyio.fail_after(DEADLINE):
                body = (await stream.response.aread()).decode()
        assert "Policy.max_streams_per_principal allows 2" in read_answer(body)["error"]["message"]

        # Another caller is not affected.
        async with Wire(url, http, bearer("bob")).listen(1, wanted) as stream:
            assert (await stream.received()).method == "notifications/subscriptions/acknowledged"
    await until_left(url)
