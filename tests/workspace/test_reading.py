"""Files that are replaced while they are served: by a link to the outside, by a pipe, by a file that is too large.

Covers `files.py` and `metadata.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError

from tests.support.waiting import DEADLINE
from tests.support.workspaces import write
from tidings.workspace.metadata import read_comment, read_meta, read_text
from tidings.workspace.python import load_python
from tidings.workspace.reading import open_inside, read_inside
from tidings.workspace.resources import compute_etag
from tidings.workspace.settings import load_settings
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio

TEMPLATE = '{"uriTemplate": "any://{+path}", "path": "resources/{path}", "name": "any"}'
URIS = ("workspace:///a.txt", "any://a.txt")


@contextmanager
def pipe_at(path: Path) -> Iterator[None]:
    """Replace a file by a named pipe. At the end, release readers that wait for a writer."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    try:
        yield
    finally:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


async def test_pipe_in_place_of_a_resource_occupies_no_thread(tmp_path: Path) -> None:
    write(tmp_path, {"resources/a.txt": "a", "resources/b.txt": "b", "resources/any.meta.json": TEMPLATE})
    async with Client(Workspace(tmp_path).server) as client:
        with pipe_at(tmp_path / "resources" / "a.txt"):
            reads = [asyncio.create_task(client.read_resource(uri)) for uri in URIS * 30]
            done, waiting = await asyncio.wait(reads, timeout=DEADLINE)
            assert not waiting
            assert all("Unknown resource" in str(read.exception()) for read in done)
        read = await client.read_resource("workspace:///b.txt")
        assert getattr(read.contents[0], "text", None) == "b"


READERS: dict[str, Callable[[Path, Path], Any]] = {
    "prompt": read_text,
    "metadata": read_meta,
    "comment": read_comment,
    "etag": compute_etag,
    "python": lambda root, path: load_python(root, path, {}),
    "settings": lambda root, path: load_settings(root),
}


@pytest.mark.parametrize("name", READERS)
async def test_pipe_in_place_of_a_file_fails_its_loading(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tidings.toml"
    with pipe_at(path):
        loading = asyncio.create_task(asyncio.to_thread(READERS[name], tmp_path, path))
        assert await asyncio.wait([loading], timeout=DEADLINE) == ({loading}, set())
        assert "it is not a file" in str(loading.exception())


async def test_link_to_the_outside_in_place_of_a_resource_is_not_read(tmp_path: Path) -> None:
    root = tmp_path / "ws"
    write(tmp_path, {"secret.txt": "secret", "ws/resources/a.txt": "a", "ws/resources/any.meta.json": TEMPLATE})
    async with Client(Workspace(root).server) as client:
        (root / "resources" / "a.txt").unlink()
        (root / "resources" / "a.txt").symlink_to(tmp_path / "secret.txt")
        for uri in URIS:
            with pytest.raises(MCPError, match="Unknown resource"):
                await client.read_resource(uri)


@pytest.mark.parametrize("path", ["link.txt", "folder/secret.txt"])
def test_link_that_appears_after_links_were_resolved_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    root = tmp_path / "ws"
    write(tmp_path, {"outside/secret.txt": "secret", "ws/a.txt": "a"})
    (root / "link.txt").symlink_to(tmp_path / "outside" / "secret.txt")
    (root / "folder").symlink_to(tmp_path / "outside")
    monkeypatch.setattr("tidings.workspace.reading.resolve_links", lambda path: path)  # as if there were no link yet
    with pytest.raises(FileNotFoundError, match="just replaced"):
        open_inside(root, root / path)


def test_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    write(tmp_path, {"folder/a.txt": "a"})
    (tmp_path / "linked").symlink_to("folder")
    (tmp_path / "linked.txt").symlink_to("linked/a.txt")
    assert read_inside(tmp_path, tmp_path / "linked.txt") == b"a"


async def test_resource_larger_than_the_limit_is_an_error_until_the_limit_is_raised(tmp_path: Path) -> None:
    write(tmp_path, {"resources/a.txt": "12345", "resources/any.meta.json": TEMPLATE})
    write(tmp_path, {"tidings.toml": "[resources]\nmax_bytes = 4\n"})
    workspace = Workspace(tmp_path)
    async with Client(workspace.server) as client:
        for uri in URIS:
            with pytest.raises(MCPError, match=r"5 bytes, more than the limit of 4; \[resources\] max_bytes"):
                await client.read_resource(uri)
        write(tmp_path, {"tidings.toml": "[resources]\nmax_bytes = 5\n"})
        workspace.rescan()
        for uri in URIS:
            assert getattr((await client.read_resource(uri)).contents[0], "text", None) == "12345"


def test_default_limit_is_16_mib(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(OSError, match="16777217 bytes, more than the limit of 16777216"):
        read_inside(tmp_path, large)
    os.truncate(large, 16 << 20)
    assert len(read_inside(tmp_path, large)) == 16 << 20
