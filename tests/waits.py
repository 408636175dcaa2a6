"""Waits for what other threads and processes do, which a test must not guess the time of."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds after which something hangs, whatever else the machine does.
LONG = 300.0


def wait_until(holds: Callable[[], object], seconds: float = LONG) -> None:
    """Return once `holds()` is true; AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not so after {seconds:g} s"
        time.sleep(0.01)
