"""Leaves a process that does not end by itself, since a thread of it can't be interrupted.

What was registered for its end is done all the same, for as long as a moment lasts: the store is written, telemetry is
sent, log files are flushed. Not the ordinary way: that is to return.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import NoReturn

__all__ = ["leave"]

_MOMENT = 0.5
"""Seconds: a client that ends its server gives it about two, of which most are gone by then."""


def leave(status: int) -> NoReturn:
    # On a thread of its own, since whatever it waits for may be what hangs.
    last = threading.Thread(target=atexit._run_exitfuncs, name="leaving", daemon=True)
    last.start()
    last.join(_MOMENT)
    os._exit(status)
