"""`tidings watch TARGET`: print the changes of any MCP server while they happen."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from tidings.cli.options import Header, Lines, Program, Token, TokenFile, flag, option, read_server
from tidings.cli.output import fail, print_stderr
from tidings.core.model import Feature, Operation

__all__ = ["watch"]

_CLOSE_TIMEOUT = 8.0
"""Seconds to close after Ctrl-C. The SDK waits up to seven for a stdio server to end."""


def watch(
    target: Program,
    feature: Annotated[
        list[Feature] | None,
        option(
            "A list to watch. May be repeated; the default is all lists, or none with --uri.", "tools|prompts|resources"
        ),
    ] = None,
    uri: Annotated[
        list[str] | None,
        option("A resource whose content to watch; for Tidings servers also a pattern. May be repeated.", "URI"),
    ] = None,
    operation: Annotated[
        list[Operation] | None,
        option("Only changes of this kind. May be repeated; the default is all.", "added|removed|updated|deleted"),
    ] = None,
    command: Annotated[
        str | None,
        option(
            "Run this shell command for each change. It gets the change as JSON on standard input, and "
            "TIDINGS_OPERATION, TIDINGS_FEATURE, TIDINGS_NAME and TIDINGS_TIME.",
            "CMD",
            "--exec",
        ),
    ] = None,
    as_json: Lines = False,
    legacy: Annotated[bool, flag("--legacy", "Use a protocol version before 2026-07-28.")] = False,
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
        server=server,
        is_legacy=legacy,
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
