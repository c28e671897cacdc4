"""The configuration files of the programs that host clients: one table, from which servers are written and read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tidings.errors import TidingsError

__all__ = ["HOSTS", "PLACEHOLDER", "TOKEN_VARIABLE", "Host", "HostedServer", "read_servers"]

TOKEN_VARIABLE: Final = "TIDINGS_AUTH_TOKEN"
PLACEHOLDER: Final = "PUT-THE-TOKEN-HERE"


@dataclass(frozen=True)
class HostedServer:
    """A server that a client connects to: a command, or a URL."""

    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The format of one program's settings. The defaults are the format that most of them have."""

    where: str
    """The file that the settings belong to, as a hint to the user."""
    member: str = "mcpServers"
    """The member that contains the servers by name."""
    local: Mapping[str, Any] = field(default_factory=dict)
    """The other members of a server that is a command."""
    command_is_list: bool = False
    """Whether the command is a list of words, without `args`."""
    env: str = "env"
    """The member with the environment of a command."""
    remote: Mapping[str, Any] | None = field(default_factory=dict)
    """The other members of a server that is a URL; None if the program supports only commands."""
    url: str = "url"
    headers: str = "headers"
    token_variable: str | None = None
    """The member that names the variable with the token, instead of a header."""
    variable: str = PLACEHOLDER
    """The program's syntax for the variable with the token, or a placeholder if it has none."""
    inputs: tuple[dict[str, Any], ...] = ()
    """The inputs that the program asks its user for."""

    def write(self, name: str, server: HostedServer) -> dict[str, Any]:
        """Return the settings with this server."""
        if not server.url:
            words = [*server.command]
            command = {"command": words} if self.command_is_list else {"command": words[0], "args": words[1:]}
            entry = {**self.local, **command} | ({self.env: dict(server.env)} if server.env else {})
        elif self.remote is None:
            entry = _start_mcp_remote(server)
        else:
            entry = {**self.remote, self.url: server.url}
            headers = dict(server.headers)
            if self.token_variable is not None and headers.get("Authorization") == f"Bearer {self.variable}":
                entry[self.token_variable] = TOKEN_VARIABLE
                del headers["Authorization"]
            if headers:
                entry[self.headers] = headers
        return {self.member: {name: entry}}


def _start_mcp_remote(server: HostedServer) -> dict[str, Any]:
    entry: dict[str, Any] = {"command": "npx", "args": ["-y", "mcp-remote", server.url]}
    if server.headers:
        # The argument contains no space, because mcp-remote splits arguments at spaces on some systems.
        variables = {name: name.upper().replace("-", "_") for name in server.headers}
        for name, variable in variables.items():
            entry["args"] += ["--header", f"{name}:${{{variable}}}"]
        entry["env"] = {variables[name]: value for name, value in server.headers.items()}
    return entry


HOSTS: Final = {
    "claude-code": Host(
        where=".mcp.json in your project",
        local={"type": "stdio"},
        remote={"type": "http"},
        variable=f"${{{TOKEN_VARIABLE}}}",
    ),
    "claude-desktop": Host(where="claude_desktop_config.json (Settings, Developer, Edit Config)", remote=None),
    "cline": Host(where="cline_mcp_settings.json (MCP Servers, Configure)", remote={"type": "streamableHttp"}),
    "codex": Host(
        where="~/.codex/config.toml",
        member="mcp_servers",
        headers="http_headers",
        token_variable="bearer_token_env_var",
        variable=f"${TOKEN_VARIABLE}",
    ),
    "cursor": Host(where=".cursor/mcp.json in your project, or in ~", variable=f"${{env:{TOKEN_VARIABLE}}}"),
    "gemini-cli": Host(
        where=".gemini/settings.json in your project, or in ~", url="httpUrl", variable=f"${{{TOKEN_VARIABLE}}}"
    ),
    "lm-studio": Host(where="mcp.json (Program, Install, Edit mcp.json)"),
    "opencode": Host(
        where="opencode.json in your project",
        member="mcp",
        local={"type": "local", "enabled": True},
        command_is_list=True,
        env="environment",
        remote={"type": "remote", "enabled": True},
        variable=f"{{env:{TOKEN_VARIABLE}}}",
    ),
    "vscode": Host(
        where=".vscode/mcp.json in your project",
        member="servers",
        local={"type": "stdio"},
        remote={"type": "http"},
        variable="${input:tidings-token}",
        inputs=(
            {"type": "promptString", "id": "tidings-token", "description": "The server's token", "password": True},
        ),
    ),
    "windsurf": Host(
        where="~/.codeium/windsurf/mcp_config.json", url="serverUrl", variable=f"${{env:{TOKEN_VARIABLE}}}"
    ),
    "zed": Host(
        where="settings.json (zed: open settings)", member="context_servers", local={"source": "custom", "env": {}}
    ),
}


_URLS: Final = (*dict.fromkeys(host.url for host in HOSTS.values() if host.url != "url"), "url")
"""The members with a URL. Beside another one, `url` is the older transport, as in Gemini CLI."""


def read_servers(settings: Mapping[str, Any]) -> dict[str, HostedServer]:
    """Return the servers by name in the settings of any of the programs. Raise `TidingsError` if there are none."""
    for member in dict.fromkeys(host.member for host in HOSTS.values()):
        found = _objects_in(settings.get(member))
        # The user settings of VS Code have the servers in `mcp.servers`.
        if member == "mcp" and not _is_server(found.get("servers", {})):
            found = _objects_in(found.get("servers")) or found
        if found:
            return {name: _read(name, entry) for name, entry in found.items()}
    raise TidingsError('the settings have no servers; they are in the member "mcpServers"')


def _objects_in(value: Any) -> dict[str, dict[str, Any]]:
    """Return the members that are objects. Gemini CLI has settings named `mcp`, too, which are not servers."""
    return {name: each for name, each in value.items() if isinstance(each, dict)} if isinstance(value, dict) else {}


def _is_server(entry: Mapping[str, Any]) -> bool:
    return not {"command", *_URLS}.isdisjoint(entry)


def _read(name: str, members: Mapping[str, Any]) -> HostedServer:
    """Return one server, whichever program has written it."""

    def find(names: Iterable[str | None], kind: type) -> Any:
        return next((members[each] for each in names if each and isinstance(members.get(each), kind)), kind())

    hosts = HOSTS.values()
    command, headers = members.get("command"), dict(find(dict.fromkeys(host.headers for host in hosts), dict))
    words = [command, *find(["args"], list)] if isinstance(command, str) else find(["command"], list)
    if variable := find(dict.fromkeys(host.token_variable for host in hosts), str):
        headers["Authorization"] = f"Bearer ${variable}"
    url = find(_URLS, str)
    if not words and not url:
        raise TidingsError(f"the server {name!r} has neither a command nor a URL")
    return HostedServer(
        tuple(map(str, words)), dict(find(dict.fromkeys(host.env for host in hosts), dict)), url, headers
    )
