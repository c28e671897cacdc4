"""`tidings config DIR --client NAME`: print the settings that a client needs, without writing a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tidings.cli.auth import TOKEN_VARIABLE
from tidings.cli.command_line import absolute_command
from tidings.cli.folder import check_folder
from tidings.cli.options import Folder
from tidings.cli.output import fail, print_json, print_stderr, print_stdout, toml_value

__all__ = ["CLIENTS", "Client", "config"]

_PLACEHOLDER = "PUT-THE-TOKEN-HERE"


class Client(StrEnum):
    CLAUDE_CODE = "claude-code"
    CLAUDE_DESKTOP = "claude-desktop"
    CLINE = "cline"
    CODEX = "codex"
    CURSOR = "cursor"
    GEMINI_CLI = "gemini-cli"
    LM_STUDIO = "lm-studio"
    OPENCODE = "opencode"
    VSCODE = "vscode"
    WINDSURF = "windsurf"
    ZED = "zed"


def _local(**more: Any) -> Callable[[list[str]], dict[str, Any]]:
    return lambda command: {**more, "command": command[0], "args": command[1:]}


def _remote(member: str = "url", **more: Any) -> Callable[[str, dict[str, str]], dict[str, Any]]:
    return lambda url, headers: {**more, member: url} | ({"headers": headers} if headers else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """The format of one client's settings. The defaults are the format that most clients have."""

    where: str
    """The file that the settings belong to, as a hint to the user."""
    member: str = "mcpServers"
    """The member that contains the servers by name."""
    local: Callable[[list[str]], dict[str, Any]] = field(default_factory=_local)
    remote: Callable[[str, dict[str, str]], dict[str, Any]] = field(default_factory=_remote)
    variable: str = _PLACEHOLDER
    """The client's syntax for the variable with the token, or a placeholder if it has none."""
    inputs: tuple[dict[str, Any], ...] = ()
    """The inputs that the client asks its user for."""


def _mcp_remote(url: str, headers: dict[str, str]) -> dict[str, Any]:
    """Return an entry that starts mcp-remote, because Claude Desktop's file supports only local processes."""
    entry: dict[str, Any] = {"command": "npx", "args": ["-y", "mcp-remote", url]}
    if headers:
        # The argument contains no space, because mcp-remote splits arguments at spaces on some systems.
        entry["args"] += ["--header", "Authorization:${AUTHORIZATION}"]
        entry["env"] = {"AUTHORIZATION": headers["Authorization"]}
    return entry


def _codex_remote(url: str, headers: dict[str, str]) -> dict[str, Any]:
    return {"url": url} | ({"bearer_token_env_var": TOKEN_VARIABLE} if headers else {})


CLIENTS = {
    Client.CLAUDE_CODE: _Format(
        where=".mcp.json in your project",
        local=_local(type="stdio"),
        remote=_remote(type="http"),
        variable=f"${{{TOKEN_VARIABLE}}}",
    ),
    Client.CLAUDE_DESKTOP: _Format(
        where="claude_desktop_config.json (Settings, Developer, Edit Config)", remote=_mcp_remote
    ),
    Client.CLINE: _Format(
        where="cline_mcp_settings.json (MCP Servers, Configure)", remote=_remote(type="streamableHttp")
    ),
    Client.CODEX: _Format(
        where="~/.codex/config.toml", member="mcp_servers", remote=_codex_remote, variable=f"${TOKEN_VARIABLE}"
    ),
    Client.CURSOR: _Format(where=".cursor/mcp.json in your project, or in ~", variable=f"${{env:{TOKEN_VARIABLE}}}"),
    Client.GEMINI_CLI: _Format(
        where=".gemini/settings.json in your project, or in ~",
        remote=_remote("httpUrl"),
        variable=f"${{{TOKEN_VARIABLE}}}",
    ),
    Client.LM_STUDIO: _Format(where="mcp.json (Program, Install, Edit mcp.json)"),
    Client.OPENCODE: _Format(
        where="opencode.json in your project",
        member="mcp",
        local=lambda command: {"type": "local", "command": command, "enabled": True},
        remote=_remote(type="remote", enabled=True),
        variable=f"{{env:{TOKEN_VARIABLE}}}",
    ),
    Client.VSCODE: _Format(
        where=".vscode/mcp.json in your project",
        member="servers",
        local=_local(type="stdio"),
        remote=_remote(type="http"),
        variable="${input:tidings-token}",
        inputs=(
            {"type": "promptString", "id": "tidings-token", "description": "The server's token", "password": True},
        ),
    ),
    Client.WINDSURF: _Format(
        where="~/.codeium/windsurf/mcp_config.json",
        remote=_remote("serverUrl"),
        variable=f"${{env:{TOKEN_VARIABLE}}}",
    ),
    Client.ZED: _Format(
        where="settings.json (zed: open settings)", member="context_servers", local=_local(source="custom", env={})
    ),
}


def config(
    client: Annotated[Client, typer.Option(help="The client.")],
    folder: Folder = Path(),
    http: Annotated[
        str | None,
        typer.Option(help="Connect to a running server at this URL instead of starting one on stdio.", metavar="URL"),
    ] = None,
    auth: Annotated[
        bool, typer.Option("--auth", help="The server requires a token. The token itself is not printed.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(help="The name of the server in the client.", metavar="NAME", show_default="its own name"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the settings as JSON for every client, and the file they belong to.")
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
    chosen = CLIENTS[client]
    key = name or _get_server_name(folder)
    if http is None:
        entry = chosen.local([*absolute_command(), "serve", str(folder.resolve()), "--stdio"])
    else:
        entry = chosen.remote(http, {"Authorization": f"Bearer {chosen.variable}"} if auth else {})
    inputs = {"inputs": list(chosen.inputs)} if auth and chosen.inputs else {}
    settings = {**inputs, chosen.member: {key: entry}}
    if as_json:
        print_json({"client": client, "where": chosen.where, "settings": settings})
        return
    if client is Client.CODEX:
        print_stdout(_format_toml(chosen.member, key, entry))
    else:
        print_json(settings)
    print_stderr(f"For {chosen.where}")
    if auth:
        if chosen.inputs:
            print_stderr("The client will ask for the token")
        elif chosen.variable == _PLACEHOLDER:
            print_stderr(f"Replace {_PLACEHOLDER} with the token")
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
