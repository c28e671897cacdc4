"""The errors of Tidings, in one hierarchy.

Each message says what happened, to which item, and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "AlreadyExists",
    "ChangesMissed",
    "Disconnected",
    "InvalidFeature",
    "InvalidItem",
    "InvalidPattern",
    "InvalidPolicy",
    "LimitReached",
    "NotFound",
    "NotSupported",
    "TidingsError",
    "TooManyStreams",
    "UnsupportedEventLoop",
    "missing_extra",
]


class TidingsError(Exception):
    """The base class of all errors that Tidings raises on purpose."""


class InvalidFeature(TidingsError, ValueError):
    """A feature is not tools, prompts or resources."""


class InvalidItem(TidingsError, ValueError):
    """The definition of an item is invalid. The catalog is unchanged."""


class InvalidPattern(TidingsError, ValueError):
    """A URI pattern is invalid. Nothing was subscribed."""


class InvalidPolicy(TidingsError, ValueError):
    """A setting has an invalid value."""


class NotFound(TidingsError, LookupError):
    """The item to remove or update is not in the catalog."""


class AlreadyExists(TidingsError):
    """The key of the item to add is in use."""


class LimitReached(TidingsError):
    """A limit of the policy is reached. The message names the limit."""


class TooManyStreams(LimitReached):
    """As many streams are open as the policy allows. A later attempt may succeed."""


class UnsupportedEventLoop(TidingsError, RuntimeError):
    """The server runs on an event loop that is not one of asyncio."""


class ChangesMissed(TidingsError):
    """An in-process listener missed changes that the journal no longer has.

    The listener stays usable: read the catalog again and continue the iteration.
    """


class Disconnected(TidingsError, ConnectionError):
    """A mirror has no connection to its server at the moment."""


class NotSupported(TidingsError):
    """The server does not support, or does not grant, what a client asks for."""


def missing_extra(feature: str, extra: str) -> TidingsError:
    """Return the error for a feature whose packages are not installed. It ends with the command that installs them.

    The command names the packages and not Tidings, so that it works for every way in which Tidings was installed.
    """
    # Imported here, because every program that uses Tidings imports this module.
    import shlex
    import sys
    from importlib.metadata import PackageNotFoundError, requires
    from importlib.util import find_spec

    message = f'{feature} needs the extra "{extra}" of Tidings'
    try:
        lines = [line.partition(";") for line in requires("tidings") or ()]
    except PackageNotFoundError:  # Tidings was copied and not installed
        return TidingsError(message)
    packages = [package.strip() for package, _, marker in lines if marker.strip() == f"extra == '{extra}'"]
    python = sys.executable or "python"
    # An environment of uv has no pip.
    pip = [python, "-m", "pip", "install"] if find_spec("pip") else ["uv", "pip", "install", "--python", python]
    return TidingsError(f"{message}: {shlex.join([*pip, *packages])}")
