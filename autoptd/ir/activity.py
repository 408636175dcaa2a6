"""Progress messages of long-running commands: the logger `autoptd.activity`, at level INFO.

The command line shows them (`wings/cli/live.py`); in Python:

    logging.basicConfig(level=logging.INFO)
    autoptd.parallelize(...)            # INFO:autoptd.activity:tracing 2 samples: 1.2 s

    with activity("tracing 2 samples"):
        ...
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

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


__all__ = ["LOGGER", "activity"]
