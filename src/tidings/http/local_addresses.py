"""Local addresses, and the Host and Origin headers that a server on one of them accepts.

An attacker's web page can have its host name resolve to this machine, and then call the server (DNS rebinding). The
SDK checks the headers only for `127.0.0.1`, `localhost` and `::1`, but the whole network 127.0.0.0/8 is local, and an
address has several notations.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

from mcp.server.transport_security import TransportSecuritySettings

from tidings.wire.addresses import is_loopback, parse_address

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["is_local", "is_local_request", "make_security", "needs_security"]

_LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_CHECKED_BY_SDK = ("127.0.0.1", "localhost", "::1")

_LOCAL_HOST = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?", re.IGNORECASE)

_PROXY_HEADERS = frozenset(
    {
        *("forwarded", "via", "cdn-loop", "x-real-ip", "x-client-ip", "x-cluster-client-ip", "true-client-ip"),
        *("cf-connecting-ip", "fastly-client-ip", "fly-client-ip", "x-envoy-external-address"),
    }
)
"""Headers that proxies add, besides all that begin with `x-forwarded`. A proxy that adds none can't be recognised."""


def is_local(host: str) -> bool:
    """Return whether only this machine can reach a host: all of its addresses are loopback addresses."""
    addresses = _resolve(host)
    return bool(addresses) and all(map(is_loopback, addresses))


def is_local_request(request: Request) -> bool:
    """Return whether a process of this machine sent a request. A web page in its browser uses another host name, and
    is refused."""
    if request.client is None or not _LOCAL_HOST.fullmatch(request.headers.get("host", "")):
        return False
    if any(name in _PROXY_HEADERS or name.startswith("x-forwarded") for name in request.headers):
        return False
    return parse_address(request.client.host) is not None and is_loopback(request.client.host)


def needs_security(host: Any) -> TypeGuard[str]:
    """Return whether `host` is a local address for which the SDK checks no headers."""
    return isinstance(host, str) and host not in _CHECKED_BY_SDK and is_local(host)


def make_security(host: str, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> TransportSecuritySettings:
    """Return settings that accept the names of this machine, the names of the local address `host`, and `hosts`."""
    local = dict.fromkeys(_LOCAL_HOSTS)
    if is_local(host):
        local |= dict.fromkeys(f"[{name}]" if ":" in name else name for name in (host.strip("[]"), *_resolve(host)))
    return TransportSecuritySettings(
        allowed_hosts=[pattern for name in (*local, *hosts) for pattern in _host_patterns(name)],
        allowed_origins=[*(f"http://{name}:*" for name in local), *origins],
    )


def _host_patterns(host: str) -> list[str]:
    """Return the patterns for a host. Without a port, they match every port, and a header without a port."""
    return [host] if re.search(r":\d+$", host) else [host, f"{host}:*"]


def _resolve(host: str) -> list[str]:
    if is_loopback(host):
        return [host.strip("[]")]
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []
