"""Progress of a command on stderr: the current activity on a terminal; one line per finished activity
elsewhere.

In: `activity` messages from all parts of the compiler. Out: on a terminal, one line that changes and
disappears at the end; in a file or a pipe, a plain line with the seconds of each activity, the first one
before torch is loaded.

    with shown(quiet=False), activity("importing torch"):       # importing torch ... 2.1 s
        import torch
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from autoptd.ir.scopes import LOGGER

# Shorter passes are not listed.
MIN_SECONDS = 0.1
# The width of a terminal that does not report one.
COLUMNS = 80
# ANSI: erase to the end of the line.
ERASE = "\x1b[K"


@contextmanager
def shown(quiet: bool) -> Iterator[None]:
    """Show the activities inside a block, on rank 0 only under torchrun."""
    if quiet or os.environ.get("RANK", "0") != "0":
        yield
        return
    handler = Terminal(sys.stderr) if sys.stderr.isatty() else Lines(sys.stderr)
    level, propagates = LOGGER.level, LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)
    # The user's model may set up logging; do not print each message twice.
    LOGGER.propagate = False
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
        LOGGER.propagate = propagates
        handler.close()


class Lines(logging.Handler):
    """Log one line per activity: its name when it begins, its seconds when it ends."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream, self._is_open = stream, False

    def emit(self, record: logging.LogRecord) -> None:
        words, seconds, is_brief = (record.__dict__[name] for name in ("words", "seconds", "is_brief"))
        if seconds is None and not is_brief:
            self._end_line()
            self._print(f"{words} ...", "")
        elif seconds is not None and self._is_open:
            self._print(f" {seconds:.1f} s", "\n")
        elif seconds is not None and seconds >= MIN_SECONDS:
            self._print(f"{words} {seconds:.1f} s", "\n")

    def close(self) -> None:
        self._end_line()
        super().close()

    def _end_line(self) -> None:
        """End the line of an activity that failed."""
        if self._is_open:
            self._print("", "\n")

    def _print(self, text: str, end: str) -> None:
        print(text, end=end, file=self._stream, flush=True)
        self._is_open = not end


class Terminal(logging.Handler):
    """Show the current activity on one line, which is erased before other output."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream, self._start = stream, time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if record.__dict__["seconds"] is None:
            minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
            self._print(f"{minutes:02}:{seconds:02}  {record.__dict__['words']}")
        else:
            self._print("")

    def close(self) -> None:
        self._print("")
        super().close()

    def _print(self, text: str) -> None:
        """Replace the line, cut to the width of the terminal: an overlong line could not be erased."""
        self._stream.write(f"\r{text[: self._columns - 1]}{ERASE}")
        self._stream.flush()

    @property
    def _columns(self) -> int:
        # The window may shrink meanwhile, and some terminals report zero columns.
        with suppress(OSError, ValueError):
            return os.get_terminal_size(self._stream.fileno()).columns or COLUMNS
        return COLUMNS
