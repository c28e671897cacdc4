"""`tidings serve DIR`: a folder as a live MCP server, over HTTP or on standard input and output."""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidings.cli import access
from tidings.cli.argument import Folder
from tidings.cli.executable import as_called
from tidings.cli.export import exported
from tidings.cli.folder import check_folder, open_workspace
from tidings.cli.output import LogFormat, LogLevel, counted, fail, print_line, say, set_up_logging
from tidings.cli.stdio import POLL, make_live, serve_stdio
from tidings.stdio.process_exit import leave

if TYPE_CHECKING:
    from tidings.http.health import Audience
    from tidings.live import Live
    from tidings.workspace.source import Workspace

__all__ = ["serve"]

logger = logging.getLogger(__name__)

_LONGEST_END = 3.0
"""Seconds: one for calls in progress, another one for executables after their SIGTERM, and one for a busy machine."""

_TOKEN_VARIABLE = "TIDINGS_AUTH_TOKEN"
_HTTP = "Over HTTP"
_ACCESS = "Who may call"


class Metrics(StrEnum):
    LOCAL = "local"
    ANYONE = "anyone"
    OFF = "off"


_AUDIENCES: dict[Metrics, Audience | None] = {Metrics.LOCAL: "local", Metrics.ANYONE: "anyone", Metrics.OFF: None}

_HTTP_ONLY = (
    "metrics",
    "host",
    "port",
    "path",
    "auth_token",
    "auth_token_file",
    "allow_host",
    "allow_origin",
    "insecure",
    "as_json",
)


def serve(
    context: typer.Context,
    folder: Folder = Path(),
    host: Annotated[
        str, typer.Option(help="The address to bind. One that others can reach needs a token.", rich_help_panel=_HTTP)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="The port to bind; 0 takes a free one.", min=0, max=65535, rich_help_panel=_HTTP)
    ] = 8765,
    path: Annotated[str, typer.Option(help="The path of the endpoint.", rich_help_panel=_HTTP)] = "/mcp",
    stdio: Annotated[
        bool, typer.Option("--stdio", help="Serve one client on standard input and output instead.")
    ] = False,
    auth_token: Annotated[
        str | None,
        typer.Option(
            help="Let in only who sends this bearer token. Other users of the machine can see it in the list of "
            "processes: prefer the variable, or a file.",
            envvar=_TOKEN_VARIABLE,
            show_envvar=True,
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    auth_token_file: Annotated[
        Path | None,
        typer.Option(help="The same, read from a file.", metavar="FILE", readable=False, rich_help_panel=_ACCESS),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A Host header to let in besides the local ones, as behind a proxy. May be repeated.",
            metavar="NAME[:PORT]",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="A web page's origin whose scripts may call, besides local ones. May be repeated.",
            metavar="URL",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Bind an address that others can reach without a token: something else checks who calls.",
            rich_help_panel=_ACCESS,
        ),
    ] = False,
    poll: Annotated[
        float,
        typer.Option(
            help="Seconds between two looks at every file, for file systems that tell of no change; 0 for never.",
            metavar="SECONDS",
            min=0,
        ),
    ] = POLL,
    metrics: Annotated[
        Metrics, typer.Option(help="Who may ask for /metrics: this machine, anyone, or nobody.", rich_help_panel=_HTTP)
    ] = Metrics.LOCAL,
    state: Annotated[
        str | None,
        typer.Option(
            help="The file that keeps the state over restarts, or none. By default .tidings/state.db in the workspace.",
            metavar="PATH|none",
            show_default=False,
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="What to write to standard error.")] = LogLevel.INFO,
    log_format: Annotated[LogFormat, typer.Option(help="How: lines of text, or of JSON.")] = LogFormat.TEXT,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing unless something is wrong.")] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print where it serves as one line of JSON on standard output.", rich_help_panel=_HTTP
        ),
    ] = False,
) -> None:
    """Serve a folder as a live MCP server.

    Every change in the folder is told to every connected client at once. Ctrl-C ends it.
    """
    check_folder(folder)
    if stdio:
        _refuse_http_options(context)
        serve_stdio(folder, poll, log_level, log_format, quiet, state)
        return
    level = log_level.unless(quiet)
    if not path.startswith("/"):
        fail(f"--path {path}: it must begin with a slash, as /mcp does")
    if re.search(r"[?#%{}\s]", path):
        fail(f"--path {path}: no request could name it; leave out white space and any of ? # % {{ }}")
    host = host.strip("[]")  # as it stands in a URL
    if auth_token is not None and auth_token_file is not None and not _is_from_environment(context, "auth_token"):
        fail("--auth-token and --auth-token-file are two tokens; give one")
    token = access.read_token(auth_token, auth_token_file)
    os.environ.pop(_TOKEN_VARIABLE, None)  # no tool needs it
    if not access.is_local(host) and token is None and not insecure:
        fail(
            f"{host} can be reached from other machines, and whoever reaches a workspace runs its tools. "
            f"Give a token (--auth-token-file FILE, or {_TOKEN_VARIABLE}), "
            "or --insecure if something in front of it checks who calls"
        )
    door = _Door(folder, host, port, path, token, tuple(allow_host or ()), tuple(allow_origin or ()))
    set_up_logging(level, log_format)
    _serve_http(door, poll, metrics, level, quiet, as_json, state, log_format)


