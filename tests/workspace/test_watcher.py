"""Changes that only a watched folder sees. Full scans are off, unless the test is about them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from mcp.shared.exceptions import MCPError

from tests.support.waiting import until
from tests.support.workspaces import RESOURCES, TOOLS, UPDATED, call, list_names, run_source, script, watch, write
from tidings.core.model import Feature
from tidings.workspace import watcher as watcher_module
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio


@pytest.fixture
def no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system without events."""

    async def watch_paths(root: Path, list_other_folders: object) -> AsyncIterator[set[Path] | None]:
        yield None
        await asyncio.Event().wait()

    monkeypatch.setattr(watcher_module, "watch_paths", watch_paths)


@pytest.mark.usefixtures("no_events")
async def test_full_scan_finds_changes_without_events(tmp_path: Path) -> None:
    async with watch(tmp_path, poll=0.05) as watcher:
        write(tmp_path, {"found.sh": script("Found")})
        (tmp_path / "found.sh").rename(tmp_path / "tools" / "found.sh")
        assert await watcher.settle() == [(TOOLS, "added", "found")]


@pytest.mark.usefixtures("no_events")
async def test_full_scan_waits_before_it_removes_a_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"tools/kept.sh": script("Kept")})
    workspace = Workspace(tmp_path, poll=0.05)
    async with run_source(workspace):
        with monkeypatch.context() as patch:
            patch.setattr(watcher_module, "_REMOVAL_GRACE", 3600.0)
            (tmp_path / "tools" / "kept.sh").unlink()
            await until(lambda: workspace.watcher.pending or not list_names(workspace))
            assert list_names(workspace) == ["kept"]
        await until(lambda: not list_names(workspace))


async def test_recreated_folder_is_watched(tmp_path: Path) -> None:
    async with watch(tmp_path) as watcher:
        shutil.rmtree(tmp_path / "tools")
        write(tmp_path, {"tools/one.sh": script("One")})
        await watcher.until_tools("one")
        await watcher.settle()
        write(tmp_path, {"tools/two.sh": script("Two")})
        await watcher.until_tools("one", "two")


async def test_workspace_moved_away_and_back_is_watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, away = tmp_path / "here", tmp_path / "away"
    write(root, {"tools/one.sh": script("One")})
    async with watch(root) as watcher:
        root.rename(away)
        await watcher.until_tools()
        await until(lambda: "can't be watched" in caplog.text)
        away.rename(root)
        await watcher.until_tools("one")
        await watcher.settle()
        write(root, {"tools/two.sh": script("Two")})
        await watcher.until_tools("one", "two")


async def test_watch_limit_is_logged_once_with_advice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[bool] = []

    async def reach_limit(*folders: Path, ignore_permission_denied: bool, **options: object) -> AsyncIterator[None]:
        attempts.append(ignore_permission_denied)
        if ignore_permission_denied:
            await asyncio.Event().wait()  # like watchfiles, which then ignores every failure
        raise OSError("OS file watch limit reached.")
        yield

    monkeypatch.setattr(watcher_module, "awatch", reach_limit)
    monkeypatch.setattr(watcher_module, "_RETRY", 0.001)
    write(tmp_path, {"tools/one.sh": script("One")})
    async with run_source(Workspace(tmp_path, poll=0)):
        await until(lambda: len(attempts) > 8)
    [message] = [record.getMessage() for record in caplog.records if record.name == watcher_module.__name__]
    assert "OS file watch limit reached" in message
    assert "max_user_watches" in message


async def test_edited_file_notifies_for_every_item_made_of_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "resources/sub/real.txt": "one",
            "resources/named.meta.json": '{"uri": "workspace:///named", "path": "sub/real.txt"}',
            "resources/late.meta.json": '{"uri": "workspace:///late", "path": "other/late.txt"}',
            "server.d/register.json": '{"prompts": [{"name": "greet", "path": "texts/greet.md"}]}',
            "prompts/texts/greet.md": "Say {one}",
        },
    )
    (tmp_path / "resources" / "link.txt").symlink_to("sub/real.txt")
    async with watch(tmp_path) as watcher:
        (tmp_path / "resources" / "folder").symlink_to("sub")
        await watcher.settle()
        assert "the file 'other/late.txt' does not exist" in await watcher.errors()
        write(
            tmp_path,
            {
                "resources/sub/real.txt": "two",
                "resources/other/late.txt": "here",
                "prompts/texts/greet.md": "---\ndescription: Changed\n---\nSay {one}",
            },
        )
        updated = {key for method, _, key in await watcher.settle() if method == UPDATED}
        names = {"named", "late", "sub/real.txt", "link.txt", "folder/real.txt"}
        assert {f"workspace:///{name}" for name in names} <= updated
        assert await watcher.errors() == ""
        assert await watcher.prompts() == {"greet": "Changed"}
        listed = await watcher.resources()
        watcher.workspace.rescan()
        assert await watcher.resources() == listed


