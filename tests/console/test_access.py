"""Access control of the console: the token, the cookie, other sites and hosts, and writing."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from types import SimpleNamespace

import httpx2
import pytest

from tests.support.console import MARKER, ConsoleServer, serving_console
from tests.support.http_server import example_server
from tidings import Live, TidingsError
from tidings.console.access import HEADERS
from tidings.http.local_addresses import make_security

pytestmark = pytest.mark.anyio

TOKEN = "correct-horse-battery-staple"


async def log_in(served: ConsoleServer, token: str = TOKEN, **headers: str) -> httpx2.Response:
    return await served.http.post("/console", data={"token": token}, headers=headers)


async def test_console_is_off_unless_it_is_asked_for() -> None:
    async with serving_console(False) as served:
        assert (await served.http.get("/console")).status_code == 404
        assert served.live.subscriptions.client_observer is None
    with pytest.raises(TidingsError, match="it must be True or one of read, write"):
        Live(example_server()).http_app(console="admin")  # type: ignore[arg-type]


async def test_every_response_has_the_headers_that_protect_the_page() -> None:
    async with serving_console() as served:
        paths = ("/console", "/console/", "/console/static/style.css", "/console/static/none", "/console/api/overview")
        for path in (*paths, "/console/api/changes/7", "/console/api/none"):
            response = await served.http.get(path)
            for name, value in HEADERS.items():
                if name != "cache-control":
                    assert response.headers[name] == value, path
        policy = HEADERS["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert (await served.http.get("/console/api/overview")).headers["cache-control"] == "no-store"


async def test_page_shows_nothing_without_the_token() -> None:
    async with serving_console("read", token=TOKEN) as served:
        page = await served.http.get("/console")
        assert (page.status_code, "<form" in page.text, "<script" in page.text) == (200, True, False)
        assert (await served.http.get("/console/static/style.css")).status_code == 200
        for path in ("/console/static/index.html", "/console/api/overview", "/console/api/events"):
            response = await served.http.get(path)
            assert (response.status_code, list(response.json())) == (401, ["error"]), path
        assert (await served.post("read", {"uri": "local://r"})).status_code == 401


async def test_login_sets_a_cookie_that_is_not_the_token_and_logout_removes_it() -> None:
    async with serving_console("read", token=TOKEN) as served:
        wrong = await log_in(served, "wrong")
        assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
        assert "not the server" in wrong.text

        answer = await log_in(served)
        cookie = answer.headers["set-cookie"]
        assert (answer.status_code, answer.headers["location"]) == (303, "/console")
        assert TOKEN not in cookie
        for flag in ("HttpOnly", "SameSite=strict", "Path=/console", "Max-Age="):
            assert flag in cookie
        assert (await served.get("overview"))["server"]["login"] is True
        assert (await served.http.get("/console")).text.count("<form") == 0

        assert (await served.http.post("/console/logout", headers=MARKER)).status_code == 200
        assert (await served.http.get("/console/api/overview")).status_code == 401


async def test_events_end_when_the_login_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_console("read", token=TOKEN) as served:
        await log_in(served)
        async with served.events() as events:
            await events.until("overview")
            later = time.time() + 13 * 3600
            monkeypatch.setattr("tidings.console.access.time", SimpleNamespace(time=lambda: later))
            with pytest.raises(EOFError):
                await events.until("never")
        assert (await served.http.get("/console/api/events")).status_code == 401


@pytest.mark.parametrize("change", [lambda text: text[:-1], lambda text: re.sub(r"^\d+", "9999999999", text), len])
async def test_forged_cookie_is_refused(change: object) -> None:
    async with serving_console("read", token=TOKEN) as served:
        await log_in(served)
        name, value = next(iter(dict(served.http.cookies).items()))
        served.http.cookies.clear()
        forged = str(change(value))  # type: ignore[operator]
        response = await served.http.get("/console/api/overview", headers={"Cookie": f"{name}={forged}"})
        assert response.status_code == 401


async def test_cookie_of_another_token_is_refused() -> None:
    async with serving_console("read", token=TOKEN) as first, serving_console("read", token="another") as second:
        await log_in(first)
        value = next(iter(dict(first.http.cookies).values()))
        name = f"tidings-console-{httpx2.URL(second.url).port}"
        response = await second.http.get("/console/api/overview", headers={"Cookie": f"{name}={value}"})
        assert response.status_code == 401


async def test_programs_send_the_token_as_a_bearer_token() -> None:
    async with serving_console("read", token=TOKEN) as served:
        for token, status in ((TOKEN, 200), ("wrong", 401), (f"{TOKEN}x", 401)):
            headers = {"Authorization": f"Bearer {token}"}
            assert (await served.http.get("/console/api/overview", headers=headers)).status_code == status


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Host": "evil.example"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"X-Forwarded-For": "192.0.2.1"},
    ],
    ids=str,
)
async def test_request_of_another_site_or_machine_is_refused(headers: Mapping[str, str]) -> None:
    async with serving_console("write") as served:
        for method, path in (("GET", "/console/api/overview"), ("POST", "/console/api/call"), ("POST", "/console")):
            response = await served.http.request(method, path, headers={**MARKER, **headers})
            assert response.status_code == 403, (method, path, response.text)
            assert "<form" in response.text if path == "/console" else list(response.json()) == ["error"]


async def test_form_of_the_page_may_have_no_origin() -> None:
    """With the policy `no-referrer`, a browser sends the form with the origin `null`."""
    async with serving_console("read", token=TOKEN, security=make_security("127.0.0.1")) as served:
        answer = await log_in(served, **{"Origin": "null", "Sec-Fetch-Site": "same-origin"})
        assert answer.status_code == 303
        for site in ({}, {"Sec-Fetch-Site": "cross-site"}):
            answer = await log_in(served, **{"Origin": "null", **site})
            assert (answer.status_code, "<form" in answer.text) == (403, True)


async def test_link_from_another_site_opens_the_page_and_no_more() -> None:
    async with serving_console() as served:
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        assert (await served.http.get("/console", headers=link)).status_code == 200
        assert (await served.http.get("/console/api/overview", headers=link)).status_code == 403


async def test_own_page_is_accepted_by_every_name_of_this_machine() -> None:
    async with serving_console() as served:
        port = httpx2.URL(served.url).port
        for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
            headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
            assert (await served.http.get("/console/api/overview", headers=headers)).status_code == 200


async def test_foreign_host_is_refused_with_a_token_too() -> None:
    security = make_security("127.0.0.1", ["console.example"])
    async with serving_console("read", token=TOKEN, security=security) as served:
        for host, status in (("console.example", 200), ("evil.example", 421)):
            headers = {"Host": host, "Authorization": f"Bearer {TOKEN}"}
            assert (await served.http.get("/console/api/overview", headers=headers)).status_code == status


async def test_read_only_console_changes_nothing() -> None:
    async with serving_console("read") as served:
        for path in ("call", "read", "prompt", "clients/c1/end"):
            response = await served.post(path)
            assert response.status_code == 403
            assert "--console=write" in response.json()["error"]


async def test_post_needs_the_header_that_a_form_can_not_send() -> None:
    async with serving_console("write") as served:
        response = await served.http.post("/console/api/call", json={"name": "clock", "arguments": {}})
        assert (response.status_code, "X-Tidings-Console" in response.text) == (403, True)


async def test_files_outside_of_the_page_are_not_served() -> None:
    async with serving_console() as served:
        for name in ("..%2Fapp.py", "%2e%2e/app.py", "app.py", ".hidden", "none.js"):
            assert (await served.http.get(f"/console/static/{name}")).status_code == 404, name


async def test_invalid_requests_get_one_sentence() -> None:
    async with serving_console("write") as served:
        for answer in (
            await served.http.get("/console/api/changes", params={"limit": "many"}),
            await served.http.get("/console/api/item", params={"feature": "none", "key": "a"}),
            await served.http.get(f"/console/api/clients/{'9' * 5000}"),
            await served.http.post("/console/api/call", content=b"[1]", headers=MARKER),
            await served.http.post("/console/api/call", content=b"{", headers=MARKER),
            await served.http.post("/console/api/call", content=b"{" + b" " * (5 << 20), headers=MARKER),
        ):
            assert answer.status_code == 400, answer.text
            assert list(answer.json()) == ["error"]
