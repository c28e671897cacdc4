"""Run the MCP conformance suite on `examples/everything.py`, with and without `Live`.

Every check that the server passes with the SDK alone must pass with `Live`. The suite checks neither
`resources/updated` nor legacy list_changed; the other Live tests do.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.support.everything import serving
from tests.typescript.node import MODULES, needs_node, node

pytestmark = [pytest.mark.node, needs_node]

SUITE = MODULES / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
REVISIONS = ("2025-11-25", "2026-07-28")

Check: TypeAlias = tuple[str, str]
"""A scenario, and one of its checks."""
Results: TypeAlias = dict[Check, bool]


def run_suite(*arguments: str) -> str:
    """Return the output of the suite. Its exit code also counts optional scenarios."""
    program = node()
    assert program is not None
    command = [program, str(SUITE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=140).stdout


def check_server(url: str, revision: str, directory: Path) -> Results:
    """Return whether each check passed. Omit checks that are skipped or only informative."""
    printed = run_suite("server", "--url", url, "--requirements", revision, "--output-dir", str(directory))
    results: dict[Check, list[bool]] = defaultdict(list)
    for file in directory.glob("*/checks.json"):
        # The directory is named `server-`, the scenario, and the time.
        scenario = file.parent.name.removeprefix("server-")[: -len("-2026-01-01T00-00-00-000Z")]
        for check in json.loads(file.read_text(encoding="utf-8")):
            if check["status"] in ("SUCCESS", "FAILURE", "WARNING"):
                results[scenario, check["id"]].append(check["status"] == "SUCCESS")
    assert results, printed
    return {check: all(each) for check, each in results.items()}


def scored(revision: str) -> set[str]:
    """Return the scenarios that a server must pass."""
    listed = run_suite("list", "--server", "--requirements", revision)
    _, _, servers = listed.partition("Server scenarios")
    section, _, _ = servers.partition("\n\n")
    return {line.strip().removeprefix("- ") for line in section.splitlines() if line.strip().startswith("- ")}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Results]:
    """Return the results by mode (`plain` or `live`) and revision."""
    output = tmp_path_factory.mktemp("conformance")

    def check_all_revisions(mode: str) -> dict[tuple[str, str], Results]:
        with serving(*(["--plain"] if mode == "plain" else [])) as url:
            return {(mode, revision): check_server(url, revision, output / mode / revision) for revision in REVISIONS}

    with ThreadPoolExecutor() as threads:
        plain, live = threads.map(check_all_revisions, ("plain", "live"))
    return plain | live


@pytest.mark.parametrize("revision", REVISIONS)
def test_live_passes_every_scored_check(revision: str, results: dict[tuple[str, str], Results]) -> None:
    scenarios = scored(revision)
    live = results["live", revision]

    assert len(scenarios) >= 30
    assert scenarios <= {scenario for scenario, _ in live}
    assert [check for check, has_passed in live.items() if check[0] in scenarios and not has_passed] == []


@pytest.mark.parametrize("revision", REVISIONS)
def test_live_passes_every_check_that_the_sdk_passes(revision: str, results: dict[tuple[str, str], Results]) -> None:
    """This includes checks that are not scored: sessions, resumed streams, headers and tasks."""
    plain, live = results["plain", revision], results["live", revision]
    passed = {check for check, has_passed in plain.items() if has_passed}

    assert len(passed) >= 80
    assert {check for check in passed if not live.get(check)} == set()


def test_listen_checks_saw_real_changes(results: dict[tuple[str, str], Results]) -> None:
    """The suite skips these checks on a server without the tools that they call."""
    live = results["live", "2026-07-28"]

    for topic in ("tools", "prompts"):
        assert live["server-stateless", f"sep-2575-server-sends-{topic}-list-changed-on-subscription"]


def test_live_accepts_whitespace_after_a_header_value(results: dict[tuple[str, str], Results]) -> None:
    """This check is not scored. The SDK alone fails it if httptools is installed, as it is with Tidings."""
    assert results["live", "2026-07-28"]["http-header-validation", "sep-2243-server-accepts-whitespace-header-value"]
