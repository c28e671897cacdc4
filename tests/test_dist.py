"""The wheel and the sdist are complete, and the wheel works in an environment that has nothing else.

The environment gets the wheel and its dependencies through pip, without extras and without this source tree. If pip
finds no packages, the tests that need it are skipped.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
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
            needs_extra = ("tidings.client.adapters.", "tidings.cluster.", "tidings.sdk.fastmcp")
            assert module.name.startswith(needs_extra) and "needs the extra" in str(error), error
print(tidings.__file__)
"""

NEEDS_EXTRA = {
    "nats": ("-m", "tidings", "cluster", "status"),
    "otlp": ("-m", "tidings", "serve", ".", "--stdio"),
    "google-adk": ("-c", "import tidings.client.adapters.google_adk"),
    "langchain": ("-c", "import tidings.client.adapters.langchain"),
    "openai-agents": ("-c", "import tidings.client.adapters.openai_agents"),
    "pydantic-ai": ("-c", "import tidings.client.adapters.pydantic_ai"),
}
"""Commands that need an extra, as arguments of Python. Without `fastmcp`, the user's own import fails first."""


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
    constraints = _constraints(ROOT / "requirements" / "run.lock", folder)
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


def _constraints(lock: Path, folder: Path) -> Path:
    """Write the versions of a lock file as constraints for pip, without the hashes."""
    pinned = re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;]+)", lock.read_text(), re.MULTILINE)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(f"{name}=={version}" for name, version in pinned))
    return constraints


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", ["cluster status", "serve --port 0 --workers 2", "serve --port 0 --nats nats://x"]
)
def test_command_that_needs_an_extra_names_it_in_one_line(arguments: str, environment: Path, tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()  # makes the folder a workspace
    command = [str(environment / "tidings"), *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r'tidings: [^\n]+ needs the extra "nats" of Tidings: [^\n]+\n', done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("extra", NEEDS_EXTRA)
def test_command_in_the_error_installs_the_missing_extra(extra: str, environment: Path, tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()  # makes the folder a workspace
    # A new environment for each extra, on top of the one with the wheel.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True, timeout=DEADLINE)
    folders = ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    python = tmp_path / "env" / "bin" / "python"
    below, own = (subprocess.check_output([each, *folders], text=True) for each in (environment / "python", python))
    (Path(own.strip()) / "below.pth").write_text(below)
    lock = ROOT / "requirements" / ("test.lock" if extra in ("nats", "otlp") else "adapters.lock")
    variables = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1" if extra == "otlp" else "",
        "PIP_CONSTRAINT": str(_constraints(lock, tmp_path)),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    missing = f' needs the extra "{extra}" of Tidings: '
    printed = run(python, *NEEDS_EXTRA[extra]).stderr.partition(missing)[2].splitlines()
    assert printed
    assert shlex.split(printed[0])[0] == str(python)
    installed = run(*shlex.split(printed[0]))
    assert installed.returncode == 0, installed.stderr
    now = run(python, *NEEDS_EXTRA[extra])
    assert missing not in now.stderr
    assert "Traceback" not in now.stderr
