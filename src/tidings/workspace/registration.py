"""Registered items: `server.d/register.json`, or `register.sh` and executables `register.*` that print the same.

```json
{"tools": [{"name": "greet", "path": "scripts/greet.sh", "inputSchema": {…}}],
 "resources": [{"uri": "…", "path": "…"}], "resourceTemplates": […], "prompts": [{"name": "…", "path": "…"}]}
```

Paths are relative to the folder of their kind, or to the workspace. If the registration contains a kind, the server
serves only the registered items of that kind, and none for an empty list.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tidings.errors import TidingsError
from tidings.workspace.environment import add_env_script, build_environment
from tidings.workspace.files import FileChecker, find_inside, read_state
from tidings.workspace.items import LoadedItem, UnitContent
from tidings.workspace.metadata import parse_object, read_file
from tidings.workspace.problems import InvalidFile
from tidings.workspace.process import run_process
from tidings.workspace.prompts import make_prompt
from tidings.workspace.resources import make_resource
from tidings.workspace.settings import Settings
from tidings.workspace.templates import make_template
from tidings.workspace.tools import find_unstarted, load_registered_tool

__all__ = ["RegisterScripts"]

_REGISTRIES = {"tools": "tools", "resources": "resources", "resourceTemplates": "templates", "prompts": "prompts"}
"""The kinds of a registration, and the registries of `MCPServer` that they belong to."""

_SOURCE = 'source "${MCP_SDK}/register-sdk.sh"; source "$0"'
"""Runs a `register.sh` with the functions of mcp-bash-framework, as that framework does."""

_SIGNAL_INTERVAL = 0.1
"""Seconds between two checks for a signal: one that arrives just before a wait does not interrupt the wait."""

_KNOWN_MEMBERS = frozenset({*_REGISTRIES, "completions", "version", "_meta", "ui", "uiResources"})


def _select_scripts(files: list[Path]) -> list[Path]:
    """Return the executables among the unit's files, and `register.sh`. A `register.json` replaces all of them.

    `register.sh` needs no permission, because bash sources it: mcp-bash-framework runs it without one, too.
    """
    if any(path.name == "register.json" for path in files):
        return []
    return [path for path in files if path.name == "register.sh" or os.access(path, os.X_OK)]


class RegisterScripts:
    """The scripts of a workspace, with the last output of each."""

    def __init__(self, root: Path, get_settings: Callable[[], Settings], list_files: Callable[[], list[Path]]) -> None:
        """Prepare the runs. `list_files` returns the files of the unit that the last scan found."""
        self._root = root
        self._get_settings = get_settings
        self._list_files = list_files
        self._output: dict[Path, bytes | InvalidFile] = {}
        self._state: list[tuple[Any, ...]] = []
        self._must_run = asyncio.Event()

    async def follow(self, load: Callable[[list[Path]], Awaitable[Any]]) -> None:
        """Run the scripts after `wake`, and at their interval. Call `load` with the scripts after each run.

        This does not run inside a scan, so that a script that hangs delays no other file.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._get_settings().register_ttl):
                    await self._must_run.wait()
            self._must_run.clear()
            if scripts := await self.run():
                await load(scripts)

    def wake(self) -> None:
        """Start a run if a script has changed."""
        if self.has_changes():
            self._must_run.set()

    def has_changes(self) -> bool:
        """Return whether a script is new or has changed since the last run."""
        scripts = self._list_scripts()
        return bool(scripts) and self._state != list(map(read_state, scripts))

    async def run(self) -> list[Path]:
        """Run the scripts, and return them."""
        settings, scripts = self._get_settings(), self._list_scripts()
        # Compare only the scripts, because a script may write other files beside it.
        state = list(map(read_state, scripts))
        output: dict[Path, bytes | InvalidFile] = {}
        for path in scripts:
            try:
                output[path] = await _run_script(self._root, settings, path)
            except InvalidFile as error:
                output[path] = error
        if scripts:
            self._output, self._state = output, state
        return scripts

    def run_blocking(self) -> list[Path]:
        """Run the scripts in a thread with its own event loop, because the caller may be inside an event loop."""
        if not self._list_scripts():
            return []
        loop = asyncio.new_event_loop()
        task = loop.create_task(self.run())
        has_ended = threading.Event()  # unlike `Thread.join`, waiting for it can be repeated after an interrupt

        def run_loop() -> None:
            try:
                loop.run_until_complete(asyncio.wait([task]))
            finally:
                loop.close()
                has_ended.set()

        thread = threading.Thread(target=run_loop, name="registration")
        try:
            thread.start()
            while not has_ended.wait(_SIGNAL_INTERVAL):
                pass
        except BaseException:  # this process is stopping, and a script must not outlive it
            with suppress(RuntimeError):  # the loop is closed: the scripts have ended
                loop.call_soon_threadsafe(task.cancel)
            if thread.is_alive():  # if it has not started yet, it stops by itself
                has_ended.wait()
            raise
        return task.result()

    def load(self, files: list[Path], previous: UnitContent) -> UnitContent:
        """Return the registered items, or the previous ones until every script has run."""
        settings = self._get_settings()
        for path in files:
            if path.name == "register.json":
                return _parse_registration(self._root, settings, path, read_file(self._root, path))
        items: list[LoadedItem] = []
        exclusive: frozenset[str] = frozenset()
        scripts = _select_scripts(files)
        if not self._output.keys() >= set(scripts):
            return previous
        for path in scripts:
            output = self._output[path]
            if isinstance(output, InvalidFile):
                raise output
            registration = _parse_registration(self._root, settings, path, output)
            items += registration.items
            exclusive |= registration.exclusive
        others = [path for path in files if path not in scripts]
        return UnitContent(items, exclusive, problems=find_unstarted(self._root, others, "does not run"))

    def _list_scripts(self) -> list[Path]:
        """Return the scripts that the last scan found and that are still inside the workspace."""
        return list(filter(FileChecker(self._root).is_inside, _select_scripts(self._list_files())))


