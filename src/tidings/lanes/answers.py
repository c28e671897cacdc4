"""Where the process is ours: modern lists answered at the connection, before there is an ASGI request at all.

A request that was seen before, byte for byte up to its body, needs no parser; one that was not is held back until its
body is there. Either way the same verdicts and the same bytes are used as by the front, and the response is what
uvicorn would have written. When anything is missing or in doubt, the request goes on as if nothing had happened.

Only for an app that has nothing between the connection and the front: no authentication, no middleware of anybody's.
Every part of uvicorn that this relies on is named here, and shown to be there by `tests/test_seams_uvicorn.py`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.utils import get_client_addr, get_path_with_query_string

from tidings.lanes.front import Front
from tidings.lanes.lists import Kept
from tidings.lanes.parked import parts_to_take_over
from tidings.lanes.shortcut import front_of
from tidings.lanes.verdicts import LISTEN, LISTS, Claim, Form, form_of, remember

__all__ = ["FORWARDED", "Door", "QuickAnswers", "known_door"]

logger = logging.getLogger(__name__)

_LARGEST: Final = 16_384
"""Bytes of a request that is held back. A list request has a few hundred."""

_LONGEST_HEAD: Final = 2048
"""Bytes of a head that is remembered."""

_ASIDE: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade"})
FORWARDED: Final = frozenset({b"x-forwarded-for", b"x-forwarded-proto"})
"""Of which uvicorn makes the client's address in its log."""


class _Seen(NamedTuple):
    """The head of a request that was answered here: the same bytes will be parsed in the same way, so next time they
    need not be."""

    form: Form
    claim: Claim
    length: int
    """Of the body."""


_Making = asyncio.Future[bool | None]
"""An answer that is being made."""


class Door:
    """What all connections of one server share."""

    def __init__(self, app: Any, path: str, front: Front) -> None:
        self.path = path.encode()
        self.line = b"POST %b HTTP/1.1\r\n" % self.path
        """What a request for the front begins with: others are not for us, and need not be looked at."""
        self.front = front
        self._app = app
        self._route = app.routes[0]
        self._seen: dict[bytes, _Seen] = {}
        """By all the bytes of a request before its body."""
        self._streams: dict[bytes, _Seen] = {}
        """The same, of listen requests."""
        self._waiting: dict[_Making, dict[QuickAnswers, None]] = {}
        """Connections whose list is being made."""
        self._defaults: list[tuple[bytes, bytes]] | None = None
        self._start = b""
        self._begun: tuple[Kept | None, int, bytes] = (None, 0, b"")
        """Of the last response, all up to the id: it is the same for all ids of one length."""

    @property
    def is_first(self) -> bool:
        """Whether still nothing stands before the front: a route may be put there at any time."""
        routes = self._app.routes
        return bool(routes) and routes[0] is self._route

    def recognize(self, data: bytes) -> tuple[_Seen, bytes] | None:
        """A request that was seen before, if this is all of it, and its id."""
        head, _, body = data.partition(b"\r\n\r\n")
        seen = self._seen.get(head)
        if seen is None or len(body) != seen.length:
            return None
        question = self.front.verdicts.question(seen.claim.method, seen.claim.version, body)
        return None if question is None else (seen, question.tag)

    def recognize_stream(self, data: bytes) -> tuple[Claim, bytes] | None:
        """The claim and the body of a listen request whose head was seen before, if this is all of it."""
        if len(data) > _LARGEST:
            return None
        head, _, body = data.partition(b"\r\n\r\n")
        seen = self._streams.get(head)
        if seen is None or len(body) != seen.length or not self.is_first:
            return None
        return (seen.claim, body) if self.front.verdicts.known(seen.form) == seen.claim else None

    def answer(self, seen: _Seen) -> Kept | _Making | None:
        """What everybody gets who asks for this, as things are now; or, while it is being made, when to look again."""
        front, claim = self.front, seen.claim
        if not self.is_first or front.verdicts.known(seen.form) != claim or not front.may_answer(claim):
            return None
        return front.find(claim)

    def remember(self, data: bytes, form: Form, claim: Claim, body: bytes) -> None:
        head, _, rest = data.partition(b"\r\n\r\n")
        if rest == body and body and len(head) <= _LONGEST_HEAD:
            heads = self._streams if claim.method == LISTEN else self._seen
            remember(heads, head, _Seen(form, claim, len(body)))

    def wait(self, connection: QuickAnswers, making: _Making) -> None:
        """Let a connection go on when the list is made, or can't be."""
        waiting = self._waiting.get(making)
        if waiting is None:
            waiting = self._waiting[making] = {}
            making.add_done_callback(self._go_on)
        waiting[connection] = None

    def leave(self, connection: QuickAnswers) -> None:
        for waiting in self._waiting.values():
            waiting.pop(connection, None)

    def _go_on(self, making: _Making) -> None:
        # Looked up once for all that ask alike: nothing can change before the last of them has its answer.
        answers: dict[Form, Kept | _Making | None] = {}
        for connection in self._waiting.pop(making):
            try:
                connection.go_on(answers)
            except Exception:  # all the others wait for the same
                logger.exception("a connection failed when its list was there; going on")

    def start(self, defaults: list[tuple[bytes, bytes]]) -> bytes:
        """What every response begins with."""
        if self._defaults is not defaults:  # uvicorn makes a new list when the date has changed
            self._defaults = defaults
            self._start = STATUS_LINE[200] + b"".join(b"%b: %b\r\n" % (name.lower(), value) for name, value in defaults)
            self._begun = (None, 0, b"")
        return self._start

    def response(self, kept: Kept, tag: bytes, defaults: list[tuple[bytes, bytes]]) -> bytes:
        start = self.start(defaults)
        made_of, length, begin = self._begun
        if made_of is not kept or length != len(tag):
            whole = len(kept.head) + len(tag) + len(kept.tail)
            begin = b"".join((start, kept.lines % whole, b"\r\n", kept.head))
            self._begun = (kept, len(tag), begin)
        return b"".join((begin, tag, kept.tail))


