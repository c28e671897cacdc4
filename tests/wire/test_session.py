from __future__ import annotations

import pytest

from tidings.wire.session import split_messages


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        (b'{"id": 1}', [b'{"id": 1}']),
        (b' [{"id": 1}, {"id": [2]}]', [b'{"id": 1}', b'{"id": [2]}']),  # allowed by 2025-03-26
        (b"", []),
        (b"<html>", []),
        (b"[" * 100_000, []),
    ],
)
def test_the_messages_of_a_body_keep_their_bytes(body: bytes, messages: list[bytes]) -> None:
    assert split_messages(body) == messages
