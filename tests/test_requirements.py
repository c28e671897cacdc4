"""Keeps docs/requirements.md in step with the tests it names.

A row claims that something is shown. This module checks that the claim can be looked up: the numbering has no
holes, each cell is `planned` or well-formed references, and each reference leads to a test or a file that is there.
It does not check that the named test shows what the row says; that takes a reader. Tests are found by parsing
their files, never by importing them, so a claim can be checked where its test can't run.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = "docs/requirements.md"

LAST_R = 146  # the documents behind the R rows are closed: they will ask for nothing more
LETTERS = frozenset("RCLWSMT")  # a section that vanished whole would leave no hole in any numbering

HEADER = ("id", "requirement", "shown by")
SEPARATOR = ("---", "---", "---")
CELL_BORDER = re.compile(r"(?<!\\)\|")  # `\|` is Markdown's way to write a bar inside a cell
ID = re.compile(r"(?P<letter>[A-Z])(?P<number>[1-9][0-9]*)")

# Path segments start with a word character, so `..` can't lead out of the repository.
NODE_ID = re.compile(r"`(?P<path>tests/(?:\w[\w-]*/)*test_\w+\.py)(?:::(?P<group>Test\w*))?(?:::(?P<name>\w+))?`")
FILE = re.compile(r"`(?P<path>(?:bench|docs|\.ci)(?:/\w[\w.-]*)+)`")


@dataclass(frozen=True)
class Row:
    line: int
    letter: str
    number: int
    requirement: str
    shown_by: str

    @property
    def id(self) -> str:
        return f"{self.letter}{self.number}"

    def problem(self, text: str) -> str:
        return f"{DOCUMENT}:{self.line}: row {self.id}: {text}"


def find_problems(table: str, root: Path) -> list[str]:
    """All that is wrong with the table, one message each; references are looked up below `root`."""
    rows, found = read_rows(table)
    found += numbering_problems(rows)
    for row in rows:
        if not row.requirement:
            found.append(row.problem("says nothing; write the requirement"))
        found += [row.problem(text) for text in claim_problems(row.shown_by, root)]
    return found


def read_rows(table: str) -> tuple[list[Row], list[str]]:
    """The rows, and a message for each line that looks like a row and is none."""
    rows: list[Row] = []
    unreadable: list[str] = []
    for line, text in enumerate(table.splitlines(), start=1):
        if not text.startswith("|"):
            continue
        cells = tuple(cell.strip() for cell in CELL_BORDER.split(text.strip())[1:-1])
        if cells in (HEADER, SEPARATOR):
            continue
        found = ID.fullmatch(cells[0]) if len(cells) == len(HEADER) else None
        if found is None:
            unreadable.append(f"{DOCUMENT}:{line}: not a row of the form '| C1 | requirement | shown by |': {text}")
        else:
            rows.append(Row(line, found["letter"], int(found["number"]), cells[1], cells[2]))
    return rows, unreadable


def numbering_problems(rows: Iterable[Row]) -> Iterator[str]:
    line_of: dict[str, int] = {}
    latest: Counter[str] = Counter()
    for row in rows:
        if row.id in line_of:
            yield row.problem(f"line {line_of[row.id]} has this id already")
            continue
        line_of[row.id] = row.line
        expected = latest[row.letter] + 1
        if row.number != expected:
            yield row.problem(f"expected {row.letter}{expected} here; the ids of a letter run 1, 2, 3 … in order")
        latest[row.letter] = row.number


def claim_problems(shown_by: str, root: Path) -> Iterator[str]:
    if shown_by == "planned":
        return
    for reference in map(str.strip, shown_by.split("<br>")):
        if node := NODE_ID.fullmatch(reference):
            yield from node_problems(node["path"], node["group"], node["name"], root)
        elif file := FILE.fullmatch(reference):
            if not (root / file["path"]).is_file():
                yield f"claims {file['path']}, and there is no such file"
        else:
            yield (
                f"can't read {reference!r}; write planned, or references in backticks with <br> between them: a test "
                "as `tests/test_x.py::test_y` or `tests/test_x.py::TestX::test_y`, or a file in bench/, docs/ or .ci/"
            )


def node_problems(path: str, group: str | None, name: str | None, root: Path) -> Iterator[str]:
    if not (root / path).is_file():
        yield f"claims a test in {path}, and there is no such file"
    elif group is None and name is None:
        yield f"claims all of {path}; name the test in it that shows this"
    else:
        tests = find_tests(root / path)
        if group not in tests:
            yield f"claims {path}::{group}, and there is no such class with tests in it"
        elif name is not None and name not in tests[group]:
            claimed = "::".join(filter(None, (path, group, name)))
            yield f"claims {claimed}, and there is no such test"


@cache
def find_tests(file: Path) -> dict[str | None, frozenset[str]]:
    """The names of a file's tests by the class that holds them; under None, those outside any class.

    A class inherits the tests of its bases in the same file. A Hypothesis state machine becomes a test by an
    assignment, `TestHub = HubMachine.TestCase`, and its one test is then called `runTest`.
    """
    module = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    tests: dict[str | None, frozenset[str]] = {None: find_functions(module.body)}
    for statement in module.body:
        match statement:
            case ast.ClassDef(name=name, bases=bases, body=body):
                inherited = [tests.get(base.id, frozenset()) for base in bases if isinstance(base, ast.Name)]
                tests[name] = find_functions(body).union(*inherited)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr="TestCase"))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Attribute(attr="TestCase"))
            ):
                tests[name] = frozenset({"runTest"})
    return {group: names for group, names in tests.items() if names or group is None}


def find_functions(body: Iterable[ast.stmt]) -> frozenset[str]:
    """Only those that pytest runs: a claim must not rest on a helper."""
    functions = (statement for statement in body if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(function.name for function in functions if function.name.startswith("test"))


@pytest.fixture(scope="module")
def table() -> str:
    return (ROOT / DOCUMENT).read_text(encoding="utf-8")


def test_every_claim_of_the_table_leads_to_a_test_or_file(table: str) -> None:
    problems = find_problems(table, ROOT)

    assert not problems, "\n" + "\n".join(problems)


def test_every_requirement_of_the_documents_has_exactly_one_row(table: str) -> None:
    rows, _ = read_rows(table)
    count = Counter(row.number for row in rows if row.letter == "R")

    wrong = {f"R{number}": count[number] for number in range(1, LAST_R + 1) if count[number] != 1}
    assert not wrong, f"{DOCUMENT}: rows per id, where it is not one: {wrong}"
    assert max(count) == LAST_R, f"{DOCUMENT}: R{max(count)} is none of R1…R{LAST_R}"


def test_every_section_has_rows(table: str) -> None:
    rows, _ = read_rows(table)

    missing = sorted(LETTERS - {row.letter for row in rows})
    assert not missing, f"{DOCUMENT}: no row of {', '.join(missing)}"


# What follows shows that the checker itself can fail, on a small repository of its own.

TEST_FILE = """
class Contract:
    def test_inherited(self): ...

