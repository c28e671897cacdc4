"""Servers of FastMCP and of the TypeScript SDK that a test controls as it controls a `ScriptedServer`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.support.scripted_server import ScriptedServer
from tests.support.uvicorn_server import run_uvicorn
from tests.typescript.node import node

__all__ = ["FastServer", "NodeServer"]

SCRIPT = Path(__file__).parents[1] / "typescript" / "server.mjs"


class FastServer(ScriptedServer):
    """A `FastMCP`. It never notifies."""

    @asynccontextmanager
    async def serving(self, port: int = 0, *, live: bool = False) -> AsyncIterator[Any]:
        import fastmcp

        self._fast = fastmcp.FastMCP("fast", list_page_size=self.page_size)
        self._applied: dict[str, dict[str, str]] = {name: {} for name in self.lists}
        await self.changed()
        async with run_uvicorn(self._fast.http_app(), port=port, http="h11") as server:
            yield server

    async def changed(self) -> None:
        provider = self._fast.local_provider
        for name, items in self.lists.items():
            applied, kind = self._applied[name], name[:-1]
            for key in [key for key in applied if items.get(key) != applied[key]]:
                getattr(provider, f"remove_{kind}")(key)
            for key in [key for key in items if items[key] != applied.get(key)]:
                options: Any = {"name": key, "description": items[key]}
                if name == "templates":
                    self._fast.resource(key, **options)(lambda n: n)
                elif name == "resources":
                    self._fast.resource(key, **options)(lambda: "")
                else:
                    getattr(self._fast, kind)(**options)(lambda: "")
            self._applied[name] = dict(items)

    async def notify(self, feature: str, meta: dict[str, Any] | None = None) -> None:
        pass


class NodeServer(ScriptedServer):
    """A server of the TypeScript SDK, in a process of its own."""

    @asynccontextmanager
    async def serving(self, port: int = 0, *, live: bool = False) -> AsyncIterator[Any]:
        command = [node() or "", str(SCRIPT), str(port), json.dumps(self.lists)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        try:
            self.port = int(await process.stdout.readline())
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{self.port}") as self._control:
                yield self
        finally:
            process.kill()
            await process.wait()

    def url(self, server: Any) -> str:  # type: ignore[override]
        return f"http://127.0.0.1:{self.port}/mcp"

    async def changed(self) -> None:
        await self._post("/lists", json=self.lists)

    async def notify(self, feature: str, meta: dict[str, Any] | None = None) -> None:
        await self._post(f"/notify/{feature}")

    async def drop(self, server: Any) -> None:
        await self._post("/drop")

    async def _post(self, path: str, **options: Any) -> None:
        (await self._control.post(path, **options)).raise_for_status()
