"""Tidings stays ahead of the SDK that it is built on. What is compared is the CPU that both servers take in one run.

How far ahead is the bench's to say (`make bench-peers`); here only a loss of most of it is caught.
"""

from __future__ import annotations

import sys

import pytest

from bench.peers.guard import delivering, listing, times_less

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="the CPU of another process is read as Linux shows it"),
]

LEAST = 4.0


def test_a_delivery_takes_a_quarter_of_the_sdks_cpu_at_most() -> None:
    assert times_less(delivering) >= LEAST


def test_a_list_takes_a_quarter_of_the_sdks_cpu_at_most() -> None:
    assert times_less(listing) >= LEAST
