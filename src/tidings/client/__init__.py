"""The client side: a copy of a server's lists that is always current."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidings.client.group import MirrorGroup
    from tidings.client.mirror import Mirror, Status
    from tidings.client.snapshot import Detected, ItemChange, Snapshot
    from tidings.client.timing import Timing

__all__ = ["Detected", "ItemChange", "Mirror", "MirrorGroup", "Snapshot", "Status", "Timing"]


def __getattr__(name: str) -> Any:
    # Imported on demand, because these need the SDK, and the command line uses `hosts` alone.
    if name in __all__:
        return getattr(import_module("tidings.client.group"), name, None) or getattr(
            import_module("tidings.client.snapshot"), name
        )
    raise AttributeError(f"module 'tidings.client' has no attribute {name!r}")
