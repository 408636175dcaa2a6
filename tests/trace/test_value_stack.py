"""What lies in a frame's memory is read only of a Python whose frames are known."""

from __future__ import annotations

import pytest

from autoptd.errors import TraceError
from autoptd.trace.instructions import TRIED, check_tried

UNKNOWN = [
    ("cpython", (3, 14), False, "cpython 3.14"),
    ("cpython", (3, 13), True, "cpython 3.13 without its global lock"),
    ("pypy", (3, 11), False, "pypy 3.11"),
]


@pytest.mark.parametrize(("name", "version", "has_no_lock", "shown"), UNKNOWN)
def test_an_unknown_python_is_refused(
    name: str, version: tuple[int, int], has_no_lock: bool, shown: str
) -> None:
    with pytest.raises(
        TraceError, match=rf"{shown}: the writes of a forward cannot be watched.*3.11, 3.12 or"
    ):
        check_tried(name, version, has_no_lock)


def test_those_that_it_ran_on_are_not() -> None:
    for version in TRIED:
        check_tried("cpython", version, has_no_lock=False)
