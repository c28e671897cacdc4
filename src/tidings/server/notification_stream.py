"""The interface of a write stream that accepts encoded notifications, beside the messages of the SDK."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

__all__ = ["NotificationStream"]


class NotificationStream(ABC):
    write_notification: Callable[[bytes, Callable[[], None]], bool]
    """Write a notification with its newline. Return False if the stream is full now: before the next one, the caller
    must wait until the given function is called."""

    @abstractmethod
    def on_handshake(self) -> None:
        """Handle the start of a session. Its protocol version can differ from the one before."""
