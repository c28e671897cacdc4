"""The packages that Tidings uses: which are missing, and whether an installed version has what Tidings needs.

`check_sdk` compares the version, before the slow import of the SDK. All other checks look for names, and read the
version only for the error. The metadata of Tidings says which versions are supported.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import Any, Final, NamedTuple

from tidings.errors import TidingsError, UnsupportedVersion

__all__ = [
    "SDK",
    "Names",
    "check_names",
    "check_sdk",
    "has_name",
    "missing_extra",
    "missing_name_error",
    "warn_of_missing_names",
]

logger = logging.getLogger(__name__)

Names = Mapping[str, Sequence[str]]
"""Private names by their module (`package.module`) or class (`package.module:Class`)."""

SDK: Final = "mcp>=2.3,<3"
"""The requirement in the metadata of Tidings, which is slow to read."""


class _Versions(NamedTuple):
    """The versions of a package. A field is empty if the value is unknown."""

    installed: str
    supported: list[str]
    """The conditions, the lower bound first: `[">=2.3", "<3", "!=2.4"]`."""


def check_sdk() -> None:
    """Raise `UnsupportedVersion` if the installed SDK is too old. Take less than a millisecond otherwise."""
    installed = _find_sdk_version()
    if installed and _is_too_old(installed, _conditions_of(SDK)):
        raise UnsupportedVersion(
            f"Tidings needs {SDK}, and mcp {installed} is installed. "
            f"Unless other code here needs that version, type: {_install_command(SDK)}"
        )


def _find_sdk_version() -> str:
    """Return the version in the name of `mcp-2.3.0.dist-info` beside the SDK. `importlib.metadata` is much slower."""
    with suppress(OSError, ValueError):  # the SDK is in a zip file, or is no usual module
        spec = find_spec("mcp")  # does not import it
        if spec is not None and spec.origin:
            with os.scandir(spec.origin.rsplit(os.sep, 2)[0]) as entries:
                for entry in entries:
                    if entry.name.startswith("mcp-") and entry.name.endswith(".dist-info"):
                        return entry.name.removeprefix("mcp-").removesuffix(".dist-info")
    return ""


def check_names(package: str, names: Names) -> None:
    """Raise `UnsupportedVersion` if the installed version of a package lacks any of these names."""
    for place in names:
        for name in names[place]:
            if not has_name(place, name):
                raise missing_name_error(package, f"{place}.{name}")


def warn_of_missing_names(package: str, names: Names) -> None:
    """Log the error of `check_names`, for names without which Tidings works, but worse."""
    try:
        check_names(package, names)
    except UnsupportedVersion as error:
        logger.warning("%s", error)


def has_name(place: str, name: str) -> bool:
    """Return whether a module or class has an attribute, or the instances of the class have it."""
    try:
        module, _, name_of_class = place.partition(":")
        found: Any = import_module(module)
        found = getattr(found, name_of_class) if name_of_class else found
    except (ImportError, AttributeError):
        return False
    if hasattr(found, name) or not isinstance(found, type):
        return hasattr(found, name)
    # `__init__` assigns most attributes, so look for the name in the code of the methods.
    methods = [each for kind in found.__mro__ for each in vars(kind).values() if isinstance(each, FunctionType)]
    return any(name in method.__code__.co_names for method in methods)


def missing_name_error(package: str, name: str) -> UnsupportedVersion:
    """Return the error for a version that lacks a name. It ends with the command that installs another version."""
    installed, supported = _versions_of(package)
    needed = supported
    if _is_too_old(installed, supported):
        problem = "too old for it. To install a newer one"
    else:
        problem = "too new for it. To install an older one"
        upper = [each for each in supported if each.startswith("<")]
        if installed and all(_release(installed) < _release(each[1:]) for each in upper):
            needed = [each for each in supported if each not in upper] + [f"<{installed}"]
    return UnsupportedVersion(
        f"{package} {installed or '(of an unknown version)'} has no {name}, which Tidings uses. Tidings supports "
        f"{package}{','.join(supported)}, and this version is {problem}: {_install_command(package + ','.join(needed))}"
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
    found = [_conditions_of(line) for line, _ in _requirements() if _name_of(line) == package]
    return _Versions(installed, found[0] if found else [])


def _name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _conditions_of(requirement: str) -> list[str]:
    """Return the conditions of a requirement, the lower bound first. Metadata may have `mcp (!=2.4, <3, >=2.3)`."""
    return sorted(re.findall(r"[<>=!~]+[\w.*+]+", requirement.replace(" ", "")), reverse=True)


def _is_too_old(installed: str, conditions: list[str]) -> bool:
    lower = [_release(each[2:]) for each in conditions if each.startswith(">=")]
    return bool(installed and lower) and _release(installed) < lower[0]


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
