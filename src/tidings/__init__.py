"""Tidings makes a Python MCP server live: every connected client is told what changed, once and in order."""

from tidings.catalog import Catalog
from tidings.errors import (
    AlreadyExists,
    Behind,
    InvalidItem,
    InvalidPattern,
    InvalidPolicy,
    LimitReached,
    NotFound,
    TidingsError,
)
from tidings.hub import BUSY, Hub
from tidings.journal import Journal
from tidings.mailbox import Filter
from tidings.model import Change, Feature, Item, Notification, Operation, Priority, Reason, Topic, Version
from tidings.policy import Policy
from tidings.subscriber import Subscriber

__all__ = [
    "BUSY",
    "AlreadyExists",
    "Behind",
    "Catalog",
    "Change",
    "Feature",
    "Filter",
    "Hub",
    "InvalidItem",
    "InvalidPattern",
    "InvalidPolicy",
    "Item",
    "Journal",
    "LimitReached",
    "NotFound",
    "Notification",
    "Operation",
    "Policy",
    "Priority",
    "Reason",
    "Subscriber",
    "TidingsError",
    "Topic",
    "Version",
]
