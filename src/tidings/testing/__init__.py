"""What Tidings promises, as checks over a recorded history, for the tests of Tidings and of its users.

A `History` is what happened, in the order in which it was seen: who asked for what, what changed, who was told. It may
come from inside (`Recorder(hub)`) or from clients of a real server (`Told.from_message`), which know only what is on
the wire. So the checks take a client's time for what it is: a notification may arrive from the moment a subscription
is asked for until its end is answered. Record a change before its effects can be seen, and before whoever is to know
it already subscribes.

One check per promise, each on its own reading of what a subscription covers: nothing here asks the code it judges. No
check waits: `check_reliable` is for a history in which everybody was given the chance to be told.
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
