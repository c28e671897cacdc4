"""A folder as a source: what its files say is what the server lists.

The file system's events only wake; digests decide. A unit is read again when its files' state says that they may be
others, and its items replace the former ones in one commit: there is no moment with a missing or half list. A unit that
can't be loaded keeps its last good items, and says why in `tidings://errors`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import mcp_types as types
import msgspec
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.resources import FunctionResource

from tidings import seams
from tidings.catalog import Catalog
from tidings.counts import Counts
from tidings.errors import TidingsError
from tidings.model import Feature
from tidings.observer import Observer
from tidings.spans import SCAN
from tidings.workspace.executable import ExecutableTool
from tidings.workspace.files import FileContent, load_resources
from tidings.workspace.follow import Follower
from tidings.workspace.loader import REGISTER, Inside, Unit, is_python, parents_of, state_of, unit_of, walk
from tidings.workspace.problems import Broken, Problem, etag_of, problem_of
from tidings.workspace.prompts import load_prompts
from tidings.workspace.register import Registered, Scripts, scripts_of
from tidings.workspace.settings import Settings, load_settings
from tidings.workspace.tools import load_tools
from tidings.workspace.units import Piece, piece_of

if TYPE_CHECKING:
    from mcp.server import Server

__all__ = ["ERRORS", "Workspace"]

logger = logging.getLogger(__name__)

ERRORS = "tidings://errors"


@dataclass
class _Held:
    """A unit as it was last read."""

    state: tuple[Any, ...]
    files: list[Path] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    only: frozenset[str] = frozenset()
    others: frozenset[Path] = frozenset()
    """Files of which it is made as well."""


class Workspace:
    """What `Live` needs of a server, served from a folder."""

    lists_are_shared = True

    def __init__(self, root: Path | str, *, poll: float = 10.0) -> None:
        """`poll` is the seconds between two looks at every file, for file systems that tell of nothing."""
        self.root = Path(root).resolve()
        if not self.root.is_dir():
            raise TidingsError(f"{root} is not a folder; `tidings new {root}` makes one to begin with")
        self.settings = self._started = self._first_settings()
        self._late: list[str] = []
        self.server: MCPServer[Any] = MCPServer(
            self.settings.name,
            title=self.settings.title,
            description=self.settings.description,
            instructions=self.settings.instructions,
            version=self.settings.version,
            warn_on_duplicate_tools=False,
            log_level="WARNING",
        )
        self.lowlevel: Server[Any] = seams.lowlevel_of(self.server)
        self._follower = Follower(self, poll)
        self._catalog: Catalog | None = None
        self._units: dict[Unit, _Held] = {}
        self._claims: dict[tuple[Feature, str], dict[Unit, Piece]] = {}
        """Who offers an item under a key: the first of them, registered ones before all others, is served."""
        self._rivals: set[tuple[Feature, str]] = set()
        """The keys under which more than one unit offers an item."""
        self._offered: dict[tuple[Feature, str], Piece] = {}
        """What is served, as the SDK's registries and the catalog have it: it changes with them."""
        self._only: frozenset[str] = frozenset()
        self._broken: dict[Unit, Problem] = {}
        self._users: dict[Path, set[Unit]] = {}
        """The units that are made of files other than their own, by those."""
        self._scripts = Scripts(self.root)
        self.rescans: Counter[str] = Counter()
        """How often the folder was looked through, by what came of it."""
        self.observer = Observer(Counts())
        self._lock = threading.Lock()
        self._problems: tuple[Problem, ...] = ()
        errors = FunctionResource.from_function(
            self._describe_problems,
            uri=ERRORS,
            name="errors",
            title="Errors of this workspace",
            description="Files that could not be loaded, and why. Empty when all is well.",
            mime_type="text/plain",
        )
        seams.registries_of(self.server)["resources"][ERRORS] = errors
        self.lowlevel.add_request_handler("resources/list", types.PaginatedRequestParams, self._list_resources)
        self._errors = piece_of(errors)
        self.rescan()

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self._problems

    # What Live asks for

    def watch(self, catalog: Catalog, wake: Callable[[Feature], None]) -> None:
        self._catalog = catalog
        resources = catalog.resources
        served = {key: piece for (feature, key), piece in self._offered.items() if feature is Feature.RESOURCES}
        with catalog.batch():
            # What an earlier life of this server left there may have come, gone or changed since.
            for key in [item.key for item in resources.snapshot()]:
                if key not in served and key != ERRORS:
                    resources.deleted(key)
            for key, piece in served.items():
                if piece.etag is not None:
                    resources.updated(key, etag=piece.etag)
            if self._problems or resources.content(ERRORS).revision:
                resources.updated(ERRORS, etag=etag_of(self._problems))

    def list_now(self, feature: Feature, on_invalid: object = None) -> list[dict[str, Any]]:
        # Not of what is being loaded, and not with its lock: loading takes the catalog's while it holds its own, and
        # whoever asks may hold the catalog's already.
        with self._catalog.lock if self._catalog is not None else nullcontext():
            listed = [piece.definition for (of, _), piece in self._offered.items() if of is feature]
        return listed + ([self._errors.definition] if feature is Feature.RESOURCES else [])

    def list_one(self, feature: Feature, key: str) -> bytes | None:
        listed = (each for each in self.list_now(feature) if key in (each.get("name"), each.get("uri")))
        return next(map(msgspec.json.encode, listed), None)

    def has_own_middleware(self) -> bool:
        return False

    def address(self, uri: str) -> str:
        return uri

    def add(self, feature: Feature, thing: Any, *, replace: bool, **options: Any) -> None:
        raise TidingsError(f"{feature.value}: this server is a folder; put a file into it")

    def remove(self, feature: Feature, key: str) -> None:
        raise TidingsError(f"{feature.value}: this server is a folder; remove the file of {key!r}")

    def update(self, feature: Feature, key: str, fields: Mapping[str, Any]) -> None:
        raise TidingsError(f"{feature.value}: this server is a folder; edit the file of {key!r}")

    def delete(self, uri: str) -> None:
        self.remove(Feature.RESOURCES, uri)

    async def run(self) -> None:
        """Follow the folder for as long as the server runs."""
        try:
            await self._follower.run()
        finally:
            self._scripts.end()

    @property
    def is_settled(self) -> bool:
        """Whether no file is gone of which it is not yet sure that it stays away."""
        return self._follower.is_settled

    @property
    def scripts(self) -> list[Path]:
        """The registrations that are run."""
        held = self._units.get(REGISTER)
        return scripts_of(held.files) if held is not None else []

    @property
    def has_new_scripts(self) -> bool:
        """Whether there are some that were not run as they are now."""
        return bool(scripts := self.scripts) and self._scripts.ran != tuple(map(state_of, scripts))

    # Reading

    def rescan_guarded(self, paths: Iterable[Path] | None, *, spares: bool = False, runs: bool = True) -> set[Path]:
        try:
            return self.rescan(paths, spares=spares, runs=runs)
        except Exception:  # the watcher must go on whatever a file system comes up with
            self.rescans["failed"] += 1
            logger.exception("looking through %s failed; it will be looked through again", self.root)
            # What these paths told must not be lost.
            return set() if paths is None else self.rescan_guarded(None, spares=spares, runs=runs)

    def rescan(self, paths: Iterable[Path] | None = None, *, spares: bool = False, runs: bool = True) -> set[Path]:
        """Read what may have changed: what these paths belong to, or, with none, whatever looks different.

        With `spares`, what is gone altogether is left as it was, and its files are returned. Registrations are run if
        `runs`.
        """
        touched = self._found() if paths is None else self._touched(paths)
        has_read, gone = self._reload(touched, paths is not None, spares, runs)
        self.rescans["failed" if not self.is_answering else "read" if has_read else "unchanged"] += 1
        return gone

    def _touched(self, paths: Iterable[Path]) -> dict[Unit, list[Path]]:
        """The units that paths belong to, each with all of its files."""
        touched: dict[Unit, set[Path]] = {}
        folders: set[str] = set()
        for path in paths:
            try:
                relative = PurePosixPath(path.relative_to(self.root).as_posix())
            except ValueError:
                continue
            if path == self.root:
                continue  # its own times changed, and nothing in it
            if not path.is_file():
                folders.add(str(relative))
            own = unit_of(relative)
            if own is not None:
                touched.setdefault(own, set()).add(path)
            for unit in self._users.get(path, ()):
                touched.setdefault(unit, set())
        # A folder that came or went takes its files with it, and their own events may not come.
        for unit in list(self._units) if folders else ():
            if not folders.isdisjoint(parents_of(unit.key)):
                touched.setdefault(unit, set())
        for folder in folders:
            if folders.isdisjoint(parents_of(folder)):
                for unit, files in self._found(folder).items():
                    touched.setdefault(unit, set()).update(files)
        for unit in list(self._broken):
            if unit.kind in ("resources", "prompts"):
                touched.setdefault(unit, set())  # what it lacks may be there now
        known = {unit: self._units[unit].files for unit in touched if unit in self._units}
        return {unit: sorted(files.union(known.get(unit, ()))) for unit, files in touched.items()}

    def _found(self, below: str = "") -> dict[Unit, list[Path]]:
        """The units below a folder with their files; with none given, those that are known and gone too."""
        found: dict[Unit, list[Path]] = {} if below else {unit: [] for unit in (*self._units, *self._broken)}
        if not below and (self.root / "tidings.toml").is_symlink():
            found.setdefault(Unit("settings", "tidings.toml"), [])  # a link that leads outside is named, not walked
        for path, _ in walk(self.root, below):
            unit = unit_of(path)
            if unit is not None:
                found.setdefault(unit, []).append(self.root / path)
        return {unit: sorted(files) for unit, files in found.items()}

    @property
    def is_answering(self) -> bool:
        """Whether there is a folder to read."""
        return self.root.is_dir()

    def _reload(
        self, units: Mapping[Unit, list[Path]], is_known_to_differ: bool, spares: bool, runs: bool
    ) -> tuple[bool, set[Path]]:
        """Load units anew, from those of the files that are there; whether any had to be, and what was spared."""
        if runs and REGISTER in units:
            # Before anything is locked: nobody must wait for it.
            files = list(filter(Inside(self.root).has, units[REGISTER]))
            self._scripts.run(self.settings, files, tuple(map(state_of, scripts_of(files))))
        gone: set[Path] = set()
        with self._lock:
            inside = Inside(self.root)
            due: list[tuple[Unit, list[Path], tuple[Any, ...], _Held | None]] = []
            for unit, candidates in sorted(units.items()):
                held = self._units.get(unit)
                # Another look may have found more since this one began, and what is gone is decided once, here.
                files = list(filter(inside.has, sorted({*candidates, *(held.files if held else ())})))
                if spares and held and not files:
                    gone.update(held.files)
                    continue
                state = tuple(map(state_of, [*files, *sorted(held.others if held else ())]))
                if held is None or held.state != state or is_known_to_differ:
                    due.append((unit, files, state, held))
            if due:
                with self.observer.span(SCAN, units=len(due)):
                    before = self.settings
                    keys: set[tuple[Feature, str]] = set()
                    try:
                        for each in due:
                            keys |= self._load(*each, inside)
                        tools = {unit: files for unit, files, *_ in due if unit.kind == "tools"}
                        for unit in sorted(self._also_due(tools, before.limits != self.settings.limits) - tools.keys()):
                            keys |= self._load(unit, (held := self._units[unit]).files, held.state, held, inside)
                    finally:  # what was loaded is not loaded again
                        self._apply(keys)
        return bool(due), gone

    def _also_due(self, tools: Mapping[Unit, list[Path]], has_limits: bool) -> set[Unit]:
        """What is made of the settings' limits, if these are others, and what a helper among those tools may heal or
        has made old."""
        held = self._units.items() if has_limits else ()
        also = {unit for unit, each in held if any(isinstance(_.component, ExecutableTool) for _ in each.pieces)}
        changed = {unit.place for unit, files in tools.items() if unit.is_helper and is_python(files)}
        if changed:
            also |= {unit for unit in self._broken if unit.kind == "tools"}
            also |= {unit for unit, each in self._units.items() if unit.place in changed and is_python(each.files)}
        return also & self._units.keys()

    def _load(
        self, unit: Unit, files: list[Path], state: tuple[Any, ...], held: _Held | None, inside: Inside
    ) -> set[tuple[Feature, str]]:
        """Load one unit; returns the keys whose items may be others now."""
        before = held.pieces if held else []
        new = _Held(state, files)
        problem = None
        path = files[0] if files else self.root / unit.key
        if files:
            self._units[unit] = new
        else:
            self._units.pop(unit, None)
        if files or unit.kind == "settings":
            try:
                if held and unit == REGISTER and self._scripts.are_due(files):
                    loaded = Registered(before, held.only)  # until they say what is in its place
                else:
                    loaded = self._read(unit, files)
                self._check(loaded.pieces, path)
                new.pieces, new.only = loaded.pieces, loaded.only
                made_of = {file for piece in new.pieces for file in piece.files}
                new.others = frozenset(made_of | {inside.real(file) for file in made_of}) - set(files)
            except Exception as error:  # a user's file: anything may be wrong with it
                if held:
                    new.pieces, new.only, new.others = before, held.only, held.others
                if all(file.exists() for file in files):
                    problem = problem_of(error, path, self.root)
                else:
                    problem = self._broken.get(unit)  # it went while it was read, which the next look finds out
                    new.state = _UNKNOWN
                if problem is not None and self._broken.get(unit) != problem:
                    logger.warning("%s%s", problem, "; its last good version stays" if before else "")
            if new.state is state:
                new.state = (*state[: len(files)], *map(state_of, sorted(new.others)))
            if problem is not None and unit.kind != "tools":
                new.state = _UNKNOWN  # it may lack a file that is none of its own
        for file in (held.others if held else frozenset()) - new.others:
            self._users[file].discard(unit)
            if not self._users[file]:
                del self._users[file]
        for file in new.others:
            self._users.setdefault(file, set()).add(unit)
        if problem is not None:
            self._broken[unit] = problem
        else:
            self._broken.pop(unit, None)
        keys = {(piece.feature, piece.key) for piece in (*before, *new.pieces)}
        for key in keys:
            self._claims.get(key, {}).pop(unit, None)
        for piece in new.pieces:
            self._claims.setdefault((piece.feature, piece.key), {})[unit] = piece
        for key in keys:
            if not self._claims.get(key):
                self._claims.pop(key, None)
            (self._rivals.add if len(self._claims.get(key, ())) > 1 else self._rivals.discard)(key)
        if unit.kind == "register":
            only = frozenset().union(*(each.only for each in self._units.values()))
            keys |= self._claims.keys() if only != self._only else set()
            self._only = only
        return keys

    def _check(self, pieces: list[Piece], path: Path) -> None:
        """Refuse here what the catalog or the wire could not take: the other units must not suffer for it."""
        limit = self.settings.policy.max_item_bytes
        names: set[tuple[Feature, str]] = set()
        for piece in pieces:
            try:
                size = len(msgspec.json.encode(piece.definition))
            except UnicodeEncodeError as error:
                raise Broken(path, f"{piece.key!r} holds what is no text: {error.reason}") from None
            if size > limit:
                raise Broken(path, f"{piece.key!r} has {size} bytes of JSON; Policy.max_item_bytes allows {limit}")
            if (piece.feature, piece.key) in names:
                raise Broken(path, f"{piece.feature.singular} {piece.key!r} is there twice; give each its own name")
            names.add((piece.feature, piece.key))

    def _read(self, unit: Unit, files: list[Path]) -> Registered:
        match unit.kind:
            case "tools":
                return Registered(load_tools(self.root, self.settings, files, unit.key.endswith("/")))
            case "resources":
                return Registered(load_resources(self.root, files))
            case "prompts":
                return Registered(load_prompts(self.root, files))
            case "register":
                return self._scripts.read(self.settings, files)
            case "settings":
                self._take_up(load_settings(self.root))
                return Registered()

    def _take_up(self, settings: Settings) -> None:
        self.settings = settings
        self.lowlevel.instructions = settings.instructions
        late = settings.differing(self._started)
        if late and late != self._late:
            logger.warning("%s changed; taken up when the server is started again", ", ".join(late))
        self._late = late

    def _first_settings(self) -> Settings:
        try:
            return load_settings(self.root)
        except Exception:  # a user's file: anything may be wrong with it
            return Settings(self.root.name)  # the first look through the folder says what is wrong

    # Serving

    async def _list_resources(self, ctx: Any, params: types.PaginatedRequestParams) -> types.ListResourcesResult:
        """As the SDK lists them, with their sizes, which are the contents' and make no other list."""
        listed = await self.server.list_resources()
        components = seams.registries_of(self.server)["resources"]
        for resource in listed:
            component = components.get(resource.uri)
            if isinstance(component, FileContent):
                resource.size = component.size
        return types.ListResourcesResult(resources=listed)

    def _served(self, key: tuple[Feature, str]) -> Piece | None:
        """The item that is served under a key, if any."""
        claims = self._claims.get(key)
        if not claims:
            return None
        unit = min(claims, key=_rank)
        piece = claims[unit]
        return None if unit.kind != "register" and _KINDS[piece.registry] in self._only else piece

    def _apply(self, keys: set[tuple[Feature, str]]) -> None:
        """Make the server and the catalog agree with the folder, in one commit."""
        registries = seams.registries_of(self.server)
        problems = self._all_problems()
        if self._catalog is None:
            self._fill(registries, keys)
            self._problems = problems
            return
        with self._catalog.batch():
            self._fill(registries, keys)
            for feature, key in sorted(keys, key=lambda each: (each[0].value, each[1])):
                piece = self._served((feature, key))
                items = self._catalog.items(feature)
                if piece is not None:
                    items.add(piece.definition, replace=True)
                    if piece.etag is not None:
                        self._catalog.resources.updated(key, etag=piece.etag)
                elif key in items:
                    if feature is Feature.RESOURCES:
                        self._catalog.resources.deleted(key)
                    else:
                        items.remove(key)
            if problems != self._problems:
                self._problems = problems
                self._catalog.resources.updated(ERRORS, etag=etag_of(problems))

    def _fill(self, registries: dict[str, dict[str, Any]], keys: set[tuple[Feature, str]]) -> None:
        for feature, key in keys:
            piece = self._served((feature, key))
            if piece is not None:
                self._offered[feature, key] = piece
            else:
                self._offered.pop((feature, key), None)
            names = ("resources", "templates") if feature is Feature.RESOURCES else (feature.value,)
            for name in names:
                if piece is not None and piece.registry == name:
                    registries[name][key] = piece.component
                else:
                    registries[name].pop(key, None)

    def _all_problems(self) -> tuple[Problem, ...]:
        found = list(self._broken.values())
        for feature, key in self._rivals:
            chosen, *others = sorted(self._claims[feature, key], key=_rank)
            if chosen.kind != "register":
                found += [
                    Problem(other.key, None, f"{feature.singular} {key!r} is not served from here: {chosen.key} has it")
                    for other in others
                ]
        return tuple(sorted(found, key=str))

    def _describe_problems(self) -> str:
        return "\n".join(map(str, self._problems))


_UNKNOWN = ("unknown",)
"""The state of what must be read again at the next look."""

_KINDS = {"tools": "tools", "prompts": "prompts", "resources": "resources", "templates": "resourceTemplates"}
"""The SDK's registries by the names that a registration has for them."""


def _rank(unit: Unit) -> tuple[bool, Unit]:
    """Who comes first is served: what was registered, then by the path."""
    return (unit.kind != "register", unit)
