"""The client side: a copy of a server's lists that is always current."""

from tidings.client.group import MirrorGroup
from tidings.client.mirror import Mirror, Status
from tidings.client.snapshot import Detected, ItemChange, Snapshot
from tidings.client.timing import Timing

__all__ = ["Detected", "ItemChange", "Mirror", "MirrorGroup", "Snapshot", "Status", "Timing"]
