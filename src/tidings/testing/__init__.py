"""Clients of each era for the tests of any server: `connect(server)`. They assert what they are told."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidings.testing.clients import LiveClient, LiveClients, NotificationError, connect

__all__ = ["LiveClient", "LiveClients", "NotificationError", "connect"]


def __getattr__(name: str) -> Any:
    # Imported on demand: the clients need the SDK, and the plugin is imported in each run of pytest.
    if name in __all__:
        from tidings.testing import clients

        return getattr(clients, name)
    raise AttributeError(f"module 'tidings.testing' has no attribute {name!r}")
