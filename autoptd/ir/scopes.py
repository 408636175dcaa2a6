"""Contexts in which the compiler works: its progress is logged, the garbage collector rests, its tensors are on the CPU.

Progress goes to the logger `autoptd.activity` at level INFO. The command line shows it (`wings/cli/live.py`); in
Python:

    logging.basicConfig(level=logging.INFO)
    autoptd.parallelize(...)            # INFO:autoptd.activity:tracing 2 samples: 1.2 s

    with activity("tracing 2 samples"), paused_collection(), on_cpu():
        captured = capture(model, args, kwargs, loss_fn)
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

LOGGER = logging.getLogger("autoptd.activity")


@contextmanager
def activity(words: str, *, is_brief: bool = False) -> Iterator[None]:
    """Log the start of an activity (at DEBUG) and its duration (at INFO), unless it fails.

    Records have the fields `words`, `seconds` (None at the start) and `is_brief`, for activities that are
    usually short.
    """
    if not LOGGER.isEnabledFor(logging.INFO):
        yield
        return
    LOGGER.debug("%s ...", words, extra={"words": words, "seconds": None, "is_brief": is_brief})
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    LOGGER.info(
        "%s: %.1f s", words, seconds, extra={"words": words, "seconds": seconds, "is_brief": is_brief}
    )


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause Python's garbage collector in a block, and restore its state afterwards.

    A compilation, and the imports for it, allocate a million objects and keep most of them. The collector would scan them a
    dozen times, which takes a fifth of the compile time. Only for blocks that create no real tensors: a cycle that holds device
    memory must not wait.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # Makes them old without a scan, which the first young collection would be.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def on_cpu() -> AbstractContextManager[object]:
    """Return a context in which tensors are created on the CPU unless a device is named.

    `torch.set_default_device("cuda")` at the top of a script is meant for the model. The tensors on which passes test and count
    are small, and read at once.
    """
    # Imported here: `autoptd --help` and `plan` do without torch.
    import torch

    # `torch.device` slows down every call of torch: enter it only if it changes something.
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
