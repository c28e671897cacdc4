"""Run the SDK's own tests with its servers as they are and with every server in `Live`, and explain each difference.

    python -m tests.sdk_suite                        # all tests; about five minutes on two cores
    python -m tests.sdk_suite tests/server -k cache  # some of them: arguments of pytest

The tests are those of the installed version of the SDK. pip downloads them by name into an environment of their own.
`differences.toml` names the tests whose outcome differs, with the reason. Every other difference is an error, and so is
an entry without a difference.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = ROOT / ".venv-sdk-suite"
VERSION = importlib.metadata.version("mcp")
SUITE = ENVIRONMENT / f"mcp-{VERSION}"
PYTHON = ENVIRONMENT / "bin" / "python"
PACKAGES = [
    f"mcp[cli,rich]=={VERSION}",
    *("blockbuster", "dirty-equals", "inline-snapshot", "logfire", "opentelemetry-sdk", "pillow", "pydantic-settings"),
    *("pytest>=9", "pytest-examples", "pytest-xdist", "pyyaml", "ruff", "trio"),
]
"""The development packages of the SDK that its tests import."""

Outcomes = dict[str, tuple[str, str]]


class Difference(NamedTuple):
    reason: str
    tests: list[str]
    sometimes: list[str]
    """Tests that differ only on a busy machine."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sdk_suite", description=__doc__.partition("\n")[0])
    parser.add_argument("--live-only", action="store_true", help="assume that every test passes with plain servers")
    parser.add_argument(
        "--additions", action="store_true", help="leave the documented additions in the responses of live servers"
    )
    options, pytest_arguments = parser.parse_known_args()
    prepare()
    live = run("live-additions" if options.additions else "live", pytest_arguments)
    plain = dict.fromkeys(live, ("passed", "")) if options.live_only else run("plain", pytest_arguments)
    return report(plain, live, is_complete=not pytest_arguments)


def prepare() -> None:
    """Build the environment, and unpack the SDK's sdist into it."""
    if SUITE.is_dir():
        return
    print(f"Building {ENVIRONMENT.name} for mcp {VERSION} …", flush=True)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
    subprocess.run([*pip, "install", *PACKAGES, "-e", str(ROOT)], check=True)
    command = [*pip, "download", "--no-deps", "--no-binary", "mcp", "--dest", str(ENVIRONMENT), f"mcp=={VERSION}"]
    subprocess.run(command, check=True)
    with tarfile.open(ENVIRONMENT / f"mcp-{VERSION}.tar.gz") as archive:
        archive.extractall(ENVIRONMENT, filter="data")


def run(mode: str, pytest_arguments: list[str]) -> Outcomes:
    """Run the tests, and return the outcome of each."""
    print(f"Running the tests of mcp {VERSION}: {mode} …", flush=True)
    written = ENVIRONMENT / f"{mode}.json"
    written.unlink(missing_ok=True)
    path = os.pathsep.join(["examples", str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "SDK_SUITE_MODE": mode, "SDK_SUITE_OUTCOMES": str(written)}
    command = [str(PYTHON), "-m", "pytest", "-p", "live_servers", "-p", "no:cacheprovider", "-n", "2", "-q"]
    command += ["--tb=native", "-o", "log_cli=false", "--color=no", "--no-header", "--no-summary", *pytest_arguments]
    if not any(each.startswith("tests") for each in pytest_arguments):
        command += ["tests", "--ignore", "tests/docs"]  # those are about the tools that build the SDK's documentation
    ended = subprocess.run(command, cwd=SUITE, env=environment, capture_output=True, text=True, check=False)
    print(ended.stdout.strip().rpartition("\n")[2], flush=True)
    if not written.exists() or ended.returncode not in (0, 1):
        raise SystemExit(ended.stdout[-3000:] + ended.stderr)
    outcomes: Outcomes = json.loads(written.read_text())
    return outcomes


def report(plain: Outcomes, live: Outcomes, *, is_complete: bool) -> int:
    """Print the differences by reason. Return 1 if one has no reason, or a reason has no difference."""
    differing = {test for test in plain.keys() | live.keys() if outcome_of(plain, test) != outcome_of(live, test)}
    functions = {test.partition("[")[0] for test in differing}
    explained: set[str] = set()
    unused: list[str] = []
    print(f"{len(differing)} tests differ, in {len(functions)} functions:")
    for difference in differences():
        names = {*difference.tests, *difference.sometimes}
        explained |= names
        unused += sorted(set(difference.tests) - functions)
        print(f"{sum(test.partition('[')[0] in names for test in differing):5}  {difference.reason}")
    unexplained = sorted(test for test in differing if test.partition("[")[0] not in explained)
    for test in unexplained:
        print(f"\nNo reason is known: {test}: {outcome_of(plain, test)} → {outcome_of(live, test)}")
        print(live.get(test, ("", ""))[1])
    if is_complete:
        for test in unused:
            print(f"\nNo difference any more, remove it from differences.toml: {test}")
    return int(bool(unexplained) or (is_complete and bool(unused)))


def outcome_of(outcomes: Outcomes, test: str) -> str:
    return outcomes.get(test, ("missing", ""))[0]


def differences() -> list[Difference]:
    entries = tomllib.loads((HERE / "differences.toml").read_text())["difference"]
    return [Difference(entry["reason"], entry["tests"], entry.get("sometimes", [])) for entry in entries]


if __name__ == "__main__":
    sys.exit(main())
