"""The promises of Tidings as checks over a recorded history, for the tests of Tidings and of its users.

A `History` contains events in the order in which they were observed: requests, changes, notifications. `Recorder(hub)`
records it inside a process. Clients of a real server record it from messages (`Told.from_message`). A client can
receive notifications from the request of a subscription until the server confirms its end. Record a change before its
effects can be observed, and before the request of a subscriber that already knows it.

The checks do not wait. Run `check_reliable` after every subscriber could receive all notifications.

`connect(server)` is for the tests of any server: it connects clients of each era, which assert what they are told.
"""

from typing import TYPE_CHECKING, Any

from tidings.testing.history import (
    Acknowledged,
    Changed,
    Closed,
    Event,
    Fetched,
    FetchEnded,
    FetchStarted,
    History,
    MailboxSize,
    Muted,
    PromiseBroken,
    Subscribed,
    Told,
    Unmuted,
    Unsubscribed,
)
from tidings.testing.promises import (
    PROMISES,
    check_all,
    check_bounded,
    check_filtered,
    check_ordered,
    check_reliable,
    check_resumable,
    check_unique,
)
from tidings.testing.recorder import Recorder

if TYPE_CHECKING:
    from tidings.testing.clients import LiveClient, LiveClients, NotificationError, connect

__all__ = [
    "PROMISES",
    "Acknowledged",
    "Changed",
    "Closed",
    "Event",
    "FetchEnded",
    "FetchStarted",
    "Fetched",
    "History",
    "LiveClient",
    "LiveClients",
    "MailboxSize",
    "Muted",
    "NotificationError",
    "PromiseBroken",
    "Recorder",
    "Subscribed",
    "Told",
    "Unmuted",
    "Unsubscribed",
    "check_all",
    "check_bounded",
    "check_filtered",
    "check_ordered",
    "check_reliable",
    "check_resumable",
    "check_unique",
    "connect",
]

_CLIENTS = {"LiveClient", "LiveClients", "NotificationError", "connect"}


def __getattr__(name: str) -> Any:
    # Imported on demand: the clients need the SDK, the checks do not.
    if name in _CLIENTS:
        from tidings.testing import clients

        return getattr(clients, name)
    raise AttributeError(f"module 'tidings.testing' has no attribute {name!r}")
