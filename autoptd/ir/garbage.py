"""When Python looks for garbage: not while a program is compiled, nor while the modules for that are imported.

A compilation makes a million objects and keeps most of them. Python's collector would go through all of them a dozen times,
for a fifth of the compiler's time. What refers to itself waits until the block is over.

    with paused_collection():
        captured = capture(model, args, kwargs, loss_fn)
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Do without the collector in a block; afterwards it is as it was before.

    For blocks that make no real tensors: what refers to itself and holds memory of a device must not wait.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


__all__ = ["paused_collection"]
