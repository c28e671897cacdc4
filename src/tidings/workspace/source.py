"""A folder as the source of a server's items.

File system events only name the files to check; digests decide what has changed. A unit is loaded again if the state
of its files differs. Its new items replace the old ones in one commit, so that no client sees an incomplete list. A
unit that can't be loaded keeps its last good items, and `tidings://errors` contains the reason.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import mcp_types as types
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.resources import FunctionResource

from tidings.core.catalog import Catalog
from tidings.core.model import Feature
from tidings.core.tracer import SCAN, Tracer
from tidings.errors import TidingsError
from tidings.events.types import EventTypes
from tidings.sdk import internals
from tidings.sdk.source import Source
from tidings.workspace import DEFAULT_POLL, TOP_LEVEL
from tidings.workspace.caller import set_log_level
from tidings.workspace.events import load_event
from tidings.workspace.executable import ExecutableTool
from tidings.workspace.files import IGNORE_FILES, FileChecker, list_inodes, read_state, walk
from tidings.workspace.items import ItemKey, ItemTable, LoadedItem, UnitContent, make_item
from tidings.workspace.loader import LoadedUnit, check_items, list_other_files, load_content
from tidings.workspace.problems import Problem, digest_problems, find_problem
from tidings.workspace.python import StillLoading, unload_modules, wait_for_loading
from tidings.workspace.register import RegisterScripts, select_scripts
from tidings.workspace.requests import wrap_handlers
from tidings.workspace.resources import FileResource
from tidings.workspace.settings import Settings, load_settings, read_tool_allowlist
from tidings.workspace.templates import FileTemplate
from tidings.workspace.units import REGISTER, SETTINGS, Unit, find_unit, has_python, list_parents
from tidings.workspace.watcher import FolderWatcher

if TYPE_CHECKING:
    from mcp.server import Server

__all__ = ["ERRORS", "Workspace"]

logger = logging.getLogger(__name__)

ERRORS = "tidings://errors"

_DEFAULT_VERSION = "0.0.0"
"""The version of a workspace without one, because clients expect one. mcp-bash-framework uses the same."""

_SERVES_NOTHING = Problem(
    ".",
    None,
    "this folder serves nothing yet; add a file to tools/, prompts/ or resources/, or create examples with "
    "`tidings new DIR`",
)

_UNKNOWN = ("unknown",)
"""The state of a unit that the next scan must load again."""


@dataclass(frozen=True, slots=True)
class _DueUnit:
    """A unit that must be loaded."""

    unit: Unit
    files: list[Path]
    state: tuple[Any, ...]
    previous: LoadedUnit

    @property
    def changed_files(self) -> set[Path]:
        """The files that were added, edited or removed since the unit was loaded."""
        edited = {file for file, now in zip(self.files, self.state, strict=False) if now not in self.previous.state}
        return edited | set(self.previous.files).difference(self.files)


class Workspace(Source):
    """A server whose items are the files of a folder."""

    has_shared_lists = True
    completes_handshakes = True

    def __init__(self, root: Path | str, *, poll: float = DEFAULT_POLL) -> None:
        """Load the folder. `poll` is the number of seconds between full scans; 0 turns them off."""
        self.root = Path(root).resolve()
        if not self.root.is_dir():
            raise TidingsError(f"{root} is not a folder; create a workspace with: tidings new {root}")
        self.settings = self._initial_settings = self._load_initial_settings()
        self._unapplied: list[str] = []
        self.server: MCPServer[Any] = MCPServer(
            self.settings.name,
            title=self.settings.title,
            description=self.settings.description,
            instructions=self.settings.instructions,
            version=self.settings.version or _DEFAULT_VERSION,
            warn_on_duplicate_tools=False,
            log_level="WARNING",
        )
        self.lowlevel: Server[Any] = internals.lowlevel_of(self.server)
        self._watcher = FolderWatcher(self.root, self._scan, poll, self._list_outside_folders)
        self._scripts = RegisterScripts(self.root)
        self._must_run_scripts = asyncio.Event()
        self._catalog: Catalog | None = None
        self._lock = threading.Lock()
        self._units: dict[Unit, LoadedUnit] = {}
        allowed_tools = read_tool_allowlist()
        if allowed_tools is not None:
            logger.info(
                "MCPBASH_TOOL_ALLOWLIST is set; no other tools are served: %s", ", ".join(sorted(allowed_tools))
            )
        self._table = ItemTable(allowed_tools)
        self._served: dict[ItemKey, LoadedItem] = {}
        """The items in the SDK's registries and in the catalog. It changes together with them."""
        self._failed: dict[Unit, Problem] = {}
        self._loading: set[Path] = set()
        """The Python files that the last scan did not wait for."""
        self._event_types = EventTypes()
        """The types that the files in `events/` declare, and from `serve_events` on those of the server."""
        self.rescans: Counter[str] = Counter()
        """The number of scans by outcome: `read`, `unchanged` or `failed`."""
        self.tracer = Tracer()
        self.problems: tuple[Problem, ...] = ()
        """The problems that `tidings://errors` contains."""
        self._is_loaded = False
        """Whether all files were loaded once. Until then, a folder without items may still get some."""
        errors = FunctionResource.from_function(
            lambda: "\n".join(map(str, self.problems)),
            uri=ERRORS,
            name="errors",
            title="Errors of this workspace",
            description="Files that are not served as they are, and why. Empty if there are none.",
            mime_type="text/plain",
        )
        internals.registry_of(self.server, "resources")[ERRORS] = errors
        self._errors = make_item(errors)
        self.lowlevel.add_request_handler("logging/setLevel", types.SetLevelRequestParams, set_log_level)
        self.lowlevel.add_request_handler("resources/list", types.PaginatedRequestParams, self._list_resources)
        self._handlers = wrap_handlers(self.server)
        remaining = self.rescan()
        while remaining:
            wait_for_loading(remaining)
            remaining = self.rescan(remaining)
        if scripts := self._list_scripts():
            self._scripts.run_blocking(self.settings, scripts)
            self.rescan(scripts)
        self._is_loaded = True
        self._publish(set())

    def serve_events(self, types: EventTypes) -> None:
        """Declare the event types of the files among those of the server, also when a file changes."""
        with self._lock:
            for loaded in self._units.values():
                if loaded.content.event is not None:
                    types.declare(loaded.content.event)
            self._event_types = types

    # The interface that Live uses

    def is_list_shared(self, method: str) -> bool:
        entry = self.lowlevel.get_request_handler(method)
        return entry is not None and entry.handler is self._handlers[method]

    def watch(self, catalog: Catalog, wake: Callable[[Feature], None]) -> None:
        self._catalog = catalog
        resources = catalog.resources
        etags = self._list_etags()
        with catalog.batch():
            # The store may contain resources from an earlier run of the server.
            for uri in sorted({item.key for item in resources.snapshot()} | resources.contents().keys()):
                if uri not in etags and (Feature.RESOURCES, uri) not in self._served and uri != ERRORS:
                    resources.deleted(uri)
            for uri, etag in etags.items():
                resources.updated(uri, etag=etag)
            if self.problems or resources.content(ERRORS).revision:
                resources.updated(ERRORS, etag=digest_problems(self.problems))

    def read_items(self, feature: Feature, on_invalid: object = None) -> list[dict[str, Any]]:
        # Taking `_lock` could deadlock here: loading takes the catalog's lock while it holds `_lock`, and the caller of
        # this method may already hold the catalog's lock.
        with self._catalog.lock if self._catalog is not None else nullcontext():
            definitions = [item.definition for (of, _), item in self._served.items() if of is feature]
        return definitions + ([self._errors.definition] if feature is Feature.RESOURCES else [])

    def count_items(self) -> dict[Feature, int]:
        """Count the items of each list, without the resource that Tidings adds."""
        with self._catalog.lock if self._catalog is not None else nullcontext():
            counts = Counter(feature for feature, _ in self._served)
        return {feature: counts[feature] for feature in Feature}

    async def run(self) -> None:
        """Keep the items up to date until cancelled."""
        await asyncio.gather(self._watcher.run(), self._run_scripts())

    @property
    def is_answering(self) -> bool:
        """Whether the folder exists."""
        return self.root.is_dir()

    @property
    def has_pending_scan(self) -> bool:
        """Whether the last scan left files for another one: missing or slow ones. Tests wait until there are none."""
        return self._watcher.has_pending_scan

    # Scanning

    async def _scan(self, paths: set[Path] | None, defer_removals: bool) -> set[Path]:
        remaining = await asyncio.to_thread(self.rescan_safely, paths, defer_removals=defer_removals)
        if self._scripts.has_changes(self._list_scripts()):
            self._must_run_scripts.set()
        return remaining

    async def _run_scripts(self) -> None:
        """Run the registration scripts when they have changed, and at their interval.

        This does not run inside a scan, so that a script that hangs delays no other file.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.register_ttl):
                    await self._must_run_scripts.wait()
            self._must_run_scripts.clear()
            if scripts := self._list_scripts():
                await self._scripts.run(self.settings, scripts)
                await asyncio.to_thread(self.rescan_safely, scripts)

    def _list_scripts(self) -> list[Path]:
        """Return the registration scripts that the last scan found and that are still inside the workspace."""
        loaded = self._units.get(REGISTER, LoadedUnit())
        return list(filter(FileChecker(self.root).is_inside, select_scripts(loaded.files)))

    def rescan_safely(self, paths: Iterable[Path] | None, *, defer_removals: bool = False) -> set[Path]:
        """Scan as `rescan` does. After an unexpected error, scan all files instead of raising it."""
        try:
            return self.rescan(paths, defer_removals=defer_removals)
        except Exception:  # a file system may raise any error, and the watcher must continue
            self.rescans["failed"] += 1
            logger.exception("could not scan %s; the next scan covers all files", self.root)
            return set() if paths is None else self.rescan_safely(None, defer_removals=defer_removals)

    def rescan(self, paths: Iterable[Path] | None = None, *, defer_removals: bool = False) -> set[Path]:
        """Load the units that `paths` belong to, or, without paths, every unit whose files have changed.

        Return the paths to scan again soon: Python files that are still being loaded and, with `defer_removals`, the
        files of units without any file left, which keep their items until then.
        """
        if paths is not None and (self._has_new_ignore_rules(paths) or self._may_add_linked_files(paths)):
            paths = None
        units = self._find_units() if paths is None else self._find_affected(paths)
        with self._lock:
            checker = FileChecker(self.root)
            self._loading = set()
            due, missing = self._find_due(units, checker, is_forced=paths is not None, defer_removals=defer_removals)
            if due:
                self._load_all(due, checker)
            self.rescans["failed" if not self.is_answering else "read" if due else "unchanged"] += 1
            return missing | self._loading

    def _list_outside_folders(self) -> set[Path]:
        """Return the folders beside `tools`, `resources` and so on that items are loaded from, by a link or a `path`.

        The workspace itself is not one: it may contain anything, and only a scan finds files directly inside it."""
        loaded = list(self._units.values())  # without `_lock`, which is held while a file is loaded
        folders = {path.parent for each in loaded for path in each.other_files}
        folders = folders.union(*(each.content.folders for each in loaded)) - {self.root}
        return {folder for folder in folders if folder.relative_to(self.root).parts[0] not in TOP_LEVEL}

    def _has_new_ignore_rules(self, paths: Iterable[Path]) -> bool:
        return any(path.parent == self.root and path.name in IGNORE_FILES for path in paths)

    def _may_add_linked_files(self, paths: Iterable[Path]) -> bool:
        """Return whether a path may be a new file of a linked folder. The name of its unit is that of the link."""
        outside = self._list_outside_folders()
        new = {path for path in paths if path.parent in outside}
        return bool(new.difference(*(loaded.other_files for loaded in list(self._units.values()))))

    def _find_units(self, below: str = "") -> dict[Unit, list[Path]]:
        """Return the units below a folder with their files; for the whole workspace, also units without files."""
        found: dict[Unit, list[Path]] = {} if below else {unit: [] for unit in (*self._units, *self._failed)}
        if not below and (self.root / "tidings.toml").is_symlink():
            found.setdefault(SETTINGS, [])  # `walk` omits a link to a file outside, but it must be reported
        for path in walk(self.root, below):
            unit = find_unit(path)
            if unit is not None:
                found.setdefault(unit, []).append(self.root / path)
        return found

    def _find_affected(self, paths: Iterable[Path]) -> dict[Unit, list[Path]]:
        """Return the units that changes at `paths` may affect, with their files."""
        found: dict[Unit, set[Path]] = {}
        folders: set[str] = set()
        changed = {path for path in paths if self.root in path.parents}
        for path in changed:
            relative = PurePosixPath(path.relative_to(self.root).as_posix())
            if not path.is_file():
                folders.add(str(relative))
            unit = find_unit(relative)
            if unit is not None:
                found.setdefault(unit, set()).add(path)
        changed_folders = {parent for path in changed for parent in path.parents} | changed
        for unit, loaded in list(self._units.items()):
            # A folder may be created or removed without events for its files.
            is_below = folders and not folders.isdisjoint(list_parents(unit.key))
            has_template = not changed_folders.isdisjoint(loaded.content.folders)
            if is_below or has_template or not changed.isdisjoint(loaded.other_files):
                found.setdefault(unit, set())
        for folder in folders:
            if folders.isdisjoint(list_parents(folder)):
                for unit, files in self._find_units(folder).items():
                    found.setdefault(unit, set()).update(files)
        for unit in list(self._failed):
            if unit.kind in ("resources", "prompts"):
                found.setdefault(unit, set())  # a file that was missing may exist now
        return {unit: list(files) for unit, files in found.items()}

    def _find_due(
        self, units: Mapping[Unit, list[Path]], checker: FileChecker, *, is_forced: bool, defer_removals: bool
    ) -> tuple[list[_DueUnit], set[Path]]:
        """Return the units whose files have changed, or all of them with `is_forced`, and the files that are missing.

        A missing file is one whose removal is deferred.
        """
        due: list[_DueUnit] = []
        absent: list[_DueUnit] = []
        for unit, candidates in sorted(units.items()):
            previous = self._units.get(unit, LoadedUnit())
            # Include the known files, because another scan may have found more since this one started.
            files = list(filter(checker.is_inside, sorted({*candidates, *previous.files})))
            if defer_removals and previous.files and not files:
                absent.append(_DueUnit(unit, files, (), previous))
                continue
            state = tuple(map(read_state, [*files, *sorted(previous.other_files)]))
            has_templates = bool(previous.content.folders)  # their files are not part of `state`
            if is_forced or has_templates or unit not in self._units or previous.state != state:
                due.append(_DueUnit(unit, files, state, previous))
        # A renamed file is not missing: its old and its new name must change together.
        found = {number for each in due for number in list_inodes(each.state)}
        renamed = [each for each in absent if not found.isdisjoint(list_inodes(each.previous.state))]
        missing = {path for each in absent if each not in renamed for path in each.previous.files}
        return sorted([*due, *renamed], key=lambda each: each.unit), missing

    # Loading

    def _load_all(self, due: list[_DueUnit], checker: FileChecker) -> None:
        """Load units and those that depend on them, and publish the result in one commit."""
        with self.tracer.span(SCAN, units=len(due)):
            unload_modules(set[Path]().union(*(each.changed_files for each in due)))
            limits = self.settings.limits
            keys: set[ItemKey] = set()
            try:
                for each in due:
                    keys |= self._load(each, checker)
                loaded = {each.unit: each.files for each in due}
                for unit in sorted(self._find_dependents(loaded, self.settings.limits != limits)):
                    previous = self._units[unit]
                    keys |= self._load(_DueUnit(unit, previous.files, previous.state, previous), checker)
            finally:  # also after an error: the next scan does not load these units again
                self._publish(keys)

    def _find_dependents(self, loaded: Mapping[Unit, list[Path]], has_new_limits: bool) -> set[Unit]:
        """Return the units to load again because the limits have changed, or a module that they may import."""
        found: set[Unit] = set()
        if has_new_limits:
            for unit, each in self._units.items():
                if any(
                    isinstance(item.component, ExecutableTool | FileResource | FileTemplate)
                    for item in each.content.items
                ):
                    found.add(unit)
        folders = {unit.import_folder for unit, files in loaded.items() if unit.is_helper and has_python(files)}
        if folders:
            found |= {unit for unit in self._failed if unit.kind == "tools"}
            found |= {
                unit for unit, each in self._units.items() if unit.import_folder in folders and has_python(each.files)
            }
        return (found & self._units.keys()) - {unit for unit in loaded if unit.kind == "tools"}

    def _load(self, due: _DueUnit, checker: FileChecker) -> set[ItemKey]:
        """Load one unit. Return the keys whose served item may differ."""
        unit, old = due.unit, due.previous
        new, problem = self._load_or_keep(due, checker)
        if due.files:
            self._units[unit] = new
        else:
            self._units.pop(unit, None)
        if problem is not None:
            self._failed[unit] = problem
        else:
            self._failed.pop(unit, None)
        if new.content.event is not None:
            self._event_types.declare(new.content.event, replaces=True)
        elif old.content.event is not None:
            self._event_types.remove(old.content.event.name)
        keys = self._table.replace(unit, old.content.items, new.content.items)
        if unit == REGISTER:
            keys |= self._table.set_exclusive(new.content.exclusive)
        return keys

    def _load_or_keep(self, due: _DueUnit, checker: FileChecker) -> tuple[LoadedUnit, Problem | None]:
        """Return the unit with its new items, or, if they can't be loaded, with its old items and the problem."""
        unit, files, old = due.unit, due.files, due.previous
        new = LoadedUnit(due.state, files)
        if not files and unit.kind != "settings":
            return new, None
        path = files[0] if files else self.root / unit.key
        try:
            new.content = self._read(unit, files, old)
            check_items(new.content.items, path, self.settings.policy.max_item_bytes)
            new.other_files = list_other_files(new.content.items, files, checker)
            new.state = (*due.state[: len(files)], *map(read_state, sorted(new.other_files)))
            return new, None
        except StillLoading as loading:
            new.content, new.other_files, new.state = old.content, old.other_files, _UNKNOWN
            self._loading.update(loading.args)
            return new, self._failed.get(unit)
        except Exception as error:  # a file may contain any error, and may be code that raises any exception
            new.content, new.other_files = old.content, old.other_files
            if all(file.exists() for file in files):
                problem: Problem | None = find_problem(error, path, self.root)
            else:  # removed while it was read; the next scan handles that
                problem = self._failed.get(unit)
                new.state = _UNKNOWN
        if problem is not None and unit.kind != "tools":
            new.state = _UNKNOWN  # the cause may be a missing file of another unit
        return new, problem

    def _read(self, unit: Unit, files: list[Path], old: LoadedUnit) -> UnitContent:
        if unit == REGISTER:
            if old.files and not self._scripts.has_output(files):
                return old.content  # until the new script has run
            return self._scripts.load(self.settings, files)
        if unit == SETTINGS:
            self._apply_settings(load_settings(self.root))
            return UnitContent()
        if unit.kind == "events":
            return UnitContent(event=load_event(self.root, self.settings, files[0]))
        return load_content(self.root, self.settings, unit, files)

    def _apply_settings(self, settings: Settings) -> None:
        self.settings = settings
        self.lowlevel.instructions = settings.instructions
        unapplied = settings.list_changes_needing_restart(self._initial_settings)
        if unapplied and unapplied != self._unapplied:
            logger.warning("tidings.toml: %s changed; restart the server to apply it", ", ".join(unapplied))
        self._unapplied = unapplied

    def _load_initial_settings(self) -> Settings:
        try:
            return load_settings(self.root)
        except Exception:  # the first scan reports the error
            return Settings(self.root.name)

    # Serving

    async def _list_resources(self, ctx: Any, params: types.PaginatedRequestParams) -> types.ListResourcesResult:
        """List resources as the SDK does, and add the sizes of files.

        A size is not part of the definition, because a new size must not count as a change of the list.
        """
        resources = await self.server.list_resources()
        components = internals.registry_of(self.server, "resources")
        for resource in resources:
            component = components.get(resource.uri)
            if isinstance(component, FileResource):
                resource.size = component.size
        return types.ListResourcesResult(resources=resources)

    def _publish(self, keys: set[ItemKey]) -> None:
        """Update the SDK's registries and the catalog with the loaded items, in one commit."""
        problems = self._find_problems()
        self._log_problems(problems)
        previous = [item for key in keys if (item := self._served.get(key)) is not None]
        if self._catalog is None:
            self._register(keys)
            self.problems = problems
            return
        with self._catalog.batch():
            self._register(keys)
            for feature, key in sorted(keys, key=lambda each: (each[0].value, each[1])):
                item = self._served.get((feature, key))
                items = self._catalog.items(feature)
                if item is not None:
                    items.add(item.definition, replace=True)
                    for uri, etag in item.etags.items():
                        self._catalog.resources.updated(uri, etag=etag)
                elif key in items:
                    items.remove(key)
            present = {uri for key in keys if (served := self._served.get(key)) for uri in served.etags}
            removed = {uri for item in previous for uri in item.etags} - present
            for uri in sorted(removed.difference(self._list_etags()) if removed else ()):
                self._catalog.resources.deleted(uri)
            if problems != self.problems:
                self.problems = problems
                self._catalog.resources.updated(ERRORS, etag=digest_problems(problems))

    def _find_problems(self) -> tuple[Problem, ...]:
        """Return the problems of the files.

        If there are none and no item is served, return that as the only problem.
        """
        problems = [*self._failed.values(), *self._table.list_conflicts()]
        for unit, loaded in self._units.items():
            if unit not in self._failed and not self._table.is_replaced(unit):
                problems += loaded.content.problems
        if problems or not self._is_loaded or self._table.serves_items():
            return tuple(sorted(problems, key=str))
        return () if any(loaded.content.event for loaded in self._units.values()) else (_SERVES_NOTHING,)

    def _log_problems(self, problems: tuple[Problem, ...]) -> None:
        """Log each new problem, and each file that has none any more."""
        kept = {problem for unit, problem in self._failed.items() if self._units.get(unit, LoadedUnit()).content.items}
        for problem in problems:
            if problem not in self.problems:
                logger.warning("%s%s", problem, "; its last good version is still served" if problem in kept else "")
        fixed = {problem.path for problem in self.problems} - {problem.path for problem in problems}
        for path in sorted(fixed - {_SERVES_NOTHING.path}):
            logger.info("%s has no problem any more", path)

    def _list_etags(self) -> dict[str, str]:
        """Return the etags of all contents that are served, by URI."""
        return {uri: etag for item in self._served.values() for uri, etag in item.etags.items()}

    def _register(self, keys: set[ItemKey]) -> None:
        """Put the served items into the SDK's registries, and remove the others."""
        for feature, key in keys:
            item = self._table.find_served((feature, key))
            if item is not None:
                self._served[feature, key] = item
            else:
                self._served.pop((feature, key), None)
            names = ("resources", "templates") if feature is Feature.RESOURCES else (feature.value,)
            for name in names:
                registry = internals.registry_of(self.server, name)
                if item is not None and item.registry == name:
                    registry[key] = item.component
                else:
                    registry.pop(key, None)
