"""Keeps tests/requirements.md consistent with the tests and files that it names.

The checks show that each reference leads to an existing test or file. They do not show that the test proves the
requirement. Tests are found by parsing their files, so that a reference can be checked where its test can't run.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = "tests/requirements.md"

LAST_R = 146  # the number of requirements in the source documents, which are complete
LETTERS = frozenset("RCLWSMTKNOE")

# Path segments start with a word character, so `..` can't lead out of the repository.
TEST = re.compile(r"`(?P<path>tests/(?:\w[\w-]*/)*test_\w+\.py)::(?P<name>\w+)`")
FILE = re.compile(r"`(?P<path>(?:bench|docs|\.ci)(?:/\w[\w.-]*)+)`")


class Row(NamedTuple):
    line: int
    letter: str
    number: int
    references: str


def read_rows(table: str) -> Iterator[Row | str]:
    """Yield each row, or a message for a line that starts like a row and is not one."""
    for line, text in enumerate(table.splitlines(), start=1):
        if found := re.fullmatch(r"\| ([A-Z])([1-9]\d*) \| (?:[^|]|\\\|)*\w(?:[^|]|\\\|)* \| ([^|]*) \|", text):
            yield Row(line, found[1], int(found[2]), found[3].strip())
        elif text.startswith("|") and text not in ("| id | requirement | shown by |", "|---|---|---|"):
            yield f"{DOCUMENT}:{line}: not a row of the form '| C1 | requirement | shown by |': {text}"


def find_problems(table: str, root: Path) -> Iterator[str]:
    """Yield a message for each problem of the table; references are looked up below `root`."""
    latest: Counter[str] = Counter()
    for row in read_rows(table):
        if isinstance(row, str):
            yield row
            continue
        latest[row.letter] += 1
        if row.number != latest[row.letter]:
            yield f"{DOCUMENT}:{row.line}: expected {row.letter}{latest[row.letter]}; ids of a letter run 1, 2, 3 …"
        if row.references not in ("planned", "withdrawn"):
            for reference in map(str.strip, row.references.split("<br>")):
                if not exists(reference, root):
                    yield f"{DOCUMENT}:{row.line}: row {row.letter}{row.number}: no such test or file: {reference!r}"


def exists(reference: str, root: Path) -> bool:
    if file := FILE.fullmatch(reference):
        return (root / file["path"]).is_file()
    found = TEST.fullmatch(reference)
    if found is None or not (root / found["path"]).is_file():
        return False
    return found["name"] in find_tests(root / found["path"])


@cache
def find_tests(file: Path) -> frozenset[str]:
    """Return the names of the tests of a file, which are functions: no test is in a class."""
    module = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    functions = (node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(function.name for function in functions if function.name.startswith("test"))


@pytest.fixture(scope="module")
def table() -> str:
    return (ROOT / DOCUMENT).read_text(encoding="utf-8")


def test_every_claim_of_the_table_leads_to_a_test_or_file(table: str) -> None:
    problems = list(find_problems(table, ROOT))
    assert not problems, "\n" + "\n".join(problems)


def test_every_requirement_of_the_documents_has_exactly_one_row(table: str) -> None:
    rows = [row for row in read_rows(table) if isinstance(row, Row)]
    assert [row.number for row in rows if row.letter == "R"] == list(range(1, LAST_R + 1))
    assert {row.letter for row in rows} >= LETTERS


HUB = """
async def test_listen(): ...
def test_hub(): ...
def helper(): ...
"""


@pytest.mark.parametrize(
    ("row", "is_valid"),
    [
        ("| C1 | It works. | planned |", True),
        ("| C1 | It works. | withdrawn |", True),
        ("| C1 | It works. | `tests/core/test_hub.py::test_listen`<br>`bench/core.py` |", True),
        ("| C1 | It works. | `tests/core/test_hub.py::test_hub` |", True),
        ("| C1 | It works. | `tests/core/test_hub.py::test_gone` |", False),
        ("| C1 | It works. | `tests/core/test_hub.py::helper` |", False),
        ("| C1 | It works. | `tests/core/test_hub.py` |", False),
        ("| C1 | It works. | `tests/core/test_gone.py::test_listen` |", False),
        ("| C1 | It works. | `bench/core.py`<br>`bench/gone.py` |", False),
        ("| C1 | It works. | `bench/../bench/core.py` |", False),
        ("| C1 | It works. | bench/core.py |", False),
        ("| C1 | It works. |  |", False),
        ("| C1 |  | planned |", False),
        ("| C1 | planned |", False),
        ("| C2 | It works. | planned |", False),
    ],
)
def test_a_claim_that_leads_nowhere_is_reported_with_its_row(row: str, is_valid: bool, tmp_path: Path) -> None:
    for path, text in {"tests/core/test_hub.py": HUB, "bench/core.py": ""}.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    table = f"Text.\n\n| id | requirement | shown by |\n|---|---|---|\n{row}\n"
    problems = list(find_problems(table, tmp_path))
    assert [problem.split(": ")[0] for problem in problems] == ([] if is_valid else [f"{DOCUMENT}:5"])
