"""What `memory=BYTES` leaves to be chosen: whatever may make ranks smaller, and was not asked for.

In: the keywords of a request. Out: the same, with "auto" where nothing was said. How it is chosen: `compiler/memory_search.py`.

    relieved({"t": 2, "memory": "40GB", "zero": 1})
    # {"t": 2, "memory": "40GB", "zero": 1, "sequence_parallel": "auto", "recompute": "auto"}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What only some choices go with; where one of these was asked for, the choice is not made here.
NEEDS_ZERO, NEEDS_RECOMPUTE = ("dp_shard", "reduce_dtype"), ("recompute_num_layers",)


def relieved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords with what a bound on memory leaves open."""
    if given.get("memory") is None:
        return dict(given)
    chosen = {"sequence_parallel": "auto"}
    if not any(given.get(name) for name in NEEDS_ZERO):
        chosen["zero"] = "auto"
    # What torch's compiler saves within a layer is its own.
    if given.get("fuse") != "inductor" and not any(given.get(name) for name in NEEDS_RECOMPUTE):
        chosen["recompute"] = "auto"
    return {**chosen, **given}


__all__ = ["relieved"]
