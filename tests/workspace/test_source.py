"""A folder is what the server lists: a real file system, a real server, a real client."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp.client.client import Client

from tests.support.waiting import until
from tidings.core.model import Feature
from tidings.live import Live
from tidings.workspace.source import ERRORS, Workspace

Told = tuple[str, dict[str, Any]]

MARKER = "workspace:///marker.txt"
NEVER = 3600.0


def mark(root: Path, number: int) -> None:
    """Change the marker in one step, so that it is told once."""
    temporary = root / "resources" / ".marker"
    temporary.write_text(str(number))
    temporary.replace(root / "resources" / "marker.txt")


class Watcher:
    """A client that watches everything, and a folder that it watches."""

    def __init__(self, root: Path, client: Client, told: asyncio.Queue[Told], workspace: Workspace) -> None:
        self.root = root
        self.client = client
        self.workspace = workspace
        self._told = told
        self._marks = 0

    async def settle(self) -> list[tuple[str, str, str]]:
        """What was told until now, as (method, operation, key).

        A marker's own notification ends it, and a second marker's: the first one may be told together with other
        changes, in any order, but what comes after it is told after all of those.
        """
        heard: list[tuple[str, str, str]] = []
        rounds = 0
        async with asyncio.timeout(100):
            while rounds < 2:
                self._marks += 1
                mark(self.root, self._marks)
                while True:
                    method, change = await self._told.get()
                    if change.get("uri") == MARKER:
                        break
                    changes = change.get("changes", [change])
                    heard += [(method, each["operation"], each.get("name", each.get("uri"))) for each in changes]
                rounds = 0 if self.workspace.is_confirming_removals else rounds + 1
        return heard

    async def tools(self) -> dict[str, str]:
        listed = await self.client.list_tools(cache_mode="bypass")
        return {tool.name: tool.description or "" for tool in listed.tools}

    async def prompts(self) -> dict[str, str]:
        listed = await self.client.list_prompts(cache_mode="bypass")
        return {prompt.name: prompt.description or "" for prompt in listed.prompts}

    async def resources(self) -> set[str]:
        listed = await self.client.list_resources(cache_mode="bypass")
        return {resource.uri for resource in listed.resources} - {ERRORS, MARKER}

    async def errors(self) -> str:
        read = await self.client.read_resource(ERRORS, cache_mode="bypass")
        return str(getattr(read.contents[0], "text", ""))


@asynccontextmanager
async def watching(root: Path, poll: float = NEVER) -> AsyncIterator[Watcher]:
    for folder in ("tools", "resources", "prompts"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    mark(root, 0)
    workspace = Workspace(root, poll=poll)
    live = Live(workspace, policy=workspace.settings.policy)
    server = uvicorn.Server(uvicorn.Config(live.http_app(), port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    told: asyncio.Queue[Told] = asyncio.Queue()

    async def on_message(message: Any) -> None:
        if not isinstance(message, Exception):
            told.put_nowait((message.method, (message.params.meta or {})["dev.tidings/change"]))

    try:
        async with (
            Client(f"http://127.0.0.1:{port}/mcp", mode="2026-07-28", message_handler=on_message) as client,
            client.listen(
                tools_list_changed=True,
                prompts_list_changed=True,
                resources_list_changed=True,
                resource_subscriptions=["workspace:///**", ERRORS],
            ),
        ):
            watcher = Watcher(root, client, told, workspace)
            await watcher.settle()  # the watcher of files is at work
            yield watcher
    finally:
        server.should_exit = True
        live.stop()
        await serving


def run(root: Path, scenario: Callable[[Watcher], Awaitable[None]], poll: float = NEVER) -> None:
    async def main() -> None:
        async with watching(root, poll) as watcher:
            await scenario(watcher)

    asyncio.run(main())


def script(path: Path, description: str, body: str = "echo ok") -> None:
    path.write_text(f"#!/bin/sh\n# @describe {description}\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


TOOLS = "notifications/tools/list_changed"
RESOURCES = "notifications/resources/list_changed"
UPDATED = "notifications/resources/updated"


def test_a_script_is_a_tool_from_the_moment_it_is_there(tmp_path: Path) -> None:
    async def scenario(watcher: Watcher) -> None:
        temporary = tmp_path / "deploy.sh"
        script(temporary, "Deploy the site")
        temporary.rename(tmp_path / "tools" / "deploy.sh")
        assert await watcher.settle() == [(TOOLS, "added", "deploy")]
        assert await watcher.tools() == {"deploy": "Deploy the site"}
        result = await watcher.client.call_tool("deploy", {})
        assert getattr(result.content[0], "text", None) == "ok"
        (tmp_path / "tools" / "deploy.sh").unlink()
        assert await watcher.settle() == [(TOOLS, "removed", "deploy")]

    run(tmp_path, scenario)


def test_only_what_changes_the_definition_changes_the_list(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    path = tmp_path / "tools" / "deploy.sh"
    script(path, "Deploy")

    async def scenario(watcher: Watcher) -> None:
        os.utime(path)
        assert await watcher.settle() == []
        path.write_text(path.read_text())
        assert await watcher.settle() == []
        script(path, "Deploy", "echo another body")
        assert await watcher.settle() == []
        result = await watcher.client.call_tool("deploy", {})
        assert getattr(result.content[0], "text", None) == "another body"
        before = path.stat()
        script(path, "Redeploy")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert await watcher.settle() == [(TOOLS, "updated", "deploy")]

    run(tmp_path, scenario)


def test_a_file_that_breaks_keeps_its_last_good_version_and_says_where(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    path = tmp_path / "tools" / "sums.py"
    good = 'def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n'
    path.write_text(good)

    async def scenario(watcher: Watcher) -> None:
        path.write_text(good.replace("a + b", "a +"))
        assert await watcher.settle() == [(UPDATED, "updated", ERRORS)]
        assert "tools/sums.py:3:" in await watcher.errors()
        result = await watcher.client.call_tool("add", {"a": 2, "b": 3})
        assert result.structured_content == {"result": 5}
        path.write_text(good.replace("Add.", "Add two."))
        told = await watcher.settle()
        assert sorted(told) == [(UPDATED, "updated", ERRORS), (TOOLS, "updated", "add")]
        assert await watcher.errors() == ""

    run(tmp_path, scenario)


def test_an_edit_of_a_resource_is_told_to_its_subscribers_and_is_no_list_change(tmp_path: Path) -> None:
    (tmp_path / "resources").mkdir()
    path = tmp_path / "resources" / "notes.md"
    path.write_text("one")

    async def scenario(watcher: Watcher) -> None:
        saved = tmp_path / "resources" / ".notes.md.swp"
        saved.write_text("two")
        saved.replace(path)
        assert await watcher.settle() == [(UPDATED, "updated", "workspace:///notes.md")]
        path.unlink()
        assert await watcher.settle() == [
            (UPDATED, "deleted", "workspace:///notes.md"),
            (RESOURCES, "removed", "workspace:///notes.md"),
        ]

    run(tmp_path, scenario)


def test_a_folder_that_goes_and_comes_back_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    for number in range(20):
        script(tmp_path / "tools" / f"t{number:02}.sh", "A tool")

    async def scenario(watcher: Watcher) -> None:
        shutil.move(tmp_path / "tools", tmp_path / "elsewhere")
        assert [operation for _, operation, _ in await watcher.settle()] == ["removed"] * 20
        assert await watcher.tools() == {}
        shutil.move(tmp_path / "elsewhere", tmp_path / "tools")
        while len(await watcher.tools()) < 20:
            await watcher.settle()
        script(tmp_path / "tools" / "t05.sh", "Another tool")
        assert (TOOLS, "updated", "t05") in await watcher.settle()

    run(tmp_path, scenario)


def test_a_thousand_files_at_once_are_all_there_at_the_end(tmp_path: Path) -> None:
    async def scenario(watcher: Watcher) -> None:
        for number in range(1000):
            script(tmp_path / "tools" / f"t{number}.sh", f"Tool {number}")
        while len(await watcher.tools()) < 1000:
            await watcher.settle()
        assert await watcher.tools() == {f"t{number}": f"Tool {number}" for number in range(1000)}

    run(tmp_path, scenario)


def test_a_checkout_of_a_thousand_files_is_told_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr("tidings.workspace.watcher._REMOVAL_GRACE", 1.0)  # git may have to wait between two steps
    (tools := tmp_path / "tools").mkdir()
    git("init", "-q", "-b", "one")
    for number in range(1000):
        script(tools / f"t{number:03}.sh", "One")
    git("add", "-A")
    git("commit", "-qm", "one")
    git("checkout", "-qb", "two")
    for number in range(500):
        script(tools / f"t{number:03}.sh", "Two")
    for number in range(500, 600):
        (tools / f"t{number:03}.sh").unlink()
    script(tools / "new.sh", "Two")
    git("add", "-A")
    git("commit", "-qm", "two")
    git("checkout", "-q", "one")

    async def scenario(watcher: Watcher) -> None:
        await asyncio.to_thread(git, "checkout", "-q", "two")
        # A file that git is still writing may be reported in between.
        told = [(operation, key) for _, operation, key in await watcher.settle() if key != ERRORS]
        expected = [("updated", f"t{number:03}") for number in range(500)] + [("added", "new")]
        expected += [("removed", f"t{number:03}") for number in range(500, 600)]
        # More than 64 changes at once are told as such, without naming each: what is named is right, and said once.
        assert sorted(set(told).intersection(expected)) == sorted(told)
        assert len(await watcher.tools()) == 901

    run(tmp_path, scenario)


def test_whoever_lists_meanwhile_never_sees_a_missing_or_half_list(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    for number in range(50):
        script(tmp_path / "tools" / f"t{number}.sh", "0")

    async def scenario(watcher: Watcher) -> None:
        seen: set[int] = set()
        edits = asyncio.create_task(asyncio.to_thread(_edit_all, tmp_path))
        while not edits.done():
            seen.add(len(await watcher.tools()))
        await watcher.settle()
        assert seen == {50}
        assert set((await watcher.tools()).values()) == {"9"}

    run(tmp_path, scenario)


def _edit_all(root: Path) -> None:
    for version in range(10):
        for number in range(50):
            temporary = root / "tools" / f".t{number}"
            script(temporary, str(version))
            temporary.replace(root / "tools" / f"t{number}.sh")


def test_where_a_file_system_tells_of_nothing_the_poll_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silence(root: Path) -> AsyncIterator[set[Path] | None]:
        yield None
        await asyncio.Event().wait()

    monkeypatch.setattr("tidings.workspace.watcher.watch_paths", silence)

    async def scenario(watcher: Watcher) -> None:
        script(tmp_path / "found.sh", "Found")  # and only then to its place: a look may come at any moment
        (tmp_path / "found.sh").rename(tmp_path / "tools" / "found.sh")
        assert await watcher.settle() == [(TOOLS, "added", "found")]

    run(tmp_path, scenario, poll=0.05)


def test_nothing_outside_the_workspace_can_be_reached(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    root = tmp_path / "ws"
    (root / "resources").mkdir(parents=True)
    (root / "resources" / "link.txt").symlink_to(tmp_path / "secret.txt")
    (root / "resources" / "up.meta.json").write_text('{"uri": "file://../secret.txt", "name": "up"}')
    (root / "resources" / "any.meta.json").write_text('{"uriTemplate": "any://{+path}", "path": "resources/{path}"}')
    (root / "resources" / "inside.txt").write_text("inside")

    async def scenario(watcher: Watcher) -> None:
        assert await watcher.resources() == {"workspace:///inside.txt"}
        assert "up.meta.json" in await watcher.errors()
        read = await watcher.client.read_resource("any://inside.txt")
        assert getattr(read.contents[0], "text", None) == "inside"
        for path in ("link.txt", "..%2F..%2Fsecret.txt", "../../secret.txt"):
            with pytest.raises(Exception, match="Unknown resource"):
                await watcher.client.read_resource(f"any://{path}")

    run(root, scenario)


KINDS = ("tool", "python", "prompt", "resource")
NAMES = st.sampled_from(["a", "b", "c"])
TEXTS = st.sampled_from(["one", "two"])
OPERATIONS = st.one_of(
    st.tuples(st.just("tool"), NAMES, TEXTS),
    st.tuples(st.just("python"), NAMES, TEXTS),
    st.tuples(st.just("broken"), NAMES, st.just("")),
    st.tuples(st.just("prompt"), NAMES, TEXTS),
    st.tuples(st.just("resource"), NAMES, TEXTS),
    st.tuples(
        st.sampled_from(["remove tool", "remove python", "remove prompt", "remove resource"]), NAMES, st.just("")
    ),
    st.tuples(st.sampled_from(["rename tool", "rename resource"]), NAMES, NAMES),
    st.tuples(st.just("touch"), NAMES, st.just("")),
)


class Model:
    """What the folder ought to be served as, kept beside it in the simplest way."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tools: dict[str, str] = {}
        self.prompts: dict[str, str] = {}
        self.resources: dict[str, str] = {}

    def path(self, kind: str, name: str) -> Path:
        folder, ending = {
            "tool": ("tools", f"sh_{name}.sh"),
            "python": ("tools", f"py_{name}.py"),
            "prompt": ("prompts", f"{name}.md"),
            "resource": ("resources", f"{name}.txt"),
        }[kind]
        return self.root / folder / ending

    def do(self, kind: str, name: str, text: str) -> None:
        if kind == "tool":
            script(self.path(kind, name), text)
            self.tools[f"sh_{name}"] = text
        elif kind == "python":
            self.path(kind, name).write_text(f'def py_{name}(x: int) -> int:\n    """{text}"""\n    return x\n')
            self.tools[f"py_{name}"] = text
        elif kind == "broken":
            self.path("python", name).write_text("def broken(:\n")
        elif kind == "prompt":
            self.path(kind, name).write_text(f"---\ndescription: {text}\n---\nSay {{it}}\n")
            self.prompts[name] = text
        elif kind == "resource":
            self.path(kind, name).write_text(text)
            self.resources[name] = text
        elif kind == "touch":
            for each in KINDS:
                if self.path(each, name).exists():
                    os.utime(self.path(each, name))
        else:
            self._move(kind, name, text)

    def _move(self, kind: str, name: str, text: str) -> None:
        verb, _, what = kind.partition(" ")
        source = self.path(what, name)
        if not source.exists():
            return
        held = {"tool": self.tools, "python": self.tools, "prompt": self.prompts, "resource": self.resources}[what]
        prefix = {"tool": "sh_", "python": "py_"}.get(what, "")
        if verb == "remove":
            source.unlink()
            held.pop(prefix + name, None)
        elif text != name:
            source.replace(self.path(what, text))
            held[prefix + text] = held.pop(prefix + name)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(bursts=st.lists(st.lists(OPERATIONS, min_size=1, max_size=4), min_size=1, max_size=8))
