"""`tidings config DIR --client NAME`: print the settings that a client needs, without writing a file."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tidings.cli.command_line import absolute_command
from tidings.cli.folder import check_folder
from tidings.cli.options import Folder, flag, option
from tidings.cli.output import fail, print_json, print_stderr, print_stdout, toml_value
from tidings.client.hosts import HOSTS, PLACEHOLDER, TOKEN_VARIABLE, HostedServer

__all__ = ["config"]


if TYPE_CHECKING:
    _Client = str
else:
    _Client = StrEnum("Client", {name: name for name in HOSTS})


def config(
    client: Annotated[_Client, option("The client.")],
    folder: Folder = Path(),
    http: Annotated[
        str | None, option("Connect to a running server at this URL instead of starting one on stdio.", "URL")
    ] = None,
    auth: Annotated[bool, flag("--auth", "The server requires a token. The token itself is not printed.")] = False,
    name: Annotated[
        str | None, option("The name of the server in the client.", "NAME", show_default="its own name")
    ] = None,
    as_json: Annotated[
        bool, flag("--json", "Print the settings as JSON for every client, and the file they belong to.")
    ] = False,
) -> None:
    """Print the settings that connect a client to a workspace.

    They have the client's own format. The file that they belong to is printed on standard error.
    """
    check_folder(folder)
    if auth and http is None:
        fail("--auth requires --http: on stdio, the client starts the server itself")
    if http is not None and not re.match(r"https?://\S+$", http):
        fail(f"--http {http}: give the whole URL, for example http://127.0.0.1:8765/mcp")
    chosen = HOSTS[client]
    key = name or _get_server_name(folder)
    if http is None:
        server = HostedServer((*absolute_command(), "serve", str(folder.resolve()), "--stdio"))
    else:
        server = HostedServer(url=http, headers={"Authorization": f"Bearer {chosen.variable}"} if auth else {})
    inputs = {"inputs": list(chosen.inputs)} if auth and chosen.inputs else {}
    settings = inputs | chosen.write(key, server)
    if as_json:
        print_json({"client": client, "where": chosen.where, "settings": settings})
        return
    if client == "codex":
        print_stdout(_format_toml(chosen.member, key, settings[chosen.member][key]))
    else:
        print_json(settings)
    print_stderr(f"For {chosen.where}")
    if auth:
        if chosen.inputs:
            print_stderr("The client will ask for the token")
        elif chosen.variable == PLACEHOLDER:
            print_stderr(f"Replace {PLACEHOLDER} with the token")
        else:
            print_stderr(f"Start the client with the token in {TOKEN_VARIABLE}")


def _get_server_name(folder: Path) -> str:
    from tidings.errors import TidingsError
    from tidings.workspace.settings import load_settings

    root = folder.resolve()
    try:
        name = load_settings(root).name
    except TidingsError:
        name = root.name  # `tidings validate` reports the error in the settings
    # Clients use the name in tool names, which may contain only these characters.
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "workspace"


def _format_toml(table: str, key: str, values: dict[str, Any]) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", key):
        key = toml_value(key)
    return "\n".join([f"[{table}.{key}]", *(f"{name} = {toml_value(value)}" for name, value in values.items())])
