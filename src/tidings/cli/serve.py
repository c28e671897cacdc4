"""`tidings serve DIR`: serve a folder as a live MCP server, over HTTP or on standard input and output."""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tidings.cli import auth
from tidings.cli.command_line import shell_command
from tidings.cli.folder import check_workspace, open_workspace
from tidings.cli.logs import LogFormat, LogLevel, LogOptions, set_up_logging
from tidings.cli.nats import EMBEDDED, NATS_VARIABLE, NatsOptions, open_nats
from tidings.cli.options import Folder, NatsCredentials, Token, TokenFile, flag, option
from tidings.cli.otlp import export_telemetry
from tidings.cli.output import fail, pluralize, print_json_lines, print_stderr
from tidings.cli.serve_stdio import accept_commands, make_live, serve_stdio
from tidings.cli.workers import Worker, run_workers
from tidings.core.redact import one_line
from tidings.runtime.shutdown import HTTP_DEADLINE, exit_after, exit_on_signals
from tidings.server.garbage_collection import without_gc
from tidings.workspace import DEFAULT_POLL

if TYPE_CHECKING:
    from mcp.server.transport_security import TransportSecuritySettings

    from tidings.console.console import Mode
    from tidings.http.health import Audience

__all__ = ["serve"]

logger = logging.getLogger(__name__)


class Metrics(StrEnum):
    LOCAL = "local"
    ANYONE = "anyone"
    OFF = "off"


class ConsoleOption(StrEnum):
    READ = "read"
    WRITE = "write"
    OFF = "off"


_STDIO_OPTIONS = ("folder", "stdio", "poll", "state", "log_level", "log_format", "quiet")