def test_the_lists_equal_the_folder_after_anything(
    bursts: list[list[tuple[str, str, str]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("ws")
    model = Model(root)

    async def scenario(watcher: Watcher) -> None:
        for burst in _told_apart(bursts):
            before = (dict(model.tools), dict(model.prompts), dict(model.resources))
            for operation in burst:
                model.do(*operation)
            told = await watcher.settle()
            assert await watcher.tools() == model.tools
            assert await watcher.prompts() == model.prompts
            assert await watcher.resources() == {f"workspace:///{name}.txt" for name in model.resources}
            if len(burst) == 1:
                _check_told(told, before, model)

    run(root, scenario)


def _told_apart(bursts: list[list[tuple[str, str, str]]]) -> Iterator[list[tuple[str, str, str]]]:
    """The last good version of a file is the last that was seen: one that breaks must not do so in the same burst."""
    for burst in bursts:
        if any(operation[0] == "broken" for operation in burst):
            yield from ([operation] for operation in burst)
        else:
            yield burst


def _check_told(told: list[tuple[str, str, str]], before: tuple[dict[str, str], ...], model: Model) -> None:
    """One operation: exactly the notifications that it needs."""
    tools, prompts, resources = before
    expected: list[tuple[str, str, str]] = []
    for method, old, new, form in (
        (TOOLS, tools, model.tools, "{}"),
        ("notifications/prompts/list_changed", prompts, model.prompts, "{}"),
        (RESOURCES, dict.fromkeys(resources), dict.fromkeys(model.resources), "workspace:///{}.txt"),
    ):
        expected += [(method, "added", form.format(name)) for name in new if name not in old]
        expected += [(method, "removed", form.format(name)) for name in old if name not in new]
        expected += [(method, "updated", form.format(name)) for name in new if name in old and old[name] != new[name]]
    for name in {*resources, *model.resources}:
        uri = f"workspace:///{name}.txt"
        if name not in model.resources:
            expected.append((UPDATED, "deleted", uri))
        elif resources.get(name) != model.resources[name]:
            expected.append((UPDATED, "updated", uri))
    assert sorted(each for each in told if each[2] != ERRORS) == sorted(expected)


def test_a_folder_that_is_being_loaded_keeps_nobody_who_asks_for_its_lists(tmp_path: Path) -> None:
    """Loading takes the catalog's lock last, and whoever reads the lists takes it first."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "slow.py").write_text("def slow() -> str:\n    return 'slow'\n")
    workspace = Workspace(tmp_path)
    live = Live(workspace)
    asking = threading.Thread(target=live.wake, args=[Feature.TOOLS], daemon=True)
    with workspace._lock:
        asking.start()
        asking.join(10)
        assert not asking.is_alive()
    asyncio.run(live.attend(None))
    assert "slow" in live.catalog.tools


def test_lists_that_are_read_while_the_folder_is_being_loaded_are_what_is_served(tmp_path: Path) -> None:
    """And not what a client is answered, which has the files' sizes and may be older than the catalog by then."""
    (tmp_path / "resources").mkdir()
    (tmp_path / "resources" / "a.txt").write_text("a")
    workspace = Workspace(tmp_path)
    live = Live(workspace)

    async def read_while_it_is_loaded() -> None:
        await live.attend(None)
        before = live.catalog.resources.version
        with workspace._lock:
            live.wake(Feature.RESOURCES)
            await live.attend(None)
        assert live.catalog.resources.version == before
        assert live.knows(Feature.RESOURCES)

    asyncio.run(read_while_it_is_loaded())
