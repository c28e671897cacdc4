"""The wheel and the sdist are complete, and the wheel works in an environment that has nothing else.

The environment gets the wheel and its dependencies through pip, without extras and without this source tree. If pip
finds no packages, the tests that need it are skipped.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from tests.support.command import DEADLINE, HELLO, Notifications, replace_file, serving

ROOT = Path(__file__).parent.parent

SERVER = """
from mcp.server.mcpserver import MCPServer
from tidings import Live

mcp = MCPServer("board")
live = Live(mcp)

@mcp.tool()
def close_sprint() -> str:
    live.tools.remove("close_sprint")
    return "closed"

live.run("stdio")
"""

IMPORT_ALL = """
import importlib, pkgutil, tidings

for module in pkgutil.walk_packages(tidings.__path__, "tidings."):
    if not module.name.endswith(("__main__", "tidings.testing.plugin")):  # the plugin is for pytest
        try:
            importlib.import_module(module.name)
        except tidings.TidingsError as error:
            needs_extra = module.name.startswith(("tidings.client.adapters.", "tidings.cluster."))
            assert needs_extra and "pip install" in str(error), error
print(tidings.__file__)
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and the sdist as `make dist` does; return their folder."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True, timeout=DEADLINE)
    return folder


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an empty environment, with the versions of the lock; return the folder of its programs."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=DEADLINE)
    lock = (ROOT / "requirements" / "run.lock").read_text()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(f"{name}=={version}" for name, version in _pinned(lock)))
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "install", "--quiet", "-c", str(constraints), str(next(dist.glob("*.whl")))],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "No matching distribution found" in done.stderr:
        pytest.skip(f"pip finds no packages here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def _pinned(lock: str) -> list[tuple[str, str]]:
    return re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;]+)", lock, re.MULTILINE)


def test_wheel_has_every_file_of_the_package(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}

    assert packed == {path.relative_to(ROOT / "src").as_posix() for path in _files(ROOT / "src" / "tidings")}
    for name in ("py.typed", "workspace/sdk/tool-sdk.sh", "cli/scaffold/tools/report/tool.sh"):
        assert f"tidings/{name}" in packed


def test_sdist_has_what_make_and_the_tests_need(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}

    for folder in (".ci", "bench", "deploy", "docs", "examples", "requirements", "src", "tests"):
        assert {path.relative_to(ROOT).as_posix() for path in _files(ROOT / folder)} <= packed
    assert {"CHANGELOG.md", "LICENSE", "Makefile", "PKG-INFO", "README.md"} <= packed
    assert not [name for name in packed if "node_modules" in name or name.endswith(".pyc")]


def _files(folder: Path) -> list[Path]:
    """Return the files in a folder, without those that programs leave there."""
    left = {"node_modules", "__pycache__", ".tidings"}
    return [path for path in folder.rglob("*") if path.is_file() and not left.intersection(path.parts)]


@pytest.mark.slow
def test_every_module_can_be_imported_without_extras(environment: Path, tmp_path: Path) -> None:
    command = [str(environment / "python"), "-I", "-c", IMPORT_ALL]
    imported = subprocess.check_output(command, cwd=tmp_path, text=True, timeout=DEADLINE)
    assert imported.startswith(str(environment.parent))


@pytest.mark.slow
def test_serve_works_without_extras(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    installed = str(environment / "tidings")
    monkeypatch.setattr("tests.support.command.forked_command", lambda program, *arguments: [installed, *arguments])
    folder = tmp_path / "folder"
    subprocess.run([installed, "new", folder], check=True, timeout=DEADLINE)

    async def scenario() -> None:
        told = Notifications()
        async with serving(folder) as server, Client(server.url, message_handler=told) as client:
            assert {"greet", "today", "report"} <= {tool.name for tool in (await client.list_tools()).tools}
            assert not (await client.call_tool("today")).is_error
            async with client.listen(tools_list_changed=True):
                replace_file(folder / "tools" / "hello.py", HELLO)
                await told.until("notifications/tools/list_changed")
            assert (await client.call_tool("hello")).content[0].text == "hello"  # type: ignore[union-attr]

    asyncio.run(scenario())


@pytest.mark.slow
def test_live_works_without_extras(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    script = tmp_path / "board.py"
    script.write_text(SERVER)

    async def scenario() -> None:
        told = Notifications()
        server = StdioServerParameters(command=str(environment / "python"), args=[str(script)], cwd=tmp_path)
        async with asyncio.timeout(DEADLINE), Client(stdio_client(server), message_handler=told) as client:
            async with client.listen(tools_list_changed=True):
                await client.call_tool("close_sprint")
                await told.until("notifications/tools/list_changed")
            assert (await client.list_tools(cache_mode="bypass")).tools == []

    asyncio.run(scenario())
