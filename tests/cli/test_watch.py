"""`tidings watch`, with servers of both eras, over HTTP and stdio. Covers `watch_change.py` and `watch_session.py`."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import DEADLINE, HELLO, Running, replace_file, run_command, serving, start_command
from tests.support.defective_server import DefectiveServer
from tests.support.forking import forked_command
from tests.support.scripted_server import ScriptedServer
from tests.support.sdk_clients import serving as serving_board
from tests.support.terminal import Screen
from tests.support.uvicorn_server import run_uvicorn
from tests.support.waiting import free_port, until

pytestmark = pytest.mark.anyio

ERAS = {"modern": (), "legacy": ("--legacy",)}
EVIL = "\x1b[31mred\n12:00:00.000  added"
"""A text that would control a terminal, and that looks like two lines."""


class Watch(Running):
    """A process `tidings watch`."""

    status_of_interrupt = 0
    greeting = ""

    async def interrupt(self) -> str:
        """Check also that the rest ends with the summary."""
        errors = await super().interrupt()
        assert re.search(r"^Watched for \d+ s: .*\.$", errors.splitlines()[-1])
        return errors


@asynccontextmanager
async def watching(*arguments: object, **options: Any) -> AsyncIterator[Watch]:
    async with asyncio.timeout(DEADLINE), start_command("watch", *arguments, **options) as process:
        watch = Watch(process)
        watch.greeting = await watch.status("Watching")
        yield watch


@pytest.mark.parametrize("era", ERAS)
async def test_changes_of_a_folder_have_fields_latency_era_and_transport(board: Path, era: str) -> None:
    hello = board / "tools" / "hello.py"
    options = ("--json", "--feature", "tools", "--uri", "workspace:///**", *ERAS[era])
    async with serving(board) as server, watching(server.url, *options) as watch:
        protocol = {"modern": "2026-07-28", "legacy": "2025-11-25"}[era]
        assert f"board, {era} era ({protocol}), HTTP; 3 tools, 1 prompt" in watch.greeting
        replace_file(hello, HELLO)
        added = await watch.change("hello")
        assert (added["operation"], added["feature"], added["item"]["description"]) == ("added", "tools", "Say hello.")
        replace_file(hello, HELLO.replace("hello()", "hello(name: str)"))
        updated = await watch.change("hello")
        assert updated["operation"] == "updated"
        assert {"field": "inputSchema.required", "after": ["name"]} in updated["fields"]
        assert updated["before"] == added["item"]
        assert updated["foundBy"] == "notification"
        assert 0 < updated["latencyMs"] < DEADLINE * 1000
        assert [updated[name] for name in ("era", "protocol", "transport")] == [era, protocol, "http"]
        replace_file(board / "resources" / "sprint.md", "new text")
        content = await watch.change("sprint.md")
        assert content["operation"] == "updated"
        assert (content["uri"], content["latencyMs"], "feature" in content) == ("workspace:///sprint.md", None, False)
        hello.unlink()
        assert (await watch.change("hello"))["operation"] == "removed"
        (board / "resources" / "sprint.md").unlink()
        assert (await watch.change("sprint.md"))["operation"] == "deleted"
        summary = await watch.interrupt()
        assert "5 changes (1 added, 2 updated, 1 removed, 1 deleted); latency " in summary
        assert await watch.process.stdout.read() == b""  # not the list of resources


@pytest.mark.parametrize("form", ["quoted", "words"])
async def test_a_stdio_server_is_started_and_its_messages_are_escaped(board: Path, tmp_path: Path, form: str) -> None:
    script = tmp_path / "server.py"
    noise = "import os, sys; sys.stderr.write('\\x1b[31m' + os.environ['NOISE'] + '\\n'); sys.stderr.flush()\n"
    script.write_text(f"{noise}from tidings.cli import main\nmain(['serve', {str(board)!r}, '--stdio', '-q'])\n")
    words = forked_command(script)
    target = [shlex.join(words)] if form == "quoted" else ["--", *words]
    async with (
        asyncio.timeout(DEADLINE),
        start_command("watch", "--json", "--feature", "tools", *target, env={"NOISE": "noise"}) as process,
    ):
        watch = Watch(process)
        assert await watch.status("noise") == "server: \\x1b[31mnoise\n"
        assert "modern era (2026-07-28), stdio" in await watch.status("Watching")
        (board / "tools" / "hello.py").write_text(HELLO)
        added = await watch.change("hello")
        assert (added["operation"], added["transport"], added["foundBy"]) == ("added", "stdio", "notification")
        await watch.interrupt()


async def test_a_legacy_server_of_the_sdk_is_watched_across_a_restart() -> None:
    server, port = ScriptedServer(), free_port()
    async with server.serving(port) as running:
        url = server.url(running)
        async with watching(url, "--legacy", "--json", "--feature", "tools", "--uri", "a://b") as watch:
            server.lists["tools"]["first"] = "one"
            await server.notify("tools")
            await watch.change("first")
            await server.notify("tools")  # nothing changed
            server.lists["tools"]["first"] = "two"
            await server.notify("tools")
            updated = await watch.change("first")
            assert (updated["foundBy"], updated["era"]) == ("notification", "legacy")
            assert updated["fields"] == [{"field": "description", "before": "one", "after": "two"}]
            await server.notify_content("a://b")
            assert (await watch.change("a://b"))["foundBy"] == "notification"
            running.should_exit = True
            assert "Reconnecting" in await watch.status("Connection lost: ")
            await until(lambda: not running.servers[0].is_serving() and not running.server_state.connections)
            server.lists["tools"]["second"] = ""
            async with server.serving(port):
                assert "scripted, legacy era" in await watch.status("Connected again")
                found = {}
                for _ in range(2):
                    change = json.loads(await watch.process.stdout.readline())
                    found[change.get("name", change.get("uri"))] = change["foundBy"]
                assert found == {"second": "reconnect", "a://b": "reconnect"}
                assert "; 1 reconnect." in await watch.interrupt()


@pytest.mark.slow  # the first poll comes after five seconds
async def test_a_server_that_does_not_notify_is_polled() -> None:
    server = ScriptedServer(listens=False, ttl=1)
    async with server.serving() as running, watching(server.url(running), "--json") as watch:
        await watch.status("Polling")
        server.lists["templates"]["a://{x}"] = ""
        added = await watch.change("a://{x}")
        assert (added["feature"], added["uri"], added["foundBy"], added["latencyMs"]) == (
            *("resources", "a://{x}"),
            *("poll", None),
        )
        await watch.interrupt()


async def test_lines_show_what_changed_without_control_characters() -> None:
    server = ScriptedServer()
    server.lists["prompts"] = {"kept": "same " * 50 + "old", "gone": ""}
    options = ("--feature", "tools", "--feature", "prompts", "--operation", "updated", "--operation", "added")
    async with server.serving() as running, watching(server.url(running), *options) as watch:
        server.lists["resources"]["a://b"] = "not a list that is watched"
        await server.notify("resources")
        server.lists["prompts"] = {"kept": "same " * 50 + "new"}
        await server.notify("prompts")
        assert re.fullmatch(
            r"\d\d:\d\d:\d\d\.\d{3}  updated  prompt    kept  (\d+ ms|\d+\.\d s)\n", await watch.line("")
        )
        assert re.fullmatch(r'    ~ description: …(same )+old" → …(same )+new"\n', await watch.line(""))
        server.lists["tools"] = {EVIL: EVIL}
        await server.notify("tools")
        escaped = re.escape(EVIL.encode("unicode_escape").decode())
        assert re.fullmatch(rf"\S+  added    tool      {escaped}  .*s\n", await watch.line(""))
        assert re.fullmatch(rf"    {escaped}\n", await watch.line(""))
        assert "2 changes (1 updated, 1 added);" in await watch.interrupt()


@pytest.mark.parametrize("colour", [True, False])
async def test_colours_are_used_on_a_terminal_only(colour: bool) -> None:
    server = ScriptedServer()
    master, slave = pty.openpty()
    env = {"TERM": "xterm-256color", "COLUMNS": "40"} | ({} if colour else {"NO_COLOR": "1"})
    async with server.serving() as running, watching(server.url(running), stdout=slave, env=env) as watch:
        os.close(slave)
        screen = Screen(master)
        try:
            server.lists["tools"] = {EVIL: "x" * 100}
            await server.notify("tools")
            await screen.shows(r"added +tool +\\x1b\[31mred\\n12:00:00.000  added  .*\r\n    x{100}\r\n")
            assert ("\x1b[32madded" in screen.raw) == colour
            assert "\x1b[31m" not in screen.raw
            await watch.interrupt()
        finally:
            screen.close()


async def test_a_command_runs_for_each_change_and_may_fail(tmp_path: Path) -> None:
    server, log = ScriptedServer(), tmp_path / "log"
    (script := tmp_path / "script").write_text(
        f'printf "%s %s %s\\n" $TIDINGS_OPERATION $TIDINGS_FEATURE "$TIDINGS_NAME" >> {log}; cat >> {log}\n'
        'echo ran; test "$TIDINGS_NAME" = b\n'
    )
    async with (
        server.serving() as running,
        watching(
            server.url(running), "--json", "--uri", "a://b", "--feature", "tools", "--exec", f"sh {script}"
        ) as watch,
    ):
        server.lists["tools"] = {EVIL: "", "b": ""}
        await server.notify("tools")
        printed = [await watch.change('"name": "' + start) for start in ("\\u001b", "b")]
        assert "the command ended with status 1 (added tool \\x1b[31mred\\n" in await watch.status("--exec")
        await server.notify_content("a://b")
        printed.append(await watch.change("a://b"))
        await watch.status("--exec")
        lines = log.read_text().splitlines()
        assert [json.loads(line) for line in lines[1::2]] == printed
        assert lines[::2] == [
            f"added tools {EVIL.encode('unicode_escape').decode()}",
            "added tools b",
            "updated content a://b",
        ]
        assert "; 2 commands failed." in await watch.interrupt()


async def test_ctrl_c_ends_the_command_that_runs(tmp_path: Path) -> None:
    server, log = ScriptedServer(), tmp_path / "log"
    async with (
        server.serving() as running,
        watching(
            server.url(running), "--exec", f"trap 'echo ended > {log}; exit' TERM; echo ran; sleep 600 & wait"
        ) as watch,
    ):
        server.lists["tools"] = {"a": "", "b": ""}
        await server.notify("tools")
        await watch.line("ran")
        assert "2 changes (2 added); latency " in (summary := await watch.interrupt())
        assert "; 2 commands not finished." in summary
        assert log.read_text() == "ended\n"


async def test_a_token_or_a_header_opens_a_protected_server() -> None:
    with serving_board("mcpserver", auth=True) as url:
        (await run_command("watch", url)).check_error("requires a token")
        refused = await run_command("watch", url, token="mallory")
        refused.check_error("does not accept this token")
        async with watching(url, env={"TIDINGS_AUTH_TOKEN": "alice"}) as watch:
            await watch.interrupt()
        async with watching(url, "--header", "authorization: Bearer alice", env={"TIDINGS_AUTH_TOKEN": "x"}) as watch:
            await watch.interrupt()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:1/mcp"], "can't be reached"),
        (["http://127.0.0.1:99999/mcp"], "is not a URL"),
        (["ftp://127.0.0.1/mcp"], "only http and https URLs are possible; give one of them, or a command"),
        (["http://127.0.0.1:1/mcp", "extra"], "a URL takes no further arguments, such as extra"),
        ([""], "the target is empty"),
        (["'"], "is not a command: No closing quotation"),
        (["no-such-command --stdio"], "there is no command no-such-command; give a URL"),
        (["BOARD"], "is a folder; give the URL of its server, or a command: tidings watch 'tidings serve "),
        (["true", "--header", "a: b"], "--header is for a URL"),
        (["http://127.0.0.1:1/mcp", "--header", "secret"], "give a header as 'NAME: VALUE'"),
        (["http://127.0.0.1:1/mcp", "--uri", ""], "--uri is empty"),
        (["true", "--operation", "moved"], "'moved' is not one of"),
    ],
)
async def test_a_target_or_option_that_is_wrong_is_a_one_line_error(
    board: Path, arguments: list[str], message: str
) -> None:
    failed = await run_command("watch", *(board if each == "BOARD" else each for each in arguments))
    failed.check_error(message)
    assert "secret" not in failed.stderr


async def test_a_command_that_is_no_server_is_a_one_line_error() -> None:
    async with asyncio.timeout(DEADLINE), start_command("watch", "echo hello") as process:
        stdout, stderr = await process.communicate()
        assert (process.returncode, stdout) == (2, b"")
        assert re.fullmatch(rb"tidings: echo hello can't be reached: [^\n]* a command that speaks MCP [^\n]*\n", stderr)


async def test_an_invalid_notification_is_a_one_line_warning() -> None:
    server = DefectiveServer("not-requested/uri")
    async with run_uvicorn(server, http="h11") as running, watching(ScriptedServer.url(running), "--legacy") as watch:
        server.call("change")
        failed = "Failed to validate notification: notifications/resources/updated"
        assert await watch.status(failed) == f"warning: {failed}\n"
        await watch.interrupt()


async def test_a_server_that_cannot_watch_a_content_is_a_one_line_error() -> None:
    server = ScriptedServer()
    async with server.serving() as running:
        failed = await run_command("watch", server.url(running), "--uri", "a://**")
        failed.check_error("--uri a://**: only Tidings servers support patterns")
    server = ScriptedServer(listens=False)
    async with server.serving() as running:
        failed = await run_command("watch", server.url(running), "--uri", "a://b")
        failed.check_error("does not support subscriptions to resources")


async def test_a_reader_that_goes_away_ends_the_watch() -> None:
    server = ScriptedServer()
    async with server.serving() as running, watching(server.url(running)) as watch:
        watch.process._transport.get_pipe_transport(1).close()
        server.lists["tools"]["first"] = ""
        await server.notify("tools")
        assert await watch.process.wait() == 1
        assert await watch.process.stderr.read() == b""
