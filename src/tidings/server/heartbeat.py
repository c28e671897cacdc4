"""The pulse of bookmarks on lanes that have no heartbeat of their own: stdio, and legacy streams.

A listen stream over HTTP has one, and sends its bookmark in the place of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

__all__ = ["Bookmarks"]

logger = logging.getLogger(__name__)


class Bookmarks:
    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._beats: dict[Callable[[], None], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def join(self, beat: Callable[[], None]) -> None:
        """Call `beat` every so often; it must not wait."""
        self._beats[beat] = None
        if self._timer is None:
            self._arm()

    def leave(self, beat: Callable[[], None]) -> None:
        """Leaving twice, or without having joined, is fine."""
        self._beats.pop(beat, None)
        if not self._beats and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __len__(self) -> int:
        return len(self._beats)

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._pulse)

    def _pulse(self) -> None:
        self._timer = None
        for beat in list(self._beats):
            try:
                beat()
            except Exception:  # of one connection; the others have their pulse all the same
                logger.exception("a bookmark could not be sent; going on")
        if self._beats:
            self._arm()