def serve(
    context: typer.Context,
    folder: Folder = Path(),
    stdio: Annotated[bool, flag("--stdio", "Serve one client on standard input and output instead of HTTP.")] = False,
    host: Annotated[
        str, option("The address to bind. A token is required unless it is local.", "ADDRESS")
    ] = "127.0.0.1",
    port: Annotated[int, option("The port to bind; 0 for any free port.", "PORT", min=0, max=65535)] = 8765,
    path: Annotated[str, option("The path of the endpoint.", "PATH")] = "/mcp",
    auth_token: Token = None,
    auth_token_file: TokenFile = None,
    allow_host: Annotated[
        list[str] | None,
        option(
            "Accept this Host header besides the local ones, for example behind a proxy. May be repeated.",
            "NAME[:PORT]",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        option("Accept calls from web pages of this origin besides local ones. May be repeated.", "URL"),
    ] = None,
    insecure: Annotated[
        bool,
        flag(
            "--insecure",
            "Bind an address that is not local without a token, because something else checks the callers.",
        ),
    ] = False,
    poll: Annotated[
        float,
        option(
            "Seconds between two scans of all files, for file systems that report no changes; 0 for never.",
            "SECONDS",
            min=0,
        ),
    ] = DEFAULT_POLL,
    workers: Annotated[int, option("The number of processes that serve. They share one address.", "NUMBER", min=1)] = 1,
    nats: Annotated[
        str | None,
        option(
            "Share the catalog with all servers of this name through NATS: its URL, or `embedded` to start one. "
            "Several workers without this option start one.",
            f"URL|{EMBEDDED}",
            envvar=NATS_VARIABLE,
            show_envvar=True,
        ),
    ] = None,
    nats_credentials: NatsCredentials = None,
    metrics: Annotated[Metrics, option("The readers of /metrics: this machine, anyone, or none.")] = Metrics.LOCAL,
    console: Annotated[
        ConsoleOption | None,
        option(
            "The page /console: read-only, with calls of tools, or none. The default is read for a local address, and "
            "off for others. With a token, the page asks for it.",
            show_default=False,
        ),
    ] = None,
    state: Annotated[
        str | None,
        option(
            "The file that keeps the state across restarts, or none. The default is .tidings/state.db in the "
            "workspace.",
            "PATH|none",
            show_default=False,
        ),
    ] = None,
    log_level: Annotated[LogLevel, option("The lowest level to write to standard error.")] = LogLevel.INFO,
    log_format: Annotated[LogFormat, option("Write lines of text or of JSON.")] = LogFormat.TEXT,
    quiet: Annotated[bool, flag("--quiet", "-q", "Print only warnings and errors.")] = False,
    as_json: Annotated[
        bool, flag("--json", "Print name, URL and folder as one line of JSON on standard output.")
    ] = False,
) -> None:
    """Serve a folder as a live MCP server.

    Every client that listens is notified immediately of each change in the folder. Stop it with Ctrl-C.
    """
    check_workspace(folder)
    logs = LogOptions(log_level, log_format, quiet)
    if stdio:
        _refuse_http_options(context)
        serve_stdio(folder, poll, state, logs)
        return
    if not path.startswith("/"):
        fail(f"--path {path}: the path must start with a slash, for example /mcp")
    if re.search(r"[?#%{}\s]", path):
        fail(f"--path {path}: the path must not contain white space or any of ? # % {{ }}")
    host = host.strip("[]")  # accept an IPv6 address in brackets, as in a URL
    if auth_token is not None and auth_token_file is not None and _get_source(context, "auth_token") != "ENVIRONMENT":
        fail("--auth-token and --auth-token-file exclude each other; give one of them")
    token = auth.read_token(auth_token, auth_token_file)
    auth.erase_variable(auth.TOKEN_VARIABLE)
    auth.erase_variable(NATS_VARIABLE)
    from tidings.http.local_addresses import is_local

    if not is_local(host) and token is None and not insecure:
        fail(
            f"other machines can reach {host}, and every caller runs the tools of the workspace. "
            f"Give a token (--auth-token-file FILE, or {auth.TOKEN_VARIABLE}), "
            "or --insecure if something in front of the server checks the callers"
        )
    if workers > 1:
        nats = nats or EMBEDDED
    if nats_credentials is not None and nats in (None, EMBEDDED):
        fail("--nats-credentials is for a NATS server of your own; give its URL with --nats")
    if nats and state not in (None, "none"):
        fail(f"--state {state} is for one process; with --nats or several workers, NATS keeps the state; leave it out")
    if console is None:
        console = ConsoleOption.READ if is_local(host) else ConsoleOption.OFF
    set_up_logging(logs)
    with exit_on_signals() as check_stopped, _bind(host, port) as listener:
        server = _Server(
            check_stopped=check_stopped,
            listener=listener,
            folder=folder,
            url=_build_url(host, listener.getsockname()[1], path),
            host=host,
            path=path,
            security=auth.make_security(host, allow_host or (), allow_origin or ()),
            origins=allow_origin or (),
            token=token,
            metrics=None if metrics is Metrics.OFF else cast("Audience", metrics.value),
            console=None if console is ConsoleOption.OFF else cast("Mode", console.value),
            poll=poll,
            state=state,
            logs=logs,
            as_json=as_json,
        )
        if not nats:
            server.run()
            return
        with open_nats(nats, nats_credentials, folder, keeps_data=state is None) as (options, restart_nats):
            server = replace(server, nats=options)
            if workers == 1 and nats != EMBEDDED:
                server.run()
                return
            with without_gc():
                server.preload()
            check_stopped()
            run_workers(workers, server.run, server.greet, restart_nats)


@dataclass(frozen=True, kw_only=True)
class _Server:
    """A folder that is served over HTTP, by this process or by workers."""

    check_stopped: Callable[[], None]
    listener: socket.socket
    folder: Path
    url: str
    host: str
    path: str
    security: TransportSecuritySettings | None
    origins: Sequence[str]
    token: str | None
    metrics: Audience | None
    console: Mode | None
    poll: float
    state: str | None
    logs: LogOptions
    as_json: bool
    nats: NatsOptions | None = None

    def preload(self) -> None:
        """Import what workers need, so that they share its memory."""
        import tidings.cli.status
        import tidings.console.console
        import tidings.http.affinity
        import tidings.http.router
        import tidings.live
        import tidings.workspace.source  # noqa: F401

    def run(self, worker: Worker | None = None) -> None:
        """Serve until this process gets a signal to end."""
        is_shown = worker is None or worker.is_first  # the other workers would show the same
        if not is_shown:
            from tidings.cli.status import hide_status

            hide_status(self.logs)
        self.check_stopped()
        workspace = open_workspace(self.folder, poll=self.poll)
        self.check_stopped()
        if self.token is not None:
            auth.require_token(workspace.server, self.token, self.url)
        with without_gc():
            from tidings.cli.status import show_status
            from tidings.http.app import serve_app

            live = make_live(workspace, self.state, self.nats and self.nats.connect())
            app: Any = live.http_app(host=self.host, streamable_http_path=self.path, transport_security=self.security)
        app.router.routes.extend(live.health_routes(metrics=self.metrics, token=self.token))
        if self.console is not None:
            app.router.routes.extend(live.console_routes(self.console, token=self.token, security=self.security))
        if self.origins:
            auth.allow_origins(app, self.origins)
        name = workspace.settings.name
        items = ", ".join(pluralize(number, feature.singular) for feature, number in workspace.count_items().items())
        served = {"name": name, "items": items, "workspace": str(workspace.root)}
        self.check_stopped()
        # Before the greeting: who has read it may run a command on the folder.
        with accept_commands(live, workspace, "none" if self.nats else self.state):
            if worker is None:
                self.greet(served)
                title = None if self._is_json_log else f"{one_line(name)}  {self.url}"
            else:
                from tidings.http.affinity import SessionAffinity

                app = SessionAffinity(app, worker.name, worker.sockets)
                title = None  # a panel would show the clients of this worker alone
            with (
                export_telemetry(name, live.failures),
                show_status(live, workspace, self.logs, title=title) if is_shown else nullcontext(),
            ):
                serve_app(
                    app,
                    sockets=[self.listener] if worker is None else [self.listener, worker.listener],
                    on_start=None if worker is None else partial(worker.report, served),
                    on_signal=_limit_shutdown,
                    log_config=None,
                    access_log=self.logs.effective_level is LogLevel.DEBUG,
                )

    def greet(self, served: dict[str, str]) -> None:
        """Print what is served: the name, the items and the folder."""
        if self.as_json:
            print_json_lines([{"name": served["name"], "url": self.url, "workspace": served["workspace"]}])
        if self._is_json_log:
            logger.info("serving %s on %s", served["name"], self.url, extra={"tidings": {"event": "serving"}})
        elif not self.logs.is_quiet:
            self._print_greeting(served)

    @property
    def _is_json_log(self) -> bool:
        """Whether a program reads the log, so that neither a greeting nor a panel is printed."""
        return self.logs.format is LogFormat.JSON

    def _print_greeting(self, served: dict[str, str]) -> None:
        from tidings.http.local_addresses import is_local

        quoted = shlex.quote(str(self.folder))
        program = shell_command()
        auth_option = " --auth" if self.token is not None else ""
        print_stderr(f"Serving {one_line(served['name'])} on {self.url} ({served['items']}).")
        if not is_local(self.host) and self.token is None:
            print_stderr("Warning: there is no token, so every caller that reaches this machine may run the tools.")
        if self.console is not None:
            print_stderr(f"Console: {_build_url(self.host, self.listener.getsockname()[1], '/console')}")
        print_stderr(
            "Try next:\n"
            "  add a file to tools/: every client that listens gets the new tool\n"
            f"  {program} config {quoted} --client claude-code --http {self.url}{auth_option}    "
            "print a client's settings\n"
            f"  {program} validate {quoted}    print the problems of each file\n"
            "Stop with Ctrl-C."
        )


def _build_url(host: str, port: int, path: str) -> str:
    name = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{name}]:{port}{path}" if ":" in name else f"http://{name}:{port}{path}"


