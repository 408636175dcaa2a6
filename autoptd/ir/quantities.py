"""Parse and check quantities: bytes, degrees, seconds, steps.

In: the value of a keyword or flag. Out: the number, or an error with a valid example.

    parse_bytes("80GB")         # 8e10
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from autoptd.errors import PlanError

UNIT_BYTES = {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "kb": 1e3, "mb": 1e6, "gb": 1e9}


def parse_bytes(text: str) -> float:
    """Parse `80e9`, `80GB` or `80 gib`, in any case; ValueError for anything else."""
    for unit, nbytes in UNIT_BYTES.items():
        if text.strip().lower().endswith(unit):
            return float(text.strip().lower().removesuffix(unit)) * nbytes
    return float(text)


def microseconds_text(seconds: float) -> str:
    """Format seconds in microseconds: `40.0 us`."""
    return f"{1e6 * seconds:,.1f} us" if seconds >= 1e-7 else "<0.1 us"


def check_memory(memory: Any) -> float | None:
    """Return a rank's memory in bytes; PlanError if it is not a positive number of bytes."""
    if memory is None:
        return None
    try:
        nbytes = parse_bytes(memory) if isinstance(memory, str) else memory
        if not isinstance(nbytes, bool) and float(nbytes) > 0:
            return nbytes
    except (TypeError, ValueError, OverflowError):
        pass
    remedy = "for example memory=80e9 or '80GB'"
    raise PlanError(f"memory={memory!r}", "must be a positive number of bytes", remedy)


def check_degree(name: str, value: Any) -> None:
    """Raise PlanError unless a degree is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        fact = "a degree must be an integer of at least 1"
        remedy = f"for example {name}=1"
        if isinstance(value, (tuple, list, Mapping)):
            remedy += "; batches are passed as example_inputs="
        raise PlanError(f"{name}={reprlib.repr(value)}", fact, remedy)


def check_seconds(name: str, seconds: float) -> None:
    """Raise PlanError unless `seconds` is positive."""
    # False for NaN, too.
    if not seconds > 0:
        remedy = f"for example {name}=300"
        raise PlanError(f"{name}={seconds}", "must be a positive number of seconds", remedy)


def check_steps(name: str, steps: Any) -> None:
    """Raise PlanError unless `steps` is a non-negative integer; 0 means never."""
    # True is an int, but not a number of steps.
    is_whole = isinstance(steps, int) and not isinstance(steps, bool)
    if not is_whole or steps < 0:
        raise PlanError(
            f"{name}={steps!r}", "must be a non-negative integer", "for example 100, or 0 for never"
        )
