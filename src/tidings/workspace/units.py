"""Units: the files of a workspace that are loaded together.

A script and its `.meta.json`, or a folder with a tool in it, form one unit. A unit is loaded as a whole and fails as a
whole. A file that belongs to no unit is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from tidings.workspace.files import is_ignored
from tidings.workspace.metadata import META_SUFFIX

__all__ = ["REGISTER", "SETTINGS", "Unit", "UnitKind", "find_unit", "get_stem", "has_python", "list_parents"]

UnitKind = Literal["tools", "resources", "prompts", "events", "register", "settings"]


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    kind: UnitKind
    key: str
    """The common path of the files without suffixes, relative to the workspace; for a folder, with a final slash."""

    @property
    def is_folder(self) -> bool:
        return self.key.endswith("/")

    @property
    def is_helper(self) -> bool:
        """Whether it is not a tool, but a module or package for the Python tools beside it."""
        return self.kind == "tools" and self.key.rstrip("/").rpartition("/")[2].startswith("_")

    @property
    def import_folder(self) -> str:
        """The folder whose Python tools import the unit's modules."""
        return (self.key.rstrip("/") if self.is_helper else self.key).rpartition("/")[0]


REGISTER = Unit("register", "server.d/register")
SETTINGS = Unit("settings", "tidings.toml")


def find_unit(path: PurePosixPath) -> Unit | None:
    """Return the unit of a file, given its path relative to the workspace."""
    parts = path.parts
    if any(map(is_ignored, parts)):
        return None
    match parts:
        case ("tidings.toml",) | ("server.d", "server.meta.json"):
            return SETTINGS
        case ("server.d", name) if name.startswith("register."):
            return REGISTER
        case ("tools", name):
            return Unit("tools", f"tools/{get_stem(name)}")
        case ("tools", folder, *_):
            return Unit("tools", f"tools/{folder}/")
        case ("events", name) if name.endswith(META_SUFFIX):
            return Unit("events", f"events/{name.removesuffix(META_SUFFIX)}")
        case ("ui", folder, _, *_):
            return Unit("resources", f"ui/{folder}/")
        case ("resources" | "prompts" as kind, *folders, name):
            return Unit(kind, "/".join((kind, *folders, get_stem(name))))
    return None


def has_python(files: Iterable[Path]) -> bool:
    return any(path.suffix == ".py" for path in files)


def list_parents(key: str) -> list[str]:
    """Return the folders that contain a path. For the key of a folder unit, include that folder."""
    parts = key.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def get_stem(name: str) -> str:
    """Return a file name without its suffixes: `deploy` for `deploy.sh` and for `deploy.meta.json`."""
    return name.removesuffix(META_SUFFIX).partition(".")[0]