class TestHub(Contract):
    def test_fan_out(self): ...
    def helper(self): ...

class TestEmpty:
    def helper(self): ...

class HubMachine(RuleBasedStateMachine): ...

TestHubMachine = HubMachine.TestCase
TestTyped: type[TestCase] = HubMachine.TestCase

def test_add(): ...
async def test_listen(): ...
def helper(): ...
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for path, text in {
        "tests/core/test_hub.py": TEST_FILE,
        "tests/lanes/test_listen.py": "def test_ack(): ...",
        "bench/core.py": "",
        "docs/design.md": "",
        ".ci/run": "",
        "src/tidings/core/hub.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    return tmp_path


def table_of(*rows: str) -> str:
    return "\n".join(["Some words.", "", "| id | requirement | shown by |", "|---|---|---|", *rows])


@pytest.mark.parametrize(
    "cell",
    [
        "planned",
        "`tests/core/test_hub.py::test_add`",
        "`tests/core/test_hub.py::test_listen`",
        "`tests/core/test_hub.py::TestHub`",
        "`tests/core/test_hub.py::TestHub::test_fan_out`",
        "`tests/core/test_hub.py::TestHub::test_inherited`",
        "`tests/core/test_hub.py::TestHubMachine`",
        "`tests/core/test_hub.py::TestHubMachine::runTest`",
        "`tests/core/test_hub.py::TestTyped`",
        "`tests/lanes/test_listen.py::test_ack`",
        "`bench/core.py`",
        "`docs/design.md`",
        "`.ci/run`",
        "`tests/core/test_hub.py::test_add`<br>`bench/core.py` <br> `tests/core/test_hub.py::TestHub`",
    ],
)
def test_a_claim_that_can_be_looked_up_is_accepted(cell: str, repository: Path) -> None:
    assert find_problems(table_of(f"| C1 | It works. | {cell} |"), repository) == []


@pytest.mark.parametrize(
    ("cell", "complaint"),
    [
        (
            "`tests/core/test_hub.py::test_missing`",
            "claims tests/core/test_hub.py::test_missing, and there is no such test",
        ),
        ("`tests/test_gone.py::test_add`", "claims a test in tests/test_gone.py, and there is no such file"),
        ("`tests/core/test_hub.py::TestGone`", "claims tests/core/test_hub.py::TestGone, and there is no such class"),
        (
            "`tests/core/test_hub.py::TestGone::test_fan_out`",
            "claims tests/core/test_hub.py::TestGone, and there is no",
        ),
        ("`tests/core/test_hub.py::TestEmpty`", "claims tests/core/test_hub.py::TestEmpty, and there is no such class"),
        (
            "`tests/core/test_hub.py::TestHub::test_add`",
            "claims tests/core/test_hub.py::TestHub::test_add, and there is no",
        ),
        (
            "`tests/core/test_hub.py::test_fan_out`",
            "claims tests/core/test_hub.py::test_fan_out, and there is no such test",
        ),
        ("`tests/core/test_hub.py::helper`", "claims tests/core/test_hub.py::helper, and there is no such test"),
        (
            "`tests/core/test_hub.py::TestHub::helper`",
            "claims tests/core/test_hub.py::TestHub::helper, and there is no",
        ),
        ("`tests/core/test_hub.py`", "claims all of tests/core/test_hub.py; name the test"),
        ("`bench/gone.py`", "claims bench/gone.py, and there is no such file"),
        ("`tests/core/test_hub.py::test_add`<br>`bench/gone.py`", "claims bench/gone.py, and there is no such file"),
        ("", "can't read ''"),
        ("Planned", "can't read 'Planned'"),
        ("tests/core/test_hub.py::test_add", "can't read 'tests/core/test_hub.py::test_add'"),
        ("`tests/core/test_hub.py::test_add`, `bench/core.py`", "can't read '`tests/core/test_hub.py::test_add`, "),
        ("`tests/core/test_hub.py::test_add`<br>", "can't read ''"),
        ("planned<br>`bench/core.py`", "can't read 'planned'"),
        ("`tests/core/test_hub.py::test_add[stdio]`", "can't read '`tests/core/test_hub.py::test_add[stdio]`'"),
        ("`src/tidings/core/hub.py`", "can't read '`src/tidings/core/hub.py`'"),
        ("`bench/../src/tidings/hub.py`", "can't read '`bench/../src/tidings/hub.py`'"),
    ],
)
def test_a_claim_that_leads_nowhere_is_reported_with_its_row(cell: str, complaint: str, repository: Path) -> None:
    table = table_of("| C1 | It works. | planned |", f"| C2 | It works well. | {cell} |")

    problems = find_problems(table, repository)

    assert len(problems) == 1
    assert problems[0].startswith(f"docs/requirements.md:6: row C2: {complaint}")


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (["| C1 | a | planned |", "| C1 | b | planned |"], ":6: row C1: line 5 has this id already"),
        (["| C1 | a | planned |", "| C3 | b | planned |"], ":6: row C3: expected C2 here"),
        (["| C2 | a | planned |"], ":5: row C2: expected C1 here"),
        (["| C1 |  | planned |"], ":5: row C1: says nothing"),
        (["| C1 | a |"], ":5: not a row"),
        (["| C1 | a | planned | b |"], ":5: not a row"),
        (["| C1 | a | planned"], ":5: not a row"),
        (["| c1 | a | planned |"], ":5: not a row"),
        (["| C01 | a | planned |"], ":5: not a row"),
    ],
)
def test_a_malformed_table_is_reported_with_its_line(rows: list[str], complaint: str, repository: Path) -> None:
    problems = find_problems(table_of(*rows), repository)

    assert len(problems) == 1
    assert problems[0].startswith(f"docs/requirements.md{complaint}")