def _parse_registration(root: Path, settings: Settings, source: Path, text: bytes) -> UnitContent:
    """Return the items of a registration. One invalid item makes the whole registration invalid."""
    if not text.strip():
        return UnitContent()
    try:
        content = parse_object(source, text)
    except InvalidFile as error:
        if source.name == "register.json":
            raise
        # Omit the line, because it is a line of the output and not of the script.
        raise InvalidFile(source, f"the output is {error}") from None
    if unknown := sorted(content.keys() - _KNOWN_MEMBERS):
        raise InvalidFile(source, f"{', '.join(unknown)}: not a kind of item; use {', '.join(_REGISTRIES)}")
    makers: dict[str, Callable[[dict[str, Any]], LoadedItem]] = {
        "tools": lambda meta: load_registered_tool(root, settings, _find_file(root, source, "tools", meta), meta),
        "resources": lambda meta: make_resource(root, settings, _find_file(root, source, "resources", meta), meta),
        "resourceTemplates": lambda meta: make_template(root, settings, meta, source),
        "prompts": lambda meta: make_prompt(root, _find_file(root, source, "prompts", meta), meta),
    }
    items: list[LoadedItem] = []
    exclusive: set[str] = set()
    for kind, registry in _REGISTRIES.items():
        entries = content.get(kind)
        if entries is None:
            continue
        if not isinstance(entries, list):
            raise InvalidFile(source, f"{kind} is {entries!r:.60}; it must be a list")
        if kind != "resourceTemplates" or not entries:
            exclusive.add(registry)
        for number, meta in enumerate(entries, 1):
            if not isinstance(meta, dict):
                raise InvalidFile(source, f"{kind}, item {number}: {meta!r:.60} is not an object")
            try:
                items.append(makers[kind](meta))
            except (TidingsError, ValueError, KeyError, OSError) as error:
                raise InvalidFile(source, f"{kind}, item {number}: {error}") from None
    return UnitContent(items, frozenset(exclusive))


def _find_file(root: Path, source: Path, kind: str, meta: dict[str, Any]) -> Path:
    path = str(meta.get("path") or "")
    if not path:
        raise InvalidFile(source, f"{meta.get('name', 'an item')!r} needs a path")
    if (found := find_inside(root, root / kind / path, root / path)) is None:
        raise InvalidFile(source, f"path {path!r} is not a file in {kind}/ or in the workspace")
    return found


async def _run_script(root: Path, settings: Settings, path: Path) -> bytes:
    """Run a script and return its standard output."""
    try:
        outcome = await run_process(
            add_env_script(root, [str(path)] if path.name != "register.sh" else ["bash", "-c", _SOURCE, str(path)]),
            stdin=b"",
            env=build_environment(root, {}, name="register", allowed=settings.env),
            cwd=root,
            timeout=settings.register_timeout,
            max_output=settings.max_output,
        )
    except Exception as error:
        raise InvalidFile(path, str(error)) from error
    if outcome.is_timeout:
        limit = f"{settings.register_timeout:g} s"
        raise InvalidFile(path, f"did not finish within {limit}; make it faster, or raise [register] timeout")
    if outcome.is_truncated:
        raise InvalidFile(path, f"printed more than {settings.max_output} bytes, the limit of [tools] max_output")
    if outcome.status != 0:
        stderr = outcome.stderr.decode("utf-8", "replace").strip()[-500:]
        raise InvalidFile(path, f"failed with exit status {outcome.status}{': ' + stderr if stderr else ''}")
    return outcome.stdout
