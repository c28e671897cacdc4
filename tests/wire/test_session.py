"""Sessions over both transports, with real servers. Covers `wire/http.py` and `wire/stdio.py`."""

from __future__ import annotations

import pytest

from tests.support.raw_server import raw_session
from tests.support.waiting import DEADLINE
from tidings.wire.session import split_messages

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
    async with raw_session(transport, answer, DEADLINE) as session:
        assert session.discovery is not None
        assert (session.discovery.result or {})["text"] == "x"
