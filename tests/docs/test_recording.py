"""The recording in README.md shows what the present code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "docs/recording.svg"


def lines_of(picture: Path) -> list[str]:
    """Return the lines of text of a picture, with the same time in each."""
    texts = ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")
    return [re.sub(r"[\d.]+ s\b", "0.0 s", text.text or "") for text in texts]


@pytest.mark.slow
def test_the_recording_has_what_servers_and_clients_print_today(tmp_path: Path) -> None:
    picture = tmp_path / "recording.svg"
    command = [sys.executable, str(ROOT / "docs/recording.py"), str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    lines = lines_of(picture)
    side = lines.index("With Tidings")
    assert "client: notifications in 0.0 s: 0" in lines[:side]
    assert "client: notifications in 0.0 s: 1" in lines[side:]
    assert lines == lines_of(RECORDING), "run `make screenshot`"


def test_the_recording_is_small_and_moves_without_scripts() -> None:
    assert RECORDING.stat().st_size < 150_000
    names = {element.tag.rpartition("}")[2] for element in ElementTree.parse(RECORDING).iter()}
    assert names == {"svg", "title", "style", "rect", "text"}
    assert "prefers-reduced-motion" in RECORDING.read_text(encoding="utf-8")
