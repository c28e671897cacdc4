"""The settings of a workspace, from `tidings.toml` or `server.d/server.meta.json`.

Without either, the server is named after its folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tidings.errors import InvalidPolicy
from tidings.policy import Policy
from tidings.workspace.metadata import read_meta, read_text
from tidings.workspace.problems import InvalidFile
from tidings.workspace.reading import MAX_BYTES

__all__ = ["Settings", "list_faults", "load_settings", "read_tool_allowlist", "suggest"]


@dataclass(frozen=True, slots=True)
class Settings:
    name: str
    title: str | None = None
    version: str = ""
    description: str | None = None
    instructions: str | None = None
    policy: Policy = field(default_factory=lambda: Policy(announce=True))
    """`announce`, because clients of folder servers expect one notification per list before they fetch it."""
    timeout: float = 30.0
    """Seconds that a tool may run, unless its metadata has its own: longer than a person waits for an answer."""
    max_output: int = 1 << 20
    """Bytes that a tool may print: more than a model can read."""
    max_processes: int = 32
    """Executable tools that run at the same time; further calls wait. It is enough for tools that wait for a network,
    and not too many for a small machine."""
    env: tuple[str, ...] = ()
    """Variables of the server's environment that tools get as well, by name or pattern (`AWS_*`)."""
    resources_max_bytes: int = MAX_BYTES
    """Bytes of a file that a client can read as a resource."""
    register_ttl: float = 5.0
    """Seconds between two runs of `server.d/register.*`, as in mcp-bash-framework."""
    register_timeout: float = 10.0
    """Seconds that one run may take: enough for a request to a remote service."""

    events: bool = False
    """Whether MCP Events are served: clients choose URLs that this server sends requests to."""

    @property
    def limits(self) -> tuple[Any, ...]:
        """The settings that tools and resources contain. If one changes, those must be loaded again."""
        return (self.timeout, self.max_output, self.max_processes, self.env, self.resources_max_bytes)

    def list_changes_needing_restart(self, other: Settings) -> list[str]:
        """Return the names of the settings that differ and only take effect when the server starts."""
        names = ("name", "title", "version", "description", "policy", "events")
        return [name for name in names if getattr(self, name) != getattr(other, name)]


_MINIMUM = 0.1
"""The minimum of every number: a shorter interval is a busy loop, and a shorter timeout would always expire."""

_TYPES: dict[str, dict[str, tuple[type, ...]]] = {
    "": {"name": (str,), "title": (str,), "version": (str,), "description": (str,), "instructions": (str,)},
    "tools": {"timeout": (int, float), "max_output": (int,), "max_processes": (int,), "env": (list,)},
    "resources": {"max_bytes": (int,)},
    "register": {"ttl": (int, float), "timeout": (int, float)},
    "events": {},
}
"""The settings of each section except `policy`, with their types."""

_NAMES = {section: list(settings) for section, settings in _TYPES.items()}
_NAMES["policy"] = [setting.name for setting in fields(Policy)]
"""The settings of each section. `Policy` checks its own values, so no types are given."""


def read_tool_allowlist() -> frozenset[str] | None:
    """Return the names in `MCPBASH_TOOL_ALLOWLIST`, as mcp-bash-framework reads it; None if all tools are allowed."""
    names = frozenset(re.split(r"[\s,]+", os.environ.get("MCPBASH_TOOL_ALLOWLIST", ""))) - {""}
    return names if names and "*" not in names else None


def load_settings(root: Path) -> Settings:
    path = root / "tidings.toml"
    if path.exists():
        if not path.resolve().is_relative_to(root):
            raise InvalidFile(path, "is a link to a file outside the workspace; replace it by a file")
        return _load_toml(path, root)
    return _load_meta(root / "server.d" / "server.meta.json", root)


def list_faults(root: Path) -> list[InvalidFile]:
    """Return all unknown or wrong settings in `tidings.toml`. The list is empty if it can't be read at all."""
    path = root / "tidings.toml"
    try:
        text, values = _read_toml(path, root)
    except (InvalidFile, ValueError):
        return []
    return list(_check_settings(path, text, values))


def _read_toml(path: Path, root: Path) -> tuple[str, dict[str, Any]]:
    import tomllib

    text = read_text(root, path)
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        raise InvalidFile(path, f"not TOML: {error}", int(found[1]) if found else len(text.splitlines())) from None
    except RecursionError:
        raise InvalidFile(path, "not TOML: it is nested too deeply") from None


