"""The options of the apps that the servers make, for type checkers: those of the SDK and those of FastMCP.

At runtime the server's own method checks them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from mcp.server.auth.provider import OAuthAuthorizationServerProvider, TokenVerifier
    from mcp.server.auth.settings import AuthSettings
    from mcp.server.streamable_http import EventStore
    from mcp.server.transport_security import TransportSecuritySettings
    from starlette.middleware import Middleware
    from starlette.routing import Route

    from tidings.http.health import Audience

__all__ = ["AppOptions", "RunOptions"]


class AppOptions(TypedDict, total=False):
    """Options of `Live.http_app()`."""

    # Of all servers
    json_response: bool | None
    stateless_http: bool | None
    event_store: EventStore | None
    retry_interval: int | None
    session_idle_timeout: float | Literal["auto"] | None

    # Of the SDK's servers
    streamable_http_path: str
    max_request_body_size: int
    max_sessions: int | None
    transport_security: TransportSecuritySettings | None
    host: str

    # Of the SDK's low-level server
    auth: AuthSettings | None
    token_verifier: TokenVerifier | None
    auth_server_provider: OAuthAuthorizationServerProvider[Any, Any, Any] | None
    custom_starlette_routes: list[Route] | None
    debug: bool

    # Of FastMCP
    path: str | None
    middleware: list[Middleware] | None
    host_origin_protection: bool | Literal["auto"] | None
    allowed_hosts: list[str] | None
    allowed_origins: list[str] | None


class RunOptions(AppOptions, total=False):
    """Options of `Live.run("http")`."""

    port: int
    log_level: str | int | None
    health: bool
    metrics: Audience | None
    console: bool | Literal["read", "write"]
