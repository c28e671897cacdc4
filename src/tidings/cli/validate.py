"""`tidings validate DIR`: print the problems of a workspace without serving it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidings.cli.folder import open_workspace
from tidings.cli.options import Folder
from tidings.cli.output import pluralize, print_json
from tidings.core.redact import one_line

if TYPE_CHECKING:
    from tidings.workspace.problems import Problem
    from tidings.workspace.source import Workspace

__all__ = ["validate"]


def validate(
    folder: Folder = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Load all files as a server does, and print each problem.

    A problem is a line like FILE:LINE: MESSAGE. The command runs Python files and registration scripts, but no tools.
    The exit status is 1 if there is a problem.
    """
    logging.basicConfig(level=logging.CRITICAL)  # the log would only repeat the problems
    workspace = open_workspace(folder, poll=0)
    problems = [*workspace.problems, *_find_not_executable(workspace)]
    items = {feature.value: number for feature, number in workspace.count_items().items()}
    if as_json:
        found = [{"path": problem.path, "line": problem.line, "message": problem.message} for problem in problems]
        print_json({"workspace": str(workspace.root), "items": items, "problems": found})
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console(soft_wrap=True, highlight=False)
        for problem in problems:
            # Editors and CI systems look for FILE:LINE, so an unknown line is line 1.
            place = f"{folder / problem.path}:{problem.line or 1}:"
            console.print(Text.assemble((one_line(place), "bold"), " ", one_line(problem.message)))
        result = pluralize(len(problems), "problem") if problems else "No problems"
        summary = ", ".join(pluralize(number, feature.removesuffix("s")) for feature, number in items.items())
        console.print(Text(f"{result}; {summary}", style="red" if problems else "green"))
    raise typer.Exit(1 if problems else 0)


def _find_not_executable(workspace: Workspace) -> list[Problem]:
    """Return a problem for each script with a `#!` line that is not executable. A server ignores it silently."""
    from tidings.workspace.metadata import META_SUFFIX
    from tidings.workspace.problems import Problem
    from tidings.workspace.reading import open_inside

    tools = workspace.root / "tools"
    found = []
    for path in sorted(tools.iterdir()) if tools.is_dir() else ():
        if (
            path.is_file()
            and path.suffix != ".py"
            and not path.name.endswith(META_SUFFIX)
            and not os.access(path, os.X_OK)
        ):
            try:
                with open_inside(workspace.root, path) as file:
                    is_script = file.read(2) == b"#!"
            except OSError:
                continue
            if is_script:
                message = "the script is not executable and therefore not a tool; `chmod +x` makes it one"
                found.append(Problem(f"tools/{path.name}", 1, message))
    return found
