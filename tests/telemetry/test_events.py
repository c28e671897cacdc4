"""Deliveries of MCP Events as spans."""

from __future__ import annotations

import pytest

from tests.support.events import event_receiver, serving_events
from tests.support.telemetry import RecordedTelemetry
from tests.support.waiting import until
from tidings.telemetry import Telemetry

pytestmark = pytest.mark.anyio


async def test_each_request_is_a_span_with_its_outcome() -> None:
    recorded = RecordedTelemetry()
    telemetry = Telemetry(tracer_provider=recorded.tracer_provider)
    async with (
        event_receiver() as receiver,
        serving_events(declare=lambda live: live.event("done"), telemetry=telemetry) as (live, client),
    ):
        await client.subscribe(receiver, "done")
        receiver.answers(500, 200)
        live.emit("done", {})
        await until(lambda: live.hub.counts.events["delivered"])
        spans = [each["attributes"] for each in recorded.spans("events.deliver")]
        assert [(each["tidings.event"], each["tidings.outcome"]) for each in spans] == [
            ("done", "http_5xx"),
            ("done", "ok"),
        ]
