"""Count the instructions of a server per list, open and delivery: `python -m bench.instructions`.

Times on a shared machine vary by a factor of two. Counts hardly vary, so they show small differences. The server runs
under Valgrind's `callgrind`, which counts the instructions of the process, not those of the kernel. The work is
that of `peers/guard.py`. `--checkout DIR` measures the servers of another checkout, such as the one before a change.
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

from bench.peers import guard
from bench.peers.programs import PEERS, ROOT, Failure, Server, serving
from bench.peers.record import record

TOOLS = (10, 100, 1000)
STREAMS = 100
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Count instructions per list, open and delivery.")
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
