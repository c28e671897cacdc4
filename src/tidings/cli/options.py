"""Arguments and options that several commands have, and the server that they name."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from tidings.cli.auth import TOKEN_VARIABLE, read_token
from tidings.cli.folder import PROJECT_VARIABLE
from tidings.cli.output import fail

__all__ = [
    "Folder",
    "Header",
    "Lines",
    "NatsCredentials",
    "Program",
    "Server",
    "Target",
    "Token",
    "TokenFile",
    "argument",
    "flag",
    "is_url",
    "option",
    "read_object",
    "read_server",
]


_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e]*?)[ \t]*")


def option(text: str, metavar: str | None = None, *names: str, **settings: Any) -> Any:
    """Describe an option by its help and the name of its value."""
    # `readable=False`: Tidings reports an unreadable path itself, in one line.
    return typer.Option(*names, help=text, metavar=metavar, readable=False, **settings)


def flag(*names_and_text: str) -> Any:
    """Describe an option without a value by its names and its help."""
    *names, text = names_and_text
    return typer.Option(*names, help=text)


def argument(text: str, metavar: str | None = None, **settings: Any) -> Any:
    """Describe an argument by its help and its name."""
    return typer.Argument(help=text, metavar=metavar, readable=False, **settings)


Folder = Annotated[
    Path,
    argument("The workspace: the folder that contains tools/, resources/, prompts/.", "DIR", envvar=PROJECT_VARIABLE),
]
Target = Annotated[str, argument("A running server, or the folder of a workspace.", "URL|DIR")]
Program = Annotated[
    list[str] | None,
    argument(
        "The URL of a server, or the command that starts a stdio server: in quotes, or after `--`.",
        "URL|COMMAND",
        show_default=False,
    ),
]
Header = Annotated[
    list[str] | None, option("Send this header with each request to a URL. May be repeated.", "'NAME: VALUE'")
]
Token = Annotated[
    str | None,
    option(
        "The bearer token that the server requires. Other users of this machine can see it in the process list: "
        "prefer the variable, or a file.",
        "TOKEN",
        envvar=TOKEN_VARIABLE,
        show_envvar=True,
    ),
]
TokenFile = Annotated[Path | None, option("Read the token from this file.", "FILE")]
NatsCredentials = Annotated[Path | None, option("Connect to NATS with this .creds file.", "FILE")]
Lines = Annotated[bool, flag("--json", "Print one JSON object per line.")]


def is_url(target: str, alternative: str = "a folder") -> bool:
    """Return whether the target is a URL and not the alternative. Exit with an error if it is a URL of another kind."""
    scheme, separator, _ = target.partition("://")
    if not separator or not re.fullmatch("[a-zA-Z][a-zA-Z0-9+.-]*", scheme):
        return False
    if scheme.lower() not in ("http", "https"):
        fail(f"{target}: only http and https URLs are possible; give one of them, or {alternative}")
    return True


def read_object(name: str, text: str) -> dict[str, Any]:
    """Return the JSON object that is the value of an option or an argument; - is standard input."""
    try:
        return msgspec.json.decode(sys.stdin.read() if text == "-" else text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        fail(f"{name} must be a JSON object: {error}")


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

    @property
    def transport(self) -> Literal["http", "stdio"]:
        return "http" if self.is_http else "stdio"


def read_server(
    command: str, target: Sequence[str] | None, header: Sequence[str] | None, token: str | None, token_file: Path | None
) -> Server:
    """Return the server that the arguments of `tidings COMMAND` name. Exit with an error if they are wrong."""
    if not target:
        fail(f"give the URL of a server, or a command; see `tidings {command} --help`")
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
