"""Which addresses are public, and which are those of this machine."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.addresses import ALLOWED, REFUSED
from tidings.wire.addresses import is_loopback, origin_of, reason_not_public


@pytest.mark.parametrize("address", REFUSED)
def test_address_that_is_not_public_has_a_reason(address: str) -> None:
    assert reason_not_public(ipaddress.ip_address(address)) is not None


@pytest.mark.parametrize("address", ALLOWED)
def test_public_address_is_allowed(address: str) -> None:
    assert reason_not_public(ipaddress.ip_address(address)) is None


@given(st.ip_addresses(v=4))
def test_ipv6_address_that_contains_an_ipv4_address_is_treated_like_it(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    outer = [
        ipaddress.IPv6Address((0xFFFF << 32) | number),
        ipaddress.IPv6Address((0x2002 << 112) | (number << 80)),
        ipaddress.IPv6Address((0x64FF9B << 96) | number),
    ]
    assert {reason_not_public(each) for each in outer} == {reason_not_public(address)}


@given(st.ip_addresses())
def test_address_that_python_calls_private_is_not_public(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    is_sixtofour = isinstance(address, ipaddress.IPv6Address) and address.sixtofour is not None
    assume(not is_sixtofour)  # newer versions of Python call them all private; the test above covers them
    if address.is_private or address.is_multicast or address.is_link_local or address.is_loopback:
        assert reason_not_public(address) is not None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "[0:0:0:0:0:0:0:1]", "::ffff:127.0.0.2"])
def test_loopback_address_is_recognized_in_every_form(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.example.com", ""])
def test_other_hosts_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("HTTPS://user:password@Example.com:443/path?query", "https://example.com"),
        ("http://example.com:8080", "http://example.com:8080"),
        ("http://[0:0:0:0:0:0:0:1]:80/", "http://[::1]"),
    ],
)
def test_spellings_of_one_origin_are_equal(url: str, origin: str) -> None:
    assert origin_of(url) == origin == origin_of(origin)