@dataclass(frozen=True, slots=True)
class _Door:
    """Where a workspace is served, and who is let in."""

    folder: Path
    host: str
    port: int
    path: str
    token: str | None
    hosts: tuple[str, ...]
    origins: tuple[str, ...]

    def url(self, port: int) -> str:
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(self.host, self.host)
        if ":" in name and not name.startswith("["):
            name = f"[{name}]"
        return f"http://{name}:{port}{self.path}"


def _serve_http(
    door: _Door,
    poll: float,
    metrics: Metrics,
    level: LogLevel,
    quiet: bool,
    as_json: bool,
    state: str | None,
    log_format: LogFormat,
) -> None:
    # Standard error is read by a program then, so there is neither a greeting nor a panel.
    is_plain = log_format is LogFormat.JSON
    with _ends_quietly(), _bound(door.host, door.port) as listener:
        url = door.url(listener.getsockname()[1])
        security = access.transport_security(door.host, door.hosts, door.origins)
        workspace = open_workspace(door.folder, poll=poll)
        if door.token is not None:
            access.require_token(workspace.server, door.token, url)
        from tidings.cli.status import shown
        from tidings.http.app import serve_app
        from tidings.http.health import add_routes

        live = make_live(workspace, state)
        app = live.http_app(host=door.host, streamable_http_path=door.path, transport_security=security)
        add_routes(app, live, health=True, metrics=_AUDIENCES[metrics], token=door.token)
        if door.origins:
            access.allow_origins(app, door.origins)
        if as_json:
            print_line({"name": workspace.settings.name, "url": url, "workspace": str(workspace.root)})
        if is_plain:
            logger.info("serving %s on %s", workspace.settings.name, url, extra={"tidings": {"event": "serving"}})
        elif not quiet:
            _greet(workspace, live, door, url)
        title = None if is_plain else f"{workspace.settings.name}  {url}"
        in_detail = log_format.is_in_detail(level)
        with (
            exported(workspace.settings.name, live.failures),
            shown(live, workspace, title=title, is_quiet=quiet, in_detail=in_detail),
        ):
            serve_app(
                app,
                sockets=[listener],
                on_signal=_leave_in_time,
                log_config=None,
                access_log=level is LogLevel.DEBUG,
            )


def _refuse_http_options(context: typer.Context) -> None:
    for name in _HTTP_ONLY:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = name.removeprefix("as_").replace("_", "-")
            fail(f"--{option} is for HTTP; with --stdio, whoever starts the process is its only client")


def _is_from_environment(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "ENVIRONMENT"


@contextmanager
def _ends_quietly() -> Iterator[None]:
    """A server that was told to stop, and stopped, has not failed: status 0, at whatever moment the signal comes."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_in_time() -> None:
    """Nothing can interrupt a Python tool that computes or waits in its thread; the process must not stay for it."""

    def leave_them() -> None:
        logger.warning("some calls still run after %g s; leaving them", _LONGEST_END)
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # the cursor, which the status has hidden
            sys.stderr.flush()
        leave(0)

    timer = threading.Timer(_LONGEST_END, leave_them)
    timer.daemon = True
    timer.start()


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """The socket, bound before anything slow: a port in use shows at once, and who connects early waits."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        fail(f"{host} is no address to bind: {error.strerror or error}")
    with listener:
        if os.name == "posix":
            # A port that the last server has just left may be taken again.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(2048)
        except PermissionError:
            fail(f"port {port} may not be bound by this user; choose one above 1023 with --port")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                fail(f"port {port} of {host} is in use; stop what uses it, or choose another one with --port")
            fail(f"{host}:{port} can't be bound: {error.strerror or error}")
        yield listener


def _greet(workspace: Workspace, live: Live, door: _Door, url: str) -> None:
    from tidings.cli.status import items_of

    folder = shlex.quote(str(door.folder))
    items = ", ".join(counted(number, feature.singular) for feature, number in items_of(live).items())
    say(f"Serving {workspace.settings.name} on {url} ({items}).")
    if not access.is_local(door.host) and door.token is None:
        say("Whoever reaches this machine may run the tools: there is no token.")
    program = as_called()
    needs_token = " --auth" if door.token is not None else ""
    say("Try next:")
    say("  put a file into tools/: every connected client has it at once")
    say(f"  {program} config {folder} --client claude-code --http {url}{needs_token}    what to paste into a client")
    say(f"  {program} validate {folder}    what is wrong with which file")
    say("Ctrl-C ends it.")
