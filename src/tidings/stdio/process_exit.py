"""Leaves a process that does not end by itself, since a thread of it can't be interrupted.

What was registered for its end is done all the same, for as long as a moment lasts: the store is written, log files are
flushed, and `meanwhile` telemetry is sent. Not the ordinary way: that is to return.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["leave", "meanwhile"]

_MOMENT = 0.5
"""Seconds: a client that ends its server gives it about two, of which most are gone by then."""

_meanwhile: list[Callable[[], object]] = []


@contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Do this too if the process is left within the block. Beside the rest and not before it: what waits for others, as
    for a collector that is away, must not take the store's time."""
    _meanwhile.append(work)
    try:
        yield
    finally:
        _meanwhile.remove(work)


def leave(status: int) -> NoReturn:
    # On threads of their own, since whatever they wait for may be what hangs.
    last = [threading.Thread(target=work, name="leaving", daemon=True) for work in (atexit._run_exitfuncs, *_meanwhile)]
    for each in last:
        each.start()
    end = time.monotonic() + _MOMENT
    for each in last:
        each.join(max(0.0, end - time.monotonic()))
    os._exit(status)
