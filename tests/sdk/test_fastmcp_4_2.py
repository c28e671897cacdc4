"""FastMCP 4.2 keeps the input schemas of tools in a second place. The lock has 4.1, because `fastmcp` requires it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import DEADLINE

PACKAGES = ["fastmcp-slim==4.2.0", "uncalled-for==0.6.1"]  # the second is newer than in the lock, too
TESTS = [
    "tests/sdk/test_internals.py",
    "tests/http/test_app.py::test_headers_of_a_changed_tool_are_checked_by_its_present_schema",
]


@pytest.mark.slow
def test_fastmcp_4_2_works_and_checks_headers_by_the_present_schema(tmp_path: Path) -> None:
    python, folder = tmp_path / "env" / "bin" / "python", tmp_path / "packages"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True, timeout=DEADLINE)  # has pip
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    installed = subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    if "No matching distribution found" in installed.stderr:
        pytest.skip(f"pip finds no packages here: {installed.stderr.splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr

    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout
