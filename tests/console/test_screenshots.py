"""The script that makes the pictures of docs/console.md works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import needs_browser

ROOT = Path(__file__).parents[2]


@pytest.mark.browser
@needs_browser
def test_the_script_makes_small_pictures_of_the_console(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs/console_screenshots.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    made = {picture.name for picture in tmp_path.iterdir()}
    assert made == {picture.name for picture in (ROOT / "docs").glob("console-*.png")}
    assert all(picture.stat().st_size < 150_000 for picture in (ROOT / "docs").glob("*.png"))
