"""`tidings history` and `tidings subscriptions`, as processes: against servers that run, and folders that don't."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import DEADLINE, HELLO, TIDINGS, Served, board, line_with, ran, serving, started, tidings
from tests.support.receiver import receiving, verify
from tests.support.sdk_clients import LEGACY, MODERN, open_ear
from tests.support.sdk_clients import serving as serving_board
from tests.support.stores import Server, written
from tidings import Feature
from tidings.cli.remote import Unreachable, connected
from tidings.store import State
from tidings.store.durable import SERVER, Durable
from tidings.store.sqlite import SQLiteStore, peek

__all__ = ["board"]

pytestmark = pytest.mark.anyio


async def ran_as_process(*arguments: object) -> tuple[int, str, str]:
    async with asyncio.timeout(DEADLINE), started(*arguments) as process:
        output, errors = await process.communicate()
        return process.returncode, output.decode(), errors.decode()


async def end(server: Served) -> None:
    server.process.terminate()
    async with asyncio.timeout(DEADLINE):
        await server.process.wait()


def objects(lines: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


@asynccontextmanager
async def following(*arguments: object, token: str | None = None) -> AsyncIterator[Any]:
    env = {"TIDINGS_AUTH_TOKEN": token} if token is not None else {}
    # For all that is waited for: the process has to begin, to ask, and to look again.
    async with asyncio.timeout(3 * DEADLINE), started("history", *arguments, "--follow", "--json", env=env) as process:

        async def until(text: str) -> dict[str, Any]:
            while line := (await process.stdout.readline()).decode():
                if text in line:
                    found: dict[str, Any] = json.loads(line)
                    return found
            raise AssertionError((await process.stderr.read()).decode())

        yield process, until


# History


async def test_history_of_a_server_is_printed_in_lines_and_as_json() -> None:
    with serving_board("mcpserver") as url:
        async with open_ear(url, MODERN) as ear:
            await ear.change("add", feature="tools", key="new")
            await ear.change("updated", uri="board://a", metadata={"author": "Ann"})
            status, output, _ = await ran_as_process("history", url)
            assert status == 0
            lines = [line.split() for line in output.splitlines()]
            assert [line[2:5] for line in lines[-2:]] == [
                ["added", "tools", "new"],
                ["updated", "content", "board://a"],
            ]

            status, output, _ = await ran("history", url, "--json", "--limit", 2)
            tool, content = objects(output)
            assert (tool["name"], tool["item"]["name"], tool["feature"]) == ("new", "new", "tools")
            assert (content["uri"], content["metadata"]) == ("board://a", {"author": "Ann"})
            status, output, _ = await ran(
                "history", url, "--json", "--feature", "tools", "--since", tool["revision"] - 1
            )
            assert objects(output) == [tool]
            status, output, _ = await ran("history", url, "--json", "--uri", "board://a")
            assert objects(output) == [content]
            cursor = json.dumps({"epoch": "elsewhere", "topics": {"prompts": None}})
            status, output, errors = await ran("history", url, "--since", cursor, "--limit", 0)
            assert "greet" in output
            assert "Not all of it is remembered" in errors


async def test_history_needs_a_token_where_the_server_does(tmp_path: Path) -> None:
    with serving_board("mcpserver", auth=True) as url:
        status, _, errors = await ran("history", url)
        assert (status, "wants a token" in errors) == (2, True)
        status, _, errors = await ran("history", url, token="mallory")
        assert (status, "does not take this token" in errors) == (2, True)
        assert "mallory" not in errors
        status, output, _ = await ran("history", url, token="alice")
        assert (status, "steady" in output) == (0, True)
        (tmp_path / "token").write_text("alice\n")
        status, output, _ = await ran("history", url, "--auth-token-file", tmp_path / "token")
        assert (status, "steady" in output) == (0, True)


async def test_history_of_what_is_not_there_is_one_clear_line(board: Path) -> None:
    for target, said in (
        ("http://127.0.0.1:1/mcp", "can't be reached"),
        (board, "remembers nothing yet"),
        (board / "nowhere", "is not there"),
    ):
        status, output, errors = await ran_as_process("history", target)
        assert status == 2
        assert said in errors
        assert "Traceback" not in errors
        assert output == ""
    for target in ("http://", "http://[::1", "http://127.0.0.1:port/mcp", "http://127.0.0.1:99999/mcp"):
        status, output, errors = await ran("history", target)
        assert (status, output, "is no URL" in errors) == (2, "", True)
    for options in (["--since", "yesterday"], ["--feature", "tools", "--uri", "a://b"], ["--feature", "tool"]):
        assert tidings("history", board, *options).exit_code == 2


@pytest.mark.parametrize("version", [MODERN, LEGACY[-1]])
async def test_history_goes_on_with_what_changes_and_ctrl_c_ends_it(version: str) -> None:
    with serving_board("mcpserver") as url:
        async with open_ear(url, version) as ear, following(url, "--limit", 1) as (process, until):
            await until("revision")
            await ear.change("add", feature="tools", key="new")
            assert (await until("new"))["operation"] == "added"
            await ear.change("updated", uri="board://a")
            assert (await until("board://a"))["operation"] == "updated"
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130
            assert "Traceback" not in (await process.stderr.read()).decode()


@pytest.mark.parametrize("caller", ["alice", "bob"])
async def test_history_goes_on_with_contents_that_the_server_tells_nobody_of_by_a_pattern(caller: str) -> None:
    # An `authorize` that has to be waited for can't be asked of what a pattern matches. So bob is told of nothing.
    deny = {"bob": ["tools", "prompts", "resources"]}
    with serving_board("mcpserver", auth=True, deny=deny, asks="async") as url:
        async with open_ear(url, MODERN, token="alice") as ear:
            await ear.change("updated", uri="board://a")
            async with following(url, token=caller) as (process, until):
                await until("board://a")
                await ear.change("updated", uri="board://b")
                assert (await until("board://b"))["operation"] == "updated"
                process.kill()
                assert (await process.stderr.read()).decode() == ""


async def test_history_of_a_folder_is_there_with_and_without_its_server(board: Path) -> None:
    async with serving(board) as server:
        (board / "tools" / "hello.py").write_text(HELLO)
        await server.line_with("hello added")
        async with following(board) as (process, until):
            assert (await until('"hello"'))["operation"] == "added"
            (board / "tools" / "hello.py").unlink()
            assert (await until("removed"))["name"] == "hello"
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130
        status, of_server, _ = await ran("history", server.url, "--json", "--limit", 0)
        await end(server)
    status, output, _ = await ran("history", board, "--json", "--limit", 0)
    assert status == 0
    assert objects(output) == objects(of_server)
    status, output, _ = await ran("history", board, "--feature", "tools", "--limit", 2)
    assert [line.split()[2:5] for line in output.splitlines()] == [
        ["added", "tools", "hello"],
        ["removed", "tools", "hello"],
    ]
    last = objects(of_server)[-1]["revision"]
    status, output, _ = await ran("history", board, "--since", last)
    assert (status, output) == (0, "")


async def test_history_follows_a_server_over_its_restart(board: Path) -> None:
    async with serving(board, "--port", 0) as server:
        port = server.url.split(":")[2].split("/")[0]
        async with following(server.url, "--limit", 1) as (process, until):
            await until("revision")
            await end(server)
            (board / "tools" / "hello.py").write_text(HELLO)
            async with started("serve", board, "--port", port):
                assert (await until('"hello"'))["operation"] == "added"
                process.send_signal(signal.SIGINT)
                assert await process.wait() == 130


async def test_history_follows_a_state_through_a_link_and_one_that_takes_its_place(tmp_path: Path) -> None:
    path, link = tmp_path / "there" / "state.db", tmp_path / "state.db"
    link.symlink_to(path)
    server = Server(SQLiteStore(path))
    server.catalog.tools.replace([{"name": "first"}, {"name": "second"}])
    server.write()
    async with following(link) as (process, until):
        await until("second")
        server.catalog.tools.add({"name": "third"})
        server.write()
        assert (await until("third"))["operation"] == "added"

        another = Server(SQLiteStore(tmp_path / "another.db"))
        another.catalog.tools.add({"name": "fourth"})  # of a lower revision than the last one that was seen
        another.write()
        another.store.close()
        (tmp_path / "new").symlink_to(tmp_path / "another.db")
        (tmp_path / "new").replace(link)
        assert (await until("fourth"))["operation"] == "added"
        process.kill()
        assert "Another state is there now" in (await process.stderr.read()).decode()
    server.store.close()


async def test_history_waits_for_a_state_that_is_gone_until_ctrl_c_ends_it(tmp_path: Path) -> None:
    path, spare = tmp_path / "state.db", tmp_path / "spare.db"
    for each, name in ((path, "first"), (spare, "second")):
        server = Server(SQLiteStore(each))
        server.catalog.tools.add({"name": name})
        server.write()
        server.store.close()
    async with following(path) as (process, until):
        await until("first")
        path.unlink()
        await line_with(process.stderr, "there is no such file")
        spare.rename(path)
        assert (await until("second"))["operation"] == "added"
        path.unlink()
        # Said once each time, with nothing else between the two.
        assert "Another state is there now" in (await process.stderr.readline()).decode()
        assert "there is no such file" in (await process.stderr.readline()).decode()
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
        assert (await process.stderr.read()).decode() == ""


async def test_a_proxy_that_can_not_be_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALL_PROXY", "all_proxy"):  # whichever the machine itself has set
        monkeypatch.setenv(name, "gopher://127.0.0.1")
    status, _, errors = await ran("subscriptions", "HTTP://127.0.0.1:1/mcp")
    assert (status, "names a proxy that can't be used" in errors) == (2, True)


async def test_a_proxy_without_its_server_is_no_wrong_address() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as proxy:
        url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/mcp"
        with pytest.raises(Unreachable, match="answered 503; it is not served for now"):
            async with asyncio.timeout(DEADLINE), connected(url, None):
                pass


def test_on_a_terminal_history_is_a_table(board: Path) -> None:
    with serving_board("mcpserver") as url:
        printed = on_terminal("history", url)
        assert "revision" in printed
        assert "steady" in printed


def test_names_neither_command_a_terminal_nor_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    server = Server(SQLiteStore(path))
    server.catalog.resources.updated("a://long/" + "x" * 100 + "\x1b]0;owned\x07\n")
    name = "laptop\x1b[2J\nphone"
    server.write({(None, name): Durable(name=name, features=(Feature.TOOLS,), expires=time.time() + 3600)})
    server.store.close()
    for command, said in (
        ("history", r"a://long/" + "x" * 100 + r"\x1b]0;owned\x07\n"),
        ("subscriptions", r"laptop\x1b[2J\nphone"),
    ):
        lines = tidings(command, path).stdout
        assert (said in lines, len(lines.splitlines())) == (True, 1)
        for columns in (80, 300):
            printed = on_terminal(command, str(path), columns=columns)
            assert "…" not in printed
            assert not any(each in printed for each in ("\x1b]", "\x1b[2J", "\x07"))
            assert columns < 300 or said in printed


def on_terminal(*arguments: str, columns: int = 200) -> str:
    parent, child = pty.openpty()
    with subprocess.Popen(
        [TIDINGS, *arguments], stdout=child, stderr=child, stdin=child, env=os.environ | {"COLUMNS": str(columns)}
    ) as process:
        os.close(child)
        printed = b""
        while True:
            try:
                chunk = os.read(parent, 65536)
            except OSError:  # Linux' way to say that the other end is closed
                break
            if not chunk:
                break
            printed += chunk
        os.close(parent)
        assert process.wait(DEADLINE) == 0, printed
    return printed.decode()


# Subscriptions


def is_any_dead(board: Path) -> bool:
    durables = peek(board / ".tidings" / "state.db").durables.values()
    return any(each.webhook is not None and each.webhook.is_dead for each in durables)


async def test_a_webhook_of_a_folder_is_added_listed_given_up_revived_and_removed(board: Path) -> None:
    (board / "tidings.toml").write_text((board / "tidings.toml").read_text() + "\n[policy]\nwebhook_attempts = 1\n")
    async with receiving() as receiver:
        async with serving(board) as server:
            await end(server)
        added = ["subscriptions", board, "add", "hook", "--webhook", receiver.url, "--feature", "tools"]
        status, output, errors = await ran_as_process(*added, "--json")
        assert status == 0, errors
        described, shown = objects(output)
        assert (described["webhook"]["url"], described["webhook"]["state"]) == (receiver.url, "active")
        secret = shown["secret"]

        receiver.answers(500)
        async with serving(board) as server:
            (board / "tools" / "hello.py").write_text(HELLO)
            delivery = await receiver.next()
            assert delivery.gist == "tools.list_changed added hello"
            while not await asyncio.to_thread(is_any_dead, board):
                pass
            listed = objects((await ran("subscriptions", board, "--json"))[1])
            assert (listed[0]["name"], listed[0]["webhook"]["lastError"]) == ("hook", "answered 500")
            assert secret not in json.dumps(listed)
            status, output, _ = await ran("subscriptions", board)
            assert "dead" in output
            assert "answered 500" in output
            for action in ("remove", "revive"):
                status, _, errors = await ran("subscriptions", board, action, "hook")
                assert status == 2
                assert "a server is running" in errors
            await end(server)

        receiver.answers(200)
        status, output, _ = await ran("subscriptions", board, "revive", "hook", "--json")
        assert (status, objects(output)[0]["webhook"]["state"]) == (0, "active")
        async with serving(board) as server:
            again = await receiver.next()
            assert again.gist == "tools.list_changed added hello"
            verify(again, secret, now=time.time())
            await end(server)
        status, _, errors = await ran("subscriptions", board, "remove", "hook")
        assert (status, errors) == (0, "Removed hook.\n")
        status, _, errors = await ran("subscriptions", board, "remove", "hook")
        assert (status, "there is no 'hook'" in errors) == (1, True)
        status, output, errors = await ran_as_process("subscriptions", board)
        assert (status, output, errors) == (0, "", "There are no durable subscriptions.\n")


def test_a_webhook_that_would_not_be_what_was_meant_is_refused(tmp_path: Path) -> None:
    path, nothing = tmp_path / "state.db", tmp_path / "secret"
    written(path)
    nothing.write_text("\n")
    add = ("subscriptions", path, "add", "hook", "--webhook", "https://receiver.example/")
    for option, value, said in (
        ("--secret-file", nothing, "there is no secret in"),
        ("--uri", "", "a --uri is empty"),
    ):
        refused = tidings(*add, option, value)
        assert (refused.exit_code, said in refused.stderr) == (2, True)
    assert peek(path).durables == {}


async def test_a_webhook_of_a_folder_is_told_of_no_list_that_never_changed(board: Path) -> None:
    async with receiving() as receiver:
        async with serving(board) as server:
            await end(server)
        added = ["subscriptions", board, "add", "hook", "--webhook", receiver.url]
        assert (await ran(*added))[0] == 0
        kept = look(board).durables[SERVER, "hook"]
        assert set(kept.lists) == set(Feature)
        assert None not in kept.lists.values()
        async with serving(board) as server:
            (board / "tools" / "hello.py").write_text(HELLO)
            assert (await receiver.next()).gist == "tools.list_changed added hello"
            await end(server)
        assert receiver.came.empty()

        told = look(board).durables[SERVER, "hook"].lists
        assert (await ran(*added, "--uri", "board://*", "--feature", "tools"))[0] == 0
        again = look(board).durables[SERVER, "hook"]
        assert again.lists == {Feature.TOOLS: told[Feature.TOOLS]}, "it knows what it was told"
        assert again.uris == ("board://*",)
        status, _, errors = await ran(*added, "--uri", "board://{")
        assert (status, "Traceback" in errors) == (2, False), errors


def look(board: Path) -> State:
    return peek(board / ".tidings" / "state.db")


async def test_a_state_file_that_can_not_be_used_is_explained(board: Path) -> None:
    path = board / ".tidings" / "state.db"
    path.parent.mkdir()
    path.touch()
    status, _, errors = await ran("subscriptions", board)
    assert (status, "is empty; a server that is started with it" in errors) == (2, True), errors
    async with serving(board) as server:
        await end(server)

    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        for arguments in ([], ["remove", "hook"]):
            status, _, errors = await ran("subscriptions", board, *arguments)
            assert (status, "is locked by another program" in errors) == (2, True), errors
            assert "a server is running" not in errors


async def test_a_callers_webhooks_are_managed_through_its_server() -> None:
    policy = {"webhook_private": True, "webhook_backoff": 0.01, "webhook_attempts": 1}
    async with receiving() as receiver:
        with serving_board("mcpserver", auth=True, policy=policy) as url:
            add = ["subscriptions", url, "add", "hook", "--webhook", receiver.url, "--uri", "board://*"]
            status, output, errors = await ran(*add, token="alice")
            assert status == 0, errors
            secret = output.split()[-1]
            assert secret.startswith("whsec_")
            status, output, _ = await ran("subscriptions", url, token="alice")
            assert [part for part in output.split("  ") if part][:3] == ["hook", "board://*", "active"]
            status, output, _ = await ran("subscriptions", url, "--json", token="bob")
            assert (status, output) == (0, "")
            status, _, errors = await ran("subscriptions", url, "remove", "hook", token="bob")
            assert (status, "there is no 'hook' of this caller's" in errors) == (1, True)

            receiver.answers(410, 200)
            async with open_ear(url, MODERN, token="bob") as bob:
                await bob.change("updated", uri="board://a")
            assert (await receiver.next()).gist == "resources.updated updated board://a"
            async with open_ear(url, MODERN, token="alice") as alice:
                while "dead" not in str(await alice.request("dev.tidings/subscriptions/list")):
                    pass
            assert "dead" in (await ran("subscriptions", url, token="alice"))[1]
            status, output, _ = await ran("subscriptions", url, "revive", "hook", token="alice")
            assert (status, "whsec" in output) == (0, False)
            verify(await receiver.next(), secret, now=time.time())
            status, _, _ = await ran("subscriptions", url, "revive", "nobody", token="alice")
            assert status == 1
            status, _, errors = await ran("subscriptions", url, "remove", "hook", token="alice")
            assert (status, errors) == (0, "Removed hook.\n")


async def test_a_stranger_and_a_private_address_are_refused_in_words(board: Path) -> None:
    add = ["add", "hook", "--webhook"]
    async with serving(board) as server:
        status, _, errors = await ran("subscriptions", server.url, *add, "https://receiver.example/")
        assert (status, "Policy.webhooks" in errors) == (2, True)
    with serving_board("mcpserver", auth=True) as url:
        status, _, errors = await ran("subscriptions", url, *add, "http://127.0.0.1:9/", token="alice")
        assert (status, "this server's own machine" in errors) == (2, True)
    for arguments in (["add", "hook"], ["remove"], ["list", "hook"], ["add", "hook", "--webhook", "http://a.example/"]):
        status, _, errors = await ran("subscriptions", board, *arguments)
        assert status == 2
        assert "Traceback" not in errors


def test_both_commands_explain_themselves_and_every_option() -> None:
    for command in ("history", "subscriptions"):
        shown = tidings(command, "--help")
        assert shown.exit_code == 0
        assert "URL|DIR" in shown.output


def test_the_commands_cost_the_others_nothing() -> None:
    program = "import sys, tidings.cli; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE
    )
    assert not {name.split(".")[0] for name in found.stdout.split()} & {"asyncio", "mcp", "httpx2", "sqlite3"}
