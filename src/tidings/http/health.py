"""`/health/live`, `/health/ready` and `/metrics`, beside the endpoint of a server.

They stand outside its authentication, since whoever asks for them (an orchestrator, Prometheus) is no client of it.
Health says yes or no, and which lists are waited for. Metrics are for this machine alone unless their owner says
otherwise: they hold no names of items or clients, but how busy a server is may be nobody else's business.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tidings.telemetry.metrics import CONTENT_TYPE, render

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["Audience", "add_routes", "routes"]

Audience = Literal["local", "anyone"]

_LOCAL_HOST = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?", re.IGNORECASE)


_PROXIED = frozenset({"forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip"})
"""What proxies add; all `x-forwarded-…` do too."""


def routes(
    live: Live, *, health: bool = True, metrics: Audience | None = "local", token: str | None = None
) -> list[Route]:
    """For an app of your own, which has to run the lifespan of the server's:

    `app = live.http_app()`
    `Starlette(routes=[*routes(live), Mount("/", app)], lifespan=app.router.lifespan_context)`

    With a token, local metrics are for who sends it: a proxy on the same machine may leave no sign of itself.
    """

    async def is_alive(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def is_ready(request: Request) -> Response:
        waiting = live.waits_for()
        if not waiting:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "not ready", "waiting for": waiting}, 503, {"retry-after": "1"})

    async def tell_metrics(request: Request) -> Response:
        if metrics == "local" and not _is_local(request):
            return PlainTextResponse("Metrics are for the machine itself; see docs/telemetry.md.\n", 403)
        if metrics == "local" and token is not None and not _bears(request, token):
            return PlainTextResponse("Metrics need the server's token.\n", 401, {"www-authenticate": "Bearer"})
        return Response(render(live.metrics), media_type=CONTENT_TYPE)

    found = [Route("/health/live", is_alive), Route("/health/ready", is_ready)] if health else []
    return found + ([Route("/metrics", tell_metrics)] if metrics is not None else [])


def add_routes(app: Any, live: Live, *, health: bool, metrics: Audience | None, token: str | None = None) -> None:
    app.router.routes.extend(routes(live, health=health, metrics=metrics, token=token))


def _bears(request: Request, token: str) -> bool:
    sent = request.headers.get("authorization", "")
    return hmac.compare_digest(sent.encode("utf-8", "surrogateescape"), f"Bearer {token}".encode())


def _is_local(request: Request) -> bool:
    """Whether a process of this machine asks, and not a web page that has its browser do so under another name."""
    if request.client is None or not _LOCAL_HOST.fullmatch(request.headers.get("host", "")):
        return False
    if any(name in _PROXIED or name.startswith("x-forwarded-") for name in request.headers):
        return False  # somebody else, through a proxy
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    # As a socket for both families has it.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
