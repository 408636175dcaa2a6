"""`python -m autoptd` is the command `autoptd`: see `autoptd/wings/cli`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from typing import NoReturn

from autoptd.wings.cli import main

# Commands that compile one model and are over. The others may run for hours.
BRIEF = ("show", "compile")


def run() -> NoReturn:
    """Run one command in a process of its own, and end the process.

    A brief one has its memory for itself: nobody looks for garbage in it, nor takes a million objects apart at
    its end. That is a quarter of the time of `show`.
    """
    is_brief = sys.argv[1:2] != [] and sys.argv[1] in BRIEF
    if is_brief:
        gc.disable()
    status = main()
    if is_brief:
        _leave(status)
    sys.exit(status)


def _leave(status: int) -> NoReturn:
    """End the process: what is registered for its end is done, objects stay as they are."""
    # Temporary folders go, and loggers are flushed. There is no public name for it.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Its reader may be gone, and then it is closed.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    run()

__all__ = ["main", "run"]
