"""What a long command is doing, for whoever looks: the logger `autoptd.activity`, at level INFO.

Nobody hears it unless asked, as with any logger. The command line shows it (`wings/cli/live.py`); in Python:

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
    """Log that something begins (at DEBUG), and how long it took (at INFO); nothing more where it fails.

    Records have what is done as `words`, for how long as `seconds` (None at the beginning), and `is_brief`:
    nobody waits for it as a rule.
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
