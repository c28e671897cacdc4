"""Legacy sessions of workers that pass requests to each other, in the event loop of the test."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from tests.support.command import Notifications
from tests.support.http_server import example_server
from tests.support.messages import ACCEPT_BOTH
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE, until
from tests.support.wire_clients import LegacyWire, Wire, http
from tidings import Live
from tidings.http.affinity import SessionAffinity

__all__ = ["http"]

pytestmark = pytest.mark.anyio

SESSION = "Mcp-Session-Id"


@dataclass
class Worker:
    app: Any
    server: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{address_of(self.server)[1]}/mcp"

    def abort_connections(self) -> None:
        """Do what the system does with the connections of a process that is killed."""
        for connection in list(self.server.server_state.connections):
            getattr(connection, "transport").abort()  # noqa: B009  # uvicorn does not declare it


@asynccontextmanager
async def running(app: Any, name: str, folder: Path, number: int = 2) -> AsyncIterator[Worker]:
    """Run one of several workers, on a port of its own and on its Unix socket."""
    sockets = {str(each): str(folder / str(each)) for each in range(number)}
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
    listeners[1].bind(sockets[name])
    affinity = SessionAffinity(app, name, sockets)
    try:
        async with run_uvicorn(affinity, sockets=listeners, http="httptools", lifespan="auto") as server:
            yield Worker(app, server)
    finally:
        for listener in listeners:
            listener.close()


@asynccontextmanager
async def two(apps: list[Any], folder: Path) -> AsyncIterator[list[Worker]]:
    async with running(apps[0], "0", folder) as first, running(apps[1], "1", folder) as second:
        yield [first, second]


class InTurn(httpx2.AsyncBaseTransport):
    """Sends each request to the next of several ports, on a new connection."""

    def __init__(self, urls: list[str]) -> None:
        self._ports = itertools.cycle([httpx2.URL(url).port for url in urls])

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.url = request.url.copy_with(port=next(self._ports))
        transport = httpx2.AsyncHTTPTransport(verify=False)
        response = await transport.handle_async_request(request)
        closing = response.aclose

        async def close() -> None:
            await closing()
            await transport.aclose()

        response.aclose = close  # type: ignore[method-assign]
        return response


@pytest.mark.parametrize("start", [0, 1])
async def test_sdk_client_uses_its_session_on_every_worker(tmp_path: Path, start: int) -> None:
    """With `start` 0 or 1, requests reach the worker without the session: only POST, or GET streams too."""
    lives = [Live(example_server()) for _ in range(2)]
    async with two([live.http_app() for live in lives], tmp_path) as workers:
        urls = [worker.url for worker in workers]
        in_turn = InTurn(urls[start:] + urls[:start])
        told = Notifications()
        async with (
            asyncio.timeout(DEADLINE),
            httpx2.AsyncClient(transport=in_turn, timeout=DEADLINE) as client,
            Client(streamable_http_client(urls[0], http_client=client), mode="legacy", message_handler=told) as session,
        ):
            for _ in range(3):
                assert len((await session.list_tools()).tools) == 2
                result = await session.call_tool("weather", {"city": "Oslo"})
                assert getattr(result.content[0], "text", "") == "Oslo"
            await until(lambda: sum(len(live.hub) for live in lives) == 1)
            for live in lives:
                live.tools.remove("clock")
            await told.until("notifications/tools/list_changed")
        await until(lambda: not any(len(live.hub) for live in lives))  # DELETE came to the right worker too


async def test_modern_requests_and_unknown_sessions_stay_where_they_are(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    seen: list[str] = []

    def recording(name: str, app: Any) -> Any:
        async def record(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                seen.append(name)
            await app(scope, receive, send)

        return record

    apps = [recording(name, Live(example_server()).http_app()) for name in "ab"]
    async with two(apps, tmp_path) as workers:
        url = workers[0].url
        assert (await Wire(url, http).post("tools/list")).status_code == 200
        for unknown in ("0.x", "7.x", "x", ".", "1"):
            wire = LegacyWire(url, http, session_id=unknown)
            answer = await http.post(url, json={}, headers=wire.headers)
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, "Session not found")
        assert seen == ["a"] * 6


async def test_sessions_of_a_worker_that_is_gone_are_unknown(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    apps = [Live(example_server()).http_app() for _ in range(2)]
    async with running(apps[0], "0", tmp_path) as first:
        async with running(apps[1], "1", tmp_path) as second:
            wire = LegacyWire(second.url, http)
            await wire.shake_hands()
            wire.url = first.url
            async with wire.stream() as stream:
                second.server.should_exit = True
                await until(lambda: not (tmp_path / "1").exists(), action=(tmp_path / "1").unlink)
                while await stream.event():
                    pass  # the worker that stops ends the stream
        for session_id in (wire.session_id, "unknown"):
            for method in ("POST", "GET", "DELETE"):
                headers = wire.headers | {SESSION: session_id}
                answer = await http.request(method, first.url, headers=headers, content=b"{}")
                assert (answer.status_code, answer.json()["error"]["message"]) == (404, "Session not found")
        await wire_again(first.url, http)


async def wire_again(url: str, http: httpx2.AsyncClient) -> None:
    wire = LegacyWire(url, http)
    await wire.shake_hands()
    assert wire.session_id.startswith("0.")


def app_of(respond: Callable[[Any, Any, Any], Any]) -> Any:
    """Return an ASGI app for HTTP without a lifespan."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await respond(scope, receive, send)

    return app


