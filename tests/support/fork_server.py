"""Start a Python program in a process that has already imported the SDK, which takes more than a second otherwise.

    python -IS tests/support/fork_server.py SOCKET ARGUMENTS…

does the same as `python ARGUMENTS…`, if ARGUMENTS begin with a file, `-m` or `-c`. The program gets the standard
streams, the environment and the directory of this process, and this process ends with its status. The program itself
runs in a fork of the server at SOCKET. This process forwards SIGINT and SIGTERM. SIGUSR1 kills the program, and this
process exits after it. SIGKILL ends this process first, and the program exits a moment later.
"""

import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType

PRELOADED = (
    *("tests.support.faults.wire", "tests.support.kinds", "tests.support.sdk_clients", "tests.support.telemetry"),
    *("tidings.cli.commands", "tidings.cli.serve", "tidings.cli.remote", "tidings.cli.status", "tidings.store.sqlite"),
    "tidings.cli.watch_session",
    *("tidings.http.app", "tidings.http.router", "tidings.workspace.source", "tidings.workspace.watcher"),
    *("tidings.server.fastmcp", "tidings.server.mcpserver", "tidings.stdio.transport"),
    *("fastmcp.server.server", "fastmcp.server.auth.providers.jwt", "fastmcp.server.middleware.dereference", "griffe"),
    *("key_value.aio.adapters.pydantic", "key_value.aio.stores.memory"),
    *("anyio._backends._asyncio", "uvloop", "uvicorn.lifespan.on", "uvicorn.protocols.websockets.auto"),
    *("uvicorn.protocols.http.h11_impl", "uvicorn.protocols.http.httptools_impl"),
    "uvicorn.protocols.websockets.websockets_sansio_impl",
)
"""Modules that boards, the servers of the fault tests and the commands of `tidings` import, at the start or later."""


def main() -> int:
    path, *arguments = sys.argv[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)

        def forward(number: int, frame: FrameType | None) -> None:
            connection.send(bytes([signal.SIGKILL if number == signal.SIGUSR1 else number]))

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, forward)
        start = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()  # noqa: PTH109  # pathlib loads slowly
        socket.send_fds(connection, [start], [0, 1, 2])
        for fd in (0, 1):
            os.close(fd)  # so that the client and the program each notice when the other closes its end
        return connection.recv(1)[0]


def serve(path: str) -> None:
    """Fork for each connection until standard input ends."""
    import gc
    import importlib

    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # the collector of a fork visits only the objects of the program itself
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _run(connection)
                return
            connection.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # so that the CPU time of this process includes the programs
                    pass


def _run(connection: socket.socket) -> None:
    """Run the program in a second fork, and send its exit status. Only the second fork returns, after the program."""
    start, fds, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    program = os.fork()
    if program == 0:
        connection.close()
        _execute(json.loads(start), fds)
        return
    for fd in (0, 1, *fds):
        os.close(fd)
    ended = os.pidfd_open(program)
    while ended not in (ready := select.select([connection.fileno(), ended], [], [])[0]):
        if connection.fileno() in ready:
            number = connection.recv(1)
            os.kill(program, number[0] if number else signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with suppress(BrokenPipeError):  # the process that started the program was killed
        connection.send(bytes([status if status >= 0 else 128 - status]))
    os._exit(0)


def _execute(start: tuple[list[str], dict[str, str], str], fds: list[int]) -> None:
    import runpy

    arguments, environment, directory = start
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it has a buffer already
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
