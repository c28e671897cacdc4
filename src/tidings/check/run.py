"""One run of `tidings check`: the sessions that its checks share, and its report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidings.check.listing import Refused, ServerList, read_content, read_lists
from tidings.check.report import Report
from tidings.check.transcript import Transcript
from tidings.core.model import Feature
from tidings.core.redact import one_line
from tidings.errors import Disconnected
from tidings.wire.http import HttpClientSession
from tidings.wire.methods import LIST_METHODS
from tidings.wire.session import LEGACY, MODERN, Era, Frame, Session, Stream, Unanswered
from tidings.wire.stdio import StdioClientSession

__all__ = ["CheckOptions", "Listener", "Run"]

_MAX_URIS = 3
"""Resources that are subscribed to if the user names none."""


@dataclass(frozen=True)
class CheckOptions:
    target: str | tuple[str, ...]
    """A URL, or the words of a command."""
    name: str
    headers: Mapping[str, str] = field(default_factory=dict)
    token: str | None = None
    second_token: str | None = None
    token_expires: float | None = None
    """Seconds after the start of the check."""
    replicas: tuple[str, ...] = ()
    uris: tuple[str, ...] = ()
    trigger: str | None = None
    timeout: float = 20.0
    quiet_time: float = 3.0


class Listener(NamedTuple):
    """A session, and the stream on which it is told of changes."""

    session: Session
    stream: Stream

    def is_promised(self, feature: Feature) -> bool:
        """Return whether the server has promised to notify of this list."""
        if self.stream.request_id is not None:
            return self.stream.granted.get(f"{feature.value}ListChanged") is True
        return self.session.advertises(feature)

    @property
    def uris(self) -> list[str]:
        """The URIs of which the server has promised to notify."""
        if self.stream.request_id is None:
            return sorted(self.stream.subscribed)
        found = self.stream.granted.get("resourceSubscriptions")
        return [uri for uri in found if isinstance(uri, str)] if isinstance(found, list) else []


class Run:
    def __init__(self, options: CheckOptions, on_progress: Callable[[str], None]) -> None:
        self.options = options
        self.progress = on_progress
        self.transcript = Transcript()
        self.report = Report(options.name)
        self.modern: Session | None = None
        self.legacy: Session | None = None
        self.missing: dict[Era, str] = {}
        """The reason why an era has no session, by era."""
        self.refusals: list[str] = []
        self.opened: list[Session] = []
        """All sessions of the check."""
        self.listeners: list[Listener] = []
        self.uris: list[str] = []
        """The resources to which the check subscribes."""
        self.before: dict[Session, dict[str, ServerList]] = {}
        """The lists of the first session of each era, before anything else."""
        self.contents: dict[str, Any] = {}
        """The contents of those resources that are the same whenever they are read."""
        self._counts: dict[str, int] = {}
        self._refused: dict[Era, set[str]] = {}
        """For each era, the list requests that the server answered with an error when the check began."""
        self.fetched: dict[tuple[Session, Feature], float] = {}
        """The time of the first answer to a list request. Before it, the client knows no list."""

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *_: object) -> None:
        # All at once: a process that ignores SIGTERM takes ten seconds.
        await asyncio.gather(*(session.close() for session in self.opened), return_exceptions=True)

    @property
    def sessions(self) -> list[Session]:
        """The first session of each era that the server supports."""
        return [session for session in (self.modern, self.legacy) if session is not None]

    @property
    def is_http(self) -> bool:
        return isinstance(self.options.target, str)

    async def open(self, era: Era, *, token: str | None = None, url: str | None = None) -> Session:
        """Open a new session. On stdio, it is a new process."""
        options = self.options
        self._counts[era] = self._counts.get(era, 0) + 1
        channel = f"{era} session {self._counts[era]}"
        session: Session
        common: dict[str, Any] = {"client": "tidings-check", "channel": channel, "record": self.transcript.record}
        if isinstance(options.target, str):
            headers = dict(options.headers)
            if (bearer := token or options.token) is not None:
                headers["Authorization"] = f"Bearer {bearer}"
            session = HttpClientSession(url or options.target, era, options.timeout, headers=headers, **common)
        else:
            session = StdioClientSession(options.target, era, options.timeout, **common)
        self.opened.append(session)
        await session.open()
        if session.discovery is not None and session.discovery.result is None:
            raise Unanswered(one_line(f"it answered {json.dumps(session.discovery.content)}", 200))
        return session

    async def connect(self) -> None:
        """Open the first session of each era. Raise `Disconnected` if the server supports none."""
        self.modern, self.legacy = await asyncio.gather(self._try("modern"), self._try("legacy"))
        if not self.sessions:
            reason = self.refusals[-1]
            hint = "; give a token with --auth-token-file" if "HTTP 401" in reason or "HTTP 403" in reason else ""
            raise Disconnected(f"{self.options.name} can't be checked: {reason}{hint}")
        self.report.server = self.sessions[0].name
        self.report.transport = self.sessions[0].transport
        self.report.protocols = [each.version for each in self.sessions]

    async def _try(self, era: Era) -> Session | None:
        try:
            return await self.open(era)
        except Unanswered as error:
            version = MODERN if era == "modern" else LEGACY
            self.missing[era] = f"there is no session of {version}: {error}"
            self.refusals.append(str(error))
            return None

    async def read_first_lists(self) -> None:
        """Read the lists before anything else, and choose the resources to subscribe to."""
        for session in self.sessions:
            self.before[session] = await self._read_known_lists(session)
        listing = self.before[self.sessions[0]].get("resources/list")
        self.uris = list(self.options.uris) or (listing.keys[:_MAX_URIS] if listing else [])
        for uri in self.uris:
            first, second = [await read_content(self.sessions[0], uri) for _ in range(2)]
            if first is not None and first == second:
                self.contents[uri] = first

    async def lists(self, session: Session) -> dict[str, ServerList]:
        """Read the lists of all features that the server declares, except for those that it refused."""

        def set_fetched(method: str, page: Frame) -> None:
            self.fetched.setdefault((session, LIST_METHODS[method].feature), page.time)

        return await read_lists(session, self._refused.get(session.era, ()), set_fetched)

    async def _read_known_lists(self, session: Session) -> dict[str, ServerList]:
        """Read the lists of a first session. Later sessions of its era do not ask for those that it is refused."""
        while True:
            try:
                return await self.lists(session)
            except Refused as error:
                self._refused.setdefault(session.era, set()).add(error.method)
                self.report.problems.append(f"lists: {error}")

    def skip(self, rules: Sequence[str], reason: str) -> None:
        for rule in rules:
            self.report.skip(rule, reason)

    def passed(self, *rules: str) -> None:
        """Mark rules as checked. They pass unless the report has a finding of them."""
        self.report.checked.update(rules)
