"""A clock that stands still, and a subscriber that records its notifications."""

from __future__ import annotations

from tidings import BUSY, Catalog, Notification


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Reader:
    """Records notifications. While it is slow, it accepts one at a time."""

    def __init__(self) -> None:
        self.received: list[Notification] = []
        self.is_slow = False

    def take(self, notification: Notification) -> object:
        self.received.append(notification)
        return BUSY if self.is_slow else None

    def told(self) -> list[list[str]]:
        """Return the notifications since the last call, each as a list of `operation key`."""
        received, self.received = self.received, []
        return [[f"{change.operation} {change.key}" for change in notification.changes] for notification in received]


def add(catalog: Catalog, *names: str) -> None:
    for name in names:
        catalog.tools.add({"name": name})


def lines(reader: Reader) -> list[str]:
    """Return the notifications since the last call, each as one line."""
    return [" + ".join(told) for told in reader.told()]
