"""Tidings makes MCP servers live: every client that listens is notified of each change, once and in order."""

import sys
from typing import TYPE_CHECKING, Any

from tidings.core.catalog import Catalog
from tidings.core.cursor import Cursor
from tidings.core.filters import Filter, Terms
from tidings.core.hub import BUSY, Hub
from tidings.core.journal import Journal
from tidings.core.model import Change, Feature, Item, Notification, Operation, Priority, Reason, Topic, Version
from tidings.core.subscriber import Subscriber
from tidings.dependencies import check_sdk
from tidings.errors import (
    AlreadyExists,
    ChangesMissed,
    Disconnected,
    InvalidFeature,
    InvalidItem,
    InvalidPattern,
    InvalidPolicy,
    LimitReached,
    NotFound,
    NotSupported,
    TidingsError,
)
from tidings.policy import Policy
from tidings.server.authorization import Principal

if TYPE_CHECKING:
    from tidings.client import Mirror, MirrorGroup
    from tidings.live import Live

__all__ = [
    "BUSY",
    "AlreadyExists",
    "Catalog",
    "Change",
    "ChangesMissed",
    "Cursor",
    "Disconnected",
    "Feature",
    "Filter",
    "Hub",
    "InvalidFeature",
    "InvalidItem",
    "InvalidPattern",
    "InvalidPolicy",
    "Item",
    "Journal",
    "LimitReached",
    "Live",
    "Mirror",
    "MirrorGroup",
    "NotFound",
    "NotSupported",
    "Notification",
    "Operation",
    "Policy",
    "Principal",
    "Priority",
    "Reason",
    "Subscriber",
    "Terms",
    "TidingsError",
    "Topic",
    "Version",
]

# No module above imports the SDK. The command `tidings` (`-m` while `python -m tidings` imports this) does this check
# itself, and prints the error as one line.
if not (sys.argv or [""])[0].endswith(("/tidings", "\\tidings.exe", "-m")):
    check_sdk()


def __getattr__(name: str) -> Any:
    # Imported on demand, because these need the SDK, which takes most of a second to import.
    if name == "Live":
        from tidings.live import Live

        return Live
    if name in ("Mirror", "MirrorGroup"):
        import tidings.client

        return getattr(tidings.client, name)
    raise AttributeError(f"module 'tidings' has no attribute {name!r}")
