"""End a process whose threads can't be interrupted.

The functions registered with `atexit` and `run_at_exit` still run, for a short time: the store is written, log files
are flushed, telemetry is sent. This is not the normal way to end: return from the main function if that is possible.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["exit_process", "run_at_exit"]

EXIT_TIMEOUT = 0.5
"""Seconds. A client that ends its server waits about two seconds, and most of that time has passed by then."""

_functions: list[Callable[[], object]] = []


@contextmanager
def run_at_exit(function: Callable[[], object]) -> Iterator[None]:
    """Call a function if the process exits within the block.

    It runs in parallel with the functions of `atexit`: an unreachable collector must not delay the store.
    """
    _functions.append(function)
    try:
        yield
    finally:
        _functions.remove(function)


def exit_process(status: int) -> NoReturn:
    # In their own threads, because each of them can hang.
    threads = [
        threading.Thread(target=function, name="exit", daemon=True) for function in (atexit._run_exitfuncs, *_functions)
    ]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        # Python 3.12 starts no thread once the main thread has ended. All blocks of `run_at_exit` have ended then too.
        atexit._run_exitfuncs()
    else:
        end = time.monotonic() + EXIT_TIMEOUT
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
    os._exit(status)
