"""The layers of docs/architecture.md: which package may import which, and what the core may use."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tidings
from tidings.sdk import internals

SOURCE = Path(tidings.__file__).parent

LAYERS = (
    {"core", "dependencies", "errors", "policy"},
    {"runtime"},
    {"wire"},
    {"store"},
    {"client", "check"},
    {"sdk"},
    {"server"},
    {"http", "stdio", "webhooks", "telemetry", "cluster"},
    {"console", "events"},
    {"live"},
    {"workspace", "relay"},
    {"cli"},
)
"""From bottom to top. A package imports from itself and from lower layers; those of the lowest also from each other."""
RANK = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}
CLIENT_SIDE = {"core", "dependencies", "errors", "policy", "runtime", "wire"}
"""The packages that `client` and `check` may import: they must not need the server side."""
TESTING_SIDE = {"core", "errors", "testing", "wire"}
"""The packages that `testing` may import, at any time."""

CORE_LIBRARIES = {"msgspec"}
INPUT_OUTPUT = {
    *("asyncio", "concurrent", "http", "io", "multiprocessing", "os", "pathlib", "select", "selectors", "shutil"),
    *("socket", "sqlite3", "ssl", "subprocess", "tempfile", "urllib"),
}
ROOT_MODULES = {"__init__", "__main__", "dependencies", "errors", "live", "policy"}

MODULES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if "scaffold" not in path.parts)
CORE = [path for path in MODULES if path.parts[0] == "core"]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse((SOURCE / path).read_text(encoding="utf-8"), filename=str(path))


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the full names of all imported modules and members, including those imported inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def called(tree: ast.Module) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def package_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imported_packages(path: Path) -> set[str]:
    names = [name.split(".") for name in imported(parse(path)) if name.startswith("tidings.")]
    return {parts[1] for parts in names if (SOURCE / parts[1]).is_dir() or (SOURCE / f"{parts[1]}.py").exists()}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_downwards(path: Path) -> None:
    package = package_of(path)
    if package in ("__init__", "__main__"):
        return  # they only name what the packages offer
    used = imported_packages(path) - {package}
    if package == "testing":
        assert used <= TESTING_SIDE
    elif package in ("client", "check"):
        assert used <= CLIENT_SIDE
    else:
        highest = max(RANK[package] - 1, 0)
        assert {name for name in used if RANK.get(name, len(LAYERS)) > highest} == set()


def test_only_few_modules_are_in_the_root_of_the_package() -> None:
    assert {path.stem for path in MODULES if len(path.parts) == 1} == ROOT_MODULES


@pytest.mark.parametrize("path", CORE, ids=str)
def test_core_imports_only_core_msgspec_and_the_standard_library(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(parse(path))} - {"tidings"}

    assert roots <= (set(sys.stdlib_module_names) | CORE_LIBRARIES) - INPUT_OUTPUT
    assert imported_packages(path) <= {"core", "errors", "policy"}


@pytest.mark.parametrize("path", CORE, ids=str)
def test_core_does_no_input_or_output_and_is_synchronous(path: Path) -> None:
    tree = parse(path)

    assert not called(tree) & {"open", "print", "input", "exec", "eval", "breakpoint", "__import__"}
    assert not {node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.Await)}


@pytest.mark.parametrize("path", CORE, ids=str)
def test_core_reads_only_the_clock_that_it_is_given(path: Path) -> None:
    """`time.time` and `time.monotonic` are defaults of parameters; the core does not call them."""
    assert not {call for call in called(parse(path)) if call.startswith(("time.", "datetime."))}


ALLOWED_PRIVATE = {"os._exit", "atexit._run_exitfuncs"}
NAMED_TUPLE = {"_asdict", "_fields", "_replace"}
"""Public, in spite of their names."""


def class_attributes(tree: ast.Module) -> set[str]:
    """Return the names of the methods, fields, slots and attributes of the classes that a module defines."""
    names: set[str] = set()
    for owner in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        for node in owner.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign):
                names.add(ast.unparse(node.target))
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
                names |= set(ast.literal_eval(node.value))
        for each in ast.walk(owner):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and is_own(each.value):
                names.add(each.attr)
    return names


def is_own(node: ast.expr) -> bool:
    return ast.unparse(node) in ("self", "cls", "super()")


def private_accesses(path: Path) -> set[str]:
    """Return the private names that a module imports from another one, and its accesses to private attributes of other
    objects, unless a class of the module has an attribute with this name."""
    tree = parse(path)
    own = class_attributes(tree) | NAMED_TUPLE
    found = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value) and node.attr not in own
    }
    return (found - ALLOWED_PRIVATE) | {
        name for name in imported(tree) if name.startswith("tidings.") and any(map(is_private, name.split(".")))
    }


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_module_touches_private_names_of_another_module(path: Path) -> None:
    """`sdk` alone knows the private parts of the SDK and FastMCP."""
    if package_of(path) != "sdk":
        assert private_accesses(path) == set()


def test_each_private_name_of_the_sdk_is_checked_at_the_start() -> None:
    tables = (internals.SDK_NAMES, internals.FASTMCP_NAMES, internals.OPENTELEMETRY_NAMES)
    checked = {name for table in tables for names in table.values() for name in names}
    used = {
        access.rpartition(".")[2] for path in MODULES if package_of(path) == "sdk" for access in private_accesses(path)
    }

    assert used <= checked | set(internals.FASTMCP_SCHEMA_NAMES)


def test_importing_tidings_imports_neither_the_sdk_nor_an_event_loop() -> None:
    program = "import sys, tidings, tidings.core.frames; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.split(".")[0] for name in found.stdout.split()}

    assert not loaded & {"mcp", "mcp_types", "fastmcp", "starlette", "uvicorn", "anyio", "asyncio", "opentelemetry"}


def test_only_the_command_line_imports_the_opentelemetry_sdk() -> None:
    packages = {
        package_of(path)
        for path in MODULES
        if any(name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")) for name in imported(parse(path)))
    }

    assert packages == {"cli"}


def test_every_public_name_exists_and_every_error_is_a_tidings_error() -> None:
    public = {name: getattr(tidings, name) for name in tidings.__all__}
    errors = [value for value in public.values() if isinstance(value, type) and issubclass(value, Exception)]

    assert len(public) == len(tidings.__all__)
    assert {"Catalog", "Hub", "Live", "Policy"} <= public.keys()
    assert all(issubclass(error, tidings.TidingsError) for error in errors)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_every_module_states_its_contract(path: Path) -> None:
    tree = parse(path)

    assert ast.get_docstring(tree)
    if path.name not in ("__init__.py", "__main__.py") and path.parts[:2] != ("workspace", "sdk"):  # scripts
        assert any(isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" for node in tree.body)


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES if len(path.parts) > 1}), ids=str)
def test_every_package_has_a_folder_of_tests(folder: Path) -> None:
    """Of the same name in `tests`. Folders inside a package need none of their own."""
    assert list((Path(__file__).parent / folder.parts[0]).glob("test_*.py"))


LONG = 100
"""Lines. A longer module has tests of its own."""
UNTESTED = {"__init__"}
"""Modules without tests of their own: a package's `__init__` has names and protocols, which other modules implement."""


def covered() -> Iterator[str]:
    """Yield the paths of the modules that a file of tests is named after, or names in "Covers `module.py`."."""
    tests = Path(__file__).parent
    for path in tests.rglob("test_*.py"):
        folder = path.parent.relative_to(tests)
        # `http/test_lists_random.py` covers `http/lists.py`.
        words = path.stem.removeprefix("test_").split("_")
        found = ["_".join(words[:end]) for end in range(1, len(words) + 1)]
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for names in re.findall(r"Covers (`[^.]+\.py`[^:]*?)\.(?:\s|$)", docstring):
            found += re.findall(r"`([\w/]+)\.py`", names)
        yield from (f"{name}.py" if "/" in name else (folder / f"{name}.py").as_posix() for name in found)


def test_every_long_module_has_a_file_of_tests_that_names_it() -> None:
    """In the folder of tests of its package, or with its path."""
    tested = {*covered()}
    untested = [path for path in MODULES if path.stem not in UNTESTED and path.as_posix() not in tested]

    assert not [str(path) for path in untested if len((SOURCE / path).read_text("utf-8").splitlines()) > LONG]
