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
    "UnsupportedVersion",
    "first_error",
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


class UnsupportedVersion(TidingsError, RuntimeError):
    """The installed version of a package that Tidings uses is too old, or lacks something that Tidings needs."""


class ChangesMissed(TidingsError):
    """An in-process listener missed changes that the journal no longer has.

    The listener stays usable: read the catalog again and continue the iteration.
    """


class Disconnected(TidingsError, ConnectionError):
    """A mirror has no connection to its server at the moment."""


class NotSupported(TidingsError):
    """The server does not support, or does not grant, what a client asks for."""


def first_error(error: BaseException) -> BaseException:
    """Return the first error in an exception group, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
