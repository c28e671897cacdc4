"""The pictures of README.md and docs/console.md show the panel and the page of the present code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.browser import needs_browser

ROOT = Path(__file__).parents[2]


def text_of(picture: Path) -> str:
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    return "\n".join(element.text for element in root.iter() if element.text).replace("\xa0", " ")


@pytest.mark.slow
def test_the_script_makes_a_picture_of_the_panel(tmp_path: Path) -> None:
    picture = tmp_path / "serve.svg"
    command = [sys.executable, str(ROOT / "docs/screenshot.py"), str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    shown = text_of(picture)
    for text in (
        "$ tidings serve my-server",
        "items",
        "2 modern streams, 1 legacy session",
        "tool hello added",
        "problems",
    ):
        assert text in shown
        assert text in text_of(ROOT / "docs/serve.svg"), "run `make screenshot`"


@pytest.mark.browser
@needs_browser
def test_the_script_makes_small_pictures_of_the_console(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs/console_screenshots.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    made = {picture.name for picture in tmp_path.iterdir()}
    assert made == {picture.name for picture in (ROOT / "docs").glob("console-*.png")}
    assert all(picture.stat().st_size < 150_000 for picture in (ROOT / "docs").glob("*.png"))
