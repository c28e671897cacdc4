"""What can go wrong, as one hierarchy.

Each message says what happened, to which item, and what to do about it: an error is part of the interface.
"""

from __future__ import annotations

__all__ = [
    "AlreadyExists",
    "Behind",
    "InvalidFeature",
    "InvalidItem",
    "InvalidPattern",
    "InvalidPolicy",
    "LimitReached",
    "NotFound",
    "TidingsError",
    "TooManyStreams",
]


class TidingsError(Exception):
    """The root of everything that Tidings raises on purpose."""


class InvalidFeature(TidingsError, ValueError):
    """Something other than tools, prompts or resources was to be watched."""


class InvalidItem(TidingsError, ValueError):
    """An item's definition can't be taken; the catalog is as it was."""


class InvalidPattern(TidingsError, ValueError):
    """A URI pattern can't be understood; nothing was subscribed."""


class InvalidPolicy(TidingsError, ValueError):
    """A knob was given a value that it can't have."""


class NotFound(TidingsError, LookupError):
    """An item was to be removed or updated that is not in the catalog."""


class AlreadyExists(TidingsError):
    """An item was to be added under a key that is taken."""


class LimitReached(TidingsError):
    """A limit of the policy stands in the way; the message names it."""


class TooManyStreams(LimitReached):
    """As many streams are open as the policy allows. A later attempt may succeed."""


class Behind(TidingsError):
    """An in-process listener fell so far behind that the journal no longer knows what it missed.

    The listener stays usable: read the catalog anew and go on iterating.
    """
