"""The worker processes of `tidings serve --workers N`.

The parent forks the workers, which share its listening socket. It starts a worker again that has ended, and ends all of
them on SIGTERM and SIGINT. It runs no code of the workspace and starts no thread, so it can fork at any time. A fork
shares the memory of the imported modules, and starts in milliseconds. Workers end with their parent, also after
`kill -9`: each has a thread that waits until the parent's end of a pipe is closed.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tidings.cli.output import fail, print_stderr
from tidings.errors import TidingsError
from tidings.runtime.restarts import Restarts
from tidings.runtime.shutdown import SIGNALS, STOP_WORKERS, exit_process

__all__ = ["Worker", "run_workers"]

logger = logging.getLogger(__name__)

_SIGNALS = (*SIGNALS, signal.SIGCHLD) if os.name == "posix" else ()


class Worker(NamedTuple):
    """The arguments that a worker process gets from its parent."""

    name: str
    sockets: dict[str, str]
    """The paths of the Unix sockets of all workers, by name."""
    listener: socket.socket
    """The Unix socket of this worker, through which the others pass requests."""
    report: Callable[[dict[str, Any]], None]
    """Tell the parent that this worker accepts connections, and which items it serves."""

    @property
    def is_first(self) -> bool:
        return self.name == next(iter(self.sockets))


@dataclass(eq=False)
class _Process:
    """A worker as its parent sees it."""

    name: str
    pid: int | None = None
    restarts: Restarts = field(default_factory=Restarts)
    report: bytes = b""


def run_workers(
    number: int,
    run: Callable[[Worker], None],
    on_ready: Callable[[dict[str, Any]], None],
    keep_nats: Callable[[], float | None] = lambda: None,
) -> None:
    """Run `run` in each of several worker processes until this process gets SIGTERM or SIGINT.

    `on_ready` is called with the report of the first worker when all have reported; `keep_nats` when any child process
    has ended, and after the seconds that it returns. If the first worker ends before it has reported, exit with its
    status."""
    if not hasattr(os, "fork"):
        fail("--workers needs a system with fork(), such as Linux or macOS; run one server per port instead")
    folder = Path(tempfile.mkdtemp(prefix="tidings-"))  # for this user alone
    try:
        with _captured_signals() as signals, _alive_pipe() as alive:
            _Parent(number, run, on_ready, keep_nats, folder, signals, alive).supervise()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Signals(NamedTuple):
    receiver: socket.socket
    """Gets one byte for each signal: its number."""
    restore: Callable[[], None]


@contextmanager
def _captured_signals() -> Iterator[_Signals]:
    receiver, sender = socket.socketpair()
    with receiver, sender:
        receiver.setblocking(False)
        sender.setblocking(False)
        previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        previous = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}

        def restore() -> None:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)

        try:
            yield _Signals(receiver, restore)
        finally:
            restore()


@contextmanager
def _alive_pipe() -> Iterator[tuple[int, int]]:
    """Yield the ends of a pipe to which nothing is written: reading ends when the parent has ended."""
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)


@dataclass
class _Parent:
    number: InitVar[int]
    _run: Callable[[Worker], None]
    _on_ready: Callable[[dict[str, Any]], None]
    _keep_nats: Callable[[], float | None]
    _folder: Path
    _signals: _Signals
    _alive: tuple[int, int]

    def __post_init__(self, number: int) -> None:
        self._processes = [_Process(str(index)) for index in range(1, number + 1)]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals.receiver, selectors.EVENT_READ)
        self._missing = {process.name for process in self._processes}
        """The workers that have never reported."""
        self._served: dict[str, Any] = {}
        """The first report of the first worker."""

    def supervise(self) -> None:
        gc.collect()
        gc.freeze()  # so that the garbage collector of a worker does not copy the shared memory
        try:
            while True:
                delays = [self._keep_nats(), *map(self._start_due, self._due())]
                if self._wait(min((delay for delay in delays if delay is not None), default=None)):
                    return
        finally:
            self._stop()
            self._selector.close()

    def _due(self) -> list[_Process]:
        """Return the workers that are to be started now or later.

        The others start after the first one has reported, so that an error in the workspace is printed once."""
        first = self._processes[0]
        found = [first] if first.name in self._missing else self._processes
        return [process for process in found if process.pid is None]

    def _start_due(self, process: _Process) -> float | None:
        """Start a worker if it is due. Return the seconds until it is."""
        if process.restarts.delay == 0.0:
            self._start(process)
        return process.restarts.delay

    def _wait(self, timeout: float | None) -> bool:
        """Wait for a signal or a report, and handle it. Return whether to stop."""
        for key, _ in self._selector.select(timeout):
            if key.data is not None:
                self._read_report(key.data, key.fd)
                continue
            with suppress(BlockingIOError):
                received = self._signals.receiver.recv(4096)
                if not set(SIGNALS).isdisjoint(received):
                    return True
                for process in self._processes:
                    self._check_ended(process)
        return False

    def _read_report(self, process: _Process, fd: int) -> None:
        data = os.read(fd, 65536)
        process.report += data
        if data and not process.report.endswith(b"\n"):
            return
        self._selector.unregister(fd)
        os.close(fd)
        if data:
            process.restarts.mark_ready()
        if data and process.name in self._missing:
            self._missing.remove(process.name)
            if process is self._processes[0]:
                self._served = json.loads(process.report)
            if not self._missing:
                self._on_ready(self._served)

    def _check_ended(self, process: _Process) -> None:
        if process.pid is None or not (ended := os.waitpid(process.pid, os.WNOHANG))[0]:
            return
        process.pid = None
        status = os.waitstatus_to_exitcode(ended[1])
        if self._processes[0].name in self._missing:
            raise SystemExit(status if status > 0 else 1)
        process.restarts.end()
        reason = f"status {status}" if status >= 0 else signal.Signals(-status).name
        logger.warning("worker %s ended with %s; its sessions are lost, and it starts again", process.name, reason)

    def _start(self, process: _Process) -> None:
        sys.stdout.flush()  # or each worker would write what is buffered
        reading, writing = os.pipe()
        # A signal that the worker gets before it has its own handlers would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            process.pid = os.fork()
            if process.pid == 0:
                os.close(reading)
                self._run_worker(process.name, writing)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.close(writing)
        process.report = b""
        process.restarts.start()
        self._selector.register(reading, selectors.EVENT_READ, process)

    def _stop(self) -> None:
        """End all workers, and kill those that do not end."""
        for process in self._processes:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGTERM)
        end = time.monotonic() + STOP_WORKERS
        while running := [process for process in self._processes if process.pid is not None]:
            remaining = end - time.monotonic()
            if remaining <= 0:
                logger.warning("workers still run after %g s; killing them: %d", STOP_WORKERS, len(running))
                for process in running:
                    assert process.pid is not None
                    os.kill(process.pid, signal.SIGKILL)
            self._selector.select(max(remaining, 0.1))
            with suppress(BlockingIOError):
                self._signals.receiver.recv(4096)
            for process in running:
                assert process.pid is not None
                if os.waitpid(process.pid, os.WNOHANG)[0]:
                    process.pid = None

    # In the worker

    def _run_worker(self, name: str, report_fd: int) -> NoReturn:
        status = 1
        try:
            # A group of its own, so that Ctrl-C in a terminal reaches only the parent, which then ends the workers.
            os.setpgid(0, 0)
            self._signals.restore()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            self._selector.close()
            os.close(self._alive[1])
            threading.Thread(target=self._end_with_parent, name="parent", daemon=True).start()
            sockets = {process.name: str(self._folder / process.name) for process in self._processes}
            with socket.socket(socket.AF_UNIX) as listener:
                Path(sockets[name]).unlink(missing_ok=True)  # of a worker that was killed
                listener.bind(sockets[name])
                listener.listen(2048)

                def report(values: dict[str, Any]) -> None:
                    with suppress(BrokenPipeError), open(report_fd, "wb") as pipe:
                        pipe.write(json.dumps(values).encode() + b"\n")

                self._run(Worker(name, sockets, listener, report))
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except TidingsError as error:
            print_stderr(f"tidings: {error}")
            status = 2
        except BaseException:
            logger.exception("worker %s failed", name)
        finally:
            with suppress(OSError):
                sys.stdout.flush()
            exit_process(status)  # without unwinding the stack, which belongs to the parent

    def _end_with_parent(self) -> None:
        os.read(self._alive[0], 1)
        logger.warning("the parent process has ended; stopping")
        shutil.rmtree(self._folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)
