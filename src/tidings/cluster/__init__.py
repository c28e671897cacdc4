"""Serve one catalog from several processes or machines."""

from typing import TYPE_CHECKING, Any

from tidings.cluster.memory import MemoryBackend

if TYPE_CHECKING:
    from tidings.cluster.nats import Nats

__all__ = ["MemoryBackend", "Nats"]


def __getattr__(name: str) -> Any:
    # Imported on demand, because it needs the packages of the extra `nats`.
    if name == "Nats":
        from tidings.cluster.nats import Nats

        return Nats
    raise AttributeError(f"module 'tidings.cluster' has no attribute {name!r}")
