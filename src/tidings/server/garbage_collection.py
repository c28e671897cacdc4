"""Python's garbage collector in a process that is ours: it stays away from what is there to stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["spare", "sparing"]

_THRESHOLDS = (20_000, 20, 50)
"""Python's own are 700, 10 and 10. So many objects are a few MB, which is what garbage may add here."""


def spare() -> None:
    """The collector walks all that is there again and again as streams and changes come, which is what makes one stream
    of many dearer than one of few. What the start left stays until the end, so it need not be walked at all; and
    neither a stream nor a change leaves garbage that only the collector finds, so it may come less often, for what
    requests leave."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def sparing() -> Iterator[None]:
    """Undo it in the end: the process may go on with something else. What was frozen before stays so."""
    thresholds, was_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not was_frozen:
            gc.unfreeze()
