"""The repository keeps its contract: what a fresh clone must have, and what must never be in it."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = ROOT / "requirements.lock"
ADAPTERS_LOCK = ROOT / "tests/client/adapters/requirements.lock"
FRAMEWORKS = {"google-adk", "langchain", "openai-agents", "pydantic-ai"}
"""The extras of the adapters, which only `make test-adapters` installs."""


def locked(lock: Path) -> set[str]:
    return set(re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==", lock.read_text(), re.MULTILINE))


def test_the_package_lies_below_src_and_needs_python_3_11() -> None:
    assert (ROOT / "src" / "tidings" / "py.typed").exists()
    assert PROJECT["project"]["requires-python"] == ">=3.11"


@pytest.mark.parametrize("lock", [LOCK, ADAPTERS_LOCK], ids=lambda lock: lock.parent.name)
def test_each_lock_has_versions_and_hashes_and_no_address(lock: Path) -> None:
    assert len(locked(lock)) > 20
    assert lock.read_text().count("--hash=sha256:") >= len(locked(lock))
    assert "://" not in lock.read_text()
    assert not (ROOT / "uv.lock").exists()


def packages(requirements: list[str]) -> set[str]:
    return {match[0].lower() for each in requirements if (match := re.match(r"[\w.-]+", each))} - {"tidings"}


def test_every_dependency_is_locked_and_the_frameworks_apart() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    frameworks = packages([each for extra in FRAMEWORKS for each in extras[extra]])
    named = [each for name, extra in extras.items() if name not in FRAMEWORKS for each in extra]
    assert packages(PROJECT["project"]["dependencies"] + named) <= locked(LOCK)
    assert not frameworks & locked(LOCK)
    assert frameworks | packages(PROJECT["project"]["dependencies"]) <= locked(ADAPTERS_LOCK)


def test_the_licence_is_apache_2() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


def test_all_is_every_extra_but_the_frameworks_and_the_tools() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert extras["all"] == ["tidings[fastmcp,nats,otlp]"]
    assert extras.keys() == {"all", "dev", "fastmcp", "nats", "otlp"} | FRAMEWORKS


def test_the_readme_says_what_it_is_and_has_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "makes a Python MCP server live" in text[:100]
    assert re.search(r"## From a checkout\n.*?```sh\nmake run .*\nmake test .*\n```", text, re.DOTALL)
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_makefile_has_its_targets() -> None:
    targets = ("run", "test", "test-all", "check", "dist", "bench", "bench-peers", "lock", "format", "clean", "help")
    assert commands_of(*targets)


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
