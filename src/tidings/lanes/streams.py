"""The connections of our own process: lists answered and listen streams opened there, and all streams parked.

A stream is opened at its connection, without an ASGI request, where a list would be answered there (`QuickAnswers`),
and its request came alone. Every check is the one of the whole way (`Front`, `ListenLane`): what the headers and the
body say, the limits, the server's authorization. Whatever has to be waited for, and every answer that is not a stream,
goes the whole way.
"""

from __future__ import annotations

from contextvars import copy_context
from functools import partial

from tidings.lanes.answers import FORWARDED, Door, QuickAnswers
from tidings.lanes.channel import limit_silence
from tidings.lanes.listen import STREAM_HEADERS, ListenStream
from tidings.lanes.parked import Parked, ParkingProtocol
from tidings.lanes.verdicts import LISTEN, Claim
from tidings.policy import Policy

__all__ = ["Connection"]

_HEAD = b"".join(b"%b: %b\r\n" % header for header in [*STREAM_HEADERS, (b"transfer-encoding", b"chunked")])


class Connection(QuickAnswers, ParkingProtocol):
    """uvicorn's, for its option `http`."""

    def _may_settle(self, claim: Claim, headers: set[bytes]) -> bool:
        # Who is behind a proxy is counted by the address that the proxy names, which is for uvicorn to find out.
        return super()._may_settle(claim, headers) or (claim.method == LISTEN and not headers & FORWARDED)

    def _settle(self, door: Door, claim: Claim, body: bytes, *, is_alone: bool) -> bool:
        if claim.method != LISTEN:
            return super()._settle(door, claim, body, is_alone=is_alone)
        if not is_alone:
            return False
        address = self.client[0] if self.client else None
        # In a context of its own, as a request's task is: what is set in there is of this request alone.
        return copy_context().run(door.front.open_at_once, claim, body, address, partial(self._begin, door))

    def _begin(self, door: Door, acknowledged: bytes, stream: ListenStream, policy: Policy) -> Parked:
        self._log_access(door)
        self._unset_keepalive_if_required()
        limit_silence(self.transport, policy)
        # First, since it hears of it if the reader has to be waited for.
        parked = self.park(stream, policy.write_deadline)
        start = door.start(self.server_state.default_headers)
        self.transport.write(b"%b%b\r\n%x\r\n%b\r\n" % (start, _HEAD, len(acknowledged), acknowledged))
        return parked
