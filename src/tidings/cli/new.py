"""`tidings new DIR`: a workspace with one of each kind of file, to begin with. Nothing is ever overwritten."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from tidings.cli.executable import as_called
from tidings.cli.output import fail, print_json, say

__all__ = ["new"]

_SCAFFOLD = Path(__file__).parent / "scaffold"
_NAME = '"my-workspace"'
"""What stands in the scaffold's `tidings.toml` for the workspace's own name."""


def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make, or to fill.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON.")] = False,
) -> None:
    """Make a workspace with one of each: tools, a resource, a template, a prompt, settings.

    A file that is already there is never touched: if one is in the way, nothing is made.
    """
    files = _files()
    in_the_way = [str(folder / name) for name in files if (folder / name).exists() or (folder / name).is_symlink()]
    if folder.exists() and not folder.is_dir():
        in_the_way = [str(folder)]
    if in_the_way:
        fail(f"nothing was made, since this is in the way: {', '.join(in_the_way)}")
    try:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name == "tidings.toml":
                content = content.replace(_NAME.encode(), _toml(folder.resolve().name))
            with path.open("xb") as file:
                file.write(content)
            if content.startswith(b"#!") and not name.startswith("server.d/"):  # it would take the prompts' place
                path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        fail(f"{error.filename or folder} can't be written: {error.strerror}")
    if as_json:
        print_json({"workspace": str(folder.resolve()), "files": sorted(files)})
        return
    program, place = as_called(), shlex.quote(str(folder))
    say(f"Made {folder}:")
    for name in files:
        say(f"  {name}")
    say("Try next:")
    say(f"  {program} run-tool {place} greet --arg name=World")
    say(f"  {program} serve {place}")


def _toml(text: str) -> bytes:
    """A JSON string is a TOML string too, once no character is escaped in halves, and one more is escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode("utf-8", "replace")


def _files() -> dict[str, bytes]:
    """The scaffold, without what an installation adds to it."""
    return {
        path.relative_to(_SCAFFOLD).as_posix(): path.read_bytes()
        for path in sorted(_SCAFFOLD.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
