"""The documents say what is true: every knob is documented, every link leads somewhere, ten lines are ten lines."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tidings import Policy

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_knob_of_the_policy_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", (ROOT / "docs/policy.md").read_text(), re.MULTILINE))
    assert sorted(rows) == sorted(field.name for field in fields(Policy))
    source = (ROOT / "src/tidings/policy.py").read_text()
    for name, default in rows.items():
        assert re.search(rf"^    {name}: [^=\n]+ = {re.escape(default)}$", source, re.MULTILINE), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", ["mcpserver.md", "lowlevel.md", "fastmcp.md"])
def test_each_kind_of_server_is_live_in_ten_lines(page: str) -> None:
    first = re.search(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert first is not None
    assert len([line for line in first[1].splitlines() if line.strip()]) <= 10
