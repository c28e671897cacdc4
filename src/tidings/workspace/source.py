"""A folder as the source of a server's items.

The scanner finds the units whose files have changed, and the publisher replaces their items in one commit. A unit that
can't be loaded keeps its last good items, and `tidings://errors` contains the reason.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mcp_types as types
from mcp.server.mcpserver import MCPServer

from tidings.core.catalog import Catalog
from tidings.core.model import Feature
from tidings.core.tracer import SCAN, Tracer
from tidings.errors import TidingsError
from tidings.events.types import EventTypes
from tidings.sdk import internals
from tidings.sdk.source import Source
from tidings.workspace import DEFAULT_POLL
from tidings.workspace.caller import set_log_level
from tidings.workspace.files import read_state
from tidings.workspace.items import UnitContent
from tidings.workspace.loader import check_items, load_content
from tidings.workspace.problems import Problem, find_problem
from tidings.workspace.publisher import Publisher
from tidings.workspace.python import StillLoading, unload_modules, wait_for_loading
from tidings.workspace.registration import RegisterScripts
from tidings.workspace.requests import wrap_handlers
from tidings.workspace.scanner import LoadedUnit, Scanner
from tidings.workspace.settings import Settings, load_settings
from tidings.workspace.units import REGISTER, SETTINGS, Unit
from tidings.workspace.watcher import FolderWatcher

if TYPE_CHECKING:
    from mcp.server import Server

__all__ = ["Workspace"]

logger = logging.getLogger(__name__)

_DEFAULT_VERSION = "0.0.0"
"""The version of a workspace without one, because clients expect one. mcp-bash-framework uses the same."""

_UNKNOWN = ("unknown",)
"""The state of a unit that the next scan must load again."""


class Workspace(Source):
    """A server whose items are the files of a folder."""

    has_shared_lists = True
    completes_handshakes = True

    def __init__(self, root: Path | str, *, poll: float = DEFAULT_POLL) -> None:
        """Load the folder. `poll` is the number of seconds between full scans; 0 turns them off."""
        self.root = Path(root).resolve()
        if not self.root.is_dir():
            raise TidingsError(f"{root} is not a folder; create a workspace with: tidings new {root}")
        self.settings = Settings(self.root.name)
        with suppress(Exception):  # the first scan reports the error
            self.settings = load_settings(self.root)
        self._initial_settings = self.settings
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
        self._scanner = Scanner(self.root)
        self.watcher = FolderWatcher(self.root, self._scan, poll, self._scanner.list_outside_folders)
        self._scripts = RegisterScripts(
            self.root, lambda: self.settings, lambda: self._scanner.units.get(REGISTER, LoadedUnit()).files
        )
        self._publisher = Publisher(self.server)
        self._lock = threading.Lock()
        self._loading: set[Path] = set()
        """The Python files that the last scan did not wait for."""
        self._event_types = EventTypes()
        """The types that the files in `events/` declare, and from `serve_events` on those of the server."""
        self.rescans: Counter[str] = Counter()
        """The number of scans by outcome: `read`, `unchanged` or `failed`."""
        self.tracer = Tracer()
        self._is_loaded = False
        """Whether all files were loaded once. Until then, a folder without items may still get some."""
        self.lowlevel.add_request_handler("logging/setLevel", types.SetLevelRequestParams, set_log_level)
        self._handlers = wrap_handlers(self.server)
        remaining = self.rescan()
        while remaining:
            wait_for_loading(remaining)
            remaining = self.rescan(remaining)
        if scripts := self._scripts.run_blocking():
            self.rescan(scripts)
        self._is_loaded = True
        self._commit()

    def serve_events(self, types: EventTypes) -> None:
        """Declare the event types of the files among those of the server, also when a file changes."""
        with self._lock:
            for loaded in self._scanner.units.values():
                if loaded.content.event is not None:
                    types.declare(loaded.content.event)
            self._event_types = types

    # The interface that Live uses

    def is_list_shared(self, method: str) -> bool:
        entry = self.lowlevel.get_request_handler(method)
        return entry is not None and entry.handler is self._handlers[method]

    def watch(self, catalog: Catalog, wake: Callable[[Feature], None]) -> None:
        self._publisher.watch(catalog)

    def read_items(self, feature: Feature, on_invalid: object = None) -> list[dict[str, Any]]:
        return self._publisher.read_items(feature)

    def count_items(self) -> dict[Feature, int]:
        """Count the items of each list, without the resource that Tidings adds."""
        return {feature: len(self.read_items(feature)) - (feature is Feature.RESOURCES) for feature in Feature}

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self._publisher.problems

    async def run(self) -> None:
        """Keep the items up to date until cancelled."""
        await asyncio.gather(
            self.watcher.run(), self._scripts.follow(lambda paths: asyncio.to_thread(self.rescan_safely, paths))
        )

    @property
    def is_answering(self) -> bool:
        """Whether the folder exists."""
        return self.root.is_dir()

    # Scanning

    async def _scan(self, paths: set[Path] | None, defer_removals: bool) -> set[Path]:
        remaining = await asyncio.to_thread(self.rescan_safely, paths, defer_removals=defer_removals)
        self._scripts.wake()
        return remaining

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
        with self._lock:
            self._loading = set()
            due, missing = self._scanner.find_due(paths, defer_removals=defer_removals)
            if due:
                self._load_all(due)
            self.rescans["failed" if not self.is_answering else "read" if due else "unchanged"] += 1
            return missing | self._loading

    # Loading

    def _load_all(self, due: dict[Unit, LoadedUnit]) -> None:
        """Load units and those that depend on them, and publish the result in one commit."""
        with self.tracer.span(SCAN, units=len(due)):
            unload_modules(self._scanner.list_files(due))
            limits = self.settings.limits
            try:
                for each in due.items():
                    self._load(*each)
                has_new_limits = self.settings.limits != limits
                for each in self._scanner.find_dependents(due, has_new_limits=has_new_limits).items():
                    self._load(*each)
            finally:  # also after an error: the next scan does not load these units again
                self._commit()

    def _commit(self) -> None:
        self._publisher.commit(self._scanner.units, may_be_empty=not self._is_loaded)

    def _load(self, unit: Unit, due: LoadedUnit) -> None:
        """Load one unit."""
        old, new = due.content, self._load_or_keep(unit, due)
        if new.files or new.problem is not None:
            self._scanner.units[unit] = new
        else:
            self._scanner.units.pop(unit, None)
        if new.content.event is not None:
            self._event_types.declare(new.content.event, replaces=True)
        elif old.event is not None:
            self._event_types.remove(old.event.name)
        self._publisher.replace(unit, old, new.content)

    def _load_or_keep(self, unit: Unit, due: LoadedUnit) -> LoadedUnit:
        """Return the unit with its new items, or, if they can't be loaded, with its old items and the problem."""
        files = due.files
        if not files and unit != SETTINGS:
            return LoadedUnit()
        path = files[0] if files else self.root / unit.key
        try:
            content = self._read(unit, due)
            check_items(content.items, path, self.settings.policy.max_item_bytes)
            other_files = self._scanner.list_other_files(content.items, files)
            state = (*due.state[: len(files)], *map(read_state, sorted(other_files)))
            return LoadedUnit(state, files, content, other_files)
        except StillLoading as loading:
            self._loading.update(loading.args)
            return replace(due, state=_UNKNOWN)
        except Exception as error:  # a file may contain any error, and may be code that raises any exception
            if not all(file.exists() for file in files):  # removed while it was read; the next scan handles that
                return replace(due, state=_UNKNOWN)
            # The cause may be a missing file of another unit, unless it is a tool.
            state = due.state if unit.kind == "tools" else _UNKNOWN
            return replace(due, state=state, problem=find_problem(error, path, self.root))

    def _read(self, unit: Unit, due: LoadedUnit) -> UnitContent:
        if unit == REGISTER:
            return self._scripts.load(due.files, due.content)
        if unit == SETTINGS:
            self._apply_settings(load_settings(self.root))
            return UnitContent()
        return load_content(self.root, self.settings, unit, due.files)

    def _apply_settings(self, settings: Settings) -> None:
        self.settings = settings
        self.lowlevel.instructions = settings.instructions
        unapplied = settings.list_changes_needing_restart(self._initial_settings)
        if unapplied and unapplied != self._unapplied:
            logger.warning("tidings.toml: %s changed; restart the server to apply it", ", ".join(unapplied))
        self._unapplied = unapplied
