"""`/health/live`, `/health/ready` and `/metrics`, beside the endpoint of a server.

They stand outside its authentication, since whoever asks for them (an orchestrator, Prometheus) is no client of it.
Health says yes or no, and which lists are waited for. Metrics are for this machine alone unless their owner says
otherwise: they hold no names of items or clients, but how busy a server is may be nobody else's business.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tidings.metrics import CONTENT_TYPE, render

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["Audience", "add_routes", "routes"]

Audience = Literal["local", "anyone"]

_LOCAL_HOST = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?", re.IGNORECASE)


def routes(live: Live, *, health: bool = True, metrics: Audience | None = "local") -> list[Route]:
    """For an app of your own: `Starlette(routes=[Mount("/", live.http_app()), *routes(live)])`."""

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
        return Response(render(live), media_type=CONTENT_TYPE)

    found = [Route("/health/live", is_alive), Route("/health/ready", is_ready)] if health else []
    return found + ([Route("/metrics", tell_metrics)] if metrics is not None else [])


def add_routes(app: Any, live: Live, *, health: bool, metrics: Audience | None) -> None:
    app.router.routes.extend(routes(live, health=health, metrics=metrics))


def _is_local(request: Request) -> bool:
    """Whether a process of this machine asks, and not a web page that has its browser do so under another name."""
    if request.client is None or not _LOCAL_HOST.fullmatch(request.headers.get("host", "")):
        return False
    if "forwarded" in request.headers or "x-forwarded-for" in request.headers:
        return False  # somebody else, through a proxy
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
