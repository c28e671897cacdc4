"""The same raw request to a server of the SDK and to the same server in `Live`: the responses are the same.

Differences that docs/live.md names are removed before the comparison. `TIDINGS_SEED=random` sends other requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import pytest

from tests.support.differential.requests import HttpRequest, random_request
from tests.support.differential.responses import HttpAnswer, answer_of, comparable, socket_answer_of
from tests.support.http_server import example_server
from tests.support.stress import sized
from tests.support.uvicorn_server import address_of, run_uvicorn
from tidings import Live, Policy

SERVERS: dict[str, tuple[int, dict[str, Any]]] = {
    "sessions": (sized(1_000, 10_000), {}),
    "json": (sized(500, 5_000), {"json_response": True}),
    "stateless": (sized(500, 5_000), {"stateless_http": True}),
}
"""The number of requests, and the options of the app."""
MAX_SESSIONS = 6
"""Sessions that requests refer to. Older ones are left to their own."""


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVERS)
def test_live_server_responds_like_the_plain_one(kind: str, seed: int) -> None:
    cases, options = SERVERS[kind]

    async def compare_apps() -> list[str]:
        async with both_apps(options) as apps:
            return await compare(seed, cases, [partial(answer_of, app) for app in apps])

    with quiet_logs():
        differences = asyncio.run(compare_apps())
    assert not differences, "\n\n".join(differences)


def test_live_server_responds_like_the_plain_one_under_uvicorn(seed: int) -> None:
    async def compare_ports() -> list[str]:
        plain, live = make_apps({})
        async with (
            run_uvicorn(plain, http="httptools") as plain_server,
            run_uvicorn(live, http="httptools") as live_server,
        ):
            ports = [address_of(server)[1] for server in (plain_server, live_server)]
            return await compare(seed + 1, 400, [partial(socket_answer_of, port) for port in ports])

    with quiet_logs():
        differences = asyncio.run(compare_ports())
    assert not differences, "\n\n".join(differences)


async def compare(seed: int, cases: int, senders: list[Callable[[HttpRequest], Awaitable[HttpAnswer]]]) -> list[str]:
    """Send requests to a plain and to a live server, and return the first differences, as text."""
    differences: list[str] = []
    sessions: list[tuple[bytes, bytes]] = []
    for number in range(cases):
        request = random_request(seed, number, sessions=len(sessions))
        index = request.session_number
        ids = sessions[index] if index is not None and index < len(sessions) else (None, None)
        plain, live = [await send(request.with_session(each)) for send, each in zip(senders, ids, strict=True)]
        expected, actual = comparable(plain), comparable(live)
        if expected != actual and not is_documented(request, plain, live):
            case = f"seed {seed}, request {number}: {request}"
            differences.append(f"{case}\nplain: {expected}\nlive:  {actual}")
            if len(differences) == 5:
                break
        opened = plain.session_id, live.session_id
        if plain.status == live.status == 200 and opened[0] and opened[1] and opened not in sessions:
            sessions = [*sessions[1 - MAX_SESSIONS :], (opened[0], opened[1])]
    return differences


def is_documented(request: HttpRequest, plain: HttpAnswer, live: HttpAnswer) -> bool:
    """Return whether a difference is one that docs/live.md names."""
    names = {name for name, _ in request.headers}
    body = b"".join(request.chunks).replace(b"\0", b"")  # it may be UTF-16
    if request.method == "GET":
        # The SDK without an event store does not respond to it.
        return b"last-event-id" in names and plain.status == 0
    if b"subscriptions/listen" in body:
        # The SDK fails with an internal error if the trace context is not text; Tidings ignores it.
        # An id that is not valid Unicode can't be repeated in each notification.
        return b"Internal server error" in plain.body or b"unpaired surrogate" in live.body
    # A plain server does not have these methods.
    return b"resources/subscribe" in body and b"-32601" in plain.body


@asynccontextmanager
async def both_apps(options: dict[str, Any]) -> AsyncIterator[tuple[Any, Any]]:
    """Run the apps of `make_apps` in this event loop."""
    async with AsyncExitStack() as stack:
        apps = make_apps(options)
        for app in apps:
            await stack.enter_async_context(app.router.lifespan_context(app))
        yield apps


def make_apps(options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the app of a plain server, and that of the same server in `Live`."""
    options = {"max_request_body_size": 50_000, **options}
    live = Live(example_server(), policy=Policy(list_max_age=3600))
    return example_server().streamable_http_app(**options), live.http_app(**options)


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Drop the log lines about invalid requests, which take longer than the requests."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
