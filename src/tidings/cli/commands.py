"""The commands of `tidings`, and the parser that finds the one to run.

Each command is a module that imports what it needs when it runs, so that `tidings --help` does not import the SDK.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from tidings.cli.check import check
from tidings.cli.cluster import cluster
from tidings.cli.config import config
from tidings.cli.emit import emit
from tidings.cli.history import history
from tidings.cli.new import new
from tidings.cli.output import fail
from tidings.cli.run_tool import run_tool
from tidings.cli.serve import serve
from tidings.cli.subscriptions import subscriptions
from tidings.cli.top import top
from tidings.cli.validate import validate
from tidings.cli.watch import watch

__all__ = ["app", "run"]

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
app.command("serve")(serve)
app.command("new")(new)
app.command("run-tool")(run_tool)
app.command("validate")(validate)
app.command("config")(config)
app.command("watch")(watch)
app.command("check")(check)
app.command("history")(history)
app.command("top")(top)
app.command("subscriptions")(subscriptions)
app.command("emit")(emit)
app.add_typer(cluster, name="cluster")

_UsageError = cast(type[Exception], typer.BadParameter.__base__)
"""Click's class. Some versions of Typer depend on Click, others contain it under a private name; none exports this."""


def run(arguments: Sequence[str]) -> None:
    """Run a command and exit with its status. A usage error is one line."""
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


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass
