"""`tidings validate DIR`: print the problems of a workspace without serving it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from tidings.cli.folder import open_workspace
from tidings.cli.options import Folder, flag
from tidings.cli.output import pluralize, print_json, print_styled
from tidings.core.redact import one_line

__all__ = ["validate"]


def validate(
    folder: Folder = Path(),
    as_json: Annotated[bool, flag("--json", "Print the result as JSON.")] = False,
) -> None:
    """Load all files as a server does, and print each problem.

    A problem is a line like FILE:LINE: MESSAGE. The command runs Python files and registration scripts, but no tools.
    The exit status is 1 if there is a problem.
    """
    logging.basicConfig(level=logging.CRITICAL)  # the log would only repeat the problems
    workspace = open_workspace(folder, poll=0)
    from tidings.workspace.checks import check_files

    faults = check_files(workspace.root)
    places = {(fault.path, fault.line) for fault in faults if fault.line is not None}
    # Loading reports the first fault of a file with a different text.
    loading = [
        problem
        for problem in workspace.problems
        if problem not in faults and (problem.path, problem.line) not in places
    ]
    problems = [*loading, *faults]
    items = {feature.value: number for feature, number in workspace.count_items().items()}
    if as_json:
        found = [{"path": problem.path, "line": problem.line, "message": problem.message} for problem in problems]
        print_json({"workspace": str(workspace.root), "items": items, "problems": found})
    else:
        for problem in problems:
            # Editors and CI systems look for FILE:LINE, so an unknown line is line 1.
            place = f"{folder / problem.path}:{problem.line or 1}:"
            print_styled((one_line(place), "bold"), (f" {one_line(problem.message)}", ""))
        result = pluralize(len(problems), "problem") if problems else "No problems"
        summary = ", ".join(pluralize(number, feature.removesuffix("s")) for feature, number in items.items())
        print_styled((f"{result}; {summary}", "red" if problems else "green"))
    raise typer.Exit(1 if problems else 0)
