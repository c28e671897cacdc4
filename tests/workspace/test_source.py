"""The lists of a server equal its folder: real files, a real server, a real client.

Covers `scanner.py` and `publisher.py`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.workspaces import (
    PROMPTS,
    RESOURCES,
    TOOLS,
    UPDATED,
    Watcher,
    call,
    list_names,
    script,
    watch,
    write,
)
from tidings.core.model import Feature
from tidings.errors import TidingsError
from tidings.live import Live
from tidings.workspace import resources
from tidings.workspace.problems import ERRORS
from tidings.workspace.scanner import Scanner
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio


# One change, seen by a client


async def test_new_script_is_a_tool_immediately(tmp_path: Path) -> None:
    async with watch(tmp_path) as watcher:
        write(tmp_path, {"deploy.sh": script("Deploy the site")})
        (tmp_path / "deploy.sh").rename(tmp_path / "tools" / "deploy.sh")
        assert await watcher.settle() == [(TOOLS, "added", "deploy")]
        assert await watcher.tools() == {"deploy": "Deploy the site"}
        assert await call(watcher.client, "deploy") == "ok"
        (tmp_path / "tools" / "deploy.sh").unlink()
        assert await watcher.settle() == [(TOOLS, "removed", "deploy")]


async def test_only_a_new_definition_changes_the_list(tmp_path: Path) -> None:
    path = tmp_path / "tools" / "deploy.sh"
    write(tmp_path, {"tools/deploy.sh": script("Deploy")})
    async with watch(tmp_path) as watcher:
        os.utime(path)
        assert await watcher.settle() == []
        path.write_text(path.read_text())
        assert await watcher.settle() == []
        path.write_text(script("Deploy", "echo another body"))
        assert await watcher.settle() == []
        assert await call(watcher.client, "deploy") == "another body"
        before = path.stat()
        path.write_text(script("Redeploy"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert await watcher.settle() == [(TOOLS, "updated", "deploy")]


async def test_broken_file_keeps_its_last_good_version_and_is_reported(tmp_path: Path) -> None:
    good = 'def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n'
    write(tmp_path, {"tools/sums.py": good})
    async with watch(tmp_path) as watcher:
        write(tmp_path, {"tools/sums.py": good.replace("a + b", "a +")})
        assert await watcher.settle() == [(UPDATED, "updated", ERRORS)]
        assert "tools/sums.py:3:" in await watcher.errors()
        assert await call(watcher.client, "add", {"a": 2, "b": 3}) == {"result": 5}
        write(tmp_path, {"tools/sums.py": good.replace("Add.", "Add two.")})
        assert sorted(await watcher.settle()) == [(UPDATED, "updated", ERRORS), (TOOLS, "updated", "add")]
        assert await watcher.errors() == ""


async def test_edited_resource_notifies_its_subscribers_without_a_list_change(tmp_path: Path) -> None:
    write(tmp_path, {"resources/notes.md": "one"})
    path = tmp_path / "resources" / "notes.md"
    async with watch(tmp_path) as watcher:
        temporary = tmp_path / "resources" / ".notes.md.swp"
        temporary.write_text("two")
        temporary.replace(path)
        assert await watcher.settle() == [(UPDATED, "updated", "workspace:///notes.md")]
        path.unlink()
        assert await watcher.settle() == [
            (UPDATED, "deleted", "workspace:///notes.md"),
            (RESOURCES, "removed", "workspace:///notes.md"),
        ]


@pytest.mark.parametrize("path", ["tools/a.sh", "prompts/a.md"])
async def test_empty_file_keeps_its_last_version(tmp_path: Path, path: str) -> None:
    write(tmp_path, {"tools/a.sh": script("one"), "prompts/a.md": "---\ndescription: one\n---\nSay {word}"})
    async with watch(tmp_path) as watcher:
        (tmp_path / path).write_text("")
        assert await watcher.settle() == [(UPDATED, "updated", ERRORS)]
        assert (await watcher.tools(), await watcher.prompts()) == ({"a": "one"}, {"a": "one"})
        assert f"{path}: the file is empty" in await watcher.errors()


# Many changes


async def test_removed_and_restored_folder_is_reported(tmp_path: Path) -> None:
    write(tmp_path, {f"tools/t{number:02}.sh": script("A tool") for number in range(20)})
    async with watch(tmp_path) as watcher:
        shutil.move(tmp_path / "tools", tmp_path / "elsewhere")
        assert [operation for _, operation, _ in await watcher.settle()] == ["removed"] * 20
        assert await watcher.tools() == {}
        shutil.move(tmp_path / "elsewhere", tmp_path / "tools")
        while len(await watcher.tools()) < 20:
            await watcher.settle()
        write(tmp_path, {"tools/t05.sh": script("Another tool")})
        assert (TOOLS, "updated", "t05") in await watcher.settle()


async def test_checkout_of_a_thousand_files_is_reported_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(branch: str) -> None:
        git("add", "-A")
        git("commit", "-qm", branch)

    monkeypatch.setattr("tidings.workspace.watcher._REMOVAL_GRACE", 1.0)  # git may pause between two steps
    git("init", "-q", "-b", "one")
    write(tmp_path, {f"tools/t{number:03}.sh": script("One") for number in range(1000)})
    commit("one")
    git("checkout", "-qb", "two")
    write(tmp_path, {f"tools/t{number:03}.sh": script("Two") for number in range(500)})
    for number in range(500, 600):
        (tmp_path / f"tools/t{number:03}.sh").unlink()
    write(tmp_path, {"tools/new.sh": script("Two")})
    commit("two")
    git("checkout", "-q", "one")

    async with watch(tmp_path) as watcher:
        await asyncio.to_thread(git, "checkout", "-q", "two")
        # Ignore `ERRORS`, because a file that git is still writing may be reported in between.
        changes = [(operation, key) for _, operation, key in await watcher.settle() if key != ERRORS]
        expected = [("updated", f"t{number:03}") for number in range(500)] + [("added", "new")]
        expected += [("removed", f"t{number:03}") for number in range(500, 600)]
        # A notification of more than 64 changes does not name all of them.
        assert sorted(set(changes).intersection(expected)) == sorted(changes)
        assert len(await watcher.tools()) == 901


async def test_lists_are_never_incomplete_during_edits(tmp_path: Path) -> None:
    write(tmp_path, {f"tools/t{number}.sh": script("0") for number in range(50)})

    def edit_all() -> None:
        for version in range(10):
            for number in range(50):
                write(tmp_path, {f"tools/.t{number}": script(str(version))})
                (tmp_path / f"tools/.t{number}").replace(tmp_path / f"tools/t{number}.sh")

    async with watch(tmp_path) as watcher:
        lengths: set[int] = set()
        editing = asyncio.create_task(asyncio.to_thread(edit_all))
        while not editing.done():
            lengths.add(len(await watcher.tools()))
        await watcher.settle()
        assert lengths == {50}
        assert set((await watcher.tools()).values()) == {"9"}


async def test_no_file_outside_the_workspace_is_reachable(tmp_path: Path) -> None:
    root = tmp_path / "ws"
    write(
        tmp_path,
        {
            "secret.txt": "secret",
            "ws/resources/up.meta.json": '{"uri": "file://../secret.txt", "name": "up"}',
            "ws/resources/any.meta.json": '{"uriTemplate": "any://{+path}", "path": "resources/{path}"}',
            "ws/resources/inside.txt": "inside",
        },
    )
    (root / "resources" / "link.txt").symlink_to(tmp_path / "secret.txt")
    async with watch(root) as watcher:
        assert await watcher.resources() == {"workspace:///inside.txt"}
        assert "up.meta.json" in await watcher.errors()
        read = await watcher.client.read_resource("any://inside.txt")
        assert getattr(read.contents[0], "text", None) == "inside"
        for path in ("link.txt", "..%2F..%2Fsecret.txt", "../../secret.txt"):
            with pytest.raises(Exception, match="Unknown resource"):
                await watcher.client.read_resource(f"any://{path}")


# Random changes

KINDS = ("tool", "python", "prompt", "resource")
NAMES = st.sampled_from(["a", "b", "c"])
TEXTS = st.sampled_from(["one", "two"])
NOTHING = st.just("")
Operation = tuple[str, str, str]
OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(KINDS), NAMES, TEXTS),
    st.tuples(st.sampled_from(["broken", "touch"]), NAMES, NOTHING),
    st.tuples(st.sampled_from([f"remove {kind}" for kind in KINDS]), NAMES, NOTHING),
    st.tuples(st.sampled_from(["rename tool", "rename resource"]), NAMES, NAMES),
)


class Model:
    """The expected lists of the server."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tools: dict[str, str] = {}
        self.prompts: dict[str, str] = {}
        self.resources: dict[str, str] = {}

    def locate(self, kind: str, name: str) -> tuple[Path, dict[str, str], str]:
        """Return the file of an item, the list that it belongs to, and its key there."""
        match kind:
            case "tool":
                return self.root / f"tools/sh_{name}.sh", self.tools, f"sh_{name}"
            case "python":
                return self.root / f"tools/py_{name}.py", self.tools, f"py_{name}"
            case "prompt":
                return self.root / f"prompts/{name}.md", self.prompts, name
        return self.root / f"resources/{name}.txt", self.resources, name

    def apply(self, action: str, name: str, text: str) -> None:
        if action == "broken":
            self.locate("python", name)[0].write_text("def broken(:\n")
        elif action == "touch":
            for kind in KINDS:
                if (path := self.locate(kind, name)[0]).exists():
                    os.utime(path)
        elif action in KINDS:
            path, items, key = self.locate(action, name)
            content = {
                "tool": script(text),
                "python": f'def py_{name}(x: int) -> int:\n    """{text}"""\n    return x\n',
                "prompt": f"---\ndescription: {text}\n---\nSay {{it}}\n",
                "resource": text,
            }
            write(self.root, {str(path.relative_to(self.root)): content[action]})
            items[key] = text
        else:
            verb, _, kind = action.partition(" ")
            path, items, key = self.locate(kind, name)
            if not path.exists():
                return
            if verb == "remove":
                path.unlink()
                items.pop(key, None)
            elif text != name:
                new_path, _, new_key = self.locate(kind, text)
                path.replace(new_path)
                items[new_key] = items.pop(key)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(bursts=st.lists(st.lists(OPERATIONS, min_size=1, max_size=4), min_size=1, max_size=8))
