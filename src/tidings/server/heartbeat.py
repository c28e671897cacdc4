"""Regular heartbeats on transports without a keep-alive: stdio, and legacy streams.

A listen stream over HTTP sends its heartbeat in place of a keep-alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

__all__ = ["Heartbeat"]

logger = logging.getLogger(__name__)


class Heartbeat:
    """Calls functions at an interval, with one timer for all."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._functions: dict[Callable[[], None], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, function: Callable[[], None]) -> None:
        """Call `function` at each interval. It must not block."""
        self._functions[function] = None
        if self._timer is None:
            self._start_timer()

    def remove(self, function: Callable[[], None]) -> None:
        """Stop calling `function`. Do nothing if it was not added."""
        self._functions.pop(function, None)
        if not self._functions and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._beat)

    def _beat(self) -> None:
        self._timer = None
        for function in list(self._functions):
            try:
                function()
            except Exception:  # an error of one connection must not stop the others
                logger.exception("a heartbeat could not be sent; sending the others")
        if self._functions:
            self._start_timer()
