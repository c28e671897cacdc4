"""Measure Tidings and its alternatives with the same work: `python -m bench.peers`, or `make bench-peers`.

In each round, all peers take turns. Each sitting is a new server process, with the server on one core and the client on
another. Prints medians with minimum and maximum of the rounds, the server's CPU per unit of work, and the ratios that
have targets. If a measurement fails, it is listed at the end, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.measuring import machine
from bench.peers import plots, report
from bench.peers.figures import TARGETS, Samples
from bench.peers.pipes import sit_at_pipes
from bench.peers.programs import MODULES, PEERS, RECORDED, Failure, Peer, compile_c
from bench.peers.record import record
from bench.peers.work import SITTINGS, Scale, sit

DEFAULT = Scale()
SIZES = (1, 100, 1000, 5000, 15_000)
FULL = Scale(streams=SIZES, legacy=SIZES, herds=SIZES)
QUICK = Scale(streams=(1, 50), legacy=(20,), herds=(50,), others=200, busy=0.05, listing=0.2, most_tools=10)
STDIO_CHANGES = 2000
PACKAGES = ("mcp", "fastmcp", "uvicorn", "uvloop", "httptools")
PARTS = (*dict.fromkeys(part.key for sitting in SITTINGS for part in sitting.parts), "stdio", "folder")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Measure Tidings beside its peers.")
    parser.add_argument(
        "--quick", action="store_true", help="check that it works, in a minute; the figures mean nothing"
    )
    parser.add_argument("--full", action="store_true", help="1 to 15,000 streams: three quarters of an hour")
    parser.add_argument("--rounds", type=int, help="number of rounds (3; quick: 1)")
    parser.add_argument("--streams", help="numbers of listen streams, for example 1,1000")
    parser.add_argument("--only", help=f"parts and peers, for example fanout,sdk,own: {', '.join((*PARTS, *PEERS))}")
    parser.add_argument("--json", action="store_true", help="print every sample, for scripts and for --load")
    parser.add_argument("--load", type=Path, help="read the samples of an earlier run from its JSON")
    parser.add_argument("--write", action="store_true", help="write the tables and plots of docs/performance.md")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    only = set(options.only.split(",")) if options.only else set()
    if unknown := only - {*PARTS, *PEERS}:
        parser.error(f"--only knows no {', '.join(sorted(unknown))}")
    options.parts = [part for part in PARTS if part in only] or list(PARTS)
    options.peers = [peer for key, peer in PEERS.items() if key in only] or list(PEERS.values())
    options.scale = QUICK if options.quick else FULL if options.full else DEFAULT
    if options.streams:
        try:
            sizes = tuple(sorted({int(size) for size in options.streams.split(",")}))
        except ValueError:
            parser.error("--streams takes numbers with commas between them")
        if sizes[0] < 1 or sizes[-1] > 18_000:
            parser.error("--streams must lie between 1 and 18,000: a process may have 20,000 files open")
        options.scale = Scale(**{**vars(options.scale), "streams": sizes})
    options.sittings = [
        sitting
        for sitting in SITTINGS
        if sitting.tools <= options.scale.most_tools and any(part.key in options.parts for part in sitting.parts)
    ]
    options.rounds = options.rounds or (1 if options.quick else 3)
    return options


class Run:
    """Takes the samples of all rounds."""

    def __init__(self, options: argparse.Namespace, programs: Path) -> None:
        self.samples = Samples()
        self.failures: list[str] = []
        self._options = options
        self._programs = programs
        self._peers: list[Peer] = []

    def take(self) -> None:
        compile_c("load", self._programs)
        for peer in self._options.peers:
            missing = peer.missing()
            if missing:
                self.failures.append(f"{peer.name} was left out: {missing}")
            else:
                self._peers.append(peer)
        if PEERS["floor"] in self._peers:
            compile_c("floor", self._programs)
        if any(peer.key in RECORDED for peer in self._peers):
            for tools in sorted({sitting.tools for sitting in self._options.sittings}):
                record(tools, self._programs)
        for turn in range(self._options.rounds):
            peers = [peer for peer in self._peers if not (turn and peer.is_taken_once)]
            # Reverse the order in every second round: a slow phase of the machine should not always hit the same peer.
            self._round(turn, peers if turn % 2 == 0 else peers[::-1])
        if "folder" in self._options.parts:
            self._folder()

    def _round(self, turn: int, peers: list[Peer]) -> None:
        options = self._options
        for sitting in options.sittings:
            for peer in peers:
                parts = sitting.parts_of(peer, options.parts)
                if parts and not (turn and sitting.is_taken_once):
                    what = f"{', '.join(part.key for part in parts)} with {sitting.tools} tools"
                    scale = options.scale.later(peer) if turn else options.scale
                    self._attempt(turn, what, peer, partial(sit, sitting, parts, peer, scale, self._programs))
        for peer in peers:
            if "stdio" in options.parts and "stdio" in peer.does:
                changes = STDIO_CHANGES // (20 if options.quick else 1)
                self._attempt(turn, "stdio", peer, partial(sit_at_pipes, peer, changes, self._programs))

    def _attempt(self, turn: int, what: str, peer: Peer, work: Callable[[dict[str, float]], None]) -> None:
        if sys.stderr.isatty():
            said = f"round {turn + 1} of {self._options.rounds}: {what}, {peer.name}"
            print(f"\r\033[K{said}", end="", file=sys.stderr, flush=True)
        notes: dict[str, float] = {}
        try:
            work(notes)
        except Failure as failure:
            self.failures.append(f"{what}: {failure}")
        self.samples.add(peer.key, notes)

    def _folder(self) -> None:
        """Measure the start of the folder server, and the time from a file change to its notification."""
        from bench import workspace

        rounds = 3 if self._options.quick else 9
        times = asyncio.run(workspace.start_times(rounds))
        heard = asyncio.run(workspace.heard_times(rounds))
        self.samples.add("own", {"heard": heard, "start": times["start"]})
        self.samples.add("sdk", {"start": times["start_bare"]})


def about(options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    packages = [f"{name} {installed}" for name in PACKAGES if (installed := _version(name))]
    package = MODULES / "@modelcontextprotocol" / "server" / "package.json"
    if package.exists():
        packages.append(f"@modelcontextprotocol/server {json.loads(package.read_text())['version']}")
    return machine() | {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _processor(),
        "rounds": options.rounds,
        "seconds": round(seconds),
        "quick": options.quick,
        "versions": ", ".join(packages),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def measure(options: argparse.Namespace) -> tuple[Samples, list[str], dict[str, Any]]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tidings-bench-") as folder:
        run = Run(options, Path(folder))
        run.take()
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return run.samples, run.failures, about(options, time.monotonic() - start)


def main() -> int:
    options = read_options()
    if sys.platform != "linux":
        print(
            "The bench reads CPU and memory of other processes from Linux; it runs only there.",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the started processes end
    try:
        if options.load:
            kept = json.loads(options.load.read_text())
            samples, failures, machine_about = Samples(kept["samples"]), kept["failures"], kept["about"]
        else:
            samples, failures, machine_about = measure(options)
    except Failure as failure:
        print(failure, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    if options.json:
        verdicts = [(target, target.verdict(samples)) for target in TARGETS]
        found = {
            "about": machine_about,
            "failures": failures,
            "targets": [vars(target) | {"verdict": verdict and vars(verdict)} for target, verdict in verdicts],
            "samples": samples.values,
        }
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        print(report.head(machine_about))
        if options.quick and not options.load:
            print("A quick run: the sizes are smaller than those of the targets.")
        for title, table in report.tables(samples):
            print(f"\n{title}\n\n{table}")
        print(f"\nTargets\n\n{report.targets(samples)}")
        if failures:
            print(f"\nNot measured\n\n{report.failures(failures)}")
    if options.write:
        plots.write_page(samples, failures, machine_about)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
