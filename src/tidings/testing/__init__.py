"""The promises of Tidings as checks over a recorded history, for the tests of Tidings and of its users.

A `History` contains events in the order in which they were observed: requests, changes, notifications. `Recorder(hub)`
records it inside a process. Clients of a real server record it from messages (`Told.from_message`). A client can
receive notifications from the request of a subscription until the server confirms its end. Record a change before its
effects can be observed, and before the request of a subscriber that already knows it.

The checks do not wait. Run `check_reliable` after every subscriber could receive all notifications.
"""

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
    "MailboxSize",
    "Muted",
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
]
