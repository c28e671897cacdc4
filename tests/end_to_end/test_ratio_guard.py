"""Tidings takes at most a quarter of the SDK's CPU, measured in one run.

This finds only large regressions; `make bench-peers` measures the exact ratios.
"""

from __future__ import annotations

import sys

import pytest

from bench.peers.guard import delivering, listing, times_less

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the CPU of other processes from Linux"),
]

LEAST = 4.0


def test_delivery_takes_at_most_a_quarter_of_the_sdk_cpu() -> None:
    assert times_less(delivering) >= LEAST


def test_list_takes_at_most_a_quarter_of_the_sdk_cpu() -> None:
    assert times_less(listing) >= LEAST
