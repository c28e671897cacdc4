"""The promises of Tidings as checks over a recorded history, for the tests of Tidings and of its users.

A `History` contains events in the order in which they were observed: requests, changes, notifications. It comes from
inside a process (`Recorder(hub)`), or from clients of a real server (`Told.from_message`), which see only the wire. So
a notification may arrive at any time from the request of a subscription until its end is confirmed. Record a change
before its effects can be observed, and before a subscriber that already knows it subscribes.

The checks do not wait. Run `check_reliable` when every subscriber has had the chance to receive everything.
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
