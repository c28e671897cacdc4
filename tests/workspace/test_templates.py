"""URI templates: which URI a file has, and that its changes reach the clients that watch this URI.

Covers `resources.py`.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from tests.support.workspaces import UPDATED, get_problems, serve, watch, write
from tidings.workspace.settings import Settings
from tidings.workspace.templates import FileTemplate, make_template

pytestmark = pytest.mark.anyio


def describe(**meta: Any) -> dict[str, str]:
    return {"resources/template.meta.json": json.dumps(meta)}


@pytest.mark.parametrize(
    ("uri_template", "path", "file", "uri"),
    [
        ("notes://{name}", "resources/notes/{name}.md", "resources/notes/first.md", "notes://first"),
        ("notes://{name}", "resources/notes/{name}.md", "resources/notes/first.txt", None),
        ("notes://{name}", "resources/notes/{name}.md", "resources/notes/zwei Äpfel.md", "notes://zwei%20%C3%84pfel"),
        ("log://{year}/{day}", "logs/{day}/{year}.log", "logs/1/2026.log", "log://2026/1"),
        ("same://{a}", "data/{a}/{a}.txt", "data/x/x.txt", "same://x"),
        ("same://{a}", "data/{a}/{a}.txt", "data/x/y.txt", None),
        ("all://{+path}", "resources/{path}", "resources/a/b/c.txt", "all://a/b/c.txt"),
        ("all://{+path}", "resources/{+path}", "resources/a/b.txt", "all://a/b.txt"),
        ("file:///resources/{name}.txt", None, "resources/one.txt", "file:///resources/one.txt"),
        ("file:///resources/{name}.txt", None, "resources/a/one.txt", None),
        ("docs://resources/{+path}", None, "resources/a/one.txt", "docs://resources/a/one.txt"),
        ("notes://{name}{?lang}", "resources/{name}.md", "resources/a.md", "notes://a"),
    ],
)
def test_file_has_the_uri_under_which_it_is_read(
    tmp_path: Path, uri_template: str, path: str | None, file: str, uri: str | None
) -> None:
    write(tmp_path, {file: "text"})
    meta = {"uriTemplate": uri_template, "path": path}
    template = make_template(tmp_path, Settings("a"), meta, tmp_path / "meta").component
    assert isinstance(template, FileTemplate)
    assert template.find_uri(PurePosixPath(file)) == uri
    if uri is not None:
        assert template.find_file(template.matches(uri) or {}) == tmp_path / file


async def test_change_of_a_file_notifies_each_uri_that_serves_it(tmp_path: Path) -> None:
    write(tmp_path, {"resources/notes/first.md": "1", "resources/notes/second.md": "1"})
    write(tmp_path, describe(uriTemplate="notes://{name}", path="resources/notes/{name}.md"))
    async with watch(tmp_path, uris=["notes://first", "notes://third"]) as watcher:
        write(tmp_path, {"resources/notes/first.md": "2", "resources/notes/second.md": "2"})
        assert sorted(await watcher.settle()) == [
            (UPDATED, "updated", "notes://first"),
            (UPDATED, "updated", "workspace:///notes/first.md"),
            (UPDATED, "updated", "workspace:///notes/second.md"),
        ]
        write(tmp_path, {"resources/notes/third.md": "1"})
        assert (UPDATED, "updated", "notes://third") in await watcher.settle()
        (tmp_path / "resources" / "notes" / "first.md").unlink()
        assert (UPDATED, "deleted", "notes://first") in await watcher.settle()


async def test_files_of_a_template_beside_the_watched_folders_are_watched(tmp_path: Path) -> None:
    write(tmp_path, {"data/a/one.csv": "1"})
    write(tmp_path, describe(uriTemplate="data://{+name}", path="data/{name}.csv"))
    async with watch(tmp_path, uris=["data://**"]) as watcher:
        write(tmp_path, {"data/a/one.csv": "2"})
        assert await watcher.settle() == [(UPDATED, "updated", "data://a/one")]
        write(tmp_path, {"data/b/two.csv": "1"})
        assert await watcher.settle() == [(UPDATED, "updated", "data://b/two")]


def test_template_of_files_outside_is_a_problem(tmp_path: Path) -> None:
    root = tmp_path / "ws"
    write(root, describe(uriTemplate="out://{name}", path="../{name}.txt"))
    assert get_problems(root) == [
        "resources/template.meta.json:1: the files of this template are outside the workspace"
    ]


def test_variable_of_a_path_that_the_template_does_not_have_is_a_problem(tmp_path: Path) -> None:
    write(tmp_path, describe(uriTemplate="log://{day}", path="logs/{dya}.txt"))
    message = "{dya} is not a variable of the uriTemplate 'log://{day}'"
    assert get_problems(tmp_path) == [f"resources/template.meta.json:1: {message}"]


async def test_mime_type_is_that_of_the_file_unless_the_template_has_one(tmp_path: Path) -> None:
    write(tmp_path, {"resources/plain": "text", "resources/page.html": "<p>", "resources/data.json": "{}"})
    (tmp_path / "resources" / "image").write_bytes(b"\x89PNG\r\n\x1a\n")
    write(tmp_path, describe(uriTemplate="any://{name}", path="resources/{name}"))
    meta = {"uriTemplate": "own://{name}", "path": "resources/{name}", "mimeType": "text/x-own"}
    write(tmp_path, {"resources/own.meta.json": json.dumps(meta)})
    async with serve(tmp_path) as (client, _):
        types = {
            uri: (await client.read_resource(uri)).contents[0].mime_type
            for uri in ("any://plain", "any://page.html", "any://data.json", "any://image", "own://page.html")
        }
        listed = (await client.list_resource_templates()).resource_templates
    assert types == {
        "any://plain": "text/plain",
        "any://page.html": "text/html",
        "any://data.json": "application/json",
        "any://image": "application/octet-stream",
        "own://page.html": "text/x-own",
    }
    assert {template.uri_template: template.mime_type for template in listed} == {
        "any://{name}": "text/plain",
        "own://{name}": "text/x-own",
    }
