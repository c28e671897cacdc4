"""Every message of the sessions of one check, in the order of its time."""

from __future__ import annotations

import time

from tidings.wire.session import Direction, Frame

__all__ = ["Transcript"]


class Transcript:
    def __init__(self) -> None:
        self._started = time.monotonic()
        self.frames: list[Frame] = []

    def now(self) -> float:
        """Return the seconds since the start of the check."""
        return time.monotonic() - self._started

    def record(self, channel: str, direction: Direction, data: bytes | str) -> Frame:
        frame = Frame(self.now(), channel, direction, data)
        self.frames.append(frame)
        return frame
