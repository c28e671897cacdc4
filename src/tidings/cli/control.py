"""The control socket of `tidings serve`: commands on the same folder reach the server that uses its state file.

It is a Unix socket beside the state file, for the user of the server alone. A connection carries one request and one
response, each a line of JSON. Without Unix sockets (Windows), or if the path is too long (macOS), there is
none, and the commands need a stopped server.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidings.errors import TidingsError

if TYPE_CHECKING:
    from tidings.server.loop_bridge import LoopBridge

__all__ = ["EMIT", "Action", "request_control", "serve_control"]

logger = logging.getLogger(__name__)

_TIMEOUT = 10.0
"""Seconds for one request: longer than an event loop is busy."""

_MAX_PATH = 100
"""Bytes of the path of a socket. The limit is 104 to 108, depending on the system."""

_DESCRIPTORS = Path("/proc/self/fd")
"""The folder through which Linux gives a short path to any open folder."""


class Action(StrEnum):
    """The actions of `tidings subscriptions`."""

    LIST = "list"
    ADD = "add"
    REMOVE = "remove"
    REVIVE = "revive"


EMIT = "emit"
"""The action of `tidings emit`."""

Handler = Callable[[dict[str, Any]], dict[str, Any]]


@contextmanager
def serve_control(state_file: Path | None, bridge: LoopBridge, handle: Handler) -> Iterator[None]:
    """Answer requests in this block. `handle` is called on the event loop of the server, and may raise `TidingsError`.

    The caller must have locked the state file. Without one, or if there can be no socket, do nothing."""
    with _open_socket(state_file) as (listener, address):
        if listener is None:
            yield
            return
        try:
            with suppress(FileNotFoundError):
                os.unlink(address)  # noqa: PTH108  # of a server that was killed; the address may be no usual path
            listener.bind(address)
            os.chmod(address, 0o600)  # noqa: PTH101  # before `listen`, so that nobody else can have connected
            listener.listen()
        except OSError as error:
            logger.info("commands can't reach this server while it runs: %s", error)
            yield
            return
        thread = threading.Thread(target=_accept, args=(listener, bridge, handle), name="control", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with suppress(OSError):
                os.unlink(address)  # noqa: PTH108


def request_control(state_file: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """Send a request to the server that uses a state file. Return its response, or None if no server listens.

    Raises `TidingsError` with the error that the server reports."""
    with _open_socket(state_file) as (connection, address):
        if connection is None:
            return None
        try:
            connection.settimeout(_TIMEOUT)
            connection.connect(address)
            with connection.makefile("rwb") as stream:
                stream.write(json.dumps(request).encode() + b"\n")
                stream.flush()
                response = json.loads(stream.readline() or "{}")
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except (OSError, ValueError) as error:
            raise TidingsError(f"the server that uses {state_file} did not answer: {error}") from None
    if "error" in response:
        raise TidingsError(str(response["error"]))
    result: dict[str, Any] = response.get("result", {})
    return result


@contextmanager
def _open_socket(state_file: Path | None) -> Iterator[tuple[socket.socket | None, str]]:
    """Yield a new socket and its address. The socket is None if there can be none."""
    if state_file is None or not hasattr(socket, "AF_UNIX") or not state_file.parent.is_dir():
        yield None, ""
        return
    path = state_file.absolute().with_name(f"{state_file.name}.sock")
    is_long = len(os.fsencode(path)) > _MAX_PATH
    if is_long and not _DESCRIPTORS.exists():
        yield None, ""
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as endpoint:
            yield endpoint, str(_DESCRIPTORS / str(folder) / path.name) if is_long else str(path)
    finally:
        os.close(folder)


def _accept(listener: socket.socket, bridge: LoopBridge, handle: Handler) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed: the server stops
            return
        with connection, suppress(OSError, ValueError):
            connection.settimeout(_TIMEOUT)
            with connection.makefile("rwb") as stream:
                response = _respond(bridge, handle, json.loads(stream.readline()))
                stream.write(json.dumps(response).encode() + b"\n")


def _respond(bridge: LoopBridge, handle: Handler, request: dict[str, Any]) -> dict[str, Any]:
    from concurrent.futures import Future

    future: Future[dict[str, Any]] = Future()

    def run() -> None:
        try:
            future.set_result(handle(request))
        except Exception as error:
            future.set_exception(error)

    bridge.call(run)
    try:
        return {"result": future.result(_TIMEOUT)}
    except TidingsError as error:
        return {"error": str(error)}
    except TimeoutError:
        return {"error": "the server is busy; try again"}
    except Exception:
        logger.exception("a command on this folder failed")
        return {"error": "the server failed; its log has the reason"}