def _refuse_http_options(context: typer.Context) -> None:
    for given in context.command.params:
        if given.name not in _STDIO_OPTIONS and _get_source(context, given.name) == "COMMANDLINE":
            fail(f"{given.opts[0]} is for HTTP; with --stdio, the process that starts the server is its only client")


def _get_source(context: typer.Context, name: str) -> str | None:
    """Return the source of the value of an option: "COMMANDLINE", "ENVIRONMENT" or "DEFAULT"."""
    source = context.get_parameter_source(name)
    return source.name if source is not None else None


def _limit_shutdown() -> None:
    """Exit after a timeout even if a Python tool still runs, because its thread can't be interrupted."""

    def warn() -> None:
        logger.warning("some calls still run after %g s; exiting without them", HTTP_DEADLINE)
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # show the cursor, which the status panel has hidden
            sys.stderr.flush()

    exit_after(HTTP_DEADLINE, 0, warn)


@contextmanager
def _bind(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket. Call this before anything slow: an error is shown immediately, and early connections wait."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        fail(f"{host} is not an address that can be bound: {error.strerror or error}")
    with listener:
        if os.name == "posix":
            # Allow a port that the previous server has just released.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(2048)
        except PermissionError:
            fail(f"this user may not bind port {port}; choose one above 1023 with --port")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                fail(f"port {port} of {host} is in use; stop the program that uses it, or choose another with --port")
            fail(f"{host}:{port} can't be bound: {error.strerror or error}")
        yield listener
