"""The house keeps its shape: what the core may know, and how large a room may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidings

SOURCE = Path(tidings.__file__).parent
CORE_NAMES = frozenset(
    {
        *("agenda", "catalog", "counts", "cursor", "delta", "digest", "durable", "errors", "fanout", "frames"),
        *("hub", "index"),
        *("journal", "logged", "mailbox", "model", "news", "observer", "patterns", "policy", "resume", "subscriber"),
        *("shown", "spans", "terms", "visit"),
    }
)
CORE = [SOURCE / f"{name}.py" for name in sorted(CORE_NAMES)]
OUTSIDE = {"mcp", "mcp_types", "fastmcp", "starlette", "uvicorn", "anyio", "asyncio", "opentelemetry"}
INPUT_OUTPUT = {"socket", "select", "selectors", "ssl", "http", "urllib", "subprocess", "pathlib", "shutil", "os", "io",
                "tempfile", "sqlite3", "multiprocessing", "concurrent"}  # fmt: skip


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports anywhere, by their full names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def called(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_the_core_imports_no_sdk_no_framework_and_nothing_that_does_io(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(parse(path))}

    assert not roots & (OUTSIDE | INPUT_OUTPUT)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_the_core_opens_nothing_prints_nothing_and_never_sleeps(path: Path) -> None:
    tree = parse(path)
    calls = set(called(tree))

    assert not calls & {"open", "print", "input", "exec", "eval", "breakpoint", "__import__"}
    assert not {call for call in calls if call.split(".")[-1] in {"sleep", "sleep_ms"}}
    assert not {name for name in imported(tree) if name.endswith(".sleep")}
    assert not {node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.Await)}


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_the_core_reads_no_clock_but_the_one_it_was_given(path: Path) -> None:
    """`time.time` and `time.monotonic` stand there as defaults, which a caller may replace; nobody calls them."""
    assert not {call for call in called(parse(path)) if call.startswith(("time.", "datetime."))}


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_the_core_knows_no_other_room_of_the_house(path: Path) -> None:
    rooms = {name.split(".")[1] for name in imported(parse(path)) if name.startswith("tidings.")}

    # `hub.listen()` leads to its lane, and imports it only when it is called.
    assert rooms <= CORE_NAMES | ({"lanes"} if path.name == "hub.py" else set())


def test_importing_tidings_brings_in_neither_the_sdk_nor_an_event_loop() -> None:
    program = "import sys, tidings, tidings.frames; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = found.stdout.split()

    assert {"tidings.hub", "tidings.frames"} <= set(loaded)
    assert not {name for name in loaded if name.split(".")[0] in OUTSIDE or name.startswith("tidings.lanes")}


def test_only_the_command_that_serves_knows_an_sdk_or_an_exporter_of_opentelemetry() -> None:
    knowing = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")) for name in imported(parse(path)))
    }

    assert knowing == {"cli/export.py"}


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    lengths = {
        str(path.relative_to(SOURCE)): len(path.read_text(encoding="utf-8").splitlines())
        for path in SOURCE.rglob("*.py")
    }

    assert {name: length for name, length in lengths.items() if length > 500} == {}


def test_everything_that_tidings_exports_is_there() -> None:
    assert [name for name in tidings.__all__ if not hasattr(tidings, name)] == []
    assert len(set(tidings.__all__)) == len(tidings.__all__)
    assert {"Catalog", "Hub", "Change", "Policy", "Journal", "Subscriber"} <= set(tidings.__all__)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_every_module_of_the_core_says_what_it_is_and_what_it_offers(path: Path) -> None:
    tree = parse(path)

    assert ast.get_docstring(tree)
    assert any(isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" for node in tree.body)


def test_every_error_is_a_tidings_error() -> None:
    errors = [value for value in vars(tidings).values() if isinstance(value, type) and issubclass(value, Exception)]

    assert len(errors) >= 8
    assert all(issubclass(error, tidings.TidingsError) for error in errors)
