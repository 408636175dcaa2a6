"""Rows that go wrong, for the tests of `make gpu`: run in its child processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from benchmarks.gpu.rows import Found, Row, Setting


def works(setting: Setting) -> Iterator[Found]:
    yield {"process": os.getpid()}


def crashes(setting: Setting) -> Iterator[Found]:
    yield {"found": "before the crash"}
    os.abort()


def hangs(setting: Setting) -> Iterator[Found]:
    yield {"found": "before the hang"}
    time.sleep(3600)


ROWS = [Row("first", works), Row("crash", crashes), Row("hang", hangs, seconds=0.1), Row("last", works)]