def test_lists_equal_the_folder_after_random_changes(
    bursts: list[list[Operation]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("ws")
    model = Model(root)

    async def check() -> None:
        async with watch(root) as watcher:
            for burst in _split_broken(bursts):
                before = (dict(model.tools), dict(model.prompts), dict(model.resources))
                for operation in burst:
                    model.apply(*operation)
                changes = await watcher.settle()
                await _check_lists(watcher, model)
                if len(burst) == 1:
                    _check_changes(changes, before, model)

    asyncio.run(check())


def _split_broken(bursts: list[list[Operation]]) -> Iterator[list[Operation]]:
    """Split each burst that breaks a file into single operations, so that the server loads each good version."""
    for burst in bursts:
        if any(operation[0] == "broken" for operation in burst):
            yield from ([operation] for operation in burst)
        else:
            yield burst


async def _check_lists(watcher: Watcher, model: Model) -> None:
    assert await watcher.tools() == model.tools
    assert await watcher.prompts() == model.prompts
    assert await watcher.resources() == {f"workspace:///{name}.txt" for name in model.resources}


def _check_changes(changes: list[tuple[str, str, str]], before: tuple[dict[str, str], ...], model: Model) -> None:
    """Check that one operation caused exactly the needed notifications."""
    old_tools, old_prompts, old_resources = before
    expected: list[tuple[str, str, str]] = []
    for method, old, new, form in (
        (TOOLS, old_tools, model.tools, "{}"),
        (PROMPTS, old_prompts, model.prompts, "{}"),
        (RESOURCES, dict.fromkeys(old_resources), dict.fromkeys(model.resources), "workspace:///{}.txt"),
    ):
        expected += [(method, "added", form.format(name)) for name in new if name not in old]
        expected += [(method, "removed", form.format(name)) for name in old if name not in new]
        expected += [(method, "updated", form.format(name)) for name in new if name in old and old[name] != new[name]]
    for name in {*old_resources, *model.resources}:
        uri = f"workspace:///{name}.txt"
        if name not in model.resources:
            expected.append((UPDATED, "deleted", uri))
        elif old_resources.get(name) != model.resources[name]:
            expected.append((UPDATED, "updated", uri))
    assert sorted(change for change in changes if change[2] != ERRORS) == sorted(expected)


# Scans, without a watcher

KEPT = {"tools/kept.sh": script("Kept")}


def test_workspace_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TidingsError, match="tidings new"):
        Workspace(tmp_path / "nowhere")


def test_folder_has_no_editor(tmp_path: Path) -> None:
    live = Live(Workspace(tmp_path))
    with pytest.raises(TidingsError, match=r"^tools: this server is a folder; add, edit or remove its files$"):
        live.tools.remove("kept")


def test_file_removed_during_a_scan_is_deferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, KEPT)
    file = tmp_path / "tools" / "kept.sh"
    workspace = Workspace(tmp_path)

    @contextmanager
    def remove_first() -> Iterator[None]:
        file.unlink()
        yield

    with monkeypatch.context() as patch:
        patch.setattr(workspace, "_lock", remove_first())
        assert workspace.rescan([file], defer_removals=True) == {file}
    assert list_names(workspace) == ["kept"]
    workspace.rescan([file])
    assert list_names(workspace) == []


