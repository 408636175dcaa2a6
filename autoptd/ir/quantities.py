"""Numbers that people write: bytes and degrees.

In: the value of a keyword or flag. Out: the number, or an error that says what it should be.

    parse_bytes("80GB")         # 8e10
"""

from __future__ import annotations

from typing import Any

from autoptd.errors import PlanError

UNIT_BYTES = {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "kb": 1e3, "mb": 1e6, "gb": 1e9}


def parse_bytes(text: str) -> float:
    """Return the bytes of `80e9`, `80GB` or `80 gib`, in any case; ValueError for what is not a number of bytes."""
    for unit, nbytes in UNIT_BYTES.items():
        if text.strip().lower().endswith(unit):
            return float(text.strip().lower().removesuffix(unit)) * nbytes
    return float(text)


def microseconds_text(seconds: float) -> str:
    """Format the seconds of an operator: `40.0 us`."""
    return f"{1e6 * seconds:,.1f} us" if seconds >= 1e-7 else "<0.1 us"


def check_memory(memory: Any) -> float | None:
    """Return a rank's memory in bytes; PlanError for what is not a positive number of them."""
    if memory is None:
        return None
    try:
        nbytes = parse_bytes(memory) if isinstance(memory, str) else memory
        if not isinstance(nbytes, bool) and nbytes > 0:
            return nbytes
    except (TypeError, ValueError):
        pass
    remedy = "for example memory=80e9 or '80GB'"
    raise PlanError(f"memory={memory!r}", "is not a positive number of bytes", remedy)


def check_degree(name: str, value: Any) -> None:
    """Raise PlanError for what is not a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        fact = "a degree is a whole number of at least 1"
        raise PlanError(f"{name}={value!r}", fact, f"for example {name}=1")


__all__ = ["check_degree", "check_memory", "microseconds_text", "parse_bytes"]
