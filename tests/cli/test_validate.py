from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.command import EXAMPLE, tidings
from tests.support.workspaces import write


def test_example_is_valid() -> None:
    assert tidings("validate", EXAMPLE).status == 0


def test_control_characters_in_names_and_problems_are_escaped(tmp_path: Path) -> None:
    write(tmp_path, {"tools/\x1b[2J.py": "def (", "tidings.toml": 'name = "\\u001b[2J"\n"\\u001b[1m" = 1\n'})
    found = tidings("validate", tmp_path)
    assert found.status == 1
    assert r"\x1b[2J.py" in found.stdout
    assert "\x1b" not in found.stdout


def test_validate_prints_file_and_line_of_each_problem(board: Path) -> None:
    (board / "tools" / "broken.py").write_text("def fine() -> str:\n    return ''\n\ndef broken(:\n")
    (board / "tools" / "other.py").write_text("def add_task(title: str) -> str:\n    return title\n")
    (board / "tools" / "plain.sh").write_text("#!/bin/sh\necho\n")
    (board / "prompts" / "bad.md").write_text("---\ndescription: [\n---\n")
    (board / "tidings.toml").write_text('name = "board"\nnmae = 1\n')

    as_text = tidings("validate", board)
    as_json = tidings("validate", board, "--json")

    assert as_text.status == as_json.status == 1
    lines = as_text.stdout.splitlines()
    for place in ("tools/broken.py:4:", "tools/other:1:", "tools/plain.sh:1:", "tidings.toml:2:"):
        assert any(line.startswith(f"{board}/{place} ") for line in lines), (place, lines)
    assert any(re.match(rf"{board}/prompts/bad.md:\d: ", line) for line in lines)
    assert "5 problems" in lines[-1]
    assert "\x1b" not in as_text.stdout
    problems = json.loads(as_json.stdout)["problems"]
    assert len(problems) == 5
    assert ("tools/broken.py", 4) in {(problem["path"], problem["line"]) for problem in problems}
