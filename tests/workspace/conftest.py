from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bash_tools import BashTools
from tidings.workspace import environment


@pytest.fixture(params=["jq if installed", "without jq"])
def bash(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BashTools]:
    """Return bash tools, with jq if it is installed and without jq. Check that calls leave no temporary files."""
    env = {}
    if request.param == "without jq":
        monkeypatch.setattr(environment, "find_json_tool", lambda path: None)
        env["MCPBASH_JSON_TOOL_BIN"] = ""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    root = tmp_path / "workspace"
    root.mkdir()
    yield BashTools(root, env)
    assert list(scratch.iterdir()) == []
