"""A package that is missing, too old or too new for Tidings: one readable error, with the versions and a command."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fastmcp import FastMCP
from mcp.server.mcpserver import MCPServer

from tests.support.waiting import DEADLINE
from tidings import Live, TidingsError, dependencies
from tidings.dependencies import missing_extra
from tidings.http import disconnects
from tidings.http.app import serve_app
from tidings.server import internals

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
EXTRAS = {extra: needs for extra, needs in PROJECT["optional-dependencies"].items() if extra not in ("all", "dev")}
SERVE = "from tidings.cli import main; main(['serve', '--port', '0'])"
COMMANDS = [
    SERVE,
    "from tidings.cli import main; main(['serve', '--stdio'])",
    "from tidings.cli import main; main(['watch', 'http://127.0.0.1:1/mcp'])",
]


def install(folder: Path, version: str) -> None:
    """Make a folder on the path claim that it contains this version of the SDK."""
    metadata = folder / f"mcp-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: mcp\nVersion: {version}\n")


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    workspace = folder / "workspace"
    (workspace / "tools").mkdir(parents=True)
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=workspace,
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def requirement_in(message: str) -> str:
    """Return what the command at the end of a message installs. It is one of pip or of uv."""
    command = shlex.split(message.rpartition(": ")[2])
    assert command[:4] == [sys.executable, "-m", "pip", "install"] or command[:3] == ["uv", "pip", "install"]
    return command[-1]


@pytest.fixture(params=["1.26.0", "2.2.0"])
def too_old(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An SDK of version 1 has other modules. One of version 2 seems to work."""
    version: str = request.param
    install(tmp_path, version)
    if version.startswith("1."):
        package = tmp_path / "mcp" / "server" / "fastmcp"
        package.mkdir(parents=True)
        for folder in (package, *package.parents[:2]):
            (folder / "__init__.py").touch()
    return version


@pytest.mark.parametrize("program", [*COMMANDS, "from tidings import Live", "import tidings.client"])
def test_sdk_that_is_too_old_is_one_error_that_says_what_to_type(program: str, too_old: str, tmp_path: Path) -> None:
    done = run(program, tmp_path)

    *before, said = done.stderr.splitlines()
    name, _, message = said.partition(": ")
    assert message.startswith(f"Tidings needs mcp>=2.3,<3, and mcp {too_old} is installed. ")
    assert "mcp 1.x" in message
    assert "python3 -m venv" in message
    assert requirement_in(message) == "mcp>=2.3,<3"
    if program in COMMANDS:
        assert (name, before, done.stdout, done.returncode) == ("tidings", [], "", 2)
    else:
        assert name == "tidings.errors.UnsupportedVersion"


def test_sdk_without_a_private_name_is_one_error_that_names_an_older_version(tmp_path: Path) -> None:
    install(tmp_path, "2.9.1")
    done = run(f"import mcp.server.stdio; del mcp.server.stdio._claim_fd; {SERVE}", tmp_path)

    assert done.returncode == 2
    assert done.stderr.startswith(
        "tidings: mcp 2.9.1 has no mcp.server.stdio._claim_fd, which Tidings uses. Tidings supports mcp>=2.3,<3, "
    )
    assert requirement_in(done.stderr) == "mcp>=2.3,<2.9.1"


def test_sdk_of_an_unsupported_version_without_a_name_is_replaced_by_any_supported_one(tmp_path: Path) -> None:
    install(tmp_path, "3.0.0")
    done = run(f"import mcp.server.session as s; s.ServerSession = object; {SERVE}", tmp_path)

    assert "mcp 3.0.0 has no mcp.server.session:ServerSession._connection" in done.stderr
    assert requirement_in(done.stderr) == "mcp>=2.3,<3"


def test_fastmcp_without_a_private_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(internals.FASTMCP_NAMES, "fastmcp:FastMCP", ["_gone"])
    with pytest.raises(TidingsError, match=r"^fastmcp 4\.[\d.]+ has no fastmcp:FastMCP\._gone, which Tidings uses"):
        Live(FastMCP("new"))


def test_uvicorn_without_a_part_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"
    monkeypatch.setitem(disconnects.UVICORN_NAMES, owner, ["gone"])
    app = Live(MCPServer("new")).http_app()
    with pytest.raises(TidingsError, match=rf"^uvicorn [\d.]+ has no {re.escape(owner)}\.gone, which Tidings uses"):
        serve_app(app, port=0, on_start=lambda: signal.raise_signal(signal.SIGINT))


def test_missing_name_that_has_a_fallback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    dependencies.warn_of_missing_names("opentelemetry-api", {"opentelemetry.trace": ["_gone"]})
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert re.match(r"opentelemetry-api [\d.]+ has no opentelemetry\.trace\._gone, ", record.getMessage())


TABLES: dict[str, Any] = {
    "mcp": internals.SDK_NAMES,
    "fastmcp": internals.FASTMCP_NAMES,
    "opentelemetry-api": internals.OPENTELEMETRY_NAMES,
    "uvicorn": disconnects.UVICORN_NAMES,
}


@pytest.mark.parametrize("package", TABLES)
def test_installed_version_has_every_name_that_is_checked(package: str) -> None:
    names = [(owner, name) for owner in TABLES[package] for name in TABLES[package][owner]]

    assert [f"{owner}.{name}" for owner, name in names if not dependencies.has_name(owner, name)] == []
    assert not any(dependencies.has_name(owner, f"{name}_gone") for owner, name in names)


def parse(requirement: str) -> tuple[str, frozenset[str]]:
    """Return the name and the conditions of a requirement. A build backend may sort the conditions."""
    found = re.fullmatch(r"([\w.\[\]-]+)(.*)", requirement)
    assert found, requirement
    return found[1], frozenset(found[2].split(","))


@pytest.mark.parametrize("extra", EXTRAS)
def test_error_for_a_missing_extra_ends_with_a_command_that_names_its_packages(extra: str) -> None:
    message, _, command = str(missing_extra("Something", extra)).partition(": ")
    assert message == f'Something needs the extra "{extra}" of Tidings'
    python, *pip, install = shlex.split(command)[:4]
    assert (python, pip, install) == (sys.executable, ["-m", "pip"], "install")
    assert sorted(map(parse, shlex.split(command)[4:])) == sorted(map(parse, EXTRAS[extra]))


def test_command_for_a_missing_extra_is_one_of_uv_if_there_is_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    assert f": uv pip install --python {shlex.quote(sys.executable)} " in str(missing_extra("Something", "nats"))


def test_error_for_a_missing_extra_has_no_command_if_tidings_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert str(missing_extra("Something", "nats")) == 'Something needs the extra "nats" of Tidings'
