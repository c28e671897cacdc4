"""What the tests of the hub share: a clock that stands still, and a reader that remembers."""

from __future__ import annotations

import pytest

from tidings import BUSY, Catalog, Hub, Notification


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Reader:
    """Remembers what it is told, and takes one notification at a time while it is slow."""

    def __init__(self) -> None:
        self.heard: list[Notification] = []
        self.is_slow = False

    def take(self, notification: Notification) -> object:
        self.heard.append(notification)
        return BUSY if self.is_slow else None

    def told(self) -> list[list[str]]:
        """What it was told since the last time, as `operation key`, one list for each notification."""
        heard, self.heard = self.heard, []
        return [[f"{change.operation} {change.key}" for change in notification.changes] for notification in heard]


def add(catalog: Catalog, *names: str) -> None:
    for name in names:
        catalog.tools.add({"name": name})


def lines(reader: Reader) -> list[str]:
    """What it was told since the last time, one line for each notification."""
    return [" + ".join(told) for told in reader.told()]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
def hub(catalog: Catalog, clock: Clock) -> Hub:
    return Hub(catalog, clock=clock)


@pytest.fixture
def reader() -> Reader:
    return Reader()
