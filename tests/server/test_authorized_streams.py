"""The end of streams whose authorization is over: the token expires, `authorize` refuses, or the server ends them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from typing import Any

import anyio.to_thread
import httpx2
import pytest
from mcp.server.auth.provider import AccessToken
from mcp.server.mcpserver import MCPServer

from tests.support.board_actions import sprint, steady
from tests.support.kinds import Own
from tests.support.tokens import authentication
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE, until
from tests.support.wire_clients import LegacyWire, Stream, Wire
from tidings import Feature, Live, Policy, Principal, Topic
from tidings.core.frames import AUTHORIZED_UNTIL_KEY, SUBSCRIPTION_KEY

pytestmark = pytest.mark.anyio

TOOLS = {"toolsListChanged": True}
PARSERS = {"parked": "httptools", "asgi": "h11", "sdk": "httptools", "fastmcp": "httptools"}
"""By the kind of stream: the parser of uvicorn. The SDK writes the streams of a server with middleware."""


class Verifier:
    """Accepts any token. Its text is the name of the client, and it expires some seconds after each use."""

    def __init__(self, lifetime: int | None = None) -> None:
        self._lifetime = lifetime
        self.scopes = ["read"]

    async def verify_token(self, token: str) -> AccessToken | None:
        expires_at = int(time.time()) + self._lifetime if self._lifetime is not None else None
        return AccessToken(token=token, client_id=token, scopes=self.scopes, expires_at=expires_at)


def make_server(kind: str, verifier: Verifier) -> Any:
    if kind == "fastmcp":
        from fastmcp import FastMCP
        from fastmcp.server.auth import AccessToken as FastAccessToken
        from fastmcp.server.auth import TokenVerifier

        class FastVerifier(TokenVerifier):
            async def verify_token(self, token: str) -> FastAccessToken | None:
                found = await verifier.verify_token(token)
                return FastAccessToken(**found.model_dump(exclude_none=True)) if found else None

        fast: Any = FastMCP("board", auth=FastVerifier())
        fast.tool(steady)
        return fast
    server: MCPServer[Any] = MCPServer("board", **authentication(verifier))
    server.tool()(steady)
    server.resource("board://sprint")(sprint)
    if kind == "sdk":
        server.middleware.append(Own())
    return server


class Board:
    """A live server, and its clients."""

    def __init__(self, live: Live, verifier: Verifier, url: str, clients: AsyncExitStack) -> None:
        self.live = live
        self.verifier = verifier
        self.url = url
        self._clients = clients

    async def client(self, name: str) -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {name}"}
        return await self._clients.enter_async_context(
            httpx2.AsyncClient(headers=headers, timeout=DEADLINE, verify=False)
        )

    async def listen(self, name: str, requested: dict[str, Any] | None = None) -> tuple[Stream, dict[str, Any]]:
        """Return a listen stream and the params of its acknowledgement."""
        wire = Wire(self.url, await self.client(name))
        stream = await self._clients.enter_async_context(wire.listen(name, requested or TOOLS))
        return stream, (await stream.message())["params"]

    async def legacy(self, name: str) -> LegacyWire:
        session = LegacyWire(self.url, await self.client(name))
        await session.shake_hands()
        return session


@asynccontextmanager
async def serving(kind: str = "parked", lifetime: int | None = None, **options: Any) -> AsyncIterator[Board]:
    verifier = Verifier(lifetime)
    live = Live(make_server(kind, verifier), **options)
    async with run_uvicorn(live.http_app(), http=PARSERS[kind]) as server, AsyncExitStack() as clients:
        yield Board(live, verifier, f"http://127.0.0.1:{address_of(server)[1]}/mcp", clients)


async def check_result(stream: Stream, name: str) -> None:
    """Check that the stream ends with its result, and that nothing else was sent before."""
    result = await stream.message()
    assert (result["id"], result["result"]["resultType"]) == (name, "complete")
    assert result["result"]["_meta"][SUBSCRIPTION_KEY] == name
    assert await stream.event() == ""


@pytest.mark.parametrize("kind", PARSERS)
async def test_stream_ends_with_its_result_when_the_token_expires(kind: str) -> None:
    async with serving(kind, lifetime=2) as board:
        start = int(time.time())
        stream, acknowledged = await board.listen("ada")
        expiry = datetime.fromisoformat(acknowledged["_meta"][AUTHORIZED_UNTIL_KEY]).timestamp()
        assert start + 2 <= expiry <= time.time() + 2

        await check_result(stream, "ada")
        assert time.time() >= expiry


async def test_acknowledgement_names_no_time_without_expiry() -> None:
    async with serving() as board:
        _, acknowledged = await board.listen("ada")
        assert AUTHORIZED_UNTIL_KEY not in acknowledged["_meta"]


async def test_legacy_stream_ends_with_the_token_and_a_new_token_continues_the_session() -> None:
    async with serving(lifetime=2) as board:
        session = await board.legacy("ada")
        # Before the stream, because the token may expire at any moment after it has opened.
        board.live.tools.add(steady, name="before")
        async with session.stream() as stream:
            assert (await stream.received()).summary == "tools added before"
            while await stream.event():  # keep-alives, until the end
                pass

        board.live.tools.add(steady, name="meanwhile")
        async with session.stream() as stream:
            assert (await stream.received()).summary == "tools added meanwhile"


@pytest.mark.parametrize("kind", PARSERS)
async def test_end_streams_ends_those_of_one_principal_on_every_transport(kind: str) -> None:
    async with serving(kind) as board:
        first, _ = await board.listen("ada")
        second, _ = await board.listen("ada")
        other, _ = await board.listen("bob")
        session = await board.legacy("ada")
        async with session.stream() as legacy:
            # From a thread, in which the SDK runs functions that are not async.
            ended = await anyio.to_thread.run_sync(board.live.end_streams, Principal("ada", scopes=("any",)))

            assert ended == 3
            await check_result(first, "ada")
            await check_result(second, "ada")
            while await legacy.event():
                pass
        assert board.live.end_streams(Principal("ada")) == 0
        board.live.tools.add(steady, name="later")
        assert (await other.received()).summary == "tools added later"


class Rights:
    """An `authorize` function whose answers change."""

    def __init__(self) -> None:
        self.refused: set[tuple[str, Topic]] = set()

    def __call__(self, principal: Principal | None, topic: Topic) -> bool:
        return principal is not None and (principal.client_id, topic) not in self.refused

    async def later(self, principal: Principal | None, topic: Topic) -> bool:
        return self(principal, topic)


@pytest.mark.parametrize("kind", PARSERS)
@pytest.mark.parametrize("is_async", [False, True])
async def test_stream_ends_when_authorize_refuses_one_of_its_topics(kind: str, is_async: bool) -> None:
    rights, policy = Rights(), Policy(authorize_interval=0.01)
    async with serving(kind, authorize=rights.later if is_async else rights, policy=policy) as board:
        requested = {**TOOLS, "resourcesListChanged": True}
        stream, acknowledged = await board.listen("ada", requested)
        assert acknowledged["notifications"] == requested
        other, _ = await board.listen("bob", requested)

        rights.refused.add(("ada", Feature.TOOLS))
        await check_result(stream, "ada")

        _, acknowledged = await board.listen("ada", requested)
        assert acknowledged["notifications"] == {"resourcesListChanged": True}
        board.live.tools.add(steady, name="later")
        assert (await other.received()).summary == "tools added later"


async def test_legacy_session_loses_only_the_topics_that_authorize_refuses() -> None:
    rights = Rights()
    async with serving(authorize=rights, policy=Policy(authorize_interval=0.01)) as board:
        session = await board.legacy("ada")
        await session.post("resources/subscribe", uri="board://sprint")
        async with session.stream() as stream:
            rights.refused |= {("ada", Feature.TOOLS), ("ada", "board://sprint")}
            hub = board.live.hub
            await until(lambda: not hub.subscribers("tools") and not hub.subscribers("board://sprint"))

            board.live.tools.add(steady, name="withheld")
            board.live.resources.updated("board://sprint")
            board.live.prompts.add(steady, name="shown")
            assert (await stream.received()).summary == "prompts added shown"


async def test_legacy_session_has_the_rights_of_the_token_that_opened_its_stream() -> None:
    def authorize(principal: Principal | None, topic: Topic) -> bool:
        return topic is not Feature.TOOLS or (principal is not None and "admin" in principal.scopes)

    async with serving(authorize=authorize) as board:
        board.verifier.scopes = ["read", "admin"]
        session = await board.legacy("ada")
        board.live.tools.add(steady, name="withheld")
        board.live.prompts.add(steady, name="shown")
        board.verifier.scopes = ["read"]
        async with session.stream() as stream:
            assert (await stream.received()).summary == "prompts added shown"


async def test_authorize_is_not_called_again_with_an_interval_of_0() -> None:
    rights = Rights()
    async with serving(authorize=rights, policy=Policy(authorize_interval=0)) as board:
        stream, _ = await board.listen("ada")
        rights.refused.add(("ada", Feature.TOOLS))
        board.live.tools.add(steady, name="seen")
        assert (await stream.received()).summary == "tools added seen"


async def test_calls_of_authorize_for_many_streams_do_not_block_the_event_loop() -> None:
    turn, calls = 0, Counter[int]()

    def authorize(principal: Principal | None, topic: Topic) -> bool:
        calls[turn] += 1
        return True

    live = Live(MCPServer("board"), authorize=authorize, policy=Policy(authorize_interval=0.001))
    is_authorized = live.subscriptions.authorization.predicate(Principal("ada"))
    for _ in range(100):
        subscriber = live.hub.subscribe(live.hub.open(print), "tools")
        subscriber.is_authorized = is_authorized
    checks = asyncio.create_task(live.subscriptions.authorized_streams.run())
    async with asyncio.timeout(DEADLINE):
        while calls.total() < 100:
            turn += 1
            await asyncio.sleep(0)
    checks.cancel()
    assert max(calls.values()) == 1


async def test_topic_that_is_added_while_authorize_is_called_again_is_not_refused() -> None:
    async def authorize(principal: Principal | None, topic: Topic) -> bool:
        live.hub.subscribe(subscriber, uris=["board://new"])
        return True

    live = Live(MCPServer("board"), authorize=authorize)
    subscriber = live.hub.subscribe(live.hub.open(print), "tools")
    subscriber.is_authorized = live.subscriptions.authorization.predicate(Principal("ada"))
    await live.subscriptions.authorized_streams.check(subscriber)
    assert set(subscriber.watched) == {Feature.TOOLS, "board://new"}
