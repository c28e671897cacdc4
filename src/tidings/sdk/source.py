"""A source: the server that the user has, as Tidings reads it, and its editor, as Tidings changes it.

There is one implementation for each kind of server, and a workspace is one too: it has no editor. A source reports
changes only as wake-ups; the list that the server returns decides. The lists of an `MCPServer` can be read immediately
and from any thread. Other servers can only be read with list requests, on an event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from mcp.server import Server

from tidings.core.catalog import Catalog
from tidings.core.model import Feature
from tidings.core.tracer import Tracer
from tidings.errors import InvalidItem, TidingsError

__all__ = ["Editor", "OnInvalid", "RegistryChange", "Source", "Wake", "source_of"]


class RegistryChange(NamedTuple):
    """A change of an item in the server's registry. A list without a token may not show the item."""

    key: str | None = None
    """None if it is unknown which item changed."""
    existed: bool = True
    exists: bool = True


class Wake(Protocol):
    """Called when a list may have changed."""

    def __call__(self, feature: Feature, key: str | None = None, *, changed: RegistryChange | None = None) -> None:
        """With `key`, only that item may have changed, and `read_item` can read it. With `changed`, an item has changed
        in any case."""


OnInvalid = Callable[[InvalidItem], None]
"""Called with the error of an item that is left out."""


class Editor(ABC):
    """Changes the items of a server. Its methods are called with the lock of the catalog."""

    @abstractmethod
    def add(self, feature: Feature, thing: Any, *, replace: bool, **options: Any) -> None: ...

    @abstractmethod
    def remove(self, feature: Feature, key: str) -> None: ...

    @abstractmethod
    def update(self, feature: Feature, key: str, fields: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def delete(self, uri: str) -> None:
        """Remove a resource that was deleted from the list, if the list can be changed."""


class Source(ABC):
    server: Any
    """The user's server, or the one that the source made. It makes the ASGI app."""
    lowlevel: Server[Any]
    editor: Editor | None = None
    """Present from the call of `watch` on; None if the items are files, which the user changes."""
    rescans: Mapping[str, int] = MappingProxyType({})
    """The number of scans of a folder, by outcome."""
    tracer: Tracer = Tracer()
    has_shared_lists = False
    """Whether every caller sees the same lists of such a server, unless the user replaces the code that lists them."""
    completes_handshakes = False
    """Whether a legacy client may leave out members of the `initialize` request, as hand-written scripts do."""

    @property
    def is_answering(self) -> bool:
        """Whether the items can be read. If not, the server is not ready."""
        return True

    @property
    def problems(self) -> Sequence[Any]:
        """The files that are not served as they are, each with its `path`, `line` and `message`."""
        return ()

    @abstractmethod
    def watch(self, catalog: Catalog, wake: Wake) -> None:
        """Call `wake` when a list may have changed, and update the catalog when the server says that a content did."""

    async def run(self) -> None:
        """Do the background work of the source while the server runs, until cancelled."""
        return

    def read_items(self, feature: Feature, on_invalid: OnInvalid) -> list[dict[str, Any]] | None:
        """Return the items that the server lists; None if it can only be read with list requests.

        Items without a JSON form are left out."""
        return None

    def read_item(self, feature: Feature, key: str) -> bytes | None:
        """Return the JSON of one item of `read_items`; None if there is none with this key."""
        return None

    def has_user_middleware(self) -> bool:
        """Return whether the user added middleware, which has to see every request.

        That is middleware which belongs to neither the SDK, FastMCP nor Tidings."""
        # A loop, because every list request comes here.
        for middleware in self.lowlevel.middleware:
            if not middleware.__module__.startswith(("mcp.", "fastmcp.", "tidings.")):
                return True
        return False

    def is_list_shared(self, method: str) -> bool:
        """Return whether every caller gets the same response to a list method now."""
        return self.has_shared_lists

    def normalize_uri(self, uri: str) -> str:
        """Return a URI as the server lists it."""
        return uri


def source_of(server: Any) -> Source:
    """Return the source for a server of any supported kind. A source is returned unchanged."""
    from mcp.server.mcpserver import MCPServer

    if isinstance(server, Source):
        return server
    if isinstance(server, MCPServer):
        from tidings.sdk.mcpserver import MCPServerSource

        return MCPServerSource(server)
    if isinstance(server, Server):
        from tidings.sdk.lowlevel import LowLevelSource

        return LowLevelSource(server)
    if any(kind.__name__ == "FastMCP" and kind.__module__.startswith("fastmcp.") for kind in type(server).__mro__):
        from tidings.sdk.fastmcp import FastMCPSource

        return FastMCPSource(server)
    raise TidingsError(
        f"Live() takes an MCPServer, a low-level Server, a FastMCP 4 or a Workspace, not {type(server).__module__}."
        f"{type(server).__name__}"
    )
