"""Measure deliveries of MCP Events: `python bench/events.py [--subscriptions 10000] [--rate 100] [--seconds 30]`.

Each event goes to one subscription. The subscriptions have ten receivers, in another process, and two more: one never
answers, and one always answers 500. A latency is the time from `live.emit()` to the arrival at one of the ten.

    python bench/events.py --compare

compares the behaviour with that of `mcp-webhook-events`, and prints the table of docs/events.md. Both servers run in
this process, with the same receivers. Needs that package: `pip install --no-deps mcp-webhook-events`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from mcp.server.mcpserver import MCPServer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `bench` and `tests`, when run as a script

from bench.measuring import machine
from tests.support.events import POLICY, EventClient, EventReceiver, event_receiver
from tests.support.tokens import authentication
from tests.support.uvicorn_server import address_of, run_uvicorn
from tidings import Live, Policy
from tidings.webhooks.signature import new_secret

NAME = "item.changed"
ARGUMENTS = {"type": "object", "properties": {"item": {"type": "integer"}}, "additionalProperties": False}
GOOD = 10


def resident() -> float:
    """Return the memory of this process, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


# Load


def receive(pipe: Any) -> None:
    asyncio.run(_receive(pipe))


async def _receive(pipe: Any) -> None:
    """Run the receivers, and send the latency of each delivery when the pipe asks for it."""
    latencies: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(head.partition("content-length:")[2].partition("\r\n")[0])
            body = json.loads(await reader.readexactly(size))
            answer, status = b"", "500 Error" if kind == "fails" else "200 OK"
            if "challenge" in body:
                answer, status = json.dumps({"challenge": body["challenge"]}).encode(), "200 OK"
            elif kind == "hangs":
                await asyncio.sleep(3600)
            elif kind == "good":
                latencies.append(time.time() - body["data"]["at"])
            writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(answer), answer))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    ports: list[int] = []
    servers: list[asyncio.Server] = []
    for kind in ["good"] * GOOD + ["hangs", "fails"]:
        server = await asyncio.start_server(partial(serve, kind=kind), "127.0.0.1", 0, backlog=4096)
        servers.append(server)
        ports.append(server.sockets[0].getsockname()[1])
    pipe.send(ports)
    while await asyncio.to_thread(pipe.recv) != "end":
        pipe.send(list(latencies))


async def load(subscriptions: int, rate: float, seconds: float) -> dict[str, Any]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    ports = await asyncio.to_thread(ours.recv)
    policy = Policy(
        webhook_private=True, webhooks="anyone", max_durables=subscriptions, max_durables_per_principal=subscriptions
    )
    with tempfile.TemporaryDirectory() as folder:
        live = Live(MCPServer("load", log_level="CRITICAL"), events=True, store=f"{folder}/s.db", policy=policy)
        live.event(NAME, arguments=ARGUMENTS)
        async with run_uvicorn(live.http_app()) as server, httpx2.AsyncClient(timeout=60, verify=False) as http:
            client = EventClient(f"http://127.0.0.1:{address_of(server)[1]}/mcp", http)
            before = resident()
            for item in range(subscriptions):
                # 1 % go to the receiver that never answers, and 1 % to the one that fails.
                port = ports[GOOD + item % 2] if item % 50 < 1 else ports[item % GOOD]
                delivery = {"mode": "webhook", "url": f"http://127.0.0.1:{port}/", "secret": new_secret()}
                params = {"name": NAME, "arguments": {"item": item}, "delivery": delivery}
                await client.request("events/subscribe", **params)
            subscribed = resident()
            print(f"{subscriptions} subscriptions: {subscribed - before:.0f} MB", file=sys.stderr)
            expected = await _emit(live, subscriptions, rate, seconds)

            def latencies() -> list[float]:
                ours.send("latencies")
                found: list[float] = ours.recv()
                return found

            deadline = time.monotonic() + 60
            # The receivers are another process: there is nothing to wait for but time.
            while len(found := await asyncio.to_thread(latencies)) < expected and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            after = resident()
        live.close()
    ours.send("end")
    found.sort()
    return {
        "subscriptions": subscriptions,
        "events per second": rate,
        "expected": expected,
        "delivered": len(found),
        "median ms": round(1000 * statistics.median(found), 1),
        "99 % ms": round(1000 * found[len(found) * 99 // 100], 1),
        "slowest ms": round(1000 * found[-1], 1),
        "memory per subscription kB": round(1024 * (subscribed - before) / subscriptions, 1),
        "memory growth during the load MB": round(after - subscribed, 1),
        "undelivered": len(live.events.occurrences),
    }


async def _emit(live: Live, subscriptions: int, rate: float, seconds: float) -> int:
    """Emit events at a rate; return how many of them the good receivers should get."""
    chosen = random.Random(1)
    start, expected, number = time.monotonic(), 0, 0
    while number < rate * seconds:
        await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
        # Every fifth event goes to one of the receivers that do not accept it.
        item = chosen.randrange(subscriptions // 50) * 50 if number % 5 == 0 else chosen.randrange(subscriptions)
        expected += item % 50 >= 1
        live.emit(NAME, {"item": item, "at": time.time()})
        number += 1
    return expected


# Comparison


class Ours:
    def __init__(self, folder: str, *, has_callers: bool = True, **policy: Any) -> None:
        server: MCPServer[Any] = MCPServer("ours", log_level="CRITICAL", **(authentication() if has_callers else {}))
        self.live = Live(server, events=True, store=f"{folder}/ours.db", policy=Policy(**{**POLICY, **policy}))
        self.live.event(NAME, arguments=ARGUMENTS)
        self.app = self.live.http_app()

    async def publish(self, item: int) -> None:
        self.live.emit(NAME, {"item": item})

    def close(self) -> None:
        self.live.close()


class Theirs:
    def __init__(self, folder: str, *, webhook_private: bool = True, has_callers: bool = True) -> None:
        from mcp_webhook_events import EventDefinition, McpEvents  # type: ignore[import-not-found, unused-ignore]
        from mcp_webhook_events import SafeHttp as Http  # type: ignore[attr-defined, unused-ignore]

        server: MCPServer[Any] = MCPServer("theirs", log_level="CRITICAL")
        self.events = McpEvents(
            server,
            store=f"{folder}/theirs.db",
            definitions=[EventDefinition(NAME, "An item has changed.", ARGUMENTS, {"type": "object"})],
            http=Http(allow_insecure_for_tests=webhook_private, timeout=2.0),
        )
        self.events.install()
        self.app = server.streamable_http_app(stateless_http=True, json_response=True)

    async def publish(self, item: int) -> None:
        await asyncio.to_thread(self.events.publish, NAME, {"item": item})
        await asyncio.to_thread(self.events.deliver_pending)

    def close(self) -> None:
        pass


OPEN = "a server without authentication, with its defaults"
"""The check that needs such a server."""

Check = Callable[[Any, EventClient, EventReceiver], Awaitable[str]]
CHECKS: dict[str, Check] = {}


def check(title: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[title] = function
        return function

    return add


async def outcome(client: EventClient, method: str, **params: Any) -> str:
    answer = await client.post(method, **params)
    error = answer.get("error")
    return "accepted" if error is None else f"error {error['code']}" if isinstance(error, dict) else f"refused: {error}"


async def arrived(receiver: EventReceiver, seconds: float = 1.0) -> Any:
    """Return the next event, or None if none comes: this is no test, so a wait may be short."""
    try:
        async with asyncio.timeout(seconds):
            return await receiver.next()
    except TimeoutError:
        return None


@check("signed challenge, once per caller and URL")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    await client.subscribe(receiver, NAME, {"item": 1})
    await client.subscribe(receiver, NAME, {"item": 2})
    return "yes" if receiver.challenges == 1 else f"{receiver.challenges} challenges"


@check("delivery accepted by `standardwebhooks`, `webhook-id` is `eventId`")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    await client.subscribe(receiver, NAME, {"item": 1})
    await side.publish(1)
    found = await arrived(receiver)
    return "yes" if found is not None and found.id == found.envelope["eventId"] else "no"


@check("after `publish` or `emit`, a retry comes by itself, with the same id")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    await client.subscribe(receiver, NAME, {"item": 1})
    receiver.answers(500, 200)
    await side.publish(1)
    first, second = await arrived(receiver), await arrived(receiver, 3.0)
    return "no: call `deliver_pending()` again" if second is None else "yes" if first.id == second.id else "other id"


@check("no retry after 413, subscription ends with 410")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    await client.subscribe(receiver, NAME, {"item": 1})
    receiver.answers(413, 410, 200)
    for _ in range(3):
        await side.publish(1)
        await asyncio.sleep(0.2)
    found = [await arrived(receiver, 0.5) for _ in range(3)]
    return "yes" if sum(each is not None for each in found) == 2 else "no"


@check("a receiver that hangs delays the others")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    async with event_receiver("/hangs") as hanging:
        await client.subscribe(hanging, NAME, {"item": 1})
        await client.subscribe(receiver, NAME, {"item": 1})
        hanging.receiver.gate.clear()
        start = time.monotonic()
        task = asyncio.create_task(side.publish(1))
        found = await arrived(receiver, 5.0)
        taken = time.monotonic() - start
        hanging.receiver.gate.set()
        await task
    return "not delivered" if found is None else "no" if taken < 1.0 else f"yes, for its timeout ({taken:.0f} s here)"


@check("redirect followed")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    async with event_receiver("/other") as other:
        await client.subscribe(receiver, NAME, {"item": 1})
        receiver.receiver.answer = lambda delivery: (307, {"location": other.url})
        await side.publish(1)
        await arrived(receiver)
        return "yes" if other.receiver.connections else "no"


@check("old and new secret sign after a rotation")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    await client.subscribe(receiver, NAME, {"item": 1})
    receiver.secret = new_secret()
    await client.subscribe(receiver, NAME, {"item": 1})
    await side.publish(1)
    found = await arrived(receiver)
    return "yes" if found is not None and len(found.headers["webhook-signature"].split(" ")) == 2 else "no"


@check("`deliveryStatus` when a subscription is renewed")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    await client.subscribe(receiver, NAME, {"item": 1})
    return "yes" if "deliveryStatus" in await client.subscribe(receiver, NAME, {"item": 1}) else "no"


@check("1 and 1.0 are the same argument")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    ids = {(await client.subscribe(receiver, NAME, {"item": item}))["id"] for item in (1, 1.0)}
    return "yes" if len(ids) == 1 else "no"


@check(OPEN)
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    client.token = ""
    return await outcome(client, "events/subscribe", **client.params(receiver, NAME, {"item": 1}))


@check("unknown event")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    return await outcome(client, "events/subscribe", **client.params(receiver, "other", {}))


@check("unsubscribing what is not subscribed")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    return await outcome(client, "events/unsubscribe", **client.params(receiver, NAME, {"item": 1}))


@check("delivery mode `push`")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    params = client.params(receiver, NAME, {"item": 1})
    return await outcome(client, "events/subscribe", **{**params, "delivery": {**params["delivery"], "mode": "push"}})


@check("changes of tools, prompts, resources and contents are events")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    found = (await client.request("events/list"))["events"]
    return "yes" if "tools.list_changed" in {each["name"] for each in found} else "no"


@check("`https://127.0.0.1/` is refused before a request")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    delivery = {"mode": "webhook", "url": "https://127.0.0.1:1/", "secret": receiver.secret}
    return await outcome(client, "events/subscribe", name=NAME, arguments={"item": 1}, delivery=delivery)


@check("`https://[64:ff9b::7f00:1]/` (NAT64 of 127.0.0.1)")
async def _(side: Any, client: EventClient, receiver: EventReceiver) -> str:
    url = "https://[64:ff9b::7f00:1]:1/"
    answer = await client.post(
        "events/subscribe", name=NAME, arguments={}, delivery={"mode": "webhook", "url": url, "secret": receiver.secret}
    )
    error = answer.get("error", {})
    reason = (error.get("data") or {}).get("reason", "")
    return f"error {error.get('code')} {reason}".strip()


STRICT = {"`https://127.0.0.1/` is refused before a request", "`https://[64:ff9b::7f00:1]/` (NAT64 of 127.0.0.1)"}
"""The checks that need the rules for production."""


async def compare() -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    for title, function in CHECKS.items():
        found: list[str] = []
        for make in (Ours, Theirs):
            with tempfile.TemporaryDirectory() as folder:
                side: Any = make(folder, webhook_private=title not in STRICT, has_callers=title != OPEN)
                async with (
                    event_receiver() as receiver,
                    run_uvicorn(side.app) as server,
                    httpx2.AsyncClient(timeout=60, verify=False) as http,
                ):
                    client = EventClient(f"http://127.0.0.1:{address_of(server)[1]}/mcp", http)
                    found.append(await function(side, client, receiver))
                side.close()
        rows.append((title, found[0], found[1]))
        print(*rows[-1], sep=" | ", file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subscriptions", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    if options.compare:
        print("| | Tidings | `mcp-webhook-events` |\n|---|---|---|")
        for row in asyncio.run(compare()):
            print(f"| {' | '.join(row)} |")
        return
    figures = asyncio.run(load(options.subscriptions, options.rate, options.seconds))
    print(json.dumps({**figures, "machine": machine()}, indent=2))


if __name__ == "__main__":
    main()
