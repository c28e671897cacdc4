"""Modern lists and streams before Starlette's own layers, in an app that has nothing else there.

Error pages, exception handlers and the router take longer than the answer. Where nobody's authentication or middleware
has to see a request first, what is known is sent at once and a stream is opened; everything else goes on as it came.
"""

from __future__ import annotations

from typing import Any

from mcp.server.streamable_http_manager import StreamableHTTPASGIApp
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route

from tidings.lanes.channel import Receive, Scope, Send
from tidings.lanes.front import Front
from tidings.lanes.guard import leave_word
from tidings.lanes.listen import ListenStream

__all__ = ["Shortcut", "front_of"]


def front_of(app: Any) -> tuple[str, Front] | None:
    """The path of an app of ours, and the front that stands there with nothing before it: whatever would have to see
    a request first, authentication above all, is in one of these places."""
    if type(app) is not Starlette or app.user_middleware or not app.routes:
        return None
    route = app.routes[0]
    if type(route) is not Route or route.app is not route.endpoint or route.methods:
        return None
    if type(route.endpoint) is not StreamableHTTPASGIApp:
        return None
    front = route.endpoint.session_manager.asgi_app
    is_plain = route.path.startswith("/") and route.path.isascii() and not set(route.path) & set("{}%?# ")
    return (route.path, front) if isinstance(front, Front) and is_plain else None


class Shortcut:
    """In front of an app's middleware stack. Made with it, when nothing more can be added."""

    def __init__(self, app: Any, stack: Any) -> None:
        self._stack = stack
        self._app = app
        self._path = ""
        self._front: Front | None = None
        if (found := front_of(app)) is not None:
            self._path, self._front = found
        self._route: BaseRoute | None = app.routes[0] if app.routes else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            self._front is not None
            and scope["type"] == "http"
            and scope["path"] == self._path
            and scope["method"] == "POST"
            and self._app.routes[0] is self._route
        ):
            rest = await self._front.answer_at_once(scope, receive, send)
            if isinstance(rest, ListenStream):
                await rest.until_lost(receive)
                return
            if rest is None:
                return
            receive = rest
        elif self._app.user_middleware and scope["type"] == "http":
            leave_word(scope, receive)
        await self._stack(scope, receive, send)