def _load_toml(path: Path, root: Path) -> Settings:
    text, values = _read_toml(path, root)
    for fault in _check_settings(path, text, values):
        raise fault
    policy = values.pop("policy", {})
    sections = {"": {key: value for key, value in values.items() if not isinstance(value, dict)}}
    sections |= {key: value for key, value in values.items() if isinstance(value, dict)}
    chosen: dict[str, Any] = {**sections[""], **sections.get("tools", {})}
    for section in ("resources", "register"):
        chosen |= {f"{section}_{key}": value for key, value in sections.get(section, {}).items()}
    chosen["events"] = "events" in sections
    if "env" in chosen:
        chosen["env"] = tuple(chosen["env"])
    try:
        chosen["policy"] = Policy(announce=True).replace(**policy)
    except (InvalidPolicy, TypeError) as error:
        name = next((name for name in policy if re.search(rf"\b{re.escape(name)}\b", str(error))), None)
        line = _find_line(text, name, "policy") if name else None
        raise InvalidFile(path, f"[policy] {error}", line or _find_line(text, "policy")) from None
    return Settings(**{"name": root.name, **chosen})


def _check_settings(path: Path, text: str, values: dict[str, Any]) -> Iterator[InvalidFile]:
    for key, value in values.items():
        is_section = isinstance(value, dict) and key not in _NAMES[""]
        if is_section and (not key or key not in _NAMES):
            advice = suggest(f"[{key}]", [f"[{section}]" for section in _NAMES if section])
            yield InvalidFile(path, f"[{key}] is not a section; {advice}", _find_line(text, key))
            continue
        section, settings = (key, value) if is_section else ("", {key: value})
        for name, setting in settings.items():
            try:
                _check_setting(path, text, section, name, setting)
            except InvalidFile as fault:
                yield fault


def _check_setting(path: Path, text: str, section: str, key: str, value: Any) -> None:
    name = f"[{section}] {key}" if section else key
    line = _find_line(text, key, section) or _find_line(text, f"{section}.{key}")
    if not section and key in _NAMES:
        raise InvalidFile(path, f"{key} is {value!r:.60}; it must be a section, [{key}]", line)
    if key not in _NAMES[section]:
        owner = next((each for each, names in _NAMES.items() if key in names), None)
        if owner is None:
            advice = suggest(key, _NAMES[section])
        else:
            advice = f"it belongs in [{owner}]" if owner else "it belongs above the first section"
        raise InvalidFile(path, f"{name} is not a setting; {advice}", line)
    if section in _TYPES:
        _check_value(path, line, name, value, _TYPES[section][key])


def _check_value(path: Path, line: int | None, name: str, value: Any, types: tuple[type, ...]) -> None:
    is_list = isinstance(value, list) and all(isinstance(element, str) for element in value)
    if not isinstance(value, types) or isinstance(value, bool) or (list in types and not is_list):
        expected = {str: "a string", list: "a list of strings", int: "a number"}[types[0]]
        raise InvalidFile(path, f"{name} is {value!r}; it must be {expected}", line)
    if isinstance(value, int | float) and not value >= _MINIMUM:
        raise InvalidFile(path, f"{name} is {value!r}; it must be at least {_MINIMUM}", line)
    if name == "name" and isinstance(value, str) and not value.strip():
        raise InvalidFile(
            path, "name is empty; write one, or remove the line: then the name of the folder is used", line
        )


def suggest(name: str, known: list[str]) -> str:
    """Return advice with the most similar of the known names, or with all of them."""
    import difflib  # here, because a server seldom needs it

    if not known:
        return "this section has none"
    if similar := difflib.get_close_matches(name.lower(), known, n=1):
        return f"did you mean {similar[0]}?"
    return f"use one of {', '.join(sorted(known))}"


def _find_line(text: str, key: str, section: str = "") -> int | None:
    """Return the line of a key, searching below the header of its section."""
    lines = list(enumerate(text.splitlines(), 1))
    header = re.compile(rf"\s*\[+\s*{re.escape(section)}\s*\]")
    start = next((number for number, line in lines if header.match(line)), 0) if section else 0
    pattern = re.compile(rf"[\s\[]*{re.escape(key)}\b")
    return next((number for number, line in lines[start:] if pattern.match(line)), None)


def _load_meta(path: Path, root: Path) -> Settings:
    ttl = os.environ.get("MCPBASH_REGISTER_TTL", "")
    chosen: dict[str, Any] = {"register_ttl": float(ttl)} if re.fullmatch(r"\d+(\.\d+)?", ttl) else {}
    if path.is_file():
        meta = read_meta(root, path)
        chosen |= {name: str(meta[name]) for name in _NAMES[""] if meta.get(name)}
    return Settings(**{"name": root.name, **chosen})
