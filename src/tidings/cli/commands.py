"""What `tidings` can be told: its commands, and how they are said.

Each command is a module, and imports what it needs when it runs: `tidings --help` must not wait for the SDK.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tidings.cli.config import config
from tidings.cli.history import history
from tidings.cli.new import new
from tidings.cli.run_tool import run_tool
from tidings.cli.serve import serve
from tidings.cli.subscriptions import subscriptions
from tidings.cli.validate import validate

__all__ = ["app"]

app = typer.Typer(
    name="tidings",
    help="A folder is a live MCP server: drop a file into it, and every connected client has a new tool.",
    epilog="Begin with `tidings new my-server`, then `tidings serve my-server`.",
    no_args_is_help=True,
    # A traceback with local variables would show tokens, and bad input gets a sentence anyway.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve)
app.command("new")(new)
app.command("run-tool")(run_tool)
app.command("validate")(validate)
app.command("config")(config)
app.command("history")(history)
app.command("subscriptions")(subscriptions)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"tidings {version('tidings')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version, and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass
