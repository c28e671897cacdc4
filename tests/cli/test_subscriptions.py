"""`tidings subscriptions`, against running servers and against state files. Covers `control.py`."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.command import HELLO, run_command, serving, tidings
from tests.support.receiver import receiving, verify
from tests.support.sdk_clients import MODERN, open_client
from tests.support.sdk_clients import serving as serving_board
from tests.support.stores import StoredServer, create_file
from tests.support.terminal import run_on_terminal
from tidings import Feature
from tidings.cli import control
from tidings.cli.control import request_control
from tidings.store import State
from tidings.store.durable import SERVER, DurableSubscription
from tidings.store.sqlite import peek

pytestmark = pytest.mark.anyio


def read_state(board: Path) -> State:
    return peek(board / ".tidings" / "state.db")


def has_dead_webhook(board: Path) -> bool:
    durables = read_state(board).durables.values()
    return any(each.webhook is not None and each.webhook.is_dead for each in durables)


async def create_state(board: Path) -> None:
    async with serving(board) as server:
        await server.stop()


async def test_webhook_of_a_folder_is_added_listed_revived_and_removed(board: Path) -> None:
    (board / "tidings.toml").write_text((board / "tidings.toml").read_text() + "\n[policy]\nwebhook_attempts = 1\n")
    async with receiving() as receiver:
        await create_state(board)
        add = ["subscriptions", board, "add", "hook", "--webhook", receiver.url, "--feature", "tools"]
        added = await run_command(*add, "--json")
        assert added.status == 0, added.stderr
        described, shown = added.json_lines()
        assert (described["webhook"]["url"], described["webhook"]["state"]) == (receiver.url, "active")
        secret = shown["secret"]

        receiver.answers(500)
        async with serving(board) as server:
            (board / "tools" / "hello.py").write_text(HELLO)
            delivery = await receiver.next()
            assert delivery.summary == "tools.list_changed added hello"
            while not await asyncio.to_thread(has_dead_webhook, board):
                pass
            listed = (await run_command("subscriptions", board, "--json")).json_lines()
            assert (listed[0]["name"], listed[0]["webhook"]["lastError"]) == ("hook", "answered 500")
            assert secret not in json.dumps(listed)
            lines = (await run_command("subscriptions", board)).stdout
            assert "dead" in lines
            assert "answered 500" in lines
            await server.stop()

        receiver.answers(200)
        revived = await run_command("subscriptions", board, "revive", "hook", "--json")
        assert (revived.status, revived.json_lines()[0]["webhook"]["state"]) == (0, "active")
        async with serving(board) as server:
            delivery = await receiver.next()
            assert delivery.summary == "tools.list_changed added hello"
            verify(delivery, secret, now=time.time())
            await server.stop()
        assert await run_command("subscriptions", board, "remove", "hook") == (0, "", "Removed hook.\n")
        again = await run_command("subscriptions", board, "remove", "hook")
        again.check_error("there is no 'hook'", status=1)
        assert await run_command("subscriptions", board) == (0, "", "There are no durable subscriptions.\n")


async def test_webhook_of_a_folder_gets_only_changes_after_it_was_added(board: Path) -> None:
    async with receiving() as receiver:
        await create_state(board)
        add = ["subscriptions", board, "add", "hook", "--webhook", receiver.url]
        assert (await run_command(*add)).status == 0
        stored = read_state(board).durables[SERVER, "hook"]
        assert set(stored.lists) == set(Feature)
        assert None not in stored.lists.values()
        async with serving(board) as server:
            (board / "tools" / "hello.py").write_text(HELLO)
            assert (await receiver.next()).summary == "tools.list_changed added hello"
            await server.stop()
        assert receiver.came.empty()

        told = read_state(board).durables[SERVER, "hook"].lists
        assert (await run_command(*add, "--uri", "board://*", "--feature", "tools")).status == 0
        stored = read_state(board).durables[SERVER, "hook"]
        assert stored.lists == {Feature.TOOLS: told[Feature.TOOLS]}, "a replaced webhook keeps its told versions"
        assert stored.uris == ("board://*",)
        assert (await run_command(*add, "--uri", "board://{")).status == 2


@pytest.mark.parametrize("is_deep", [False, True])
async def test_webhook_of_a_folder_is_managed_while_its_server_runs(board: Path, tmp_path: Path, is_deep: bool) -> None:
    """The path of a Unix socket is limited to about 100 bytes, but that of a folder is not."""
    state = tmp_path / ("deep" * 50 if is_deep else "flat") / "state.db"
    state.parent.mkdir()
    command = ["subscriptions", state]
    async with receiving() as receiver, serving(board, "--state", state) as server:
        added = await run_command(*command, "add", "hook", "--webhook", receiver.url, "--feature", "tools", "--json")
        assert added.status == 0, added.stderr
        (board / "tools" / "hello.py").write_text(HELLO)
        delivery = await receiver.next()
        assert delivery.summary == "tools.list_changed added hello"
        verify(delivery, added.json_lines()[1]["secret"], now=time.time())
        assert (await run_command(*command, "revive", "hook", "--json")).json_lines()[0]["webhook"]["state"] == "active"
        (await run_command(*command, "revive", "other")).check_error("there is no webhook 'other'", status=1)
        (await run_command(*command, "add", "bad", "--webhook", "ftp://a.example/")).check_error("https")
        listed = (await run_command(*command, "--json")).json_lines()
        assert [(each["name"], each["connected"]) for each in listed] == [("hook", True)]
        await server.stop()
        listed = (await run_command(*command, "--json")).json_lines()
        assert [(each["name"], each["connected"]) for each in listed] == [("hook", False)]
    async with serving(board, "--state", state) as server:
        assert await run_command(*command, "remove", "hook") == (0, "", "Removed hook.\n")
        assert await run_command(*command) == (0, "", "There are no durable subscriptions.\n")
        server.process.kill()
        await server.process.wait()
    assert (await run_command(*command)).status == 0, "the socket of a killed server is ignored"


def test_folder_whose_path_is_too_long_for_a_socket_has_no_control_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_DESCRIPTORS", tmp_path / "absent")  # as on macOS
    state = tmp_path / ("deep" * 50) / "state.db"
    state.parent.mkdir()
    assert request_control(state, {}) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "--uri", "a://b"], "--uri is for add, not for list"),
        (["remove", "hook", "--webhook", "https://a.example/"], "--webhook is for add, not for remove"),
        (["list", "hook"], "takes no name"),
        (["remove"], "requires the NAME"),
        (["add", "hook"], "requires --webhook"),
        (["add", "hook", "--webhook", "http://a.example/"], "https"),
        (["add", "hook", "--webhook", "https://a.example/", "--uri", ""], "--uri is empty"),
        (["add", "hook", "--webhook", "https://a.example/", "--secret-file", "/dev/null"], "contains no secret"),
    ],
)
def test_invalid_arguments_are_a_one_line_error(tmp_path: Path, arguments: list[str], message: str) -> None:
    path = tmp_path / "state.db"
    create_file(path)

    tidings("subscriptions", path, *arguments).check_error(message)
    assert peek(path).durables == {}


async def test_state_file_that_is_empty_or_locked_is_explained(board: Path) -> None:
    path = board / ".tidings" / "state.db"
    path.parent.mkdir()
    path.touch()
    (await run_command("subscriptions", board)).check_error("is empty")
    await create_state(board)

    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        for arguments in ([], ["remove", "hook"]):
            refused = await run_command("subscriptions", board, *arguments)
            refused.check_error("is locked by another program")
            assert "a server is running" not in refused.stderr


async def test_caller_manages_its_own_webhooks_through_the_server() -> None:
    policy = {"webhook_private": True, "webhook_backoff": 0.01, "webhook_attempts": 1}
    async with receiving() as receiver:
        with serving_board("mcpserver", auth=True, policy=policy) as url:
            command = ["subscriptions", url]
            add = [*command, "add", "hook", "--webhook", receiver.url, "--uri", "board://*"]
            added = await run_command(*add, token="alice")
            assert added.status == 0, added.stderr
            secret = added.stdout.split()[-1]
            assert secret.startswith("whsec_")
            listed = await run_command(*command, token="alice")
            assert [part for part in listed.stdout.split("  ") if part][:3] == ["hook", "board://*", "active"]
            assert await run_command(*command, "--json", token="bob") == (0, "", "")
            refused = await run_command(*command, "remove", "hook", token="bob")
            refused.check_error("this caller has no subscription 'hook'", status=1)

            receiver.answers(410, 200)
            async with open_client(url, MODERN, token="bob") as bob:
                await bob.change("updated", uri="board://a")
            assert (await receiver.next()).summary == "resources.updated updated board://a"
            async with open_client(url, MODERN, token="alice") as alice:
                while "dead" not in str(await alice.request("dev.tidings/subscriptions/list")):
                    pass
            assert "dead" in (await run_command(*command, token="alice")).stdout
            revived = await run_command(*command, "revive", "hook", token="alice")
            assert (revived.status, "whsec" in revived.stdout) == (0, False)
            verify(await receiver.next(), secret, now=time.time())
            assert (await run_command(*command, "revive", "other", token="alice")).status == 1
            removed = await run_command(*command, "remove", "hook", token="alice")
            assert removed == (0, "", "Removed hook.\n")


async def test_server_that_refuses_a_webhook_gives_the_reason(board: Path) -> None:
    add = ["add", "hook", "--webhook"]
    async with serving(board) as server:
        refused = await run_command("subscriptions", server.url, *add, "https://receiver.example/")
        refused.check_error("Policy.webhooks")
    with serving_board("mcpserver", auth=True) as url:
        refused = await run_command("subscriptions", url, *add, "http://127.0.0.1:9/", token="alice")
        refused.check_error("this server's own machine")


def test_names_are_printed_in_full_and_cannot_control_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    server = StoredServer(path)
    server.catalog.resources.updated("a://long/" + "x" * 100 + "\x1b]0;owned\x07\n")
    name = "laptop\x1b[2J\nphone"
    server.write({(None, name): DurableSubscription(name=name, features=(Feature.TOOLS,), expires=time.time() + 3600)})
    server.store.close()
    for command, expected in (
        ("history", r"a://long/" + "x" * 100 + r"\x1b]0;owned\x07\n"),
        ("subscriptions", r"laptop\x1b[2J\nphone"),
    ):
        lines = tidings(command, path).stdout
        assert (expected in lines, len(lines.splitlines())) == (True, 1)
        for columns in (80, 300):
            output = run_on_terminal(command, path, columns=columns)
            assert "…" not in output
            assert not any(sequence in output for sequence in ("\x1b]", "\x1b[2J", "\x07"))
            assert columns < 300 or expected in output
