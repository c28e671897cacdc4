"""Streams that are opened at their connection, in our own process: the same promises as on the whole way, byte by byte.

Who may open one is in test_opening_authorized, what the connection does in test_opening_connection.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import anyio
import pytest
from starlette.middleware import Middleware

from tests.support.faults.wire import Stream
from tests.support.loops import anyio_backend
from tests.support.opening import EVERYTHING, WHOLE_WAY, listens, opening, response, streams, tried
from tests.support.sdk_clients import DEADLINE
from tests.support.waiting import until
from tidings import Feature, Policy
from tidings.lanes.answers import known_door
from tidings.lanes.parked import Parked

__all__ = ["anyio_backend", "tried"]

pytestmark = pytest.mark.anyio

# The same bytes

ACCEPTED: dict[str, dict[str, Any]] = {
    "a list": {},
    "all there is": {"wanted": EVERYTHING},
    "a pattern": {"wanted": {"resourceSubscriptions": ["door://*"]}},
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
async def test_a_stream_begins_with_the_same_bytes_on_either_way(case: str, tried: list[bool]) -> None:
    async with opening() as door:
        said = []
        for headers in ({}, {}, WHOLE_WAY):
            async with door.line() as line:
                said.append(await response(line, listens(line, **ACCEPTED[case], **headers)))
                assert streams(door) == [Parked]
            await until(lambda: not streams(door))
        assert tried == [True, True]
        assert said[0] == said[1] == said[2]
        assert door.live.gate.count == 0
        assert door.server.server_state.total_requests == 3 + 2  # the first were the door's own


REFUSED: dict[str, dict[str, Any]] = {
    "nothing wanted": {"wanted": {}},
    "nothing allowed": {"wanted": {"promptsListChanged": True}},
    "too many URIs": {"wanted": {"resourceSubscriptions": ["door://r", "door://s"]}},
    "no list of URIs": {"wanted": {"resourceSubscriptions": "door://r"}},
    "no object": {"wanted": []},
    "an id that is none": {"request_id": True},
    "another version in the body": {"meta": {"io.modelcontextprotocol/protocolVersion": "2025-11-25"}},
    "another method in the header": {"Mcp_Method": "tools/list"},
    "another host": {"Host": "evil.example"},
    "another origin": {"Origin": "https://evil.example"},
    "no event stream": {"Accept": "application/json"},
    "another type": {"Content_Type": "text/plain"},
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_refused_is_refused_with_the_same_bytes_on_either_way(case: str, tried: list[bool]) -> None:
    policy = Policy(max_uris=1, list_memory=3600)
    asked = []

    def authorize(principal: Any, topic: Any) -> bool:
        asked.append(topic)
        return topic is not Feature.PROMPTS

    async with opening(policy=policy, authorize=authorize) as door:
        asked.clear()
        said = []
        for headers in ({}, {}, WHOLE_WAY):
            async with door.line() as line:
                request = listens(line, **{**REFUSED[case], **headers})
                said.append(await response(line, request, is_stream=False))
        assert said[0] == said[1] == said[2]
        assert (True in tried) is case.startswith("nothing"), "errors are worded on the whole way"
        assert asked == ([Feature.PROMPTS] * 3 if case == "nothing allowed" else [])
        assert not streams(door)
        assert door.live.gate.count == 0


async def test_a_body_that_is_no_text_is_refused_with_the_same_bytes(tried: list[bool]) -> None:
    async with opening() as door:
        said = []
        for headers in ({}, WHOLE_WAY):
            async with door.line() as line:
                request = listens(line, "mine", **headers).replace(b"mine", b"\xff\xffne")
                said.append(await response(line, request, is_stream=False))
        assert said[0] == said[1]
        assert b"400" in said[0][0]


@pytest.mark.parametrize("knob", ["max_streams", "max_streams_per_address"])
async def test_one_stream_too_many_is_refused_with_the_same_bytes(knob: str, tried: list[bool]) -> None:
    async with opening(policy=Policy().but(**{knob: 2})) as door, door.line() as one, door.line() as other:
        await response(one, listens(one))
        await response(other, listens(other))
        said = []
        for headers in ({}, WHOLE_WAY):
            async with door.line() as line:
                said.append(await response(line, listens(line, **headers), is_stream=False))
        assert said[0] == said[1]
        assert b"503" in said[0][0]
        assert tried == [True, True, False]
        one.writer.close()
        await until(lambda: door.live.gate.count == 1)
        async with door.line() as line:
            await response(line, listens(line))
        assert tried[-1]


async def test_whose_address_a_proxy_names_is_counted_by_it(tried: list[bool]) -> None:
    async with opening(policy=Policy(max_streams_per_address=1)) as door, door.line() as one, door.line() as other:
        await response(one, listens(one))
        await response(other, listens(other, X_Forwarded_For="192.0.2.1"))
        assert tried == [True]
        async with door.line() as line:
            assert b"503" in (await response(line, listens(line, X_Forwarded_For="192.0.2.1"), is_stream=False))[0]


# What stands before it


async def test_a_new_rule_for_hosts_counts_at_once(tried: list[bool]) -> None:
    async with opening() as door:
        for _ in range(2):
            async with door.line() as line:
                await response(line, listens(line))
        settings = door.live.server.session_manager.security_settings
        settings.allowed_hosts[:] = ["elsewhere"]
        async with door.line() as line:
            assert b"421" in (await response(line, listens(line), is_stream=False))[0]
        assert tried == [True, True]


async def test_a_middleware_of_the_users_sees_every_stream(tried: list[bool]) -> None:
    async with opening() as door:
        seen = []

        async def middleware(ctx: Any, call_next: Any) -> Any:
            seen.append(ctx.method)
            return await call_next(ctx)

        async with door.line() as line:
            await response(line, listens(line))
        door.live.lowlevel.middleware.append(middleware)
        async with door.line() as line:
            await response(line, listens(line))
        assert seen == ["subscriptions/listen"]
        assert tried == [True]


async def test_an_app_with_a_middleware_has_no_shortcut(tried: list[bool]) -> None:
    class Labelled:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.app(scope, receive, send)

    def prepare(app: Any) -> None:
        app.user_middleware.append(Middleware(Labelled))

    async with opening(prepare=prepare) as door:
        for _ in range(2):
            async with door.line() as line:
                await response(line, listens(line))
                assert streams(door) == [Parked]
            await until(lambda: not streams(door))
        assert known_door(door.server.config) is None
        assert tried == []


async def test_the_log_of_requests_has_streams_too(caplog: pytest.LogCaptureFixture, tried: list[bool]) -> None:
    caplog.set_level(logging.INFO, "uvicorn.access")
    async with opening(access_log=True) as door:
        caplog.clear()
        for headers in ({}, {}, WHOLE_WAY):
            async with door.line() as line:
                await response(line, listens(line, **headers))
        said = [record.getMessage().partition(" - ")[2] for record in caplog.records if record.name == "uvicorn.access"]
        assert said == ['"POST /mcp HTTP/1.1" 200'] * 3
        assert tried == [True, True]


async def test_all_who_ask_the_same_are_told_as_if_they_were_alone() -> None:
    """What is remembered of a request is shared: nobody's changes it."""
    async with opening() as door, door.line() as first, door.line() as second:
        for request_id, line in enumerate((first, second)):
            said = await response(line, listens(line, request_id, EVERYTHING))
            meta = json.loads(said[-1].split(b"data: ")[1])["params"]["_meta"]
            assert meta["io.modelcontextprotocol/subscriptionId"] == request_id
        first.writer.close()
        await until(lambda: len(streams(door)) == 1)
        door.live.resources.updated("door://r")
        with anyio.fail_after(DEADLINE):
            told = await Stream(second.reader, second.writer).event()
        assert told is not None
        assert told["method"] == "notifications/resources/updated"
