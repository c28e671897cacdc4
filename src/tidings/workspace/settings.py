"""What a workspace says of itself: `tidings.toml`, or `server.d/server.meta.json`, or nothing but its name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidings.errors import InvalidPolicy
from tidings.policy import Policy
from tidings.workspace.metadata import read_meta
from tidings.workspace.problems import Broken

__all__ = ["Settings", "load_settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    name: str
    title: str | None = None
    version: str = ""
    description: str | None = None
    instructions: str | None = None
    policy: Policy = field(default_factory=lambda: Policy(announce=True))
    """Clients of folder servers wait for the first notification of each list before they look."""
    timeout: float = 30.0
    """Seconds that a tool may run, unless it says otherwise: longer than what a person waits for an answer."""
    max_output: int = 1 << 20
    """Bytes of a tool's output: more than a model can read."""
    env: tuple[str, ...] = ()
    """Further variables that tools get from the server's environment, by name or pattern (`AWS_*`)."""
    register_ttl: float = 5.0
    """Seconds between two runs of `server.d/register.*`."""
    register_timeout: float = 10.0

    @property
    def limits(self) -> tuple[Any, ...]:
        """What tools have of it."""
        return (self.timeout, self.max_output, self.env)

    def differing(self, other: Settings) -> list[str]:
        """What a server has from its start to its end, and would be another one."""
        names = ("name", "title", "version", "description", "policy")
        return [name for name in names if getattr(self, name) != getattr(other, name)]


_LEAST = 0.1
"""Of every number: what is shorter is a busy loop, or a time in which nothing can be done."""

_SECTIONS: dict[str, dict[str, tuple[type, ...]]] = {
    "": {"name": (str,), "title": (str,), "version": (str,), "description": (str,), "instructions": (str,)},
    "tools": {"timeout": (int, float), "max_output": (int,), "env": (list,)},
    "register": {"ttl": (int, float), "timeout": (int, float)},
}


def load_settings(root: Path) -> Settings:
    path = root / "tidings.toml"
    if path.exists():
        if not path.resolve().is_relative_to(root):
            raise Broken(path, "leads out of the workspace")
        return _from_toml(path, root)
    return _from_meta(root / "server.d" / "server.meta.json", root)


def _from_toml(path: Path, root: Path) -> Settings:
    import tomllib

    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Broken(path, f"not UTF-8: {error}") from None
    except OSError as error:
        raise Broken(path, f"can't be read: {error.strerror}") from None
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        raise Broken(path, f"not TOML: {error}", int(found[1]) if found else len(text.splitlines())) from None
    except RecursionError:
        raise Broken(path, "not TOML that can be read: it is nested too deep") from None
    policy = given.pop("policy", {})
    if not isinstance(policy, dict):
        raise Broken(path, f"policy is {policy!r}; it must be a section, [policy]", _line_of(text, "policy"))
    sections = {"": {key: value for key, value in given.items() if not isinstance(value, dict)}}
    sections |= {key: value for key, value in given.items() if isinstance(value, dict)}
    for section, values in sections.items():
        for key, value in values.items():
            _check(path, text, section, key, value)
    tools, register = sections.get("tools", {}), sections.get("register", {})
    chosen: dict[str, Any] = {**sections[""], **tools}
    chosen |= {f"register_{key}": value for key, value in register.items()}
    if "env" in chosen:
        chosen["env"] = tuple(chosen["env"])
    try:
        chosen["policy"] = Policy(announce=True).but(**policy)
    except (InvalidPolicy, TypeError) as error:
        knob = next((name for name in policy if re.search(rf"\b{re.escape(name)}\b", str(error))), None)
        line = _line_of(text, knob, "policy") if knob else None
        raise Broken(path, f"[policy] {error}", line or _line_of(text, "[policy]")) from None
    return Settings(**{"name": root.name, **chosen})


def _check(path: Path, text: str, section: str, key: str, value: Any) -> None:
    known = _SECTIONS.get(section)
    where = f"[{section}] {key}" if section else key
    if not section and key in _SECTIONS:
        raise Broken(path, f"{key} is {value!r:.60}; it must be a section, [{key}]", _line_of(text, key))
    if known is None or key not in known:
        names = ", ".join(sorted(known or _SECTIONS.keys() - {""} | {"policy"}))
        raise Broken(path, f"{where} is not known here; there are {names}", _line_of(text, key, section))
    is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
    if not isinstance(value, known[key]) or isinstance(value, bool) or (list in known[key] and not is_list):
        kind = {str: "a text", list: "a list of texts", int: "a number"}[known[key][0]]
        raise Broken(path, f"{where} is {value!r}; it must be {kind}", _line_of(text, key, section))
    if isinstance(value, int | float) and not value >= _LEAST:
        raise Broken(path, f"{where} is {value!r}; it must be at least {_LEAST}", _line_of(text, key, section))


def _line_of(text: str, key: str, section: str = "") -> int | None:
    """Where a key stands, below its section's heading if it has one."""
    lines = list(enumerate(text.splitlines(), 1))
    heading = re.compile(rf"\s*\[+\s*{re.escape(section)}\s*\]")
    start = next((number for number, line in lines if heading.match(line)), 0) if section else 0
    return next(
        (number for number, line in lines[start:] if re.match(rf"[\s\[]*{re.escape(key.strip('[]'))}\b", line)), None
    )


def _from_meta(path: Path, root: Path) -> Settings:
    ttl = os.environ.get("MCPBASH_REGISTER_TTL", "")
    chosen: dict[str, Any] = {"register_ttl": float(ttl)} if re.fullmatch(r"\d+(\.\d+)?", ttl) else {}
    if path.is_file():
        given = read_meta(path)
        names = ("name", "title", "version", "description", "instructions")
        chosen |= {name: str(given[name]) for name in names if given.get(name)}
    return Settings(**{"name": root.name, **chosen})
