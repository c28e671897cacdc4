"""Serve one catalog from several processes or machines."""

from typing import TYPE_CHECKING, Any

from tidings.cluster.memory import MemoryBackend

if TYPE_CHECKING:
    from tidings.cluster.bus import NatsSubscriptionBus
    from tidings.cluster.nats import Nats

__all__ = ["MemoryBackend", "Nats", "NatsSubscriptionBus"]


def __getattr__(name: str) -> Any:
    # Imported on demand, because they need the packages of the extra `nats`.
    if name == "Nats":
        from tidings.cluster.nats import Nats

        return Nats
    if name == "NatsSubscriptionBus":
        from tidings.cluster.bus import NatsSubscriptionBus

        return NatsSubscriptionBus
    raise AttributeError(f"module 'tidings.cluster' has no attribute {name!r}")
