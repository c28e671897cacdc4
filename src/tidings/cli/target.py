"""The target of a command that is a client: the URL of a server, or the command that starts a stdio server."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tidings.cli.auth import read_token
from tidings.cli.options import is_url
from tidings.cli.output import fail

__all__ = ["Header", "Server", "read_server"]

_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e]*?)[ \t]*")

Header = Annotated[
    list[str] | None,
    typer.Option(help="Send this header with each request to a URL. May be repeated.", metavar="'NAME: VALUE'"),
]


@dataclass(frozen=True)
class Server:
    words: tuple[str, ...]
    """A URL, or the words of a command."""
    is_http: bool
    token: str | None
    headers: dict[str, str]

    @property
    def name(self) -> str:
        return self.words[0] if self.is_http else shlex.join(self.words)


def read_server(
    command: str, target: Sequence[str], header: Sequence[str] | None, token: str | None, token_file: Path | None
) -> Server:
    """Return the server that the arguments of `tidings COMMAND` name. Exit with an error if they are wrong."""
    words = _split(target)
    is_http = is_url(words[0], "a command")
    if is_http and len(words) > 1:
        fail(f"a URL takes no further arguments, such as {words[1]}")
    headers = dict(map(_parse_header, header or []))
    if headers and not is_http:
        fail("--header is for a URL; a stdio server gets no headers")
    token = read_token(token, token_file) if is_http else None
    if any(name.lower() == "authorization" for name in headers):
        token = None
    if not is_http:
        _check_command(command, words[0])
    else:
        from tidings.cli.remote import check_url

        check_url(words[0])
    return Server(tuple(words), is_http, token, headers)


def _split(target: Sequence[str]) -> list[str]:
    """Return the words of the target. A single one may be a whole command in quotes."""
    if len(target) > 1 or is_url(target[0], "a command"):
        return list(target)
    try:
        words = shlex.split(target[0])
    except ValueError as error:
        fail(f"{target[0]}: this is not a command: {error}")
    if not words:
        fail("the target is empty; give a URL such as http://127.0.0.1:8765/mcp, or a command")
    return words


def _check_command(command: str, program: str) -> None:
    if Path(program).is_dir():
        serve = shlex.join(["tidings", "serve", program, "--stdio"])
        fail(f"{program} is a folder; give the URL of its server, or a command: tidings {command} '{serve}'")
    if shutil.which(program) is None:
        fail(f"there is no command {program}; give a URL such as http://127.0.0.1:8765/mcp, or a command")


def _parse_header(text: str) -> tuple[str, str]:
    found = _HEADER.fullmatch(text)
    if found is None:
        fail("--header: give a header as 'NAME: VALUE', in printable ASCII")  # the value may be a secret
    return found[1], found[2]
