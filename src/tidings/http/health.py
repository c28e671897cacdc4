"""`/health/live`, `/health/ready` and `/metrics`, beside the endpoint of a server.

They are outside its authentication, because an orchestrator and Prometheus are not clients of the server. Health says
which lists are not read yet. Metrics are for processes of this machine unless the user says otherwise: they contain no
names of items or clients, but they show how busy a server is.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from typing import Literal, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tidings.core.addresses import is_loopback, parse_address
from tidings.errors import TidingsError

__all__ = ["Audience", "routes"]

Audience = Literal["local", "anyone"]

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LOCAL_HOST = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?", re.IGNORECASE)

_PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip"})
"""Headers that proxies add, besides all `x-forwarded-…`."""


def routes(
    find_missing: Callable[[], list[str]],
    find_degraded: Callable[[], list[str]],
    render_metrics: Callable[[], str],
    *,
    health: bool,
    metrics: Audience | None,
    token: str | None,
) -> list[Route]:
    """Return the routes. `find_missing` returns the lists that the server needs before it is ready. `find_degraded`
    returns what is out of order although the server is ready.

    With a token, a request for local metrics must contain it: a proxy on the same machine may not be recognizable.
    """
    if metrics not in (None, *get_args(Audience)):
        raise TidingsError(f"metrics is {metrics!r}; it must be None or one of {', '.join(get_args(Audience))}")

    async def is_alive(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def is_ready(request: Request) -> Response:
        waiting = find_missing()
        if not waiting:
            reasons = find_degraded()
            return JSONResponse({"status": "degraded", "because": reasons} if reasons else {"status": "ok"})
        return JSONResponse({"status": "not ready", "waiting for": waiting}, 503, {"retry-after": "1"})

    async def get_metrics(request: Request) -> Response:
        if metrics == "local" and not _is_local(request):
            return PlainTextResponse("Metrics are for the machine itself; see docs/telemetry.md.\n", 403)
        if metrics == "local" and token is not None and not _has_token(request, token):
            return PlainTextResponse("Metrics need the server's token.\n", 401, {"www-authenticate": "Bearer"})
        return Response(render_metrics(), media_type=_METRICS_TYPE)

    found = [Route("/health/live", is_alive), Route("/health/ready", is_ready)] if health else []
    return found + ([Route("/metrics", get_metrics)] if metrics is not None else [])


def _has_token(request: Request, token: str) -> bool:
    sent = request.headers.get("authorization", "")
    return hmac.compare_digest(sent.encode("utf-8", "surrogateescape"), f"Bearer {token}".encode())


def _is_local(request: Request) -> bool:
    """Return whether a process of this machine asks. A web page in its browser uses another host name, and is
    refused."""
    if request.client is None or not _LOCAL_HOST.fullmatch(request.headers.get("host", "")):
        return False
    if any(name in _PROXY_HEADERS or name.startswith("x-forwarded-") for name in request.headers):
        return False
    return parse_address(request.client.host) is not None and is_loopback(request.client.host)
