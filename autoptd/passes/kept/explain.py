"""Explain how the values of a module are kept for backward, and what the other way would take.

In: a LOCAL graph, marked by `keep.py`. Out: rows of text, one for each value that some operator saves:

    values for backward, of a microbatch       bytes  now                              to make it again
    c_fc: aten.linear                     33,554,432  kept, of 4 microbatches at most           41.9 us
    gelu: aten.gelu                       33,554,432  made again                                12.3 us
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from autoptd.ir.kept import KeptValue
from autoptd.ir.names import is_within
from autoptd.ir.quantities import microseconds_text

MAX_ROWS = 24
HEADER = ("values for backward, of a microbatch", "bytes", "now", "to make it again")


def explain_kept(values: Sequence[KeptValue], path: str) -> str:
    """Return what is kept of the module at `path`, and how; "" where nothing of it is saved."""
    mine = [value for value in values if not path or is_within(value.module, path)]
    if not mine:
        return ""
    rows = [HEADER]
    for value in mine[:MAX_ROWS]:
        name = ": ".join(filter(None, (_relative(value.module, path), value.operator)))
        rows.append((name, f"{value.nbytes:,}", _now(value), _seconds_text(value.seconds)))
    name, nbytes, now, seconds = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [f"{a:{name}}  {b:>{nbytes}}  {c:{now}}  {d:>{seconds}}" for a, b, c, d in rows]
    if len(mine) > MAX_ROWS:
        lines.append(f"and {len(mine) - MAX_ROWS} more; name a smaller module")
    return "\n".join(lines) + "\n"


def _relative(module: str, path: str) -> str:
    """The module's name within the module at `path`; its last part for that module itself."""
    if not path:
        return module
    return module.removeprefix(f"{path}.") if module != path else path.rpartition(".")[2]


def _now(value: KeptValue) -> str:
    if value.is_dropped:
        return "made again"
    return f"kept, of {value.in_flight} microbatch{'es' if value.in_flight > 1 else ''} at most"


def _seconds_text(seconds: float) -> str:
    return microseconds_text(seconds) if isfinite(seconds) else "impossible"
