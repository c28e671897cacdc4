"""The commands of `tidings`, and the parser that finds the one to run.

Only the module of the command that runs is imported: a client that starts `tidings serve DIR --stdio` waits for it. A
module imports what it needs when its command runs, so that `tidings --help` does not import the SDK.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, cast

import typer

from tidings.cli.output import fail

__all__ = ["COMMANDS", "make_app", "run"]

COMMANDS = (
    *("serve", "new", "run-tool", "validate", "config", "watch", "check", "history", "top", "subscriptions", "emit"),
    "cluster",
)
"""In the order of the help. Each is a function, or an app with commands of its own, in the module of its name."""


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the parser of these commands, and import their modules."""
    app = typer.Typer(
        name="tidings",
        help="Serve a folder as a live MCP server: add a file, and every client that listens gets a new tool.",
        epilog="Start with `tidings new my-server`, then `tidings serve my-server`.",
        no_args_is_help=True,
        # Typer's own layout shows a flag as `<bool>`, and needs Rich, which takes longer to import than all commands.
        rich_markup_mode=None,
        # A traceback with local variables would show tokens.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_common)
    for name in names:
        module = name.replace("-", "_")
        command = getattr(import_module(f"tidings.cli.{module}"), module)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


_UsageError = cast(type[Exception], typer.BadParameter.__base__)
"""Click's class. Some versions of Typer depend on Click, others contain it under a private name; none exports this."""


def run(arguments: Sequence[str]) -> None:
    """Run a command and exit with its status. A usage error is one line."""
    app = make_app(arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS)
    if not arguments:
        app(arguments, prog_name="tidings")  # prints the help
    try:
        status = app(arguments, prog_name="tidings", standalone_mode=False)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "tidings"
        message = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]  # see above
        message = message.replace("Value error, ", "")  # Pydantic's, in front of Typer's own text
        fail(f"{message}; see `{command} --help`")
    sys.exit(status)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        typer.echo(f"tidings {version('tidings')}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass
