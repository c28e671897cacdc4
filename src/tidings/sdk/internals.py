"""All private parts of the SDK, FastMCP and OpenTelemetry that Tidings uses.

None of them has a public equivalent in the supported versions. Their names are in a table for each package, and are
checked at the start. `tests/sdk/test_internals.py` fails if a name still exists but works differently. The parts of
uvicorn that Tidings uses are in `http/disconnects.py`.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
from mcp.server.subscriptions import ListenHandler
from opentelemetry import trace

from tidings.core.model import Feature
from tidings.dependencies import Names, check_names, warn_of_missing_names
from tidings.wire.methods import DISCOVER, LIST_METHODS, LISTEN

if TYPE_CHECKING:
    from fastmcp import FastMCP
    from mcp.server import Server
    from mcp.server.auth.provider import TokenVerifier
    from mcp.server.auth.settings import AuthSettings
    from mcp.server.connection import Connection
    from mcp.server.mcpserver import MCPServer
    from mcp.server.session import ServerSession
    from mcp.server.streamable_http import StreamableHTTPServerTransport
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from mcp.server.subscriptions import SubscriptionBus

__all__ = [
    "FASTMCP_NAMES",
    "FASTMCP_SCHEMA_NAMES",
    "OPENTELEMETRY_NAMES",
    "SDK_NAMES",
    "WatchedDict",
    "buses_of",
    "check_fastmcp",
    "claim_stdio",
    "connection_of",
    "fastmcp_endpoint",
    "follow_apps",
    "has_input_schemas",
    "has_standard_discover",
    "has_standard_list",
    "has_tracer",
    "lifespan_state_of",
    "lowlevel_of",
    "notify_request",
    "registry_of",
    "restart_idle_timeout",
    "session_of",
    "set_auth",
    "watch_fastmcp",
    "watch_mcpserver",
    "write_stream_of",
]

SDK_NAMES: Final[Names] = {
    "mcp.server.connection:NotifyOnlyOutbound": ["_outbound"],
    "mcp.server.lowlevel:Server": ["_handle_discover"],
    "mcp.server.mcpserver:MCPServer": [
        "_handle_list_prompts",
        "_handle_list_resource_templates",
        "_handle_list_resources",
        "_handle_list_tools",
        "_lowlevel_server",
        "_prompt_manager",
        "_resource_manager",
        "_subscriptions",
        "_token_verifier",
        "_tool_manager",
    ],
    "mcp.server.mcpserver.prompts:PromptManager": ["_prompts"],
    "mcp.server.mcpserver.resources:ResourceManager": ["_resources", "_templates"],
    "mcp.server.mcpserver.tools:ToolManager": ["_tools"],
    "mcp.server.session:ServerSession": ["_connection", "_request_outbound"],
    "mcp.server.stdio": ["_claim_fd", "_open_stdin_diversion", "_open_stdout_diversion"],
    "mcp.server.streamable_http:StreamableHTTPServerTransport": ["_idle_timeout", "_requests_in_flight"],
    "mcp.server.streamable_http_manager:StreamableHTTPSessionManager": [
        "_lifespan_state",
        "_server_instances",
        "_session_owners",
    ],
    "mcp.server.subscriptions:ListenHandler": ["_bus"],
    "mcp.shared.jsonrpc_dispatcher:JSONRPCDispatcher": ["_write_stream"],
}
FASTMCP_NAMES: Final[Names] = {
    "fastmcp:FastMCP": ["_mcp_server"],
    "fastmcp.server.providers:LocalProvider": ["_components"],
}
FASTMCP_SCHEMA_NAMES: Final = ["_seed_schema"]
"""Private names of the local provider, if the server keeps input schemas (`has_input_schemas`)."""
OPENTELEMETRY_NAMES: Final[Names] = {"opentelemetry.trace": ["_TRACER_PROVIDER"]}
"""Without it, Tidings makes spans that nobody collects."""

check_names("mcp", SDK_NAMES)
warn_of_missing_names("opentelemetry-api", OPENTELEMETRY_NAMES)


def check_fastmcp(server: FastMCP[Any]) -> None:
    """Raise `UnsupportedVersion` if this version of FastMCP lacks a name that Tidings uses."""
    check_names("fastmcp", FASTMCP_NAMES)
    if has_input_schemas(lowlevel_of(server)):
        kind = type(server.local_provider)
        check_names("fastmcp", {f"{kind.__module__}:{kind.__qualname__}": FASTMCP_SCHEMA_NAMES})


def has_tracer() -> bool:
    """Return whether the process has a tracer provider, so that spans are used.

    Asking the tracer costs as much as a span. The public function that returns the provider reads the environment each
    time."""
    return getattr(trace, "_TRACER_PROVIDER", trace) is not None  # True if the attribute was renamed


def connection_of(session: ServerSession) -> Connection:
    """Return the connection of a request. It has a `state`, and an `exit_stack` that is closed with it."""
    return session._connection


async def notify_request(session: ServerSession, method: str, params: Mapping[str, Any] | None) -> None:
    """Send any notification on the channel of the request, as the SDK's handlers do with a related request id."""
    await session._request_outbound.notify(method, params)


def write_stream_of(connection: Connection) -> object:
    """Return the stream to which the SDK writes all messages of a connection, on a transport with a pair of streams."""
    outbound: Any = connection.outbound
    return getattr(getattr(outbound, "_outbound", outbound), "_write_stream", None)


@contextmanager
def claim_stdio() -> Iterator[tuple[int, int]]:
    """Yield the descriptors of standard input and output, and divert both for the rest of the process, as the SDK's
    own transport does: reads find nothing, and output goes to standard error."""
    from mcp.server import stdio

    printed = sys.stdout
    if isinstance(printed, io.TextIOWrapper):
        printed.reconfigure(line_buffering=True)  # what a tool prints is seen at once
    stdin, release_stdin = stdio._claim_fd(0, sys.stdin, "rb", stdio._open_stdin_diversion)
    try:
        stdout, release_stdout = stdio._claim_fd(1, sys.stdout, "wb", stdio._open_stdout_diversion)
        try:
            yield stdin.fileno(), stdout.fileno()
        finally:
            with suppress(OSError, ValueError):  # standard error is gone, or a tool has closed the stream
                printed.flush()  # otherwise the rest of a line would reach the client at the exit
            if release_stdout is not None:
                release_stdout()
    finally:
        if release_stdin is not None:
            release_stdin()


def lowlevel_of(server: MCPServer[Any] | FastMCP[Any]) -> Server[Any]:
    """Return the low-level server of a high-level one."""
    lowlevel: Server[Any] = server._mcp_server if hasattr(server, "_mcp_server") else server._lowlevel_server
    return lowlevel


def has_standard_list(server: MCPServer[Any], path: str) -> bool:
    """Return whether a list comes from the SDK's own method and handler, which return the same to every caller.

    The user may replace both at any time, on the server or in a subclass."""
    from mcp.server.mcpserver import MCPServer

    name, entry = LIST_METHODS[path].function, lowlevel_of(server).get_request_handler(path)
    kind, handle = type(server), f"_handle_{name}"
    return (
        name not in vars(server)
        and getattr(kind, name) is getattr(MCPServer, name)
        and getattr(kind, handle) is getattr(MCPServer, handle)
        and entry is not None
        and entry.handler == getattr(server, handle)
    )


def has_standard_discover(server: Server[Any]) -> bool:
    """Return whether `server/discover` is answered by the SDK's or FastMCP's own code, the same for every caller."""
    entry = server.get_request_handler(DISCOVER)
    capabilities = server.get_capabilities
    return (
        entry is not None
        and entry.handler == server._handle_discover
        and all(each.__module__.startswith(("mcp.", "fastmcp.")) for each in (entry.handler, capabilities))
    )


def lifespan_state_of(manager: StreamableHTTPSessionManager) -> Any:
    """Return the state of the server's lifespan while the manager runs. Handlers find it in their context."""
    return manager._lifespan_state


def session_of(
    manager: StreamableHTTPSessionManager, session_id: str, user: object
) -> StreamableHTTPServerTransport | None:
    """Return a legacy session that is open and belongs to this caller, by the same checks as the manager's."""
    from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, authorization_context

    transport = manager._server_instances.get(session_id)
    owner = authorization_context(user) if isinstance(user, AuthenticatedUser) else None
    if transport is None or transport.is_terminated or owner != manager._session_owners.get(session_id):
        return None
    is_ending = transport.idle_scope is not None and transport.idle_scope.cancel_called
    return None if is_ending else transport


def restart_idle_timeout(transport: StreamableHTTPServerTransport) -> None:
    """Restart the idle timeout of a session, as its transport does after a request."""
    if transport.idle_scope is None or transport._idle_timeout is None or transport._requests_in_flight:
        return
    transport.idle_scope.deadline = anyio.current_time() + transport._idle_timeout


def buses_of(server: object, lowlevel: Server[Any]) -> list[SubscriptionBus]:
    """Return the buses with change events: that of `ctx.notify_*()`, and that of the handler of listen requests."""
    from mcp.server.mcpserver import MCPServer

    entry = lowlevel.get_request_handler(LISTEN)
    found = [server._subscriptions] if isinstance(server, MCPServer) else []
    if entry is not None and isinstance(entry.handler, ListenHandler) and entry.handler._bus not in found:
        found.append(entry.handler._bus)
    return found


def registry_of(server: MCPServer[Any], name: str) -> dict[str, Any]:
    """Return a dict with items of an `MCPServer`: "tools", "prompts", "resources" or "templates".

    The server has no methods to remove a resource or to update an item."""
    registry: dict[str, Any] = getattr(_manager_of(server, name), f"_{name}")
    return registry