async def unused(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("the request belongs to the other worker")


async def test_headers_target_and_body_reach_the_other_worker_unchanged(
    tmp_path: Path, http: httpx2.AsyncClient
) -> None:
    async def echo(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        found = {
            "headers": [[name.decode(), value.decode()] for name, value in scope["headers"]],
            "target": [scope["method"], scope["raw_path"].decode(), scope["query_string"].decode()],
            "size": len(body + message["body"]),
        }
        headers = [(b"content-type", b"application/json"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")]
        await send({"type": "http.response.start", "status": 418, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(found).encode()})

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    async with two([app_of(unused), app_of(echo)], tmp_path) as workers:
        sent = {"Host": "board.example.com", "Origin": "https://example.com", "Authorization": "Bearer x"}
        headers = ACCEPT_BOTH | sent | {SESSION: "1.abc"}
        for content in (b"x" * 1_000_000, chunks(), None):
            request = http.build_request("PUT", f"{workers[0].url}/%61?b=%20", headers=headers, content=content)
            answer = await http.send(request)
            assert answer.status_code == 418
            assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
            assert len(answer.headers.get_list("date")) == 1
            found = answer.json()
            expected = [[name.lower().decode(), value.decode()] for name, value in request.headers.raw]
            expected = [[name, "abc" if name == SESSION.lower() else value] for name, value in expected]
            assert sorted(found["headers"]) == sorted(expected)
            assert found["target"] == ["PUT", "/mcp/%61", "b=%20"]
            assert found["size"] == (1_000_000 if content is not None else 0)


async def test_disconnect_of_the_client_reaches_the_other_worker(tmp_path: Path, http: httpx2.AsyncClient) -> None:
    is_open, is_closed = asyncio.Event(), asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        is_open.set()
        if scope["method"] == "GET":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        is_closed.set()

    async with asyncio.timeout(DEADLINE), two([app_of(unused), app_of(wait)], tmp_path) as workers:
        headers = {SESSION: "1.abc"}
        async with http.stream("GET", workers[0].url, headers=headers) as response:
            assert await anext(response.aiter_bytes()) == b"first"
        await is_closed.wait()
        is_open.clear()
        is_closed.clear()
        call = asyncio.create_task(http.post(workers[0].url, headers=headers, content=b"{}"))
        await is_open.wait()
        call.cancel()
        await is_closed.wait()


@pytest.mark.parametrize("is_started", [True, False])
async def test_response_breaks_off_with_the_worker_that_sends_it(
    tmp_path: Path, http: httpx2.AsyncClient, is_started: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the response has started, the request is handled by a worker that does not know the session."""
    is_open = asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if is_started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
        is_open.set()
        await receive()

    async with asyncio.timeout(DEADLINE), two([Live(example_server()).http_app(), app_of(wait)], tmp_path) as workers:
        wire = LegacyWire(workers[0].url, http, session_id="1.abc")
        call = asyncio.create_task(http.post(wire.url, headers=wire.headers, content=b"{}"))
        await is_open.wait()
        workers[1].abort_connections()
        if is_started:
            with pytest.raises(httpx2.RemoteProtocolError):
                await call
        else:
            assert (await call).json()["error"]["message"] == "Session not found"
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_the_first_worker_serves_the_console_for_all_of_them(tmp_path: Path) -> None:
    lives = [Live(example_server()) for _ in range(2)]
    async with (
        two([live.http_app(console=True) for live in lives], tmp_path) as workers,
        httpx2.AsyncClient() as client,
    ):
        started = set()
        for worker in workers:
            url = worker.url.replace("/mcp", "/console/api")
            overview = (await client.get(f"{url}/overview")).json()
            started.add(overview["server"]["started"])
            forged = {"X-Tidings-Client": "127.0.0.1", "X-Forwarded-For": "192.0.2.1"}
            assert (await client.get(f"{url}/overview", headers=forged)).status_code == 403
            async with client.stream("GET", f"{url}/events") as events:
                assert await anext(events.aiter_lines()) == "event: hello"
        assert len(started) == 1


async def test_address_of_a_passed_request_is_that_of_its_client(tmp_path: Path) -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            seen.append((scope["client"][0], [name for name, _ in scope["headers"] if b"tidings" in name]))
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async with two([app, app], tmp_path) as workers, httpx2.AsyncClient() as client:
        for worker in workers:
            for headers in ({}, {"X-Tidings-Client": "192.0.2.1"}):
                await client.get(worker.url.replace("/mcp", "/console"), headers=headers)
    assert seen == [("127.0.0.1", [])] * 4
