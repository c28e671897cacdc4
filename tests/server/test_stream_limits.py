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


def test_sum_of_what_is_watched_is_limited_per_server_and_per_caller() -> None:
    limits = StreamLimits(Policy(max_watched=100, max_watched_per_caller=60))
    uris = [f"a://{number}" for number in range(40)]
    one, two, other, known = (
        limits.reserve(principal, address)
        for principal, address in [(None, "1"), (None, "1"), (None, "2"), (Principal("ada"), "1")]
    )
    one.watch(uris)
    with pytest.raises(LimitReached, match=r"40 URIs.*add 40; Policy.max_watched_per_caller allows 60"):
        two.watch(uris)
    known.watch(uris)
    with pytest.raises(LimitReached, match=r"80 URIs.*add 40; Policy.max_watched allows 100"):
        other.watch(uris)
    one.watch(uris[:10])
    other.watch(uris)
    for slot in (one, two, other, known):
        slot.release()
    assert limits.watched == 0
    assert not limits._watched


def test_patterns_and_long_uris_count_more() -> None:
    limits = StreamLimits(Policy())
    limits.reserve(None, None).watch(["a://b", "a://*", "a://{x}", "a" * 256])
    assert limits.watched == 1 + 10 + 50 + 2


def test_releasing_a_slot_twice_counts_once() -> None:
    limits = StreamLimits(Policy())
    slot = limits.reserve(None, "192.0.2.1")
    limits.reserve(None, "192.0.2.1")
    slot.release()
    slot.release()
    assert limits.count == 1
