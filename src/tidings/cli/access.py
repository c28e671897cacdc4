"""Who may reach a served workspace: the bearer token, the addresses, and the Host and Origin headers.

Whoever reaches a workspace runs its tools. So it is local by default, and elsewhere wants a token. Not an
authorization server: one token, known to whoever may call.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tidings.errors import TidingsError

if TYPE_CHECKING:
    from mcp.server.auth.provider import AccessToken
    from mcp.server.mcpserver import MCPServer
    from mcp.server.transport_security import TransportSecuritySettings

__all__ = ["allow_origins", "is_local", "read_token", "require_token", "transport_security"]

_LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def is_local(host: str) -> bool:
    """Whether only this machine can reach what is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(token: str | None, file: Path | None) -> str | None:
    if file is not None:
        try:
            token = file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise TidingsError(f"the token in {file} can't be read: {reason}") from None
    if token is None:
        return None
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise TidingsError("a token is one word of printable ASCII, as `openssl rand -hex 32` prints it")
    return token


class _OneToken:
    """A `TokenVerifier` of the SDK's."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def verify_token(self, token: str) -> AccessToken | None:
        from mcp.server.auth.provider import AccessToken

        # In the same time whatever was sent, so that the token can't be guessed a character at a time.
        if not hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self._token):
            return None
        return AccessToken(token=token, client_id="token", scopes=[])


def require_token(server: MCPServer[Any], token: str, url: str) -> None:
    """Let nobody through without the token. Before the server's app is made."""
    from mcp.server.auth.settings import AuthSettings

    from tidings.server import internals as seams

    # Nobody issues tokens here: the issuer is a field that must be filled in, and is shown to no one.
    settings = AuthSettings.model_validate({"issuer_url": url, "resource_server_url": None})
    seams.set_auth(server, settings, _OneToken(token))


def transport_security(host: str, hosts: Sequence[str], origins: Sequence[str]) -> TransportSecuritySettings | None:
    """The Host and Origin headers that are let in; None leaves it to the SDK, which guards local addresses."""
    for origin in origins:
        split = urlsplit(origin)
        if split.scheme not in ("http", "https") or not split.netloc or split.path or "*" in split.netloc:
            raise TidingsError(f"--allow-origin {origin}: give it as https://app.example.com, as a browser does")
    for each in hosts:
        if "/" in each or "*" in each:
            raise TidingsError(f"--allow-host {each}: give a name, or a name and a port")
    if not hosts and (not origins or not is_local(host)):
        return None
    from mcp.server.transport_security import TransportSecuritySettings

    return TransportSecuritySettings(
        allowed_hosts=[pattern for each in (*_LOCAL_HOSTS, *hosts) for pattern in _host_patterns(each)],
        allowed_origins=[*(f"http://{each}:*" for each in _LOCAL_HOSTS), *origins],
    )


def _host_patterns(host: str) -> list[str]:
    """A name without a port stands for every port, the usual one among them."""
    return [host] if re.search(r":\d+$", host) else [host, f"{host}:*"]


def allow_origins(app: Any, origins: Sequence[str]) -> None:
    """Let browsers' scripts of these origins in: they ask first, and without a token."""
    from starlette.middleware.cors import CORSMiddleware

    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Mcp-Session-Id", "Mcp-Protocol-Version", "WWW-Authenticate"],
    )
