"""What else may happen to a folder while it is served: its folders are replaced, files stand for others, settings are
edited, registrations hang. The poll is off throughout, so that only what is noticed at once is noticed at all.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, GRACE, serving, start_command
from tests.support.waiting import until
from tests.support.workspaces import call, write
from tests.workspace.test_source import NEVER, Watcher, watching
from tidings.core.model import Feature
from tidings.workspace import resources
from tidings.workspace import watcher as watch
from tidings.workspace.source import Workspace
from tidings.workspace.watcher import logger

SCRIPT = "#!/bin/sh\n# @describe {}\necho hi\n"


def follow(root: Path, scenario: Callable[[Watcher], Awaitable[None]]) -> None:
    async def main() -> None:
        async with watching(root, poll=NEVER) as watcher:
            await scenario(watcher)

    asyncio.run(main())


async def until_tools(watcher: Watcher, *names: str) -> None:
    await until(lambda: {tool["name"] for tool in watcher.workspace.list_now(Feature.TOOLS)} == set(names))
    assert (await watcher.tools()).keys() == set(names)


def test_a_folder_that_is_made_again_is_watched_as_the_first_one(tmp_path: Path) -> None:
    async def scenario(watcher: Watcher) -> None:
        shutil.rmtree(tmp_path / "tools")
        (tmp_path / "tools").mkdir()
        write(tmp_path, {"tools/one.sh": SCRIPT})
        await until_tools(watcher, "one")
        await watcher.settle()
        write(tmp_path, {"tools/two.sh": SCRIPT})
        await until_tools(watcher, "one", "two")

    follow(tmp_path, scenario)


def test_a_workspace_that_is_moved_away_and_back_is_watched_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, away = tmp_path / "here", tmp_path / "away"
    root.mkdir()
    write(root, {"tools/one.sh": SCRIPT})

    async def scenario(watcher: Watcher) -> None:
        root.rename(away)
        await until_tools(watcher)
        await until(lambda: "can't be watched" in caplog.text)
        away.rename(root)
        await until_tools(watcher, "one")
        await watcher.settle()
        write(root, {"tools/two.sh": SCRIPT})
        await until_tools(watcher, "one", "two")

    follow(root, scenario)


def test_that_nothing_can_be_watched_is_said_once_and_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bool] = []

    async def at_its_limit(*places: Path, ignore_permission_denied: bool, **options: object) -> AsyncIterator[None]:
        # As watchfiles does it: what it is told to ignore is any failure.
        tries.append(ignore_permission_denied)
        if ignore_permission_denied:
            await asyncio.Event().wait()
        raise OSError("OS file watch limit reached.")
        yield

    monkeypatch.setattr(watch, "awatch", at_its_limit)
    monkeypatch.setattr("tidings.workspace.watcher._RETRY", 0.001)
    write(tmp_path, {"tools/one.sh": SCRIPT})

    async def main() -> None:
        following = asyncio.create_task(Workspace(tmp_path, poll=0).run())
        await until(lambda: len(tries) > 8)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main())
    [said] = [record.getMessage() for record in caplog.records if record.name == logger.name]
    assert "OS file watch limit reached" in said
    assert "max_user_watches" in said


def test_a_file_that_another_one_stands_for_is_told_under_both_names(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "resources/sub/real.txt": "one",
            "resources/named.meta.json": '{"uri": "workspace:///named", "path": "sub/real.txt"}',
            "resources/late.meta.json": '{"uri": "workspace:///late", "path": "other/late.txt"}',
            "server.d/register.json": '{"prompts": [{"name": "said", "path": "texts/said.md"}]}',
            "prompts/texts/said.md": "Say {one}",
        },
    )
    (tmp_path / "resources" / "link.txt").symlink_to("sub/real.txt")

    async def scenario(watcher: Watcher) -> None:
        (tmp_path / "resources" / "folder").symlink_to("sub")
        await watcher.settle()
        assert "the file 'late.txt' does not exist" in await watcher.errors()
        write(
            tmp_path,
            {
                "resources/sub/real.txt": "two",
                "resources/other/late.txt": "here",
                "prompts/texts/said.md": "---\ndescription: Changed\n---\nSay {one}",
            },
        )
        heard = {key for method, _, key in await watcher.settle() if method == "notifications/resources/updated"}
        names = {"named", "late", "sub/real.txt", "link.txt", "folder/real.txt"}
        assert {f"workspace:///{name}" for name in names} <= heard
        assert await watcher.errors() == ""
        assert await watcher.prompts() == {"said": "Changed"}
        listed = await watcher.resources()
        watcher.workspace.rescan()  # a look at everything finds what the events have told
        assert await watcher.resources() == listed

    follow(tmp_path, scenario)


def test_a_helper_that_changes_is_new_to_all_tools_beside_it_and_shared_by_them(tmp_path: Path) -> None:
    one = "import _shared\n\ndef one() -> str:\n    _shared.calls.append(1)\n    return _shared.text\n"
    two = "import _shared\n\ndef two() -> int:\n    return len(_shared.calls)\n"
    other = "import _shared\n\ndef other() -> str:\n    return _shared.text\n"
    write(
        tmp_path,
        {
            "tools/_shared.py": "calls = []\ntext = 'old'\n",
            "tools/one.py": one,
            "tools/two.py": two,
            "tools/folder/_shared.py": "text = 'of the folder'\n",
            "tools/folder/tool.py": other,
        },
    )

    async def scenario(watcher: Watcher) -> None:
        async def answers() -> list[object]:
            return [(await call(watcher.client, name))["result"] for name in ("one", "two", "other")]

        assert await answers() == ["old", 1, "of the folder"]
        write(tmp_path, {"tools/_shared.py": "calls = []\ntext = 'new'\n"})
        await watcher.settle()
        assert await answers() == ["new", 1, "of the folder"]

    follow(tmp_path, scenario)


def test_settings_are_taken_up_as_they_are_edited_or_said_to_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_VARIABLE", "seen")
    write(tmp_path, {"tools/one.sh": '#!/bin/sh\necho "[$A_VARIABLE]"\n'})

    async def scenario(watcher: Watcher) -> None:
        assert await call(watcher.client, "one") == "[]"
        write(tmp_path, {"tidings.toml": 'name = "other"\ninstructions = "now"\n[tools]\nenv = ["A_*"]\n'})
        await until(lambda: watcher.workspace.settings.env)
        await watcher.settle()  # and what has them is read anew
        assert await call(watcher.client, "one") == "[seen]"
        assert watcher.workspace.lowlevel.instructions == "now"
        assert "tidings.toml: name changed; restart the server to apply it" in caplog.text
        (tmp_path / "tidings.toml").unlink()
        await until(lambda: not watcher.workspace.settings.env)
        await watcher.settle()
        assert await call(watcher.client, "one") == "[]"
        assert watcher.workspace.lowlevel.instructions is None

    follow(tmp_path, scenario)


def test_a_registration_that_hangs_delays_no_other_file(tmp_path: Path) -> None:
    hung = tmp_path / "hung"
    script = f"#!/bin/sh\necho > '{hung}'\nexec sleep 600\n"
    write(tmp_path, {"tidings.toml": "[register]\ntimeout = 600\n"})

    async def scenario(watcher: Watcher) -> None:
        write(tmp_path, {"server.d/register.sh": script})
        await until(hung.exists)
        write(tmp_path, {"tools/one.sh": SCRIPT})
        await until_tools(watcher, "one")

    follow(tmp_path, scenario)


def test_what_goes_while_it_is_read_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"resources/a.txt": "a"})
    workspace = Workspace(tmp_path)

    def goes(path: Path) -> str:
        path.unlink()
        raise FileNotFoundError(path)

    monkeypatch.setattr(resources, "compute_etag", goes)
    workspace.rescan([tmp_path / "resources" / "a.txt"])
    assert workspace.problems == ()
    workspace.rescan()
    assert [item["uri"] for item in workspace.list_now(Feature.RESOURCES)] == ["tidings://errors"]


def test_a_prompt_that_is_empty_is_being_written_and_stays_what_it_was(tmp_path: Path) -> None:
    async def scenario(watcher: Watcher) -> None:
        write(tmp_path, {"prompts/said.md": "---\ndescription: Said\n---\nSay {one}"})
        await watcher.settle()
        (tmp_path / "prompts" / "said.md").write_text("")
        await watcher.settle()
        assert await watcher.prompts() == {"said": "Said"}
        assert "prompts/said.md: the file is empty" in await watcher.errors()

    follow(tmp_path, scenario)


@pytest.mark.anyio
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_registration_that_hangs_does_not_outlive_its_server(
    board: Path, tmp_path: Path, number: signal.Signals
) -> None:
    pid = tmp_path / "pid"
    script = f"#!/bin/sh\necho $$ > '{pid}.new'\nmv '{pid}.new' '{pid}'\nexec sleep 600\n"
    (board / "tidings.toml").write_text("[register]\ntimeout = 600\n")
    async with asyncio.timeout(DEADLINE):
        # While it serves, and while it still starts.
        async with serving(board) as server:
            write(board, {"server.d/register.sh": script})
            await until(pid.exists)
            server.process.send_signal(number)
            assert await asyncio.wait_for(server.process.wait(), GRACE) == 0
            await until(lambda: not _is_running(int(pid.read_text())))
        pid.unlink()
        async with start_command("serve", board, "--port", 0) as process:
            await until(pid.exists)
            process.send_signal(number)
            assert await asyncio.wait_for(process.wait(), GRACE) == 0
            await until(lambda: not _is_running(int(pid.read_text())))


def _is_running(pid: int) -> bool:
    """A process that has ended and that nobody asks about any more does not run."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()  # it went just now, unless this system has no such folder