async def test_edited_settings_apply_immediately_or_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_VARIABLE", "seen")
    write(tmp_path, {"tools/one.sh": '#!/bin/sh\necho "[$A_VARIABLE]"\n'})
    async with watch(tmp_path) as watcher:
        workspace = watcher.workspace
        assert await call(watcher.client, "one") == "[]"
        write(tmp_path, {"tidings.toml": 'name = "other"\ninstructions = "now"\n[tools]\nenv = ["A_*"]\n'})
        await until(lambda: workspace.settings.env)
        await watcher.settle()
        assert await call(watcher.client, "one") == "[seen]"
        assert workspace.lowlevel.instructions == "now"
        assert "tidings.toml: name changed; restart the server to apply it" in caplog.text
        (tmp_path / "tidings.toml").unlink()
        await until(lambda: not workspace.settings.env)
        await watcher.settle()
        assert await call(watcher.client, "one") == "[]"
        assert workspace.lowlevel.instructions is None


async def test_hanging_registration_delays_no_other_file(tmp_path: Path) -> None:
    started = tmp_path / "started"
    write(tmp_path, {"tidings.toml": "[register]\ntimeout = 600\n"})
    async with watch(tmp_path) as watcher:
        write(tmp_path, {"server.d/register.sh": f"#!/bin/sh\necho > '{started}'\nexec sleep 600\n"})
        await until(started.exists)
        write(tmp_path, {"tools/one.sh": script("One")})
        await watcher.until_tools("one")


async def test_renamed_file_changes_the_list_once(tmp_path: Path) -> None:
    write(tmp_path, {"tools/old.sh": script("Named")})
    async with watch(tmp_path) as watcher:
        (tmp_path / "tools" / "old.sh").rename(tmp_path / "tools" / "new.sh")
        method, meta = await watcher.received.get()
        assert method == TOOLS
        assert {(change["operation"], change["name"]) for change in meta["changes"]} == {
            ("removed", "old"),
            ("added", "new"),
        }
        assert await watcher.settle() == []


async def test_files_beside_the_watched_folders_are_watched_if_they_are_served(tmp_path: Path) -> None:
    write(tmp_path, {"docs/linked.txt": "1", "more/one.txt": "1", "data/named.txt": "1"})
    write(tmp_path, {"resources/named.meta.json": '{"path": "../data/named.txt", "uri": "data://named"}'})
    (tmp_path / "resources" / "link.txt").symlink_to(tmp_path / "docs" / "linked.txt")
    (tmp_path / "resources" / "folder").symlink_to(tmp_path / "more")
    async with watch(tmp_path, uris=["data://named"]) as watcher:
        write(tmp_path, {"docs/linked.txt": "2"})
        assert await watcher.settle() == [(UPDATED, "updated", "workspace:///link.txt")]
        write(tmp_path, {"data/named.txt": "2"})
        assert await watcher.settle() == [(UPDATED, "updated", "data://named")]
        write(tmp_path, {"more/one.txt": "2"})
        assert await watcher.settle() == [(UPDATED, "updated", "workspace:///folder/one.txt")]
        write(tmp_path, {"more/two.txt": "2"})
        assert (RESOURCES, "added", "workspace:///folder/two.txt") in await watcher.settle()


async def test_names_that_are_not_utf8_do_not_interrupt_the_watching(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watch(tmp_path) as watcher:
        for name in (b"\xff.txt", b"\xfe.txt"):
            with open(bytes(tmp_path / "resources") + b"/" + name, "w"):  # noqa: PTH123, ASYNC230 (no Path has such a name)
                pass
            write(tmp_path, {"tools/good.sh": script(f"After {name!r}")})
            assert [change for change in await watcher.settle() if change[0] == TOOLS]
    assert "can't be watched" not in caplog.text


async def test_ignored_files_are_not_served_and_the_rules_can_change(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            ".gitignore": "*.log\nbuild/\n!keep.log\n",
            "resources/a.log": "a",
            "resources/keep.log": "kept",
            "resources/build/b.txt": "b",
            "resources/node_modules/c/index.js": "c",
            "resources/d.txt": "d",
            "resources/any.meta.json": '{"uriTemplate": "any://{+path}", "path": "resources/{path}"}',
        },
    )
    kept, other = "workspace:///keep.log", "workspace:///d.txt"
    async with watch(tmp_path) as watcher:
        assert await watcher.resources() == {kept, other}
        for name in ("a.log", "build/b.txt", "node_modules/c/index.js"):
            with pytest.raises(MCPError, match="Unknown resource"):
                await watcher.client.read_resource(f"any://{name}")
        write(tmp_path, {".tidingsignore": "!*.log\nd.*\n"})
        await until(lambda: "d.txt" not in list_names(watcher.workspace, Feature.RESOURCES))
        assert await watcher.resources() - {kept} == {"workspace:///a.log"}
        write(tmp_path, {"resources/e.log": "e", "resources/d.csv": "d"})
        await watcher.settle()
        assert await watcher.resources() == {kept, "workspace:///a.log", "workspace:///e.log"}
