"""Fast start and exit.

The modules that a command imports contain some hundred thousand objects that exist until the process ends. The garbage
collector would scan them several times during the import, in every full collection of a server, and at exit, which
takes longest.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_gc"]


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable the garbage collector in this block, and exempt all objects that exist at its end from collection."""
    if not gc.isenabled():
        yield  # a nested block
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
