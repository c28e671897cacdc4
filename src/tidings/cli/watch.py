"""`tidings watch TARGET`: print the changes of any MCP server while they happen."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tidings.cli.auth import read_token
from tidings.cli.options import Token, TokenFile, is_url
from tidings.cli.output import fail, print_stderr
from tidings.core.model import Feature, Operation

__all__ = ["watch"]

_CLOSE_TIMEOUT = 8.0
"""Seconds to close after Ctrl-C. The SDK waits up to seven for a stdio server to end."""
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e]*?)[ \t]*")


def watch(
    target: Annotated[
        list[str],
        typer.Argument(
            metavar="URL|COMMAND",
            help="The URL of a server, or the command that starts a stdio server: in quotes, or after `--`.",
            show_default=False,
        ),
    ],
    feature: Annotated[
        list[Feature] | None,
        typer.Option(
            help="A list to watch. May be repeated; the default is all lists, or none with --uri.",
            metavar="tools|prompts|resources",
        ),
    ] = None,
    uri: Annotated[
        list[str] | None,
        typer.Option(
            help="A resource whose content to watch; for Tidings servers also a pattern. May be repeated.",
            metavar="URI",
        ),
    ] = None,
    operation: Annotated[
        list[Operation] | None,
        typer.Option(
            help="Only changes of this kind. May be repeated; the default is all.",
            metavar="added|removed|updated|deleted",
        ),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--exec",
            help="Run this shell command for each change. It gets the change as JSON on standard input, and "
            "TIDINGS_OPERATION, TIDINGS_FEATURE, TIDINGS_NAME and TIDINGS_TIME.",
            metavar="CMD",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    legacy: Annotated[bool, typer.Option("--legacy", help="Use a protocol version before 2026-07-28.")] = False,
    header: Annotated[
        list[str] | None,
        typer.Option(help="Send this header with each request to a URL. May be repeated.", metavar="'NAME: VALUE'"),
    ] = None,
    auth_token: Token = None,
    auth_token_file: TokenFile = None,
) -> None:
    """Print the changes of an MCP server while they happen, until Ctrl-C.

    The server may be of either era, and needs no Tidings. Each change is shown with the fields that differ, and with
    the time from the notification until the list was fetched.
    """
    if "" in (uri or []):
        fail("--uri is empty; give the URI of a resource, or a pattern like board://*")
    words = _split(target)
    has_url = is_url(words[0], "a command")
    if has_url and len(words) > 1:
        fail(f"a URL takes no further arguments, such as {words[1]}")
    headers = dict(map(_parse_header, header or []))
    if headers and not has_url:
        fail("--header is for a URL; a stdio server gets no headers")
    token = read_token(auth_token, auth_token_file) if has_url else None
    if any(name.lower() == "authorization" for name in headers):
        token = None
    if not has_url:
        _check_command(words[0])

    from mcp.client.stdio import StdioServerParameters

    from tidings.cli.remote import check_url, run
    from tidings.cli.watch_session import WatchOptions, watch_target

    if has_url:
        check_url(words[0])
    options = WatchOptions(
        # The environment of the user, as if the user had started the command.
        target=words[0] if has_url else StdioServerParameters(command=words[0], args=words[1:], env={**os.environ}),
        name=words[0] if has_url else shlex.join(words),
        transport="http" if has_url else "stdio",
        is_legacy=legacy,
        token=token,
        headers=headers,
        features=frozenset(feature or ([] if uri else Feature)),
        uris=tuple(uri or ()),
        operations=frozenset(operation or Operation),
        is_json=as_json,
        command=command,
    )
    if has_url:
        run(watch_target(options))
    else:
        with _escape_server_output():
            run(watch_target(options), _CLOSE_TIMEOUT)


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


def _check_command(command: str) -> None:
    if Path(command).is_dir():
        serve = shlex.join(["tidings", "serve", command, "--stdio"])
        fail(f"{command} is a folder; give the URL of its server, or a command: tidings watch '{serve}'")
    if shutil.which(command) is None:
        fail(f"there is no command {command}; give a URL such as http://127.0.0.1:8765/mcp, or a command")


def _parse_header(text: str) -> tuple[str, str]:
    found = _HEADER.fullmatch(text)
    if found is None:
        fail("--header: give a header as 'NAME: VALUE', in printable ASCII")  # the value may be a secret
    return found[1], found[2]


@contextmanager
def _escape_server_output() -> Iterator[None]:
    """Print the standard error of a stdio server line by line, with its control characters escaped.

    The SDK gives the descriptor 2 to the server, so it is a pipe in this block. `sys.stderr` has another one.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(writer)
    stderr = sys.stderr
    with open(saved, "w", encoding="utf-8", errors="backslashreplace") as sys.stderr:  # noqa: PTH123  # a descriptor
        thread = threading.Thread(target=_print_server_output, args=(reader,), name="stderr", daemon=True)
        thread.start()
        try:
            yield
        finally:
            os.dup2(sys.stderr.fileno(), 2)
            thread.join(0.5)  # the server may still run, and write
            sys.stderr = stderr


def _print_server_output(reader: int) -> None:
    with open(reader, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            print_stderr(f"server: {line.rstrip()}")
