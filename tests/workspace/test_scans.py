"""Looks at a folder that run at the same time, or while it changes: none takes away what is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import until
from tests.support.workspaces import write
from tidings.core.model import Feature
from tidings.workspace.source import Workspace

TOOL = {"tools/kept.sh": "#!/bin/sh\necho kept\n"}


def listed(workspace: Workspace, feature: Feature = Feature.TOOLS) -> list[str]:
    return sorted(each["name"] for each in workspace.list_now(feature))


def test_what_goes_after_a_look_began_is_spared_as_what_went_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, TOOL)
    file = tmp_path / "tools" / "kept.sh"
    workspace = Workspace(tmp_path)

    @contextmanager
    def late() -> Iterator[None]:
        file.unlink()
        yield

    with monkeypatch.context() as patch:
        patch.setattr(workspace, "_lock", late())
        assert workspace.rescan([file], defer_removals=True) == {file}
    assert listed(workspace) == ["kept"]
    workspace.rescan([file])
    assert listed(workspace) == []


def test_a_walk_that_missed_a_file_does_not_take_it_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, TOOL)
    file, away = tmp_path / "tools" / "kept.sh", tmp_path / "away"
    workspace = Workspace(tmp_path)
    file.rename(away)
    found = workspace._find_units()
    away.rename(file)
    monkeypatch.setattr(workspace, "_find_units", lambda: found)
    workspace.rescan()
    assert listed(workspace) == ["kept"]


def test_the_poll_takes_for_removed_only_what_stays_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silence(root: Path) -> AsyncIterator[set[Path] | None]:
        await asyncio.Event().wait()
        yield None

    monkeypatch.setattr("tidings.workspace.watcher.watch_paths", silence)
    write(tmp_path, TOOL)
    workspace = Workspace(tmp_path, poll=0.05)

    async def main() -> None:
        following = asyncio.create_task(workspace.run())
        with monkeypatch.context() as patch:
            patch.setattr("tidings.workspace.watcher._REMOVAL_GRACE", 3600.0)
            (tmp_path / "tools" / "kept.sh").unlink()
            await until(lambda: workspace.is_confirming_removals or not listed(workspace))
            assert listed(workspace) == ["kept"]
        await until(lambda: not listed(workspace))
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main())


def test_settings_that_lead_out_of_the_workspace_cost_no_other_file_its_change(tmp_path: Path) -> None:
    root = tmp_path / "ws"
    write(tmp_path, {"outside.toml": 'name = "outside"\n', "ws/prompts/a.md": "A"})
    workspace = Workspace(root)
    settings = root / "tidings.toml"
    settings.symlink_to(tmp_path / "outside.toml")
    write(root, {"prompts/b.md": "B", "tools/kept.sh": "#!/bin/sh\n"})
    workspace.rescan_safely([settings, root / "prompts" / "b.md", root / "tools" / "kept.sh"])
    assert listed(workspace, Feature.PROMPTS) == ["a", "b"]
    assert listed(workspace) == ["kept"]
    assert [str(each) for each in workspace.problems] == [
        "tidings.toml: is a link to a file outside the workspace; replace it by a file"
    ]
    assert workspace.rescans["failed"] == 0
    settings.unlink()
    workspace.rescan()
    assert workspace.problems == ()


def test_after_a_look_that_failed_everything_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"prompts/a.md": "A"})
    workspace = Workspace(tmp_path)
    write(tmp_path, {"prompts/b.md": "B"})

    def fail(paths: object) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr(workspace, "_find_affected", fail)
    workspace.rescan_safely([tmp_path / "prompts" / "b.md"])
    assert listed(workspace, Feature.PROMPTS) == ["a", "b"]


def test_a_unit_that_fails_in_an_unforeseen_way_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path)
    load = workspace._load

    def fail(due: Any, *arguments: Any) -> Any:
        if due.unit.key == "prompts/b":
            raise OSError("input/output error")
        return load(due, *arguments)

    monkeypatch.setattr(workspace, "_load", fail)
    write(tmp_path, {"prompts/a.md": "A", "prompts/b.md": "B"})
    workspace.rescan_safely(None)
    assert listed(workspace, Feature.PROMPTS) == ["a"]


REGISTERED = '{"tools": [{"name": "%s", "path": "scripts/greet.sh"}]}'


def registration(name: str) -> str:
    return f"#!/bin/sh\necho '{REGISTERED % name}'\n"


@pytest.mark.parametrize("first", ["register.sh", "register.json"])
def test_what_was_registered_stays_until_what_takes_its_place_was_run(tmp_path: Path, first: str) -> None:
    write(
        tmp_path,
        {
            **TOOL,
            "scripts/greet.sh": "#!/bin/sh\necho hello\n",
            f"server.d/{first}": registration("greet") if first == "register.sh" else REGISTERED % "greet",
        },
    )
    workspace = Workspace(tmp_path)
    old, new = tmp_path / "server.d" / first, tmp_path / "server.d" / "register.bash"
    write(tmp_path, {"server.d/register.bash": registration("welcome")})
    old.unlink()
    workspace.rescan([old, new], run_scripts=False)
    assert listed(workspace) == ["greet"]
    assert workspace.problems == ()
    assert workspace._scripts.have_changed(workspace._get_register_files())
    workspace.rescan(workspace._get_register_files())
    assert listed(workspace) == ["welcome"]
    assert not workspace._scripts.have_changed(workspace._get_register_files())
    new.unlink()
    workspace.rescan([new], run_scripts=False)
    assert listed(workspace) == ["kept"]


def test_a_registration_that_writes_a_file_beside_it_is_not_new_for_that(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "scripts/greet.sh": "#!/bin/sh\necho hello\n",
            "server.d/register.sh": registration("greet") + "echo run >> server.d/register.log\n",
        },
    )
    workspace = Workspace(tmp_path)
    log = tmp_path / "server.d" / "register.log"
    assert log.read_text() == "run\n"
    workspace.rescan([log], run_scripts=False)
    assert not workspace._scripts.have_changed(workspace._get_register_files())
    write(tmp_path, {"server.d/register.sh": registration("welcome")})
    workspace.rescan([tmp_path / "server.d" / "register.sh"], run_scripts=False)
    assert workspace._scripts.have_changed(workspace._get_register_files())
