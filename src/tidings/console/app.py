"""The routes of the console: the page and its files, the API, and the stream of events.

`docs/console.md` describes them. Every response has the headers of `tidings.console.access`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tidings.console.access import HEADERS, Access, error
from tidings.console.stream import EventStream
from tidings.console.views import Views
from tidings.core.encoding import safe_json
from tidings.errors import NotFound, TidingsError

__all__ = ["ConsoleRoutes", "IsLoggedIn"]

_STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".html": "text/html",
    ".txt": "text/plain",
}
_PUBLIC: Final = frozenset({"style.css", "icon.svg"})
"""The files that are served without a login, because the login form needs them."""
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")

_MAX_BODY = 4 << 20
"""Bytes of the body of a request. The SDK has the same limit."""

IsLoggedIn = Callable[[], bool]
_Handler = Callable[[Request], Awaitable[Response]]


class ConsoleRoutes:
    """Makes the routes of one console."""

    def __init__(self, views: Views, access: Access, make_stream: Callable[[IsLoggedIn], EventStream]) -> None:
        self._views = views
        self._make_stream = make_stream
        self._access = access

    def make(self) -> list[Route]:
        views = self._views
        return [
            Route("/console", self._page(self._index)),
            Route("/console/", self._page(_redirect_to_page)),
            Route("/console", self._page(self._access.log_in), methods=["POST"]),
            Route("/console/logout", self._post(self._log_out, writes=False), methods=["POST"]),
            Route("/console/static/{name}", self._page(self._file)),
            Route("/console/api/overview", self._get(views.overview)),
            Route("/console/api/changes", self._get(views.changes)),
            Route("/console/api/changes/{id}", self._get(views.change)),
            Route("/console/api/clients", self._get(views.clients)),
            Route("/console/api/clients/{id}", self._get(views.client)),
            Route("/console/api/clients/{id}/view", self._get(views.client_view)),
            Route("/console/api/clients/{id}/end", self._post(self._call(views.end_client)), methods=["POST"]),
            Route("/console/api/catalog", self._get(views.catalog)),
            Route("/console/api/item", self._get(views.item)),
            Route("/console/api/call", self._post(self._call(views.call_tool)), methods=["POST"]),
            Route("/console/api/read", self._post(self._call(views.read_resource)), methods=["POST"]),
            Route("/console/api/prompt", self._post(self._call(views.get_prompt)), methods=["POST"]),
            Route("/console/api/events", self._api(self._events)),
            Route("/console/{path:path}", self._api(_not_found), methods=["GET", "POST"]),
        ]

    # Guards

    def _page(self, handler: _Handler) -> _Handler:
        """Guard a handler that needs no login. The handler may check the login itself."""
        return partial(self._guard, handler, True)

    def _api(self, handler: _Handler) -> _Handler:
        """Guard a handler that needs a login."""
        return partial(self._guard, handler, False)

    def _get(self, view: Callable[[Mapping[str, str]], Any]) -> _Handler:
        """Return a handler that responds with a view, made from the parameters of the query and the path."""

        async def respond(request: Request) -> Response:
            return _json(view({**request.query_params, **request.path_params}))

        return self._api(respond)

    def _post(self, handler: _Handler, *, writes: bool = True) -> _Handler:
        async def respond(request: Request) -> Response:
            return self._access.refuse_post(request, writes=writes) or await handler(request)

        return self._api(respond)

    def _call(self, action: Callable[[dict[str, Any]], Awaitable[Any]]) -> _Handler:
        """Return a handler that calls an action with the members of the body and the parameters of the path."""

        async def respond(request: Request) -> Response:
            return _json(await action({**await _read_object(request), **request.path_params}))

        return respond

    async def _guard(self, handler: _Handler, is_page: bool, request: Request) -> Response:
        try:
            refusal = await self._access.refuse(request, is_page=is_page)
            if refusal is None and not is_page and not self._access.is_logged_in(request):
                refusal = 401, "The console needs the server's token: log in, or send it as a bearer token"
            response = await handler(request) if refusal is None else self._refuse(request, *refusal)
        except NotFound as problem:
            response = error(404, str(problem))
        except TidingsError as problem:
            response = error(400, str(problem))
        except ClientDisconnect:
            return Response(status_code=400)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    def _refuse(self, request: Request, status: int, reason: str) -> Response:
        is_form = request.method == "POST" and request.url.path.endswith("/console")
        return self._access.login_form(request, reason, status) if is_form else error(status, reason)

    # Handlers

    async def _index(self, request: Request) -> Response:
        if not self._access.is_logged_in(request):
            return self._access.login_form(request)
        return _send_file("index.html")

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _PUBLIC and not self._access.is_logged_in(request):
            return error(401, "The console needs the server's token: log in first")
        return _send_file(name)

    async def _log_out(self, request: Request) -> Response:
        return self._access.log_out(request)

    async def _events(self, request: Request) -> Response:
        stream = self._make_stream(lambda: self._access.is_logged_in(request))
        return StreamingResponse(stream.events(), media_type="text/event-stream")


async def _redirect_to_page(request: Request) -> Response:
    return RedirectResponse(f"{request.scope.get('root_path', '')}/console", 308)


async def _not_found(request: Request) -> Response:
    return error(404, "The console has no such page; see docs/console.md")


def _send_file(name: str) -> Response:
    path = _STATIC / name
    kind = _TYPES.get(path.suffix)
    if not _FILE_NAME.fullmatch(name) or kind is None or not path.is_file():
        return error(404, "The console has no such file")
    return Response(path.read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})


def _json(value: Any) -> Response:
    return Response(safe_json(value), media_type="application/json")


async def _read_object(request: Request) -> dict[str, Any]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY:
            raise TidingsError(f"The request is larger than {_MAX_BODY >> 20} MiB")
    try:
        return msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise TidingsError(f"The body of the request must be a JSON object: {problem}") from None
