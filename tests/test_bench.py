"""That `make bench` measures what it says it does. How fast anything is, is the bench's to say and not a test's."""

import json
import math
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent / "bench" / "core.py"

REQUIRED = {
    "add": "≤ 1.5",
    "updated-uris": "≤ 1.5",
    "updated-patterns": "≤ 3",
    "subscribe": "≤ 1.5",
    "memory": "≤ 1,000",
    "memory-callback": "≤ 1,000",
    "mailbox": "≤ 1.1",
    "fan-out-frames": "≥ 500,000",
    "fan-out-plain": "≥ 500,000",
    "removal-closed": "≤ 41",
    "removal-lost": "≤ 41",
}
"""The figures that were asked for, and their targets."""


def bench(*arguments: str) -> str:
    command = [sys.executable, str(BENCH), "--quick", *arguments]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout


def test_json_has_every_figure_with_its_target_and_spread() -> None:
    found = json.loads(bench("--json"))

    rows = {row["key"]: row for row in found["rows"]}
    assert len(rows) == len(found["rows"])
    assert {key: rows[key]["target"] for key in REQUIRED} == REQUIRED
    for row in rows.values():
        assert math.isfinite(row["value"]), row
        assert 0 < row["low"] <= row["high"], row
        assert (row["met"] is not None) == bool(row["target"]), row
    assert found["quick"] is True
    assert isinstance(found["pgo"], bool)


def test_table_has_a_line_for_each_figure_and_says_that_a_quick_run_proves_nothing() -> None:
    printed = bench("--rounds", "1")

    for figure in ("add, ", "updated, ", "memory of ", "mailbox ", "fan-out ", "removing "):
        assert any(line.startswith(figure) for line in printed.splitlines()), figure
    assert "sizes are not those that the targets are about" in printed


def test_rounds_below_one_are_refused() -> None:
    command = [sys.executable, str(BENCH), "--rounds", "0"]
    refused = subprocess.run(command, check=False, capture_output=True, encoding="utf-8")

    assert refused.returncode == 2
    assert "--rounds must be at least 1" in refused.stderr
