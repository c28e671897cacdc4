"""`tidings config DIR --client NAME`: what to paste into a client's own settings. Nothing is written anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tidings.cli.argument import Folder
from tidings.cli.executable import command
from tidings.cli.folder import check_folder
from tidings.cli.output import fail, print_json, print_text, say

__all__ = ["CLIENTS", "Client", "config"]

_VARIABLE = "TIDINGS_AUTH_TOKEN"
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


@dataclass(frozen=True, slots=True)
class _Format:
    """How a client writes a server down."""

    where: str
    member: str
    """The member of its settings that holds servers by name."""
    local: Callable[[list[str]], dict[str, Any]]
    remote: Callable[[str, dict[str, str]], dict[str, Any]]
    variable: str = _PLACEHOLDER
    """How it takes a variable of its environment inside a text, if it does."""
    inputs: tuple[dict[str, Any], ...] = ()
    """What it asks its user for."""


def _local(**more: Any) -> Callable[[list[str]], dict[str, Any]]:
    return lambda words: {**more, "command": words[0], "args": words[1:]}


def _remote(member: str = "url", **more: Any) -> Callable[[str, dict[str, str]], dict[str, Any]]:
    return lambda url, headers: {**more, member: url} | ({"headers": headers} if headers else {})


def _bridged(url: str, headers: dict[str, str]) -> dict[str, Any]:
    """Claude Desktop's file knows only processes: mcp-remote is one that passes everything on."""
    found: dict[str, Any] = {"command": "npx", "args": ["-y", "mcp-remote", url]}
    if headers:
        # Without a space after the colon, and the value apart: it splits arguments at spaces on some systems.
        found["args"] += ["--header", "Authorization:${AUTHORIZATION}"]
        found["env"] = {"AUTHORIZATION": headers["Authorization"]}
    return found


def _codex_remote(url: str, headers: dict[str, str]) -> dict[str, Any]:
    return {"url": url} | ({"bearer_token_env_var": _VARIABLE} if headers else {})


CLIENTS = {
    Client.CLAUDE_CODE: _Format(
        ".mcp.json in your project", "mcpServers", _local(type="stdio"), _remote(type="http"), f"${{{_VARIABLE}}}"
    ),
    Client.CLAUDE_DESKTOP: _Format(
        "claude_desktop_config.json (Settings, Developer, Edit Config)", "mcpServers", _local(), _bridged
    ),
    Client.CLINE: _Format(
        "cline_mcp_settings.json (MCP Servers, Configure)", "mcpServers", _local(), _remote(type="streamableHttp")
    ),
    Client.CODEX: _Format("~/.codex/config.toml", "mcp_servers", _local(), _codex_remote, f"${_VARIABLE}"),
    Client.CURSOR: _Format(
        ".cursor/mcp.json in your project, or ~/.cursor/mcp.json",
        "mcpServers",
        _local(),
        _remote(),
        f"${{env:{_VARIABLE}}}",
    ),
    Client.GEMINI_CLI: _Format(
        ".gemini/settings.json in your project, or ~/.gemini/settings.json",
        "mcpServers",
        _local(),
        _remote("httpUrl"),
        f"${{{_VARIABLE}}}",
    ),
    Client.LM_STUDIO: _Format("mcp.json (Program, Install, Edit mcp.json)", "mcpServers", _local(), _remote()),
    Client.OPENCODE: _Format(
        "opencode.json in your project",
        "mcp",
        lambda words: {"type": "local", "command": words, "enabled": True},
        _remote(type="remote", enabled=True),
        f"{{env:{_VARIABLE}}}",
    ),
    Client.VSCODE: _Format(
        ".vscode/mcp.json in your project",
        "servers",
        _local(type="stdio"),
        _remote(type="http"),
        "${input:tidings-token}",
        ({"type": "promptString", "id": "tidings-token", "description": "The server's token", "password": True},),
    ),
    Client.WINDSURF: _Format(
        "~/.codeium/windsurf/mcp_config.json", "mcpServers", _local(), _remote("serverUrl"), f"${{env:{_VARIABLE}}}"
    ),
    Client.ZED: _Format(
        "settings.json (zed: open settings)", "context_servers", _local(source="custom", env={}), _remote()
    ),
}


def config(
    client: Annotated[Client, typer.Option(help="Whose settings.")],
    folder: Folder = Path(),
    http: Annotated[
        str | None,
        typer.Option(
            help="Connect to a running server at this URL, instead of starting one on stdio.",
            metavar="URL",
        ),
    ] = None,
    auth: Annotated[
        bool, typer.Option("--auth", help="That server wants a token. It is named here, and never printed.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="What the client calls the server.", show_default="its own name")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON whatever the client's format, and where it goes.")
    ] = False,
) -> None:
    """Print what to paste into a client's settings, in that client's own format.

    The settings go to standard output, where to put them to standard error.
    """
    check_folder(folder)
    if auth and http is None:
        fail("--auth is for --http: on stdio, whoever starts the server is its only client")
    if http is not None and not re.match(r"https?://\S+$", http):
        fail(f"--http {http}: give the whole URL, as http://127.0.0.1:8765/mcp is")
    style = CLIENTS[client]
    key = name or _name(folder)
    if http is None:
        entry = style.local([*command(), "serve", str(folder.resolve()), "--stdio"])
    else:
        entry = style.remote(http, {"Authorization": f"Bearer {style.variable}"} if auth else {})
    inputs = {"inputs": list(style.inputs)} if auth and style.inputs else {}
    settings = {**inputs, style.member: {key: entry}}
    if as_json:
        print_json({"client": client, "where": style.where, "settings": settings})
        return
    if client is Client.CODEX:
        print_text(_toml(f"{style.member}.{_toml_key(key)}", entry))
    else:
        print_json(settings)
    say(f"For {style.where}")
    if auth:
        said = f"replace {_PLACEHOLDER} in it" if style.variable == _PLACEHOLDER else f"start it with {_VARIABLE} set"
        say("It will ask you for the token" if style.inputs else f"The token: {said}")


def _name(folder: Path) -> str:
    from tidings.errors import TidingsError
    from tidings.workspace.settings import load_settings

    root = folder.resolve()
    try:
        found = load_settings(root).name
    except TidingsError:
        found = root.name  # `validate` says what is wrong with the settings
    # Clients make tools' names of it, which may hold no more than this.
    return re.sub(r"[^A-Za-z0-9_-]+", "-", found).strip("-") or "workspace"


def _toml(table: str, values: dict[str, Any]) -> str:
    # Texts and lists of texts: JSON writes both as TOML does, once nothing is escaped that needn't be.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join([f"[{table}]", *lines])


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)
