"""`/health/live`, `/health/ready` and `/metrics`."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.lowlevel
import httpx2
import mcp_types as types
import pytest
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.support.sdk_clients import DEADLINE, KINDS, serving_all
from tidings import Live, TidingsError
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def asked(app: Any) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1:80") as client,
    ):
        yield client


async def test_every_kind_of_server_is_live_and_ready() -> None:
    servers = {kind: (kind, {"app": {"health": True}, "auth": True}) for kind in KINDS}
    with serving_all(servers) as urls:
        async with httpx2.AsyncClient(timeout=DEADLINE) as http:
            for url in urls.values():
                for path in ("/health/live", "/health/ready"):
                    answer = await http.get(url.replace("/mcp", path))
                    assert (answer.status_code, answer.json()) == (200, {"status": "ok"}), (url, answer.text)
                assert (await http.get(url.replace("/mcp", "/metrics"))).status_code == 404


async def test_server_is_ready_only_after_its_lists_were_read() -> None:
    is_broken = True

    async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
        if is_broken:
            raise RuntimeError("the database is away")
        return types.ListToolsResult(tools=[])

    live = Live(Server("fragile", on_list_tools=list_tools))
    own = Starlette(routes=live.health_routes())
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(own), base_url="http://127.0.0.1") as before:
        assert (await before.get("/health/live")).status_code == 200
        early = await before.get("/health/ready")
        assert (early.status_code, early.json()["waiting for"]) == (503, ["the server"])
    async with asked(live.http_app(health=True)) as client:
        answer = await client.get("/health/ready")
        assert answer.status_code == 503
        assert answer.json() == {"status": "not ready", "waiting for": ["tools"]}
        assert answer.headers["retry-after"] == "1"
        assert (await client.get("/health/live")).status_code == 200
        is_broken = False
        await live.refresh()
        assert (await client.get("/health/ready")).json() == {"status": "ok"}
        is_broken = True
        with pytest.raises(Exception, match=r"database|Internal"):
            await live.refresh("tools")
        assert (await client.get("/health/ready")).json()["waiting for"] == ["tools"]
        live.stop()
        assert (await client.get("/health/ready")).status_code == 503


async def test_server_whose_list_hangs_is_not_ready() -> None:
    answers = anyio.Event()
    answers.set()
    asked_for = anyio.Event()

    async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
        asked_for.set()
        await answers.wait()
        return types.ListToolsResult(tools=[])

    live = Live(Server("slow", on_list_tools=list_tools))
    async with asked(live.http_app(health=True)) as client, anyio.create_task_group() as tasks:
        assert (await client.get("/health/ready")).json() == {"status": "ok"}
        answers, asked_for = anyio.Event(), anyio.Event()
        tasks.start_soon(live.refresh, "tools")
        with anyio.fail_after(DEADLINE):
            await asked_for.wait()
        live.list_reader.ready_timeout = DEADLINE
        assert (await client.get("/health/ready")).status_code == 200  # for a while, it is only slow
        live.list_reader.ready_timeout = 0.0
        answer = await client.get("/health/ready")
        assert (answer.status_code, answer.json()["waiting for"]) == (503, ["tools"])
        assert (await client.get("/health/live")).status_code == 200
        answers.set()
        with anyio.fail_after(DEADLINE):
            while (await client.get("/health/ready")).status_code != 200:
                await anyio.lowlevel.checkpoint()


async def test_routes_work_in_another_app() -> None:
    """As in the documentation."""
    live = Live(MCPServer("mine"))
    app = live.http_app()
    own = Starlette(routes=[*live.health_routes(), Mount("/", app)], lifespan=app.router.lifespan_context)
    async with asked(own) as client:
        for path in ("/health/live", "/health/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.post("/mcp", json={})).status_code != 404


@pytest.mark.parametrize(
    ("address", "headers", "status"),
    [
        ("127.0.0.1", {}, 200),
        ("::1", {}, 200),
        ("::ffff:127.0.0.1", {}, 200),
        ("::ffff:203.0.113.9", {}, 403),
        ("203.0.113.9", {}, 403),
        ("127.0.0.1", {"x-real-ip": "203.0.113.9"}, 403),
        ("127.0.0.1", {"via": "1.1 proxy"}, 403),
        ("127.0.0.1", {"cdn-loop": "cdn.example"}, 403),
        ("127.0.0.1", {"x-forwarded": "for=203.0.113.9"}, 403),
        ("127.0.0.1", {"x-forwarded-proto": "https"}, 403),
        ("127.0.0.1", {"x-forwarded-for": "203.0.113.9"}, 403),
        ("127.0.0.1", {"forwarded": "for=203.0.113.9"}, 403),
        ("127.0.0.1", {"x-client-ip": "203.0.113.9"}, 403),
        ("127.0.0.1", {"true-client-ip": "203.0.113.9"}, 403),
        ("127.0.0.1", {"cf-connecting-ip": "203.0.113.9"}, 403),
        ("127.0.0.1", {"host": "localhost:8765"}, 200),
        ("127.0.0.1", {"host": "127.0.0.1.attacker.example"}, 403),
        ("a socket of its own", {}, 403),
        (None, {}, 403),
    ],
)
async def test_metrics_are_refused_to_other_machines_and_proxies(
    address: str | None, headers: dict[str, str], status: int
) -> None:
    app = Starlette(routes=Live(MCPServer("mine")).health_routes())
    transport = httpx2.ASGITransport(app, client=None if address is None else (address, 1))  # type: ignore[arg-type]
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.get("/metrics", headers=headers)).status_code == status


def test_unknown_audience_of_metrics_is_refused() -> None:
    with pytest.raises(TidingsError, match="metrics is 'off'; it must be None or one of local, anyone"):
        Live(MCPServer("mine")).http_app(metrics=cast(Any, "off"))


async def test_anyone_can_read_public_metrics() -> None:
    app = Starlette(routes=Live(MCPServer("mine")).health_routes(health=False, metrics="anyone"))
    transport = httpx2.ASGITransport(app, client=("203.0.113.9", 1))
    async with httpx2.AsyncClient(transport=transport, base_url="http://metrics.example") as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/health/live")).status_code == 404


async def test_local_metrics_need_the_token_if_there_is_one() -> None:
    app = Starlette(routes=Live(MCPServer("mine")).health_routes(token="s3cret"))
    async with asked(app) as client:
        for sent, status in (("", 401), ("Bearer s3cre", 401), ("Bearer ü", 401), ("Bearer s3cret", 200)):
            headers = [(b"authorization", sent.encode())]
            assert (await client.get("/metrics", headers=headers)).status_code == status, sent
        assert (await client.get("/health/live")).status_code == 200


async def test_workspace_without_its_folder_is_not_ready(tmp_path: Path) -> None:
    folder = tmp_path / "board"
    (folder / "tools").mkdir(parents=True)
    live = Live(Workspace(folder, poll=0))
    async with asked(live.http_app(health=True)) as client:
        assert (await client.get("/health/ready")).status_code == 200
        shutil.rmtree(folder)
        answer = await client.get("/health/ready")
        assert (answer.status_code, answer.json()["waiting for"]) == (503, ["its source"])
        folder.mkdir()
        with anyio.fail_after(DEADLINE):
            assert (await client.get("/health/ready")).status_code == 200
