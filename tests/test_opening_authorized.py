"""Who may open a stream at its connection: `authorize` is asked and waited for as on the whole way, and nothing of one
request is left for the next.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import weakref
from typing import Any

import pytest
from opentelemetry import trace

from tests.support.loops import anyio_backend
from tests.support.opening import EVERYTHING, TRACE, WHOLE_WAY, listens, opening, response, streams, tried
from tests.support.sdk_clients import DEADLINE
from tests.support.waiting import until
from tidings import Feature
from tidings.lanes.parked import Parked

__all__ = ["anyio_backend", "tried"]

pytestmark = pytest.mark.anyio


async def allow_slowly(principal: Any, topic: Any) -> bool:
    async with asyncio.timeout(DEADLINE):  # which works in a task only
        await asyncio.sleep(0)
    return True


class Allowing:
    async def __call__(self, principal: Any, topic: Any) -> bool:
        return await allow_slowly(principal, topic)


@pytest.mark.parametrize(
    "authorize",
    [allow_slowly, functools.partial(allow_slowly), Allowing(), lambda principal, topic: allow_slowly(None, topic)],
    ids=["a function", "a partial one", "an object", "a plain function"],
)
async def test_an_authorization_that_waits_is_waited_for(authorize: Any, tried: list[bool]) -> None:
    async with opening(authorize=authorize) as door:
        for _ in range(3):
            async with door.line() as line:
                assert b'"toolsListChanged":true' in (await response(line, listens(line)))[-1]
        assert tried == [False] * 3


async def test_an_authorization_that_waits_is_asked_once(tried: list[bool]) -> None:
    asked = []

    def authorize(principal: Any, topic: Any) -> Any:
        asked.append(asyncio.ensure_future(allow_slowly(principal, topic)))
        return asked[-1]

    async with opening(authorize=authorize) as door:
        for _ in range(2):
            async with door.line() as line:
                await response(line, listens(line))
        assert len(asked) == 3  # the first was the door's own
        assert all(each.done() for each in asked)


@pytest.mark.parametrize("is_fresh", [True, False], ids=["the first on its connection", "a later one"])
async def test_after_a_refusal_the_connection_goes_on(is_fresh: bool, tried: list[bool]) -> None:
    def authorize(principal: Any, topic: Any) -> bool:
        return topic is not Feature.PROMPTS

    async with opening(authorize=authorize, timeout_keep_alive=DEADLINE) as door:
        async with door.line() as line:  # whose head is remembered
            await line.send(listens(line, wanted={"promptsListChanged": True}))
        tried.clear()
        async with door.line() as line:
            if not is_fresh:
                await line.send(line.asks("tools/list"))
            for request_id in range(3):
                refused = await line.send(listens(line, request_id, {"promptsListChanged": True}))
                assert b"acknowledged" in refused.body
                assert b'"id":%d,"result"' % request_id in refused.body
            assert b"200" in (await line.send(line.asks("tools/list"))).status
            assert door.live.gate.count == 0
            await response(line, listens(line))
            assert streams(door) == [Parked]
        assert tried == [True] * 4


async def test_an_authorization_that_fails_refuses(caplog: pytest.LogCaptureFixture, tried: list[bool]) -> None:
    def authorize(principal: Any, topic: Any) -> bool:
        if topic == "door://r":
            raise ValueError("secret")
        return True

    async with opening(authorize=authorize) as door, door.line() as line:
        said = await response(line, listens(line, wanted=EVERYTHING))
        assert b"resourceSubscriptions" not in said[-1]
        assert b"resourcesListChanged" in said[-1]
        assert tried == [True]
        assert "authorize() failed for 'door://r'" in caplog.text


async def test_what_is_set_for_one_request_ends_with_it(tried: list[bool]) -> None:
    mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="none")
    seen = []

    def note() -> None:
        span = trace.get_current_span().get_span_context()
        seen.append((mark.get(), format(span.trace_id, "032x") if span.is_valid else None))

    def authorize(principal: Any, topic: Any) -> bool:
        note()
        mark.set("left behind")
        return True

    async with opening(authorize=authorize) as door:
        door.live.hub.last = lambda topic: note()
        seen.clear()
        for headers in ({}, {}, WHOLE_WAY):
            async with door.line() as line:
                await response(line, listens(line, meta={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}, **headers))
            await until(lambda: not streams(door))
        assert seen == [("none", TRACE), ("none", None)] * 3  # asked, and gone
        assert tried == [True] * 2


class Thing:
    """Something that can be seen to be gone."""


async def test_nothing_of_the_first_request_is_kept_for_the_streams_after_it() -> None:
    """Its keep-alives are timed for all of them."""
    mark: contextvars.ContextVar[Thing] = contextvars.ContextVar("mark")
    things: list[weakref.ref[Thing]] = []

    def authorize(principal: Any, topic: Any) -> bool:
        if not things:
            thing = Thing()
            things.append(weakref.ref(thing))
            mark.set(thing)
        return True

    async with opening(authorize=authorize) as door, door.line() as second:
        async with door.line() as first:
            await response(first, listens(first))
            await response(second, listens(second))
        await until(lambda: len(streams(door)) == 1)
        gc.collect()
        assert [thing() for thing in things] == [None]
