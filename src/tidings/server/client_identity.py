"""The client behind a request or a subscription, as far as the request says.

A legacy client is identified by its session. A modern client has none: it is identified by its principal, its address
and the name and version that it gives itself (`clientInfo`). Several clients may have the same of all of these, and
then they can't be told apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, Protocol

from mcp_types import CLIENT_INFO_META_KEY, PROTOCOL_VERSION_META_KEY

from tidings.core.model import Topic
from tidings.core.subscriber import Subscriber
from tidings.server.authorization import Principal

__all__ = ["ClientIdentity", "ClientObserver"]


class ClientIdentity(NamedTuple):
    name: str = ""
    version: str = ""
    protocol: str = ""
    principal: tuple[str, str | None] | None = None
    address: str | None = None
    session: str | None = None
    """The id of a legacy session. It is a secret."""

    @property
    def key(self) -> Hashable:
        """A value that is equal for two requests of one client."""
        return self.session or (self.principal, self.address, self.name, self.version)

    @classmethod
    def of_modern(cls, meta: object, principal: Principal | None, address: str | None) -> ClientIdentity:
        """Return the client of a modern request with this `_meta`."""
        members: Mapping[str, Any] = meta if isinstance(meta, Mapping) else {}
        protocol = members.get(PROTOCOL_VERSION_META_KEY)
        return cls(
            *_name_and_version(members.get(CLIENT_INFO_META_KEY)),
            protocol if isinstance(protocol, str) else "",
            principal.identity if principal is not None else None,
            address,
        )

    @classmethod
    def of_session(
        cls, session: str, info: object, protocol: str, principal: Principal | None, address: str | None
    ) -> ClientIdentity:
        """Return the client of a legacy session, with the `clientInfo` of its handshake."""
        identity = principal.identity if principal is not None else None
        return cls(*_name_and_version(info), protocol, identity, address, session)


def _name_and_version(info: object) -> tuple[str, str]:
    if not isinstance(info, Mapping):
        return "", ""
    name, version = info.get("name"), info.get("version")
    return name if isinstance(name, str) else "", version if isinstance(version, str) else ""


class ClientObserver(Protocol):
    """Learns which clients subscribe, and which fetch a list or a content. It is called on the event loop."""

    def client_connected(self, subscriber: Subscriber, client: ClientIdentity) -> None:
        """Called after a client opened a subscription. It may have been notified already, of what it missed."""

    def client_fetched(self, client: ClientIdentity, topic: Topic, revision: int) -> None:
        """Called when a client gets a list or a content as of a revision, or later."""
