"""Access control of the console: the token, the cookie, and the headers of browsers.

* Without a token, only programs of this machine may use it. With one, every request needs the token (`Authorization:
  Bearer`) or the cookie that the login form sets.
* Requests from pages of other sites are refused (`Origin`, `Sec-Fetch-Site`). Requests for a host name that is not
  accepted are refused too (DNS rebinding).
* The page may load nothing from other hosts, and no other page may show it in a frame.

The cookie does not contain the token. It contains its expiry time, signed with a key that is derived from the token. So
all workers of a server accept it.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import time
from typing import TYPE_CHECKING, Final

from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from tidings.http.local_addresses import is_local_request

if TYPE_CHECKING:
    from mcp.server.transport_security import TransportSecuritySettings
    from starlette.requests import Request

__all__ = ["HEADERS", "Access", "error"]

HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""The headers of every response of the console."""

MARKER = "x-tidings-console"
"""The header that each POST of the page has. A form on another site can't send it."""

_LIFETIME = 12 * 3600
"""Seconds after which a user has to log in again: one working day."""

_MAX_BODY = 8192
"""Bytes of the body of a login request."""


# Without `action`, the browser posts to the address of the page, and keeps what follows the #.
_LOGIN_FORM: Final = """<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <title>Tidings console</title>
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <link rel="icon" href="{root}/static/icon.svg">
    <link rel="stylesheet" href="{root}/static/style.css">
  </head>
  <body class="login">
    <main>
      <h1>Tidings console</h1>
      <form method="post">
        <label>Token <input type="password" name="token" autocomplete="current-password" required autofocus></label>
        <button>Sign in</button>
      </form>
      {problem}
    </main>
  </body>
</html>
"""


class Access:
    """Decides whether a request to the console is accepted."""

    def __init__(self, token: str | None, security: TransportSecuritySettings | None, mode: str) -> None:
        """`security` has the accepted Host headers; None accepts all. Without a token, requests must be local."""
        self._token = token
        self._security = security
        self.can_write = mode == "write"
        self._key = b"" if token is None else hashlib.sha256(b"tidings console\0" + token.encode()).digest()

    @property
    def has_login(self) -> bool:
        return self._token is not None

    async def refuse(self, request: Request, *, is_page: bool) -> tuple[int, str] | None:
        """Return the status and the reason if the host or the site of a request is refused; None if it is accepted."""
        if self._security is not None and not await _is_accepted(request.headers.get("host", ""), self._security):
            return 421, f"{_host(request)} is not a name of this server; give it with --allow-host"
        if self._token is None and not is_local_request(request):
            return 403, (
                "Without a token, the console is for programs of this machine, at a local address; "
                "start the server with a token"
            )
        # A link to the page itself is harmless, and the cookie is not sent with it.
        is_link = is_page and request.method == "GET" and request.headers.get("sec-fetch-mode") == "navigate"
        if not is_link and not _is_same_site(request):
            return 403, "A page of another site must not use the console; open it in a tab of its own"
        return None

    def is_logged_in(self, request: Request) -> bool:
        if self._token is None:
            return True
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(sent.strip()):
            return True
        return self._is_valid_cookie(request.cookies.get(_cookie_name(request), ""))

    def refuse_post(self, request: Request, *, writes: bool) -> Response | None:
        """Return the error response if a POST to the API is refused; None if it is accepted."""
        if request.headers.get(MARKER) != "1":
            return error(403, "A POST to the console needs the header X-Tidings-Console: 1")
        if writes and not self.can_write:
            return error(403, "The console is read-only; start the server with --console=write")
        return None

    async def log_in(self, request: Request) -> Response:
        """Check the token of the login form. Respond with the cookie, or with the form again."""
        from urllib.parse import parse_qs

        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_BODY:
                return error(413, "The login form is too large")
        sent = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].strip()
        if not self.has_login:
            return _to_page(request)
        if not self._is_token(sent):
            return self.login_form(request, "This token is not the server's. Try again.", status=401)
        response = _to_page(request)
        self._set_cookie(request, response, self._sign(int(time.time()) + _LIFETIME), _LIFETIME)
        return response

    def log_out(self, request: Request) -> Response:
        response = JSONResponse({"loggedOut": True})
        self._set_cookie(request, response, "", 0)
        return response

    def login_form(self, request: Request, problem: str = "", status: int = 200) -> Response:
        root = html.escape(f"{request.scope.get('root_path', '')}/console", quote=True)
        problem = f'<p class="error" role="alert">{html.escape(problem)}</p>' if problem else ""
        return HTMLResponse(_LOGIN_FORM.format(root=root, problem=problem), status)

    def _is_token(self, sent: str) -> bool:
        # In constant time, so that a caller can't guess the token one character at a time.
        return self._token is not None and hmac.compare_digest(
            sent.encode("utf-8", "surrogateescape"), self._token.encode()
        )

    def _sign(self, expires: int) -> str:
        """Return the value of a cookie."""
        return f"{expires}.{hmac.new(self._key, str(expires).encode(), 'sha256').hexdigest()}"

    def _is_valid_cookie(self, cookie: str) -> bool:
        expires, _, _ = cookie.partition(".")
        if not (expires.isascii() and expires.isdecimal()) or len(expires) > 12:
            return False
        return hmac.compare_digest(cookie.encode("utf-8", "replace"), self._sign(int(expires)).encode()) and (
            int(expires) > time.time()
        )

    def _set_cookie(self, request: Request, response: Response, value: str, lifetime: int) -> None:
        response.set_cookie(
            _cookie_name(request),
            value,
            max_age=lifetime,
            path=f"{request.scope.get('root_path', '')}/console",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )


def error(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status)


def _to_page(request: Request) -> Response:
    return RedirectResponse(f"{request.scope.get('root_path', '')}/console", 303)


def _cookie_name(request: Request) -> str:
    """Return a cookie name that has the port of this server, because browsers send a cookie to all ports of a host."""
    return f"tidings-console-{request.url.port or 'default'}"


def _host(request: Request) -> str:
    return request.headers.get("host", "")[:200] or "An empty name"


async def _is_accepted(host: str, security: TransportSecuritySettings) -> bool:
    """Return whether a Host header is accepted. `_is_same_site` checks Origin, with stricter rules than the SDK."""
    from mcp.server.transport_security import TransportSecurityMiddleware
    from starlette.requests import Request

    only_host = Request({"type": "http", "method": "GET", "headers": [(b"host", host.encode("latin-1", "replace"))]})
    return await TransportSecurityMiddleware(security).validate_request(only_host, is_post=False) is None


def _is_same_site(request: Request) -> bool:
    """Return whether a request comes from the console's own page, or from no page at all."""
    site, origin = request.headers.get("sec-fetch-site", "none"), request.headers.get("origin")
    if site not in ("none", "same-origin"):
        return False
    if origin == "null" and site == "same-origin":
        return True  # a form of a page with the policy `no-referrer`; only the browser can say `same-origin`
    # The scheme may differ: a proxy in front of the server may end TLS.
    return origin is None or origin.partition("://")[2].lower() == request.headers.get("host", "").lower() != ""
