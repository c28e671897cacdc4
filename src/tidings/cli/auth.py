"""Access to a served workspace: the bearer token, and the Host and Origin headers.

A caller can run the tools of the workspace. The server is therefore local by default, and requires a token for any
other address. There is one token for all callers, and no authorization server.
"""

from __future__ import annotations

import hmac
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tidings.client.hosts import TOKEN_VARIABLE
from tidings.errors import TidingsError

if TYPE_CHECKING:
    from mcp.server.auth.provider import AccessToken
    from mcp.server.mcpserver import MCPServer
    from mcp.server.transport_security import TransportSecuritySettings

__all__ = [
    "TOKEN_VARIABLE",
    "allow_origins",
    "erase_variable",
    "make_security",
    "read_secret",
    "read_token",
    "require_token",
]


def read_secret(name: str, file: Path) -> str:
    """Return the secret in a file. The error message uses `name`."""
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise TidingsError(f"the {name} in {file} can't be read: {reason}") from None


def read_token(token: str | None, file: Path | None) -> str | None:
    """Return the token in `file`, or `token` if there is no file."""
    if file is not None:
        token = read_secret("token", file)
    if token is not None and not re.fullmatch(r"[\x21-\x7e]+", token):
        raise TidingsError("a token is one word of printable ASCII, for example the output of `openssl rand -hex 32`")
    return token


def erase_variable(name: str) -> None:
    """Remove a variable with a secret from the environment, because no tool needs it.

    `os.environ.pop` alone leaves it in `/proc/PID/environ`, which the tools of the server can read."""
    if name in os.environ and sys.platform.startswith("linux"):
        import ctypes

        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        address = getenv(name.encode())
        if address:
            ctypes.memset(address, 0, len(ctypes.string_at(address)))
    os.environ.pop(name, None)


class _TokenVerifier:
    """The SDK's `TokenVerifier` for one fixed token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def verify_token(self, token: str) -> AccessToken | None:
        from mcp.server.auth.provider import AccessToken

        # Compare in constant time, so that a caller can't guess the token one character at a time.
        if not hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self._token):
            return None
        return AccessToken(token=token, client_id="token", scopes=[])


def require_token(server: MCPServer[Any], token: str, url: str) -> None:
    """Refuse requests without the token. Call this before the server's app is built."""
    from mcp.server.auth.settings import AuthSettings

    from tidings.sdk import internals

    # The SDK requires the URL of an issuer, but sends it to no client.
    settings = AuthSettings.model_validate({"issuer_url": url, "resource_server_url": None})
    internals.set_auth(server, settings, _TokenVerifier(token))


def make_security(host: str, hosts: Sequence[str], origins: Sequence[str]) -> TransportSecuritySettings | None:
    """Return the accepted Host and Origin headers, or None to accept all of them."""
    for origin in origins:
        split = urlsplit(origin)
        if split.scheme not in ("http", "https") or not split.netloc or split.path or "*" in split.netloc:
            raise TidingsError(f"--allow-origin {origin}: an origin looks like https://app.example.com")
    for name in hosts:
        if "/" in name or "*" in name:
            raise TidingsError(f"--allow-host {name}: give a name, or a name and a port")
    from tidings.http import local_addresses

    # An address that is not local has a token. Any name may lead to it, so only a list of hosts restricts them.
    return local_addresses.make_security(host, hosts, origins) if hosts or local_addresses.is_local(host) else None


def allow_origins(app: Any, origins: Sequence[str]) -> None:
    """Answer the preflight requests of browsers for these origins. Such requests contain no token."""
    from starlette.middleware.cors import CORSMiddleware

    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Mcp-Session-Id", "Mcp-Protocol-Version", "WWW-Authenticate"],
    )
