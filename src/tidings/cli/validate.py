"""`tidings validate DIR`: what is wrong with which file, before a client finds out."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidings.cli.argument import Folder
from tidings.cli.folder import open_workspace
from tidings.cli.output import counted, print_json

if TYPE_CHECKING:
    from tidings.workspace.problems import Problem
    from tidings.workspace.source import Workspace

__all__ = ["validate"]


def validate(
    folder: Folder = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Load everything as a server would, and print what is wrong as FILE:LINE: MESSAGE.

    Python files and registration scripts are run for it, tools are not. Ends with status 1 if anything is wrong.
    """
    logging.basicConfig(level=logging.CRITICAL)  # what is logged meanwhile is what is printed below
    workspace = open_workspace(folder, poll=0)
    problems = [*workspace.problems, *_not_executable(workspace)]
    items = _counts(workspace)
    if as_json:
        found = [{"path": each.path, "line": each.line, "message": each.message} for each in problems]
        print_json({"workspace": str(workspace.root), "items": items, "problems": found})
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console(soft_wrap=True, highlight=False)
        for each in problems:
            # Line 1 where no line is known: editors and CI systems look for FILE:LINE.
            place = f"{folder / each.path}:{each.line or 1}:"
            console.print(Text.assemble((place, "bold"), " ", each.message))
        summary = ", ".join(counted(number, kind.removesuffix("s")) for kind, number in items.items())
        if problems:
            console.print(Text(f"{counted(len(problems), 'problem')}; {summary}", style="red"))
        else:
            console.print(Text(f"All is well: {summary}", style="green"))
    raise typer.Exit(1 if problems else 0)


def _counts(workspace: Workspace) -> dict[str, int]:
    from tidings.core.model import Feature
    from tidings.workspace.source import ERRORS

    listed = {feature.value: workspace.list_now(feature) for feature in Feature}
    return {name: sum(item.get("uri") != ERRORS for item in items) for name, items in listed.items()}


def _not_executable(workspace: Workspace) -> list[Problem]:
    """Scripts that begin with `#!` but can't be run: served as nothing, and without a word."""
    from tidings.workspace.metadata import META_SUFFIX
    from tidings.workspace.problems import Problem

    tools = workspace.root / "tools"
    if not tools.is_dir():
        return []
    found = []
    for path in sorted(tools.iterdir()):
        if (
            path.is_file()
            and path.suffix != ".py"
            and not path.name.endswith(META_SUFFIX)
            and not os.access(path, os.X_OK)
        ):
            try:
                with path.open("rb") as file:
                    is_script = file.read(2) == b"#!"
            except OSError:
                continue
            if is_script:
                message = "a script that can't be run, and so no tool: chmod +x makes it one"
                found.append(Problem(f"tools/{path.name}", 1, message))
    return found
