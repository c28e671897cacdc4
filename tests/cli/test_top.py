"""`tidings top`, and the console of `tidings serve`."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
from pathlib import Path

import httpx2
import pytest

from tests.support.command import DEADLINE, HELLO, TOKEN, run_command, running, serving, start_command, tidings
from tests.support.receiver import receiving
from tests.support.terminal import Screen

pytestmark = pytest.mark.anyio


async def test_overview_is_printed_at_once_and_after_each_change(board: Path) -> None:
    async with serving(board) as server, running("top", server.url, "--json") as top:
        first = json.loads(await top.line())
        assert (first["mode"], first["problems"]) == ("read", [])
        (board / "tools" / "hello.py").write_text(HELLO)
        while json.loads(await top.line())["catalog"]["tools"]["items"] == first["catalog"]["tools"]["items"]:
            pass
        async with running("top", server.url.replace("/mcp", "")) as plain:
            assert "0 clients" in await plain.line()
            assert await plain.interrupt() == ""
        assert await top.interrupt() == ""
        await server.stop()


async def test_overview_continues_after_the_server_restarts(board: Path) -> None:
    async with serving(board, "--json") as server:
        port = httpx2.URL(server.url).port
        async with running("top", server.url, "--json") as top:
            first = json.loads(await top.line())
            await server.stop()
            async with start_command("serve", board, "--port", port):
                while json.loads(await top.line())["server"]["started"] == first["server"]["started"]:
                    pass
                assert "has stopped" in await top.interrupt()


async def test_token_is_needed_where_the_server_needs_it(board: Path) -> None:
    async with serving(board, env={"TIDINGS_AUTH_TOKEN": TOKEN}) as server:
        assert "Console: http" in server.greeting
        refused = await run_command("top", server.url)
        refused.check_error("requires a token", "--auth-token-file")
        wrong = await run_command("top", server.url, token="wrong")
        wrong.check_error("does not accept this token")
        async with running("top", server.url, "--json", token=TOKEN) as top:
            assert json.loads(await top.line())["server"]["login"] is True
            await top.interrupt()
        await server.stop()


async def test_server_without_a_console_is_explained(board: Path) -> None:
    async with serving(board, "--console=off") as server:
        assert "Console" not in server.greeting
        result = await run_command("top", server.url)
        result.check_error("has no console", "--console=read")
        await server.stop()


def test_invalid_targets_are_refused() -> None:
    tidings("top", ".").check_error("the URL of a running server")
    tidings("top", "ftp://host").check_error("only http and https")
    tidings("top", "http://[").check_error("is not a URL")
    tidings("top", "http://127.0.0.1:1").check_error("can't be reached")


def test_invalid_proxy_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "foo://proxy")
    tidings("top", "http://server.invalid").check_error("the proxy that the environment names can't be used")


@pytest.mark.parametrize("body", ["[]", "{}", '{"clients": 1}', "\udcff"], ids=ascii)
async def test_server_that_answers_something_else_is_refused(body: str) -> None:
    async with receiving() as receiver:
        receiver.answers(200)
        receiver.body = body.encode(errors="surrogateescape")
        result = await run_command("top", receiver.url)
        result.check_error("is not the console of a Tidings server")


async def test_overview_continues_after_a_proxy_had_no_server(board: Path) -> None:
    async with serving(board) as server, httpx2.AsyncClient() as http:
        overview = await http.get(server.url.replace("/mcp", "/console/api/overview"))
        await server.stop()
    async with receiving() as receiver:
        receiver.answers(200, 502, 502, 200)  # the overview; its events; both again
        receiver.body = overview.content
        async with running("top", receiver.url, "--json") as top:
            assert await top.line() == await top.line()
            assert "answered 502" in await top.interrupt()


async def test_console_of_a_served_folder_writes_only_if_asked(board: Path) -> None:
    (board / "tools" / "hello.py").write_text(HELLO)
    for option, status in ((), 403), (("--console=write",), 200):
        async with serving(board, *option) as server:
            url = server.url.replace("/mcp", "/console")
            async with httpx2.AsyncClient(headers={"X-Tidings-Console": "1"}) as http:
                called = await http.post(f"{url}/api/call", json={"name": "hello"})
                assert called.status_code == status, called.text
                foreign = await http.get(f"{url}/api/overview", headers={"Host": "evil.example"})
                assert foreign.status_code == 421
            await server.stop()


async def test_terminal_shows_the_overview_in_place(board: Path) -> None:
    master, slave = pty.openpty()
    env = {"TERM": "xterm-256color", "COLUMNS": "120"}
    async with serving(board) as server:
        pipes = {"stdin": slave, "stdout": slave, "stderr": slave}
        async with asyncio.timeout(3 * DEADLINE), start_command("top", server.url, env=env, **pipes) as process:
            os.close(slave)
            screen = Screen(master)
            try:
                await screen.shows("clients")
                (board / "tools" / "broken.py").write_text("def broken(:\n")
                await screen.shows(r"problems +tools/broken\.py:1: ")
                process.send_signal(signal.SIGINT)
                assert await process.wait() == 130
                assert "Traceback" not in await screen.rest()
            finally:
                screen.close()
        await server.stop()
