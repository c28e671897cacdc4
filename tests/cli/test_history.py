"""`tidings history`, against running servers and against state files."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.support.command import HELLO, Running, line_with, run_command, running, serving, start_command
from tests.support.sdk_clients import MODERN, open_client
from tests.support.sdk_clients import serving as serving_board
from tests.support.stores import StoredServer
from tests.support.terminal import run_on_terminal

pytestmark = pytest.mark.anyio


def following(*arguments: object, token: str | None = None) -> AbstractAsyncContextManager[Running]:
    return running("history", *arguments, "--follow", "--json", token=token)


async def test_history_of_a_server_is_printed_as_lines_json_or_a_table() -> None:
    with serving_board("mcpserver") as url:
        async with open_client(url, MODERN) as client:
            await client.change("add", feature="tools", key="new")
            await client.change("updated", uri="board://a", metadata={"author": "Ann"})
        printed = await run_command("history", url)
        assert printed.status == 0
        lines = [line.split() for line in printed.stdout.splitlines()]
        assert [line[2:5] for line in lines[-2:]] == [["added", "tools", "new"], ["updated", "content", "board://a"]]

        tool, content = (await run_command("history", url, "--json", "--limit", 2)).json_lines()
        assert (tool["name"], tool["item"]["name"], tool["feature"]) == ("new", "new", "tools")
        assert (content["uri"], content["metadata"]) == ("board://a", {"author": "Ann"})
        options = ["--feature", "tools", "--since", tool["revision"] - 1]
        assert (await run_command("history", url, "--json", *options)).json_lines() == [tool]
        assert (await run_command("history", url, "--json", "--uri", "board://a")).json_lines() == [content]

        table = await asyncio.to_thread(run_on_terminal, "history", url)
        assert "revision" in table
        assert "board://a" in table


async def test_history_requires_the_token_that_the_server_requires(tmp_path: Path) -> None:
    with serving_board("mcpserver", auth=True) as url:
        (await run_command("history", url)).check_error("requires a token")
        refused = await run_command("history", url, token="mallory")
        refused.check_error("does not accept this token")
        assert "mallory" not in refused.stderr
        (tmp_path / "token").write_text("alice\n")
        for printed in (
            await run_command("history", url, token="alice"),
            await run_command("history", url, "--auth-token-file", tmp_path / "token", token="mallory"),
        ):
            assert (printed.status, "steady" in printed.stdout) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:1/mcp"], "can't be reached"),
        *(([f"http://{rest}"], "is not a URL") for rest in ("", "[::1", "127.0.0.1:port/mcp", "127.0.0.1:99999/mcp")),
        (["ftp://127.0.0.1/mcp"], "only http and https URLs are possible"),
        (["BOARD"], "has no state yet"),
        (["BOARD", "--since", "yesterday"], "Invalid value for '--since'"),
        (["BOARD", "--feature", "tools", "--uri", "a://b"], "exclude each other"),
    ],
)
async def test_history_error_is_one_line(board: Path, arguments: list[str], message: str) -> None:
    failed = await run_command("history", *(board if each == "BOARD" else each for each in arguments))
    failed.check_error(message)


async def test_follow_continues_with_new_changes_until_ctrl_c() -> None:
    with serving_board("mcpserver") as url:
        async with open_client(url, MODERN) as client, following(url, "--limit", 1) as follower:
            await follower.change("revision")
            await client.change("add", feature="tools", key="new")
            assert (await follower.change("new"))["operation"] == "added"
            await client.change("updated", uri="board://a")
            assert (await follower.change("board://a"))["operation"] == "updated"
            await follower.interrupt()


@pytest.mark.parametrize("caller", ["alice", "bob"])
async def test_follow_gets_changes_that_the_server_sends_no_notification_of(caller: str) -> None:
    # The server can't ask an async `authorize` for the URIs that match a pattern, and bob may watch no list either.
    deny = {"bob": ["tools", "prompts", "resources"]}
    with serving_board("mcpserver", auth=True, deny=deny, asks="async") as url:
        async with open_client(url, MODERN, token="alice") as client:
            await client.change("updated", uri="board://a")
            async with following(url, token=caller) as follower:
                await follower.change("board://a")
                await client.change("updated", uri="board://b")
                assert (await follower.change("board://b"))["operation"] == "updated"
                assert await follower.interrupt() == ""


async def test_history_of_a_folder_is_available_with_and_without_its_server(board: Path) -> None:
    async with serving(board) as server:
        (board / "tools" / "hello.py").write_text(HELLO)
        await server.line_with("hello added")
        async with following(board) as follower:
            assert (await follower.change('"hello"'))["operation"] == "added"
            (board / "tools" / "hello.py").unlink()
            assert (await follower.change("removed"))["name"] == "hello"
            await follower.interrupt()
        of_server = (await run_command("history", server.url, "--json", "--limit", 0)).json_lines()
        await server.stop()
    printed = await run_command("history", board, "--json", "--limit", 0)
    assert (printed.status, printed.json_lines()) == (0, of_server)
    printed = await run_command("history", board, "--feature", "tools", "--limit", 2)
    assert [line.split()[2:5] for line in printed.stdout.splitlines()] == [
        ["added", "tools", "hello"],
        ["removed", "tools", "hello"],
    ]
    assert await run_command("history", board, "--since", of_server[-1]["revision"]) == (0, "", "")


async def test_follow_continues_after_a_restart_of_the_server(board: Path) -> None:
    async with serving(board) as server:
        port = server.url.split(":")[2].split("/")[0]
        async with following(server.url, "--limit", 1) as follower:
            await follower.change("revision")
            await server.stop()
            (board / "tools" / "hello.py").write_text(HELLO)
            async with start_command("serve", board, "--port", port):
                assert (await follower.change('"hello"'))["operation"] == "added"
                await follower.interrupt()


async def test_follow_waits_for_a_state_file_that_was_deleted(tmp_path: Path) -> None:
    path, freeze_objects = tmp_path / "state.db", tmp_path / "spare.db"
    for file, name in ((path, "first"), (freeze_objects, "second")):
        server = StoredServer(file)
        server.catalog.tools.add({"name": name})
        server.write()
        server.store.close()
    async with following(path) as follower:
        errors = follower.process.stderr
        await follower.change("first")
        path.unlink()
        await line_with(errors, "there is no such file")
        freeze_objects.rename(path)
        assert (await follower.change("second"))["operation"] == "added"
        path.unlink()
        # Each message once, and nothing between them.
        assert "Another state is in this file now" in (await errors.readline()).decode()
        assert "there is no such file" in (await errors.readline()).decode()
        assert await follower.interrupt() == ""
