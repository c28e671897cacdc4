"""`tidings watch TARGET`: print the changes of any MCP server while they happen."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from tidings.cli.options import Token, TokenFile
from tidings.cli.output import fail, print_stderr
from tidings.cli.target import Header, read_server
from tidings.core.model import Feature, Operation

__all__ = ["watch"]

_CLOSE_TIMEOUT = 8.0
"""Seconds to close after Ctrl-C. The SDK waits up to seven for a stdio server to end."""


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
    header: Header = None,
    auth_token: Token = None,
    auth_token_file: TokenFile = None,
) -> None:
    """Print the changes of an MCP server while they happen, until Ctrl-C.

    The server may be of either era, and needs no Tidings. Each change is shown with the fields that differ, and with
    the time from the notification until the list was fetched.
    """
    if "" in (uri or []):
        fail("--uri is empty; give the URI of a resource, or a pattern like board://*")
    server = read_server("watch", target, header, auth_token, auth_token_file)

    from mcp.client.stdio import StdioServerParameters

    from tidings.cli.remote import run
    from tidings.cli.watch_session import WatchOptions, watch_target

    command_line: Any = None
    if not server.is_http:
        # The environment of the user, as if the user had started the command.
        command_line = StdioServerParameters(command=server.words[0], args=list(server.words[1:]), env={**os.environ})
    options = WatchOptions(
        target=command_line or server.name,
        name=server.name,
        transport="http" if server.is_http else "stdio",
        is_legacy=legacy,
        token=server.token,
        headers=server.headers,
        features=frozenset(feature or ([] if uri else Feature)),
        uris=tuple(uri or ()),
        operations=frozenset(operation or Operation),
        is_json=as_json,
        command=command,
    )
    if server.is_http:
        run(watch_target(options))
    else:
        with _escape_server_output():
            run(watch_target(options), _CLOSE_TIMEOUT)


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