def _manager_of(server: MCPServer[Any], name: str) -> Any:
    match name:
        case "tools":
            return server._tool_manager
        case "prompts":
            return server._prompt_manager
    return server._resource_manager


def set_auth(server: MCPServer[Any], settings: AuthSettings, verifier: TokenVerifier) -> None:
    """Require a token. The public way is only in the constructor of `MCPServer`."""
    server.settings.auth = settings
    server._token_verifier = verifier


def has_input_schemas(lowlevel: Server[Any]) -> bool:
    """Return whether a server keeps the input schemas of its tools in a second place, for the check of headers.

    FastMCP does from version 4.2. Otherwise the SDK checks by the tools that the server lists."""
    return lowlevel.get_tool_input_schema is not None


def watch_mcpserver(
    server: MCPServer[Any],
    changed: Callable[[Feature, str | None, Any, Any], None],
    lock: AbstractContextManager[Any],
) -> None:
    """Call `changed` after each change of a registry, with the feature and the arguments of `OnChange`.

    From now on, each change of a registry holds the lock."""
    for name in ("tools", "prompts", "resources", "templates"):
        feature = Feature.RESOURCES if name == "templates" else Feature(name)
        watched = WatchedDict(registry_of(server, name), partial(changed, feature), lock)
        setattr(_manager_of(server, name), f"_{name}", watched)


def watch_fastmcp(
    server: FastMCP[Any], changed: OnChange, wake: Callable[[], None], lock: AbstractContextManager[Any]
) -> None:
    """Call `changed` after each change of the registry of a server, and `wake` after a change of its providers,
    transforms and middleware."""
    provider = server.local_provider
    provider._components = WatchedDict(provider._components, changed, lock)
    # These methods are replaced, because FastMCP keeps what they add in several places, and reports no change.
    for name in ("add_provider", "mount", "add_transform", "enable", "disable", "add_middleware"):
        _call_after(server, name, wake)


def _call_after(owner: Any, name: str, function: Callable[[], None]) -> None:
    """Call a function after each call of a method of `owner`."""
    original = getattr(owner, name, None)
    if original is None:
        return

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            function()

    setattr(owner, name, wrapped)


def follow_apps(server: Any, lowlevel: Server[Any], function: Callable[[Any], None]) -> None:
    """Call a function with each streamable HTTP app that a server makes, also for its own `run()`.

    A method of the server is replaced, because neither the SDK nor FastMCP has a hook for it. A high-level server of
    the SDK calls the method of its low-level one."""
    is_sdk = hasattr(server, "streamable_http_app")
    owner, name = (lowlevel, "streamable_http_app") if is_sdk else (server, "http_app")
    original = getattr(owner, name)

    def make_app(*args: Any, **kwargs: Any) -> Any:
        app = original(*args, **kwargs)
        if "sse" not in (*args, kwargs.get("transport")):
            function(app)
        return app

    setattr(owner, name, make_app)


def fastmcp_endpoint(app: Any) -> Any:
    """Return FastMCP's ASGI endpoint inside its authentication. Each start of the app gives it a `session_manager`."""
    from fastmcp.server.http import StreamableHTTPASGIApp

    for route in app.routes:
        endpoint = getattr(route, "endpoint", None)
        while endpoint is not None:
            if isinstance(endpoint, StreamableHTTPASGIApp):
                return endpoint
            endpoint = getattr(endpoint, "app", None)
    raise LookupError("this version of FastMCP has no streamable HTTP endpoint where Tidings looks for it")


OnChange = Callable[[str | None, Any, Any], None]
"""Called with a key and its values before and after a change; None for no value. If the key is None, any key may have
changed."""


class WatchedDict(dict[str, Any]):
    """A dict that calls a function after each change.

    The change and the call hold one lock, so that a holder of the lock never sees a change before its call."""

    def __init__(self, items: dict[str, Any], changed: OnChange, lock: AbstractContextManager[Any]) -> None:
        super().__init__(items)
        self._changed = changed
        self._lock = lock

    def _change(self, key: str | None, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            before = None if key is None else self.get(key)
            result = method(*args, **kwargs)
            after = None if key is None else self.get(key)
            if key is None or before is not None or after is not None:
                self._changed(key, before, after)
            return result

    def __setitem__(self, key: str, value: Any) -> None:
        self._change(key, super().__setitem__, key, value)

    def __delitem__(self, key: str) -> None:
        self._change(key, super().__delitem__, key)

    def __ior__(self, other: Any) -> WatchedDict:  # type: ignore[override, misc]  # dict's own is an overload for pairs
        self.update(other)
        return self

    def pop(self, key: str, *default: Any) -> Any:
        return self._change(key, super().pop, key, *default)

    def popitem(self) -> tuple[str, Any]:
        key = next(reversed(self), "")
        return key, self.pop(key)

    def clear(self) -> None:
        self._change(None, super().clear)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._change(None, super().update, *args, **kwargs)

    def setdefault(self, key: str, default: Any = None) -> Any:
        return self._change(key, super().setdefault, key, default)
