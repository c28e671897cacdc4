"""Opening listen streams: accepted and refused requests, and the objects that remain after them.

Covers `request_checks.py` and `router.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import json
import weakref
from typing import Any

import anyio
import pytest

from tests.support.faults.wire import Stream
from tests.support.http_server import RawClient, example_server, serving
from tests.support.loops import anyio_backend
from tests.support.messages import LISTS
from tests.support.sdk_clients import DEADLINE
from tests.support.waiting import until
from tidings import Feature, LimitReached, Policy
from tidings.http.listen import ListenStream
from tidings.http.parking import ParkedStream

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio

EVERYTHING = {**LISTS, "resourceSubscriptions": ["local://r"]}


async def response(client: RawClient, request: bytes) -> list[bytes]:
    """Return the lines of the head, but for the date, and the first event."""
    client.writer.write(request)
    async with asyncio.timeout(DEADLINE):
        head = (await client.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        size = await client.reader.readline()
        event = await client.reader.readexactly(int(size, 16) + 2)
    return [*(each for each in head if not each.startswith(b"date:")), event]


# Accepted requests

ACCEPTED: dict[str, dict[str, Any]] = {
    "a list": {},
    "every topic": {"requested": EVERYTHING},
    "a pattern": {"requested": {"resourceSubscriptions": ["local://*"]}},
    "a text as id": {"request_id": "mine"},
    "an id to be escaped": {"request_id": 'ä"\u2028'},
    "a large id": {"request_id": 2**70},
    "a cursor": {"meta": {"dev.tidings/resume": {"epoch": "other", "topics": {"tools": None}}}},
    "terms": {"meta": {"dev.tidings/filter": {"names": ["a*"], "bookmarks": True}}},
    "the extension": {
        "meta": {"io.modelcontextprotocol/clientCapabilities": {"extensions": {"dev.tidings/changes": {}}}}
    },
    "another header": {"X_Other": "yes"},
}


@pytest.mark.parametrize("case", ACCEPTED)
async def test_same_request_opens_the_same_stream_again(case: str) -> None:
    """The second time, the checks of headers and params are cached."""
    responses = []
    async with serving(example_server()) as local:
        for _ in range(2):
            async with local.client() as client:
                responses.append(await response(client, client.listen_request(**ACCEPTED[case])))
                assert local.stream_types == [ParkedStream]
            await until(lambda: not local.stream_types)
        assert local.live.subscriptions.limits.count == 0
        assert local.server.server_state.total_requests == 2
    assert responses[0] == responses[1]
    acknowledged = json.loads(responses[0][-1].split(b"data: ")[1])["params"]["_meta"]
    assert acknowledged["io.modelcontextprotocol/subscriptionId"] == ACCEPTED[case].get("request_id", 1)


async def test_disconnect_does_not_affect_a_stream_with_the_same_request() -> None:
    """Requests with the same params share their decoded form."""
    async with serving(example_server()) as local, local.client() as first, local.client() as second:
        for request_id, client in enumerate((first, second)):
            await response(client, client.listen_request(request_id, EVERYTHING))
        first.writer.close()
        await until(lambda: len(local.stream_types) == 1)
        local.live.resources.updated("local://r")
        with anyio.fail_after(DEADLINE):
            told = await Stream(second.reader, second.writer).event()
        assert told is not None
        assert told["method"] == "notifications/resources/updated"
        assert told["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"] == 1


# Refused requests

REFUSED: dict[str, tuple[bytes, dict[str, Any]]] = {
    "nothing requested": (b"200", {"requested": {}}),
    "nothing allowed": (b"200", {"requested": {"promptsListChanged": True}}),
    "too many URIs": (b"400", {"requested": {"resourceSubscriptions": ["local://r", "local://s"]}}),
    "URIs that are not a list": (b"400", {"requested": {"resourceSubscriptions": "local://r"}}),
    "topics that are not an object": (b"400", {"requested": []}),
    "an invalid id": (b"400", {"request_id": True}),
    "another version in the body": (b"400", {"meta": {"io.modelcontextprotocol/protocolVersion": "2025-11-25"}}),
    "another method in the header": (b"400", {"Mcp_Method": "tools/list"}),
    "another host": (b"421", {"Host": "evil.example"}),
    "another origin": (b"403", {"Origin": "https://evil.example"}),
    "no event stream": (b"406", {"Accept": "application/json"}),
    "another type": (b"400", {"Content_Type": "text/plain"}),
    "a body that is not UTF-8": (b"400", {"request_id": "mine"}),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_refused_request_gets_its_error_and_the_connection_goes_on(case: str) -> None:
    """Twice, because a request that was refused must not be cached as valid."""
    asked = []

    def authorize(principal: Any, topic: Any) -> bool:
        asked.append(topic)
        return topic is not Feature.PROMPTS

    policy = Policy(max_uris=1, list_max_age=3600)
    async with serving(example_server(), policy=policy, authorize=authorize) as local, local.client() as client:
        status, changes = REFUSED[case]
        request = client.listen_request(**changes)
        if case == "a body that is not UTF-8":
            request = request.replace(b"mine", b"\xff\xffne")
        first, second = await client.send(request), await client.send(request)
        assert first == second
        assert status in first.status
        assert (b"acknowledged" in first.body) is case.startswith("nothing")
        assert asked == ([Feature.PROMPTS] * 2 if case == "nothing allowed" else [])
        assert local.live.subscriptions.limits.count == 0
        await response(client, client.listen_request())
        assert local.stream_types == [ParkedStream]


async def test_client_behind_a_proxy_is_counted_by_the_address_that_the_proxy_names() -> None:
    policy = Policy(max_streams_per_address=1)
    async with serving(example_server(), policy=policy) as local, local.client() as one, local.client() as other:
        await response(one, one.listen_request())
        await response(other, other.listen_request(X_Forwarded_For="192.0.2.1"))
        async with local.client() as client:
            assert b"503" in (await client.send(client.listen_request(X_Forwarded_For="192.0.2.1"))).status


async def test_mcp_middleware_sees_every_stream_and_its_client_is_notified() -> None:
    seen = []

    async def middleware(ctx: Any, call_next: Any) -> Any:
        seen.append(ctx.method)
        return await call_next(ctx)

    async with serving(example_server()) as local:
        async with local.client() as client:
            await response(client, client.listen_request())
        local.live.lowlevel.middleware.append(middleware)
        async with local.client() as client:
            assert b"acknowledged" in (await response(client, client.listen_request()))[-1]
            local.live.tools.update("clock", description="new")
            with anyio.fail_after(DEADLINE):
                told = await Stream(client.reader, client.writer).event()
            assert told is not None
            assert told["params"]["tool"]["description"] == "new"
    assert seen == ["subscriptions/listen"]


# After the request


@pytest.mark.parametrize("failure", [RuntimeError("a defect"), LimitReached("a limit")], ids=["a defect", "a limit"])
async def test_failure_after_parking_ends_the_connection(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise failure

    async with serving(example_server()) as local:
        with monkeypatch.context() as patch:
            patch.setattr(ListenStream, "subscribe", fail)
            async with local.client() as client:
                client.writer.write(client.listen_request())
                async with asyncio.timeout(DEADLINE):
                    with contextlib.suppress(ConnectionResetError):
                        assert (await client.reader.read()).count(b"HTTP/1.1") <= 1
        await until(lambda: not local.server.server_state.connections)
        assert local.live.subscriptions.limits.count == 0
        async with local.client() as client:
            await response(client, client.listen_request())


class Thing:
    """An object that a weak reference can follow."""


async def test_context_of_a_stream_is_released_with_it() -> None:
    """Its timer of keep-alives continues for the streams after it."""
    mark: contextvars.ContextVar[Thing] = contextvars.ContextVar("mark")
    things: list[weakref.ref[Thing]] = []

    def authorize(principal: Any, topic: Any) -> bool:
        if not things:
            thing = Thing()
            things.append(weakref.ref(thing))
            mark.set(thing)
        return True

    async with serving(example_server(), authorize=authorize) as local, local.client() as second:
        async with local.client() as first:
            await response(first, first.listen_request())
            await response(second, second.listen_request())
        await until(lambda: len(local.stream_types) == 1)
        gc.collect()
        assert [thing() for thing in things] == [None]
