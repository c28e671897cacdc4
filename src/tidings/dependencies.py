"""The packages that Tidings uses: which are missing, and whether an installed version has what Tidings needs.

The metadata of Tidings is the only list of supported versions. A version is compared only if it is the reason of an
error, or before the SDK is imported, which takes a thousand times as long.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, NamedTuple

from tidings.errors import TidingsError, UnsupportedVersion

__all__ = ["Names", "check_names", "check_sdk", "has_name", "lacks", "missing_extra", "warn_of_missing_names"]

logger = logging.getLogger(__name__)

Names = Mapping[str, Sequence[str]]
"""Private names by their module (`package.module`) or class (`package.module:Class`)."""


class _Versions(NamedTuple):
    """The versions of a package. Each is empty if it is unknown."""

    installed: str
    supported: list[str]
    """The bounds, the lower one first: `[">=2.3", "<3"]`."""


def check_sdk() -> None:
    """Raise `UnsupportedVersion` if the installed SDK is too old.

    Most programs on version 1 fail on version 2, so the error does not only say how to replace the version.
    """
    installed, supported = _versions_of("mcp")
    needed = [_release(bound[2:]) for bound in supported if bound.startswith(">=")]
    if not installed or not needed or _release(installed) >= needed[0]:
        return
    raise UnsupportedVersion(
        f"Tidings needs mcp{','.join(supported)}, and mcp {installed} is installed. A newer mcp breaks a server that "
        "is written for mcp 1.x, so such a server and Tidings need an environment each: make one with "
        "`python3 -m venv tidings-env`, and install Tidings with `tidings-env/bin/pip`. If there is no such server "
        f"here, type: {_install_command('mcp' + ','.join(supported))}"
    )


def check_names(package: str, names: Names) -> None:
    """Raise `UnsupportedVersion` if the installed version of a package lacks any of these names."""
    for owner in names:
        for name in names[owner]:
            if not has_name(owner, name):
                raise lacks(package, f"{owner}.{name}")


def warn_of_missing_names(package: str, names: Names) -> None:
    """Log the error of `check_names`, for names without which Tidings works, but worse."""
    try:
        check_names(package, names)
    except UnsupportedVersion as error:
        logger.warning("%s", error)


def has_name(owner: str, name: str) -> bool:
    """Return whether a module or class has an attribute, or the instances of the class have it."""
    try:
        found: Any = resolve_name(owner)
    except (ImportError, AttributeError):
        return False
    if hasattr(found, name) or not isinstance(found, type):
        return hasattr(found, name)
    # Only its own methods can show what an instance has: `__init__` assigns most attributes.
    methods = [each for kind in found.__mro__ for each in vars(kind).values() if isinstance(each, FunctionType)]
    return any(name in method.__code__.co_names for method in methods)


def lacks(package: str, name: str) -> UnsupportedVersion:
    """Return the error for a version that lacks a name. It ends with the command that installs another version."""
    installed, supported = _versions_of(package)
    bounds = supported
    if all(_release(installed) < _release(bound[1:]) for bound in supported if not bound.startswith(">=")):
        bounds = [bound for bound in supported if bound.startswith(">=")] + ([f"<{installed}"] if installed else [])
    return UnsupportedVersion(
        f"{package} {installed or '(of an unknown version)'} has no {name}, which Tidings uses. Tidings supports "
        f"{package}{','.join(supported)}, and this version is too new for it. To install an older one: "
        f"{_install_command(package + ','.join(bounds))}"
    )


def missing_extra(feature: str, extra: str) -> TidingsError:
    """Return the error for a feature whose packages are not installed. It ends with the command that installs them.

    The command names the packages and not Tidings, so that it works for every way in which Tidings was installed.
    """
    packages = [package for package, marker in _requirements() if marker == f"extra == '{extra}'"]
    command = f": {_install_command(*packages)}" if packages else ""
    return TidingsError(f'{feature} needs the extra "{extra}" of Tidings{command}')


def _requirements() -> list[tuple[str, str]]:
    """Return the packages that Tidings requires, each with its marker. Return none if Tidings is not installed."""
    from importlib.metadata import PackageNotFoundError, requires  # slow to import, and seldom needed

    try:
        lines = [line.partition(";") for line in requires("tidings") or ()]
    except PackageNotFoundError:  # Tidings was copied
        return []
    return [(package.strip(), marker.strip()) for package, _, marker in lines]


def _versions_of(package: str) -> _Versions:
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version(package)
    except PackageNotFoundError:
        installed = ""
    named = (f"{package}<", f"{package}>")
    bounds = [line.removeprefix(package) for line, _ in _requirements() if line.startswith(named)]
    return _Versions(installed, sorted(bounds[0].split(","), reverse=True) if bounds else [])


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version. A pre-release counts as its release."""
    numbers: list[int] = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _install_command(*packages: str) -> str:
    python = sys.executable or "python"
    # An environment of uv has no pip.
    pip = [python, "-m", "pip", "install"] if find_spec("pip") else ["uv", "pip", "install", "--python", python]
    return shlex.join([*pip, *packages])
