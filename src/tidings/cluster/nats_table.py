"""Write and watch a table in NATS, a stream that is a key-value bucket, through one connection.

The server deletes expired keys, and leaves a marker in the stream. So all watchers see an expiry in the same order as
the writes. The commands `nats kv` can read the bucket; its keys are encoded (`nats_names`).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from tidings.cluster.backend import Entry, TooLarge, Unavailable, Watcher, Write
from tidings.cluster.nats_client import Client, Lost, Msg, NatsError, Refused, request_json
from tidings.cluster.nats_names import KEY_HEADER, SubjectError, decode_key, encode_key

__all__ = ["Table", "find_stream"]

HEARTBEAT = 0.5
"""Seconds between two messages of an idle consumer."""
MISSED_HEARTBEATS = 4
"""Heartbeats in a row without which the consumer counts as lost: 2 s. Fewer could be the delay of a busy event loop."""
MARKER_TTL = 600
"""Seconds for which a deletion stays in the stream: longer than the server keeps a connection that does not respond."""
CONSUMER_TTL = 5
"""Seconds after which the server deletes a consumer whose connection is gone."""
ACK_TIMEOUT = 5.0
"""Seconds for the acknowledgement of a write."""
WRITES_IN_FLIGHT = 500
"""The server refuses writes if too many wait (10,000 of all clients)."""

STREAM_NOT_FOUND = 10059
STREAM_EXISTS = 10058  # with another configuration
WRONG_LAST_SEQUENCE = 10071
_NO_SEQUENCE = 1 << 62


class _Message(NamedTuple):
    subject: str
    value: bytes
    headers: dict[str, str] | None


async def find_stream(client: Client, name: str) -> dict[str, Any] | None:
    """Return the description of a stream, or None if there is no such stream."""
    try:
        return await request_json(client, f"STREAM.INFO.{name}")
    except Refused as error:
        if error.code == STREAM_NOT_FOUND:
            return None
        raise


class _Ack(NamedTuple):
    sequence: int | None = None
    """The sequence of the stored message; None if the write did not find the expected entry."""
    problem: str | None = None


class Table:
    """Read and write the bucket over one connection. A new connection needs a new object."""

    def __init__(
        self, client: Client, bucket: str, copies: int, old_consumers: set[str], on_undecodable: Callable[[], None]
    ) -> None:
        self._client = client
        self._stream = f"KV_{bucket}"
        self._subject = f"$KV.{bucket}."
        self._copies = copies
        self._on_undecodable = on_undecodable
        self._inbox = client.new_inbox()
        self._old_consumers = old_consumers
        """The consumers of earlier connections that could not be deleted."""
        self._consumer: str | None = None
        self._lock = asyncio.Lock()
        self._acks: dict[str, asyncio.Future[_Ack]] = {}
        self._count = 0
        self._long_keys: dict[str, str] = {}
        """The long keys by subject, because the server's marker of an expired key has no `KEY_HEADER`."""
        self._queue: deque[Msg] = deque()
        self._received = asyncio.Event()
        self._close_reason: str | None = None
        self._start = 0
        """The order of an entry is this plus its sequence in the stream."""

    async def watch(self, watcher: Watcher, on_load: Callable[[], None]) -> None:
        """Load the table into the watcher, then apply the writes. Raise `Lost` if one may be missed.

        `on_load` is called just before the load; from then on, `write` works.
        """
        await self._client.subscribe(f"{self._inbox}.ack.*", cb=self._acknowledge)
        stream = await self._open_stream()
        created: str = stream["created"]
        start = self._start = int(datetime.fromisoformat(created[:26].rstrip("Z") + "+00:00").timestamp() * 1000)
        last: int = stream["state"]["last_seq"]
        pending = await self._create_consumer()
        for name in list(self._old_consumers):
            await self._delete_consumer(name)
        snapshot: dict[str, Entry] | None = {}
        if pending == 0:
            on_load()
            watcher.load(created, [], start + last)
            snapshot = None
        count = 0
        while True:
            entries: list[Entry] = []
            for message in await self._next_messages():
                headers = message.headers or {}
                if "Status" in headers:
                    await self._control(message, headers, count)
                    pending = 0  # the consumer is idle, or stalled
                    is_idle = not message.reply and "Nats-Consumer-Stalled" not in headers
                    entry = None
                else:
                    sequence, number, pending = _positions(message.reply)
                    count += 1
                    if number != count:
                        raise Lost("the consumer has skipped a message")
                    last = max(last, sequence)
                    is_idle = pending == 0
                    entry = self._decode(message, headers, start + sequence)
                if snapshot is None:
                    if entry is not None:
                        entries.append(entry)
                    continue
                if entry is not None:
                    snapshot.pop(entry.key, None)
                    if entry.value is not None:
                        snapshot[entry.key] = entry
                # The snapshot is complete only now: a key that is written meanwhile moves to the end of the stream.
                if is_idle:
                    on_load()
                    watcher.load(created, list(snapshot.values()), start + last)
                    snapshot = None
            if entries:
                watcher.apply(entries)

    async def write(self, writes: Sequence[Write]) -> list[int | None]:
        messages = [self._encode(write) for write in writes]
        acks: list[asyncio.Future[_Ack]] = []
        sequences: list[int | None] = []
        try:
            async with asyncio.timeout(ACK_TIMEOUT * (1 + len(messages) // WRITES_IN_FLIGHT)):
                async with self._lock:  # so that two calls are stored in the order in which they were made
                    for index, message in enumerate(messages):
                        if index and index % WRITES_IN_FLIGHT == 0:
                            sequences += await self._confirm(acks)
                        acks.append(await self._publish(message))
                sequences += await self._confirm(acks)
        except TimeoutError:
            raise Unavailable(f"NATS did not acknowledge a write within {ACK_TIMEOUT:g} s") from None
        except NatsError as error:
            raise Unavailable(f"a write was not sent to NATS: {error}") from error
        return [None if sequence is None else self._start + sequence for sequence in sequences]

    def close(self, reason: str) -> None:
        """Fail the writes that wait. The next connection deletes the consumer."""
        self._close_reason = reason
        for ack in self._acks.values():
            if not ack.done():
                ack.set_result(_Ack(problem=reason))
        if self._consumer is not None:
            self._old_consumers.add(self._consumer)

    async def leave(self) -> None:
        """Delete the consumer, if the connection still works."""
        if self._consumer is not None:
            try:
                async with asyncio.timeout(1):
                    await self._delete_consumer(self._consumer)
            except (Lost, TimeoutError, NatsError, OSError):
                pass  # the server deletes it after CONSUMER_TTL

    async def _open_stream(self) -> dict[str, Any]:
        stream = await find_stream(self._client, self._stream)
        if stream is None:
            try:
                stream = await request_json(self._client, f"STREAM.CREATE.{self._stream}", **self._stream_config())
            except Refused as error:
                stream = await find_stream(self._client, self._stream) if error.code == STREAM_EXISTS else None
                if stream is None:
                    raise
        config = stream["config"]
        if (
            config.get("max_msgs_per_subject") != 1
            or not config.get("allow_msg_ttl")
            or not config.get("subject_delete_marker_ttl")
        ):
            raise Lost(f"the stream {self._stream} was not created by Tidings; delete it, or use another prefix")
        return stream

    def _stream_config(self) -> dict[str, Any]:
        return {
            "name": self._stream,
            "subjects": [f"{self._subject}>"],
            "retention": "limits",
            "storage": "file",
            "discard": "new",
            "num_replicas": self._copies,
            "max_msgs_per_subject": 1,
            "allow_msg_ttl": True,
            "subject_delete_marker_ttl": MARKER_TTL * 10**9,
            "allow_rollup_hdrs": True,  # as all key-value buckets
            "allow_direct": True,
            "deny_delete": True,
        }

    async def _create_consumer(self) -> int:
        """Create an ordered consumer with the last message of each key. Return how many there are."""
        await self._client.subscribe(
            f"{self._inbox}.watch", cb=self._receive, pending_msgs_limit=0, pending_bytes_limit=0
        )
        name = self._inbox.rpartition(".")[2]
        self._consumer = name
        reply = await request_json(
            self._client,
            f"CONSUMER.CREATE.{self._stream}.{name}.{self._subject}>",
            stream_name=self._stream,
            config={
                "name": name,
                "deliver_subject": f"{self._inbox}.watch",
                "deliver_policy": "last_per_subject",
                "filter_subject": f"{self._subject}>",
                "ack_policy": "none",
                "max_deliver": 1,
                "replay_policy": "instant",
                "flow_control": True,
                "idle_heartbeat": int(HEARTBEAT * 10**9),
                "inactive_threshold": CONSUMER_TTL * 10**9,
                "mem_storage": True,
                "num_replicas": 1,
            },
        )
        pending: int = reply["num_pending"]
        return pending

    async def _delete_consumer(self, name: str) -> None:
        try:
            await request_json(self._client, f"CONSUMER.DELETE.{self._stream}.{name}")
        except Refused:
            pass  # the server has deleted it
        self._old_consumers.discard(name)

    async def _receive(self, message: Msg) -> None:
        self._queue.append(message)
        self._received.set()

    async def _next_messages(self) -> list[Msg]:
        for _ in range(MISSED_HEARTBEATS):
            try:
                async with asyncio.timeout(HEARTBEAT):
                    await self._received.wait()
            except TimeoutError:
                continue
            self._received.clear()
            messages = list(self._queue)
            self._queue.clear()
            return messages
        raise Lost(f"NATS has sent nothing for {HEARTBEAT * MISSED_HEARTBEATS:g} s")

    async def _control(self, message: Msg, headers: dict[str, str], count: int) -> None:
        if headers["Status"] != "100":
            raise Lost(f"the consumer has ended: {headers.get('Description', headers['Status'])}")
        stalled = message.reply or headers.get("Nats-Consumer-Stalled")
        if stalled:  # flow control: all messages before this one are processed
            await self._client.publish(stalled)
        elif int(headers.get("Nats-Last-Consumer", count)) != count:
            raise Lost("a message of the consumer is missing")

    def _decode(self, message: Msg, headers: dict[str, str], order: int) -> Entry | None:
        encoded = message.subject.removeprefix(self._subject)
        try:
            key = decode_key(encoded)
            if key is None:
                key = self._decode_long_key(encoded, headers)
        except SubjectError:
            self._on_undecodable()
            return None
        if key is None:
            return None
        is_deletion = "KV-Operation" in headers or "Nats-Marker-Reason" in headers
        if is_deletion:
            self._long_keys.pop(encoded, None)
        return Entry(key, None if is_deletion else message.data, order)

    def _decode_long_key(self, encoded: str, headers: dict[str, str]) -> str | None:
        """Return None for the expiry of a key that no watcher of this connection has seen."""
        header = headers.get(KEY_HEADER)
        if header is None:
            if "Nats-Marker-Reason" not in headers:
                raise SubjectError(encoded)
            return self._long_keys.get(encoded)
        key = decode_key(header)
        if key is None or encode_key(key)[0] != encoded:
            raise SubjectError(encoded)
        self._long_keys[encoded] = key
        return key

    def _encode(self, write: Write) -> _Message:
        encoded, header = encode_key(write.key)
        headers = {} if header is None else {KEY_HEADER: header}
        if write.value is None:
            headers["KV-Operation"] = "DEL"
            headers["Nats-TTL"] = f"{MARKER_TTL}s"
        elif write.ttl is not None:
            headers["Nats-TTL"] = f"{max(math.ceil(write.ttl), 1)}s"
        if write.expected is not None:
            sequence = write.expected - self._start
            # An order of a stream that was lost is no sequence of this one. 0 would mean that the key must not exist.
            headers["Nats-Expected-Last-Subject-Sequence"] = str(sequence if sequence > 0 else _NO_SEQUENCE)
        value = write.value or b""
        size = len(value) + sum(len(name) + len(text) + 4 for name, text in headers.items()) + 12
        if size > self._client.max_payload:
            raise TooLarge(
                f"{write.key} has {size:,} bytes, more than the {self._client.max_payload:,} that the NATS server"
                " accepts (max_payload)"
            )
        return _Message(self._subject + encoded, value, headers or None)

    async def _publish(self, message: _Message) -> asyncio.Future[_Ack]:
        if self._close_reason is not None:
            raise Unavailable(self._close_reason)
        self._count += 1
        reply = f"{self._inbox}.ack.{self._count}"
        ack = self._acks[reply] = asyncio.get_running_loop().create_future()
        ack.add_done_callback(lambda _: self._acks.pop(reply, None))
        await self._client.publish(message.subject, message.value, reply, message.headers)
        return ack

    async def _confirm(self, acks: list[asyncio.Future[_Ack]]) -> list[int | None]:
        results = await asyncio.gather(*acks)
        acks.clear()
        for result in results:
            if result.problem is not None:
                raise Unavailable(result.problem)
        return [result.sequence for result in results]

    async def _acknowledge(self, message: Msg) -> None:
        ack = self._acks.get(message.subject)
        if ack is None or ack.done():
            return
        if message.headers and "Status" in message.headers:
            ack.set_result(_Ack(problem="the stream of the table does not exist, or JetStream is not available"))
            return
        reply = json.loads(message.data)
        problem = reply.get("error")
        if problem is None:
            ack.set_result(_Ack(reply["seq"]))
        elif problem.get("err_code") == WRONG_LAST_SEQUENCE:
            ack.set_result(_Ack())
        else:
            ack.set_result(_Ack(problem=f"NATS refused a write: {problem.get('description')}"))


def _positions(reply: str) -> tuple[int, int, int]:
    """Return the sequence in the stream, that in the consumer, and the number of messages that follow.

    The reply subject is `$JS.ACK.STREAM.CONSUMER.…`, or `$JS.ACK.DOMAIN.ACCOUNT.STREAM.CONSUMER.…`.
    """
    tokens = reply.split(".")
    first = 5 if len(tokens) == 9 else 7
    return int(tokens[first]), int(tokens[first + 1]), int(tokens[first + 3])