_doors: WeakKeyDictionary[Config, Door] = WeakKeyDictionary()


class QuickAnswers(HttpToolsProtocol):
    """Cooperative: may stand before another subclass of uvicorn's protocol."""

    _door: Door | None = None
    _claim: Claim | None = None
    """Of the request that is held back, if one is."""
    _body = b""
    _is_between = True
    """Whether the parser stands between two requests."""
    _data: bytes | None = None
    """What has come in one piece, if it began with a request."""
    _held: tuple[bytes, _Seen, bytes] | None = None
    """A whole request whose answer is being made, and its id."""
    _answered = 0.0
    """When the last answer was given while the timer of an idle connection ran on."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._door = _door_of(self)

    def data_received(self, data: bytes) -> None:
        if self._held is not None:
            self._take_up()  # there is an order among requests, and the app keeps it
        door = self._door
        if door is not None and self._is_between and data.startswith(door.line) and self._is_free():
            recognized = door.recognize(data) if len(data) <= _LARGEST else None
            if recognized is not None and self._answer(door, data, *recognized, door.answer(recognized[0])):
                return
        self._pass_on(data)

    def go_on(self, answers: dict[Form, Kept | _Making | None]) -> None:
        """The list that was waited for is there, or can't be made."""
        held, self._held = self._held, None
        door = self._door
        if held is None or door is None:
            return
        data, seen, tag = held
        if seen.form not in answers:
            answers[seen.form] = door.answer(seen)
        if not self._is_free() or not self._answer(door, data, seen, tag, answers[seen.form]):
            self._pass_on(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._held is not None and self._door is not None:
            self._held = None
            self._door.leave(self)
        super().connection_lost(exc)

    def _answer(self, door: Door, data: bytes, seen: _Seen, tag: bytes, answer: Kept | _Making | None) -> bool:
        """Answer a request, or hold it while its answer is being made. False if the app has to be asked."""
        if isinstance(answer, Kept):
            self._respond(door, answer, tag)
        elif answer is not None:
            self._held = (data, seen, tag)
            door.wait(self, answer)
        return answer is not None

    def _pass_on(self, data: bytes) -> None:
        self._data = data if self._is_between else None
        super().data_received(data)
        self._data = None

    def _take_up(self) -> None:
        """Let a request that waits for its answer go where it would have gone."""
        held, self._held = self._held, None
        if held is not None and self._door is not None:
            self._door.leave(self)
            self._pass_on(held[0])

    def on_message_begin(self) -> None:
        self._is_between = False
        if self._door is not None:
            # A request behind one that was answered here, in the same piece: the connection is not idle after all.
            self._unset_keepalive_if_required()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._claim = self._find_claim()
        if self._claim is None:
            super().on_headers_complete()
        else:
            self._body = b""

    def on_body(self, body: bytes) -> None:
        if self._claim is None:
            super().on_body(body)
        else:
            self._body += body

    def on_message_complete(self) -> None:
        self._is_between = True
        claim, door, body = self._claim, self._door, self._body
        if claim is None or door is None:
            super().on_message_complete()
            return
        if not self._is_free() or not self._settle(door, claim, body):
            self._let_go()
            super().on_message_complete()
            return
        self._claim = None
        if self._data is not None:
            door.remember(self._data, form_of(self.headers), claim, body)

    def timeout_keep_alive_handler(self) -> None:
        rest = self._answered + self.timeout_keep_alive - self.loop.time()
        if self._held is not None:
            rest = self.timeout_keep_alive  # the one who waits is the client
        if rest <= 0:
            super().timeout_keep_alive_handler()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(rest, self.timeout_keep_alive_handler)

    def shutdown(self) -> None:
        self._take_up()
        self._let_go()
        super().shutdown()

    def _let_go(self) -> None:
        """Let a request that is held back go where it would have gone."""
        if self._claim is not None:
            self._claim = None
            super().on_headers_complete()
            if self._body:
                super().on_body(self._body)

    def _is_free(self) -> bool:
        """Whether an answer may be written here and now: nobody's is under way, and the client reads."""
        is_answered = self.cycle is None or getattr(self.cycle, "response_complete", False)
        return is_answered and not self.pipeline and not self.flow.write_paused and not self.transport.is_closing()

    def _find_claim(self) -> Claim | None:
        """What the request claims to be, if it may be a list that is answered here."""
        door = self._door
        if self.parser.should_upgrade():
            self._door = None  # whatever comes next on this connection may not be HTTP
            return None
        if (
            door is None
            or getattr(self, "url", b"") != door.path
            or not door.is_first
            or self.parser.get_method() != b"POST"
            or self.parser.get_http_version() != "1.1"
            or not self.parser.should_keep_alive()
            or not self._is_free()
        ):
            return None
        names = {name for name, _ in self.headers}
        length = next((value for name, value in self.headers if name == b"content-length"), b"")
        if names & _ASIDE or not length.isdigit():
            return None
        claim = door.front.verdicts.known(form_of(self.headers))
        if claim is None or not claim.is_clear or int(length) > _LARGEST or not self._may_settle(claim, names):
            return None
        return claim

    def _may_settle(self, claim: Claim, headers: set[bytes]) -> bool:
        return claim.method in LISTS and not (self.access_log and headers & FORWARDED)

    def _settle(self, door: Door, claim: Claim, body: bytes) -> bool:
        """Answer a request here, if that is possible."""
        found = door.front.answer(claim, body)
        if found is not None:
            self._respond(door, *found)
        return found is not None

    def _log_access(self, door: Door) -> None:
        if self.access_log and self.access_logger.isEnabledFor(logging.INFO):
            scope: Any = {"client": self.client, "path": door.path.decode(), "query_string": b""}
            path = get_path_with_query_string(scope)
            self.access_logger.info('%s - "%s %s HTTP/%s" %d', get_client_addr(scope), "POST", path, "1.1", 200)

    def _respond(self, door: Door, kept: Kept, tag: bytes) -> None:
        self._complete(door, door.response(kept, tag, self.server_state.default_headers))

    def _complete(self, door: Door, response: bytes) -> None:
        """Give a whole response."""
        self._log_access(door)
        self.transport.write(response)
        if self.timeout_keep_alive_task is None:
            self.on_response_complete()
        else:
            # A timer that is stopped and started with every answer costs as much as the answer: it is looked at when
            # it rings.
            self.server_state.total_requests += 1
            self._answered = self.loop.time()


def known_door(config: Config) -> Door | None:
    """That of a server which had a connection before, if it has one at all."""
    return _doors.get(config)


def _door_of(protocol: QuickAnswers) -> Door | None:
    config = protocol.config
    if config.root_path or config.limit_concurrency is not None:
        return None
    found = front_of(config.app)
    if found is None:
        return None
    door = _doors.get(config)
    if door is None:
        try:
            _name_parts(protocol)
        except AttributeError as error:
            logger.debug("this version of uvicorn is another than we know (%s); the app answers every list", error)
            return None
        door = _doors[config] = Door(config.app, *found)
    return door


def _name_parts(protocol: QuickAnswers) -> tuple[object, ...]:
    """All that is used of uvicorn and is there before a request is. None of it is promised, and half of it would be
    worse than nothing."""
    return (
        parts_to_take_over(protocol),
        (protocol.parser, protocol.headers, protocol.cycle, protocol.pipeline, protocol.flow.write_paused),
        (protocol.timeout_keep_alive, protocol.timeout_keep_alive_task, protocol._unset_keepalive_if_required),
        (protocol.on_response_complete, protocol.server_state.default_headers, protocol.server_state.total_requests),
        (protocol.access_log, protocol.access_logger, protocol.client, protocol.loop, protocol.transport),
    )
