"""The tutorial works as it is written: every file, every command, every line of output."""

from __future__ import annotations

from pathlib import Path

from tests.support.doc_blocks import Session, read_blocks

PAGE = Path(__file__).parents[2] / "docs/tutorial.md"


def test_each_command_of_the_tutorial_prints_what_the_page_shows(tmp_path: Path) -> None:
    with Session.open(tmp_path) as session:
        for block in read_blocks(PAGE):
            session.run(block)
    shown = [block for block in session.has_run if block.language == "console"]
    assert len(shown) >= 8
