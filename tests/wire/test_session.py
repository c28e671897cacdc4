"""Sessions over both transports, with real servers. Covers `wire/http.py` and `wire/stdio.py`."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.support.defective_server import DefectiveServer
from tests.support.raw_server import raw_session
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE
from tidings.wire.http import HttpClientSession
from tidings.wire.session import Unanswered, split_messages
from tidings.wire.sse import MAX_MESSAGE
from tidings.wire.stdio import StdioClientSession

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        (b'{"id": 1}', [b'{"id": 1}']),
        (b' [{"id": 1}, {"id": [2]}]', [b'{"id": 1}', b'{"id": [2]}']),  # allowed by 2025-03-26
        (rb'[{"text": "\ud800"}, NaN]', [rb'{"text": "\ud800"}', b"NaN"]),
        (b"", []),
        (b"<html>", []),
        (b"[" * 100_000, []),
    ],
)
def test_the_messages_of_a_body_keep_their_bytes(body: bytes, messages: list[bytes]) -> None:
    assert split_messages(body) == messages


@pytest.mark.parametrize("transport", ["http", "stdio"])
@pytest.mark.parametrize(
    "answer",
    [
        '{"jsonrpc":"2.0","id":ID.0,"result":{"text":"x"}}',
        '{"jsonrpc":"2.0","id":ID,"result":{"text":"x","score":NaN}}',
        r'{"jsonrpc":"2.0","id":ID,"result":{"text":"x","half":"\ud800"}}',
    ],
)
async def test_what_is_not_quite_json_is_read_over_both_transports(transport: str, answer: str) -> None:
    async with raw_session(transport, answer) as session:
        assert session.discovery is not None
        assert (session.discovery.result or {})["text"] == "x"


@pytest.mark.parametrize("versions", ["5", "null", '"2026-07-28"', '["2025-11-25"]', '["2026-07-28"]'])
async def test_an_era_is_supported_only_if_the_server_lists_its_version(versions: str) -> None:
    answer = f'{{"jsonrpc":"2.0","id":ID,"result":{{"supportedVersions":{versions}}}}}'
    async with raw_session("http", answer) as session:
        assert session.supports_era is (versions == '["2026-07-28"]')


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('no port', file=sys.stderr)", "the process ended: no port"),
        (
            f"sys.stdout.write('x' * {MAX_MESSAGE + 1}); sys.stdout.flush(); sys.stdin.read()",
            "a line of more than 64 MB",
        ),
    ],
)
async def test_a_process_that_cannot_answer_is_an_error_with_the_reason(program: str, reason: str) -> None:
    async with StdioClientSession([sys.executable, "-c", f"import sys; {program}"], "modern", DEADLINE) as session:
        with pytest.raises(Unanswered, match=reason):
            await session.open()
        with pytest.raises(Unanswered, match=reason):
            await session.request("ping")


async def test_each_answer_on_stdio_reaches_its_request_in_any_order() -> None:
    program = """
import json, sys
held = []
for line in sys.stdin:
    message = json.loads(line)
    held.append({"jsonrpc": "2.0", "id": message["id"], "result": {"method": message["method"]}})
    if message["method"] != "first":
        for answer in reversed(held):
            print(json.dumps(answer), flush=True)
        held = []
"""
    async with StdioClientSession([sys.executable, "-c", program], "modern", DEADLINE) as session:
        await session.open()
        answers = await asyncio.gather(session.request("first"), session.request("second"))
        assert [answer.result for answer in answers] == [{"method": "first"}, {"method": "second"}]


async def test_the_end_of_a_legacy_session_reaches_the_server() -> None:
    async with run_uvicorn(DefectiveServer(), http="h11") as running:
        url = f"http://127.0.0.1:{address_of(running)[1]}/mcp"
        async with HttpClientSession(url, "legacy", DEADLINE, headers={}) as session:
            await session.open()
            assert session.supports_era
            assert session.session_id is not None
            statuses = [(await session.status_of("POST", session.session_id)).content]
            await session.end()
            statuses.append((await session.status_of("POST", session.session_id)).content)
    assert statuses == ["HTTP 200", "HTTP 404"]
