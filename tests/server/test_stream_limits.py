"""Limits for the number of open streams."""

from __future__ import annotations

import pytest

from tidings.errors import LimitReached
from tidings.policy import Policy
from tidings.server.authorization import Principal
from tidings.server.stream_limits import StreamLimits


def test_stream_limit_counts_a_caller_across_tokens() -> None:
    limits = StreamLimits(Policy(max_streams_per_principal=1))
    slot = limits.reserve(Principal("ada", scopes=("read",)), None)
    with pytest.raises(LimitReached, match="max_streams_per_principal"):
        limits.reserve(Principal("ada"), None)
    slot.release()
    limits.reserve(Principal("ada"), None)


def test_releasing_a_slot_twice_counts_once() -> None:
    limits = StreamLimits(Policy())
    slot = limits.reserve(None, "192.0.2.1")
    limits.reserve(None, "192.0.2.1")
    slot.release()
    slot.release()
    assert limits.count == 1
