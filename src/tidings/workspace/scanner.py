"""The scanner of a workspace: it finds the units that must be loaded, by the state of their files.

File system events only name the files to check. A unit is loaded again if the state of its files differs, or if it
depends on another one that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from tidings.workspace import TOP_LEVEL
from tidings.workspace.executable import ExecutableTool
from tidings.workspace.files import IGNORE_FILES, FileChecker, list_inodes, read_state, walk
from tidings.workspace.items import LoadedItem, UnitContent
from tidings.workspace.problems import Problem
from tidings.workspace.resources import FileResource
from tidings.workspace.templates import FileTemplate
from tidings.workspace.units import SETTINGS, Unit, find_unit, has_python, list_parents

__all__ = ["LoadedUnit", "Scanner"]


@dataclass(slots=True)
class LoadedUnit:
    """A unit as it was last loaded."""

    state: tuple[Any, ...] = ()
    """The state of `files`, then of the sorted `other_files`, before they were loaded."""
    files: list[Path] = field(default_factory=list)
    content: UnitContent = field(default_factory=UnitContent)
    """The last good items, if there is a problem."""
    other_files: frozenset[Path] = frozenset()
    """Files of other units that the items are loaded from."""
    problem: Problem | None = None
    """Why the files can't be loaded."""


class Scanner:
    """Compares the files of a workspace with its loaded units."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._checker = FileChecker(root)
        self.units: dict[Unit, LoadedUnit] = {}
        """The units as they were last loaded. The user of the scanner keeps it."""

    def find_due(
        self, paths: Iterable[Path] | None, *, defer_removals: bool
    ) -> tuple[dict[Unit, LoadedUnit], set[Path]]:
        """Return the units to load, and the files that are missing: those whose removal is deferred.

        The units have their present files and state, and the content that was loaded before. Units that `paths` may
        affect are always due; without paths, every unit whose files have changed is."""
        if paths is not None and self._may_affect_all(paths):
            paths = None
        self._checker = FileChecker(self._root)
        units = self._find_units() if paths is None else self._find_affected(paths)
        due: dict[Unit, LoadedUnit] = {}
        absent: list[tuple[Unit, LoadedUnit]] = []
        for unit, candidates in sorted(units.items()):
            previous = self.units.get(unit, LoadedUnit())
            # Include the known files: paths may name only some of them, and a file may be back after the walk.
            files = list(filter(self._checker.is_inside, sorted({*candidates, *previous.files})))
            if defer_removals and previous.files and not files:
                absent.append((unit, previous))
                continue
            state = tuple(map(read_state, [*files, *sorted(previous.other_files)]))
            has_templates = bool(previous.content.folders)  # their files are not part of `state`
            if paths is not None or has_templates or unit not in self.units or previous.state != state:
                due[unit] = replace(previous, files=files, state=state)
        # A renamed file is not missing: its old and its new name must change together.
        found = {number for each in due.values() for number in list_inodes(each.state)}
        missing: set[Path] = set()
        for unit, previous in absent:
            if found.isdisjoint(list_inodes(previous.state)):
                missing.update(previous.files)
            else:
                due[unit] = replace(previous, files=[], state=())
        return dict(sorted(due.items())), missing

    def list_files(self, due: Mapping[Unit, LoadedUnit]) -> set[Path]:
        """Return the files of units, also those that were removed since the units were loaded."""
        return {file for unit, each in due.items() for file in (*each.files, *self.units.get(unit, LoadedUnit()).files)}

    def find_dependents(self, loaded: Mapping[Unit, LoadedUnit], *, has_new_limits: bool) -> dict[Unit, LoadedUnit]:
        """Return the units to load again because the limits have changed, or a module that they may import."""
        found: set[Unit] = set()
        limited = ExecutableTool | FileResource | FileTemplate
        folders = {unit.import_folder for unit, each in loaded.items() if unit.is_helper and has_python(each.files)}
        for unit, each in self.units.items():
            may_import = unit.import_folder in folders and has_python(each.files)
            is_broken = bool(folders) and unit.kind == "tools" and each.problem is not None
            has_limits = has_new_limits and any(isinstance(item.component, limited) for item in each.content.items)
            if may_import or is_broken or has_limits:
                found.add(unit)
        found -= {unit for unit in loaded if unit.kind == "tools"}
        return {unit: self.units[unit] for unit in sorted(found)}

    def list_other_files(self, items: Iterable[LoadedItem], files: list[Path]) -> frozenset[Path]:
        """Return the files outside the unit that it is loaded from, as they are named and with links resolved."""
        paths = {path for item in items for path in item.files}.union(files)
        return frozenset(paths | {self._checker.resolve(path) for path in paths}) - set(files)

    def list_outside_folders(self) -> set[Path]:
        """Return the folders beside `tools`, `resources` and so on that items are loaded from, by a link or a `path`.

        The workspace itself is not one: it may contain anything, and only a scan finds files directly inside it."""
        loaded = list(self.units.values())  # a copy, because the watcher calls this while units are loaded
        folders = {path.parent for each in loaded for path in each.other_files}
        folders = folders.union(*(each.content.folders for each in loaded)) - {self._root}
        return {folder for folder in folders if folder.relative_to(self._root).parts[0] not in TOP_LEVEL}

    def _may_affect_all(self, paths: Iterable[Path]) -> bool:
        """Return whether a path has ignore rules, or may be a new file of a linked folder.

        The name of the unit of such a file is that of the link."""
        outside = self.list_outside_folders()
        new = {path for path in paths if path.parent in outside}
        has_rules = any(path.parent == self._root and path.name in IGNORE_FILES for path in paths)
        return has_rules or bool(new.difference(*(loaded.other_files for loaded in self.units.values())))

    def _find_units(self, below: str = "") -> dict[Unit, list[Path]]:
        """Return the units below a folder with their files; for the whole workspace, also units without files."""
        found: dict[Unit, list[Path]] = {} if below else {unit: [] for unit in self.units}
        if not below and (self._root / "tidings.toml").is_symlink():
            found.setdefault(SETTINGS, [])  # `walk` omits a link to a file outside, but it must be reported
        for path in walk(self._root, below):
            unit = find_unit(path)
            if unit is not None:
                found.setdefault(unit, []).append(self._root / path)
        return found

    def _find_affected(self, paths: Iterable[Path]) -> dict[Unit, list[Path]]:
        """Return the units that changes at `paths` may affect, with their files."""
        found: dict[Unit, list[Path]] = {}
        folders: set[str] = set()
        changed = {path for path in paths if self._root in path.parents}
        for path in changed:
            relative = PurePosixPath(path.relative_to(self._root).as_posix())
            if not path.is_file():
                folders.add(str(relative))
            unit = find_unit(relative)
            if unit is not None:
                found.setdefault(unit, []).append(path)
        changed_folders = {parent for path in changed for parent in path.parents} | changed
        for unit, loaded in self.units.items():
            # A folder may be created or removed without events for its files.
            is_below = folders and not folders.isdisjoint(list_parents(unit.key))
            has_template = not changed_folders.isdisjoint(loaded.content.folders)
            # A file that was missing may exist now.
            may_be_fixed = loaded.problem is not None and unit.kind in ("resources", "prompts")
            if is_below or has_template or may_be_fixed or not changed.isdisjoint(loaded.other_files):
                found.setdefault(unit, [])
        for folder in folders:
            if folders.isdisjoint(list_parents(folder)):
                for unit, files in self._find_units(folder).items():
                    found.setdefault(unit, []).extend(files)
        return found
