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

import mcp
import pytest
from fastmcp import FastMCP
from mcp.server.mcpserver import MCPServer

from tests.support.waiting import DEADLINE
from tidings import Live, TidingsError, dependencies
from tidings.dependencies import missing_extra, missing_name_error
from tidings.http import disconnects
from tidings.http.app import serve_app
from tidings.sdk import internals

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
EXTRAS = {extra: needs for extra, needs in PROJECT["optional-dependencies"].items() if extra not in ("all", "dev")}
SERVE = "from tidings.cli import main; main(['serve', '--port', '0'])"


def fake_sdk(folder: Path, version: str) -> None:
    """Make the SDK in a folder on the path claim that it is of this version."""
    metadata = folder / f"mcp-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: mcp\nVersion: {version}\n")
    (folder / "mcp").symlink_to(Path(mcp.__file__).parent)


def run(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    workspace = folder / "workspace"
    (workspace / "tools").mkdir(parents=True)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=workspace,
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def requirements_in(message: str) -> list[str]:
    """Return what the command at the end of a message installs. It is one of pip or of uv."""
    command = shlex.split(message.rpartition(": ")[2])
    pip, uv = [sys.executable, "-m", "pip", "install"], ["uv", "pip", "install", "--python", sys.executable]
    start = pip if command[0] == sys.executable else uv
    assert command[: len(start)] == start
    return command[len(start) :]


@pytest.mark.parametrize("command", ["serve --port 0", "serve --stdio", "watch http://127.0.0.1:1/mcp"])
def test_command_with_an_sdk_that_is_too_old_prints_one_line_that_says_what_to_type(
    command: str, tmp_path: Path
) -> None:
    fake_sdk(tmp_path, "1.26.0")
    done = run(tmp_path, Path(sys.executable).with_name("tidings"), *command.split())

    assert (done.stdout, done.returncode) == ("", 2)
    assert re.fullmatch(r"tidings: Tidings needs mcp>=2\.3,<3, and mcp 1\.26\.0 is installed\. [^\n]+\n", done.stderr)
    assert requirements_in(done.stderr) == [dependencies.SDK]


@pytest.mark.parametrize("module", ["tidings", "tidings.client", "tidings.events", "tidings.live", "tidings.telemetry"])
def test_import_with_an_sdk_that_is_too_old_raises_the_same_error(module: str, tmp_path: Path) -> None:
    fake_sdk(tmp_path, "2.2.9")
    name, _, message = run(tmp_path, "-c", f"import {module}").stderr.splitlines()[-1].partition(": ")

    assert name == "tidings.errors.UnsupportedVersion"
    assert message.startswith("Tidings needs mcp>=2.3,<3, and mcp 2.2.9 is installed. ")


def test_constant_of_the_sdk_is_the_requirement_in_the_metadata() -> None:
    assert dependencies.SDK in PROJECT["dependencies"]


def test_sdk_without_a_private_name_is_one_error_that_names_an_older_version(tmp_path: Path) -> None:
    fake_sdk(tmp_path, "2.9.1")
    done = run(tmp_path, "-c", f"import mcp.server.stdio; del mcp.server.stdio._claim_fd; {SERVE}")

    assert done.returncode == 2
    assert done.stderr.startswith(
        "tidings: mcp 2.9.1 has no mcp.server.stdio._claim_fd, which Tidings uses. Tidings supports mcp>=2.3,<3, "
    )
    assert requirements_in(done.stderr) == ["mcp>=2.3,<2.9.1"]


def test_sdk_of_an_unsupported_version_without_a_name_is_replaced_by_any_supported_one(tmp_path: Path) -> None:
    fake_sdk(tmp_path, "3.0.0")
    done = run(tmp_path, "-c", f"import mcp.server.session as s; s.ServerSession = object; {SERVE}")

    assert "mcp 3.0.0 has no mcp.server.session:ServerSession._connection" in done.stderr
    assert requirements_in(done.stderr) == ["mcp>=2.3,<3"]


@pytest.mark.parametrize(
    ("line", "installed", "problem", "command"),
    [
        ("uvicorn>=0.40", "0.30.0", "too old", "uvicorn>=0.40"),
        ("uvicorn>=0.40", "0.51.0", "too new", "uvicorn>=0.40,<0.51.0"),
        ("uvicorn (!=2.4, <3, >=2.3)", "2.5", "too new", "uvicorn>=2.3,!=2.4,<2.5"),
        ("uvicorn[standard]!=2.4,<3,>=2.3 ; extra == 'a'", "3.1", "too new", "uvicorn>=2.3,<3,!=2.4"),
    ],
)
def test_command_for_a_missing_name_installs_a_supported_version(
    line: str, installed: str, problem: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("uvicorn", installed), ("tidings", "1")):
        metadata = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        requires = f"Requires-Dist: uvicorn-worker>=9\nRequires-Dist: {line}\n"
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
    monkeypatch.syspath_prepend(tmp_path)

    message = str(missing_name_error("uvicorn", "uvicorn.gone"))
    assert message.startswith(f"uvicorn {installed} has no uvicorn.gone, ")
    assert f"this version is {problem} for it" in message
    assert requirements_in(message) == [command]


def test_fastmcp_without_a_private_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(internals.FASTMCP_NAMES, "fastmcp:FastMCP", ["_gone"])
    with pytest.raises(TidingsError, match=r"^fastmcp 4\.[\d.]+ has no fastmcp:FastMCP\._gone, which Tidings uses"):
        Live(FastMCP("new"))


def test_uvicorn_without_a_part_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"
    monkeypatch.setitem(disconnects.UVICORN_NAMES, place, ["gone"])
    app = Live(MCPServer("new")).http_app()
    with pytest.raises(TidingsError, match=rf"^uvicorn [\d.]+ has no {re.escape(place)}\.gone, which Tidings uses"):
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
    names = [(place, name) for place in TABLES[package] for name in TABLES[package][place]]

    assert [f"{place}.{name}" for place, name in names if not dependencies.has_name(place, name)] == []


def parse(requirement: str) -> tuple[str, frozenset[str]]:
    """Return the name and the conditions of a requirement. A build backend may sort the conditions."""
    found = re.fullmatch(r"([\w.\[\]-]+)(.*)", requirement)
    assert found, requirement
    return found[1], frozenset(found[2].split(","))


@pytest.mark.parametrize("extra", EXTRAS)
def test_error_for_a_missing_extra_ends_with_a_command_that_names_its_packages(extra: str) -> None:
    message, _, command = str(missing_extra("Something", extra)).partition(": ")
    assert message == f'Something needs the extra "{extra}" of Tidings'
    assert sorted(map(parse, requirements_in(command))) == sorted(map(parse, EXTRAS[extra]))


def test_command_for_a_missing_extra_is_one_of_uv_if_there_is_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    assert f": uv pip install --python {shlex.quote(sys.executable)} " in str(missing_extra("Something", "nats"))


def test_error_for_a_missing_extra_has_no_command_if_tidings_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert str(missing_extra("Something", "nats")) == 'Something needs the extra "nats" of Tidings'
