"""`tidings new DIR`: create a workspace with an example of each kind of file, without overwriting a file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from tidings.cli.command_line import shell_command
from tidings.cli.options import argument, flag
from tidings.cli.output import fail, print_json, print_stderr, toml_value

__all__ = ["new"]

_SCAFFOLD = Path(__file__).parent / "scaffold"
_NAME = b'"my-workspace"'
"""The name in the scaffold's `tidings.toml`, which the name of the new folder replaces."""


def new(
    directory: Annotated[str, argument("The folder to create, or to fill.", "DIR")],
    as_json: Annotated[bool, flag("--json", "Print the created files as JSON.")] = False,
) -> None:
    """Create a workspace with an example of each kind of file.

    These are tools, a resource, a URI template, a prompt and settings. It never changes an existing file. If a file to
    create exists already, it creates nothing.
    """
    if not directory:
        fail("DIR is empty; give the folder to create, or . for the current one")
    folder = Path(directory)
    files = _read_scaffold()
    parents = {parent for name in files for parent in (folder / name).parents}
    existing = [str(parent) for parent in sorted(parents) if _is_taken(parent) and not parent.is_dir()]
    if not existing:
        existing = [str(folder / name) for name in files if _is_taken(folder / name)]
    if existing:
        more = f" and {len(existing) - 3} more" if len(existing) > 3 else ""
        serve = f"; to serve the folder: {shell_command()} serve {shlex.quote(directory)}" if folder.is_dir() else ""
        fail(f"nothing was created, because this already exists: {', '.join(existing[:3])}{more}{serve}")
    try:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name == "tidings.toml" and (folder_name := folder.resolve().name):  # the root folder has none
                content = content.replace(_NAME, toml_value(folder_name).encode("utf-8", "replace"))
            with path.open("xb") as file:
                file.write(content)
            # Not by the permissions of the scaffold, which some installers do not keep.
            if content.startswith(b"#!"):
                path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        fail(f"{error.filename or folder} can't be written: {error.strerror}")
    if as_json:
        print_json({"workspace": str(folder.resolve()), "files": sorted(files)})
        return
    program = shell_command()
    quoted_folder = shlex.quote(f"./{folder}" if str(folder).startswith("-") else str(folder))
    created = "\n".join(f"  {name}" for name in files)
    print_stderr(
        f"Created {folder}:\n{created}\n"
        "Try next:\n"
        f"  {program} run-tool {quoted_folder} greet --arg name=World\n"
        f"  {program} serve {quoted_folder}"
    )


def _is_taken(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _read_scaffold() -> dict[str, bytes]:
    """Return the files of the scaffold by path, without the `__pycache__` that an installation adds."""
    return {
        path.relative_to(_SCAFFOLD).as_posix(): path.read_bytes()
        for path in sorted(_SCAFFOLD.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
