"""The pages are true: their code runs, their links lead somewhere, and they name every setting."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from tests.support.doc_blocks import SHELLS, Session, read_blocks
from tidings import Policy

ROOT = Path(__file__).parents[2]
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "tests/requirements.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FAST = ("README.md", "tutorial.md")
"""`make test-all` runs the other pages, too."""
WITH_CODE = [
    pytest.param(page, id=page.name, marks=() if page.name in FAST else pytest.mark.slow)
    for page in PAGES
    if any(block.language in (*SHELLS, "python") and block.marker != "not run" for block in read_blocks(page))
]


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_and_commands_of_each_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "import FastMCP" in page.read_text():
        pytest.importorskip("fastmcp")
    with Session.open(tmp_path) as session:
        for block in read_blocks(page):
            session.run(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" in target:
            continue
        found = page.parent / target if target else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in _anchors(found), f"{page.name} links to {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_names_every_page() -> None:
    named = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs/index.md").read_text()))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_the_install_page_names_every_extra() -> None:
    section = (ROOT / "docs/install.md").read_text().partition("\n## Extras\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([\w-]+)`", section)) >= EXTRAS - {"dev", "test"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_install_lines_are_where_the_release_checklist_says_and_name_extras_that_exist(page: Path) -> None:
    found = re.findall(r"""install ['"]?(?:tidings|\.)(?:\[([\w,-]+)\]|[`\s])""", page.read_text())
    assert not found or page.name in ("README.md", "CONTRIBUTING.md", "install.md")
    assert {extra for each in found if each for extra in each.split(",")} <= EXTRAS


def test_every_module_that_the_architecture_names_exists() -> None:
    named = re.findall(r"`(\w+/[\w/]+\.py|\w+\.py)`", (ROOT / "docs/architecture.md").read_text())
    assert len(set(named)) > 20
    for name in named:
        assert (ROOT / "src/tidings" / name).exists() or (ROOT / name).exists(), name


def test_every_setting_of_the_policy_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", (ROOT / "docs/policy.md").read_text(), re.MULTILINE))
    assert sorted(rows) == sorted(field.name for field in fields(Policy))
    source = (ROOT / "src/tidings/policy.py").read_text()
    for name, default in rows.items():
        assert re.search(rf"^    {name}: [^=\n]+ = {re.escape(default)}$", source, re.MULTILINE), name


@pytest.mark.parametrize("heading", ["MCPServer", "Low-level Server", "FastMCP"])
def test_each_kind_of_server_is_live_in_ten_lines(heading: str) -> None:
    _, _, section = (ROOT / "docs/servers.md").read_text().partition(f"\n## {heading}\n")
    first = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert first is not None
    assert len([line for line in first[1].splitlines() if line.strip()]) <= 10
