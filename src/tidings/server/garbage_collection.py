"""Settings of Python's garbage collector for a process that starts, and for one that only serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["freeze_objects", "restored_gc_settings", "without_gc"]

_THRESHOLDS = (20_000, 20, 50)
"""Python's defaults are 700, 10 and 10. 20,000 objects are a few MB."""


def freeze_objects() -> None:
    """Exclude the present objects from collection, and collect less often.

    While streams open and changes arrive, the collector visits all objects repeatedly, so the cost of a stream grows
    with their number. The objects that exist at the start are used until the end. Neither a stream nor a change leaves
    reference cycles; only requests do."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable the garbage collector in this block, and exclude all objects that exist at its end from collection.

    The modules that a command imports contain some hundred thousand objects that exist until the process ends. The
    collector would scan them several times during the import, in every full collection of a server, and at exit, which
    takes longest.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def restored_gc_settings() -> Iterator[None]:
    """Restore the former settings at the end of the block. Objects that were frozen before stay frozen."""
    thresholds, was_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not was_frozen:
            gc.unfreeze()
