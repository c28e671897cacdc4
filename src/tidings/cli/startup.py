"""Starting and ending fast.

What a command imports is there to stay: some hundred thousand objects of the SDK's and pydantic's. The garbage
collector would look through them several times while they are made, at every full collection that a server makes later,
and once more at the end, which takes longest of all.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["made_to_stay"]


@contextmanager
def made_to_stay() -> Iterator[None]:
    """Keep the garbage collector from everything that is made meanwhile, and was before."""
    if not gc.isenabled():
        yield  # inside another one
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
