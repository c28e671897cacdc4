"""Origins, and IP addresses: which addresses are public, and which are loopback.

Webhooks and downloads use the same check. The download helper of tools loads this file alone, in a Python without
site-packages, so it imports only the standard library.
"""

from __future__ import annotations

import ipaddress
from typing import TypeAlias
from urllib.parse import urlsplit

__all__ = ["Address", "is_loopback", "origin_of", "parse_address", "reason_not_public"]

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_DEFAULT_PORTS = {"http": 80, "https": 443}

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SPECIAL_NETWORKS = tuple(
    map(
        ipaddress.ip_network,
        ("192.0.0.0/24", "192.88.99.0/24", "64:ff9b:1::/48", "2001::/23", "3fff::/20", "5f00::/16"),
    )
)
"""Networks for special use that some Python versions do not know. One cloud provider has metadata at 192.0.0.192."""
_PROVIDER_ADDRESSES = {ipaddress.ip_address("168.63.129.16"): "Azure's own services"}
"""Public addresses that lead to internal services of a cloud provider."""


def origin_of(url: str) -> str:
    """Return the scheme, host and port of a URL. Two spellings give the same text. User name and password
    are left out.

    Raise `ValueError` if it is no URL with a host."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError(f"{url!r} has no host")
    address = parse_address(parts.hostname)
    host = parts.hostname if address is None else f"[{address}]" if address.version == 6 else str(address)
    port = "" if parts.port in (None, _DEFAULT_PORTS.get(parts.scheme)) else f":{parts.port}"
    return f"{parts.scheme}://{host}{port}"


def parse_address(host: str) -> Address | None:
    """Return the address, with or without the brackets of a URL; None if `host` is a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address."""
    address = parse_address(host)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    return host == "localhost" if address is None else address.is_loopback


def reason_not_public(address: Address) -> str | None:
    """Return why a request for a client must not go to an address; None if it may."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return reason_not_public(inner)
        if address.is_site_local:
            return "an address of a private network"
    if address.is_loopback or address.is_unspecified:
        return "an address of this server's own machine"
    if address.is_link_local:
        return "a link-local address, which cloud providers use for metadata"
    if address.is_multicast:
        return "a multicast address"
    is_special = any(address in network for network in _SPECIAL_NETWORKS)
    if address.is_private or address.is_reserved or not address.is_global or is_special:
        return "an address of a private network"
    return f"an address of {_PROVIDER_ADDRESSES[address]}" if address in _PROVIDER_ADDRESSES else None
