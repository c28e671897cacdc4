"""Count the instructions of a server and of a command, and the memory of a stream: `python -m bench.instructions`.

Times on a shared machine vary by a factor of two. Counts hardly vary, so they show small differences. The server runs
under Valgrind's `callgrind`, which counts the instructions of the process, not those of the kernel. The work of a
server is that of `peers/guard.py`. Memory is measured without Valgrind. `--checkout DIR` measures another checkout,
such as the one before a change.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.imports import INITIALIZE
from bench.peers import guard
from bench.peers.programs import PEERS, ROOT, Failure, Server, serving, starting
from bench.peers.record import record

TOOLS = (10, 100, 1000)
STREAMS = 100
STARTS = ((("--help",), b""), (("serve", "DIR", "--stdio"), json.dumps(INITIALIZE).encode() + b"\n"))
"""The arguments of a command, and what is written to its standard input."""
Work = Callable[[Server, ExitStack], guard.Sample]


@dataclass(frozen=True)
class CountedServer(Server):
    """A server under callgrind."""

    folder: Path = field(kw_only=True)

    def cpu(self) -> float:
        """Return the instructions counted so far, on all threads."""
        subprocess.run(["callgrind_control", "--dump", str(self.pid)], check=True, capture_output=True)
        # Each dump has only the instructions since the previous dump.
        return float(sum(_read_total(path) for path in self.folder.glob("counted.*")))


def _read_total(path: Path) -> int:
    with path.open() as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("totals:"))


def count(peer: str, tools: int, work: Work, programs: Path, checkout: Path) -> float:
    """Return the fewest instructions per unit of work, after one run that is not counted."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        profiler = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={name}/counted"]
        started = stack.enter_context(serving(PEERS[peer], tools, programs, profiler=profiler, checkout=checkout))
        server = CountedServer(started.peer, started.pid, started.port, started.control, folder=Path(name))
        sample = work(server, stack)
        sample()
        subprocess.run(["callgrind_control", "--instr=on", str(server.pid)], check=True, capture_output=True)
        # A sample is higher if the cache asks the SDK again in it, because a list is some seconds old.
        return min(sample() for _ in range(3))


def weigh(peer: str, is_legacy: bool, programs: Path, checkout: Path) -> float:
    """Return the least memory of one stream, in bytes."""
    with serving(PEERS[peer], 10, programs, checkout=checkout) as server, ExitStack() as stack:
        sample = guard.growing(server, stack, is_legacy)
        return min(sample() for _ in range(3))


def count_start(arguments: tuple[str, ...], request: bytes, checkout: Path) -> float:
    """Return the instructions of `tidings` until its first line after a request, or without a request until it ends."""
    with tempfile.TemporaryDirectory() as name:
        served = Path(name) / "served"
        (served / "tools").mkdir(parents=True)
        command = [sys.executable, "-m", "tidings", *(str(served) if each == "DIR" else each for each in arguments)]
        _start(command, request, checkout)  # compiles the modules
        profiler = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={name}/counted.%p"]
        pid = _start([*profiler, *command], request, checkout)
        return float(sum(_read_total(path) for path in Path(name).glob(f"counted.{pid}*")))


def _start(command: list[str], request: bytes, checkout: Path) -> int:
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with tempfile.TemporaryFile() as log, starting(command, 0, checkout, stderr=log, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request)
        process.stdin.flush()
        if not (process.stdout.readline() if request else process.stdout.read()):
            log.seek(0)
            raise Failure(f"{' '.join(command)} wrote nothing: {log.read().decode()}")
        if not request:
            process.wait()
        elif command[0] == "valgrind":
            subprocess.run(["callgrind_control", "--dump", str(process.pid)], check=True, capture_output=True)
        return process.pid


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the instructions of a server and of a command.")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the checkout to measure, by default this one")
    parser.add_argument("--only", help="names of servers, separated by commas", default="bare,starlette,asgi,own,sdk")
    parser.add_argument("--tools", help="numbers of tools in lists", default=",".join(map(str, TOOLS)))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - {*PEERS}:
        parser.error(f"--only knows no {', '.join(sorted(unknown))}")
    if shutil.which("valgrind") is None:
        print("needs valgrind: install your system's package of that name", file=sys.stderr)
        return 2
    if not (options.checkout / "src" / "tidings").is_dir():
        print(f"{options.checkout} has no src/tidings: name the folder of a checkout", file=sys.stderr)
        return 2
    checkout = options.checkout.resolve()
    os.environ["PYTHONHASHSEED"] = "0"  # the order of sets affects the count
    found: dict[str, dict[str, float]] = {}
    peers = options.only.split(",")
    with tempfile.TemporaryDirectory() as name:
        programs = Path(name)
        try:
            for tools in map(int, options.tools.split(",")):
                record(tools, programs)
                listing = partial(guard.listing, count=5 if tools >= 1000 else 50)  # callgrind is 50 times slower
                found[f"list of {tools:,} tools"] = {
                    peer: count(peer, tools, listing, programs, checkout) for peer in peers
                }
            streaming = [peer for peer in peers if "listen" in PEERS[peer].does]
            delivering = partial(guard.delivering, count=STREAMS)
            others: dict[str, Work] = {"open": guard.opening, f"delivery to one of {STREAMS} streams": delivering}
            for title, work in others.items():
                found[title] = {peer: count(peer, 10, work, programs, checkout) for peer in streaming}
            with_sessions = [peer for peer in peers if "legacy" in PEERS[peer].does]
            found["set-up of a legacy session with its stream"] = {
                peer: count(peer, 10, guard.legacy_opening, programs, checkout) for peer in with_sessions
            }
            for title, is_legacy, measured in (("", False, streaming), ("legacy ", True, with_sessions)):
                found[f"bytes of memory per {title}stream"] = {
                    peer: weigh(peer, is_legacy, programs, checkout) for peer in measured
                }
            for arguments, request in STARTS:
                title = f"tidings {' '.join(arguments)}" + (", until its first response" if request else "")
                found[title] = {"own": count_start(arguments, request, checkout)}
        except Failure as failure:
            print(failure, file=sys.stderr)
            return 1
    if options.json:
        print(json.dumps(found))
        return 0
    for title, counts in found.items():
        print(title)
        for peer, number in counts.items():
            print(f"  {PEERS[peer].name:25}{number:14,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
