"""The benchmark of the store: every figure has its target. The figures themselves depend on the machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "store.py"


@pytest.mark.slow
def test_every_figure_has_its_target_and_the_bounds_hold() -> None:
    command = [sys.executable, str(BENCH), "--quick", "--changes", "20000", "--json"]
    printed = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", timeout=300).stdout
    rows = {row["key"]: row for row in json.loads(printed)}

    ratios = [rows[f"store_{name}_{readers}_process"] for name in ("tools", "contents") for readers in (0, 1, 100)]
    assert all(row["target"] == "≤ 1.3" and row["value"] > 0.5 for row in ratios)
    for name in ("store", "store_durable"):
        assert rows[f"{name}_file"]["met"]
        assert rows[f"{name}_journal"]["met"]
    for name in ("tools_lone", "tools_storm", "contents_lone", "contents_storm"):
        assert rows[f"store_{name}_durable_each"]["target"] == "≤ 3"
        assert rows[f"store_{name}_durable"]["value"] > 0
