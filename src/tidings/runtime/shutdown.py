"""The end of this process: its signals, its phases, and the times that these take.

| phase | a server over HTTP | a server on stdio |
|---|---|---|
| refuse | uvicorn closes its listeners on the signal | no call is started after the signal |
| end streams | on the signal; uvicorn waits for them with the calls | `END_STREAMS` |
| finish calls | `FINISH_CALLS`, then uvicorn cancels them | with the streams; at the end of the input, `ANSWER_REST` |
| stop parts | child processes get `GRACE` after their SIGTERM; the store is written | the same |
| exit | after `HTTP_DEADLINE` in any case | after `STDIO_DEADLINE` |

A deadline exists because the thread of a Python tool can't be interrupted: `exit_process` then ends the process. The
functions registered with `atexit` and `run_at_exit` still run, for `EXIT_TIMEOUT`: the store is written, log files are
flushed, telemetry is sent. A client that ends its server waits about two seconds.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

__all__ = [
    "ANSWER_REST",
    "END_STREAMS",
    "FINISH_CALLS",
    "GRACE",
    "HTTP_DEADLINE",
    "SIGNALS",
    "STDIO_DEADLINE",
    "STOP_WORKERS",
    "exit_after",
    "exit_on_signals",
    "exit_process",
    "on_signals",
    "run_at_exit",
]

SIGNALS = (signal.SIGTERM, signal.SIGINT)

END_STREAMS = 0.2
"""Seconds for the tasks that write the results of listen streams on stdio."""

FINISH_CALLS = 1
"""Seconds for running requests over HTTP; uvicorn takes whole seconds."""

ANSWER_REST = 5.0
"""Seconds without any answer, after the input has ended, until a server on stdio gives up the calls that still run. A
script that pipes its requests in gets the results of all but slow tools. A client that wants to end the server sooner
sends SIGTERM, as the specification says."""

GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for a child process: enough to remove a temporary file, and short for a user who
cancelled."""

HTTP_DEADLINE = FINISH_CALLS + GRACE + 1.0
"""Seconds from the signal to the exit. The last one is for a busy machine."""

STDIO_DEADLINE = END_STREAMS + GRACE
"""Seconds from the signal, or from the last answer, to the exit. There is no call to finish, and a client waits."""

START_DEADLINE = 1.0
"""Seconds from a signal to the exit while a server starts: longer than most of its steps, so that it clears up."""

EXIT_TIMEOUT = 0.5
"""Seconds for the functions of `exit_process`. Most of the time of a client has passed by then."""

STOP_WORKERS = HTTP_DEADLINE + EXIT_TIMEOUT + 1.5
"""Seconds until workers are killed. They exit by themselves before."""

_functions: list[Callable[[], object]] = []

_deadlines: list[float] = []
"""When this process exits, once that is decided."""


@contextmanager
def on_signals(handle: Callable[[int], object], *, chains: bool = False) -> Iterator[None]:
    """Call `handle` in this block when the process gets a signal to end; with `chains`, then call the previous handler.

    Only the main thread can set handlers; in another one, this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def handler(number: int, frame: Any) -> None:
        handle(number)
        previous = before[signal.Signals(number)]
        if chains and callable(previous):
            previous(number, frame)
        elif chains and previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in SIGNALS:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, previous)


@contextmanager
def exit_on_signals() -> Iterator[Callable[[], None]]:
    """Exit with 0 after a signal in this block: at the next call of the function that is yielded or at the end of the
    block, and after `START_DEADLINE` in any case.

    The handler raises nothing: Python ignores what is raised in a callback, for example in one of an import."""
    received: list[int] = []

    def handle(number: int) -> None:
        if not received:
            exit_after(START_DEADLINE, 0)
        received.append(number)

    def check() -> None:
        if received:
            raise SystemExit(0)

    with on_signals(handle):
        try:
            yield check
        finally:
            check()


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


def exit_after(seconds: float, status: int, before: Callable[[], object] = lambda: None) -> None:
    """Exit later, even if a thread still runs then, which can't be interrupted. Call `before` first.

    Only the first call counts: uvicorn raises a signal again after its shutdown, whose time is already limited.
    """
    if _deadlines:
        return
    _deadlines.append(time.monotonic() + seconds)

    def wait() -> None:
        threading.Event().wait(seconds)
        before()
        exit_process(status)

    # Not a `Thread`: the caller may be a signal handler that has interrupted code which holds a lock of `threading`.
    _thread.start_new_thread(wait, ())


def exit_process(status: int) -> NoReturn:
    """End the process although threads still run. Return from the main function instead if that is possible."""
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
