"""The argument that most commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Folder"]

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="The workspace: the folder with tools/, resources/, prompts/.",
        readable=False,  # `check_folder` says it in one line
    ),
]
