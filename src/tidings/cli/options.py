"""Arguments and options that several commands have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from tidings.cli.auth import TOKEN_VARIABLE
from tidings.cli.folder import PROJECT_VARIABLE
from tidings.cli.output import fail

__all__ = ["Folder", "Target", "Token", "TokenFile", "is_url"]

# `readable=False`: Tidings reports an unreadable path itself, in one line.
Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="The workspace: the folder that contains tools/, resources/, prompts/.",
        readable=False,
        envvar=PROJECT_VARIABLE,
    ),
]
Target = Annotated[str, typer.Argument(metavar="URL|DIR", help="A running server, or the folder of a workspace.")]
Token = Annotated[
    str | None,
    typer.Option(
        help="The bearer token that the server requires. Other users of this machine can see it in the process list: "
        "prefer the variable, or a file.",
        metavar="TOKEN",
        envvar=TOKEN_VARIABLE,
        show_envvar=True,
    ),
]
TokenFile = Annotated[Path | None, typer.Option(help="Read the token from this file.", metavar="FILE", readable=False)]


def is_url(target: str, alternative: str = "a folder") -> bool:
    """Return whether the target is a URL and not the alternative. Exit with an error if it is a URL of another kind."""
    scheme, separator, _ = target.partition("://")
    if not separator or not re.fullmatch("[a-zA-Z][a-zA-Z0-9+.-]*", scheme):
        return False
    if scheme.lower() not in ("http", "https"):
        fail(f"{target}: only http and https URLs are possible; give one of them, or {alternative}")
    return True