def test_existing_file_that_a_scan_does_not_find_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, KEPT)
    workspace = Workspace(tmp_path)
    monkeypatch.setattr("tidings.workspace.scanner.walk", lambda root, below: iter(()))
    workspace.rescan()
    assert list_names(workspace) == ["kept"]


def test_event_for_the_folder_itself_does_not_hide_others(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write(tmp_path, KEPT)
    workspace.rescan([tmp_path, tmp_path / "tools" / "kept.sh"])
    assert list_names(workspace) == ["kept"]


def test_file_removed_while_it_is_read_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"resources/a.txt": "a"})
    workspace = Workspace(tmp_path)

    def remove(root: Path, path: Path) -> str:
        path.unlink()
        raise FileNotFoundError(path)

    monkeypatch.setattr(resources, "compute_etag", remove)
    workspace.rescan([tmp_path / "resources" / "a.txt"])
    assert workspace.problems == ()
    workspace.rescan()
    assert list_names(workspace, Feature.RESOURCES) == ["errors"]


@pytest.mark.parametrize(("step", "failing_call", "listed"), [("find_due", 1, ["a", "b"]), ("_load", 2, ["a"])])
def test_other_units_are_loaded_after_an_unexpected_error_in_a_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, failing_call: int, listed: list[str]
) -> None:
    workspace = Workspace(tmp_path)
    owner = Scanner if step == "find_due" else Workspace
    original = getattr(owner, step)
    calls = 0

    def fail_once(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise OSError("input/output error")
        return original(*arguments, **options)

    monkeypatch.setattr(owner, step, fail_once)
    write(tmp_path, {"prompts/a.md": "A", "prompts/b.md": "B"})
    workspace.rescan_safely([tmp_path / "prompts"] if step == "find_due" else None)
    assert list_names(workspace, Feature.PROMPTS) == listed
    workspace.rescan_safely(None)
    assert list_names(workspace, Feature.PROMPTS) == ["a", "b"]
    assert workspace.rescans["failed"] == 1


def test_lists_can_be_read_while_the_folder_is_loaded(tmp_path: Path) -> None:
    """Loading takes the catalog's lock last, and a reader of the lists takes it first."""
    write(tmp_path, {"resources/a.txt": "a", **KEPT})
    workspace = Workspace(tmp_path)
    live = Live(workspace)
    asyncio.run(live.list_reader.ensure_loaded(None))
    before = live.catalog.resources.version
    with workspace._lock:
        reading = threading.Thread(target=live.list_reader.wake, args=[Feature.RESOURCES], daemon=True)
        reading.start()
        reading.join(10)
        assert not reading.is_alive()
        asyncio.run(live.list_reader.ensure_loaded(None))
    assert "kept" in live.catalog.tools
    # The definitions that were read contain no sizes, unlike the list of a client, so the version is unchanged.
    assert live.catalog.resources.version == before
