"""The choices that `memory=BYTES` leaves to the compiler: every unset keyword that can make ranks smaller.

In: the keywords of a request. Out: the same, with "auto" for those that are unset. The search is in
`compiler/memory_search.py`.

    relieved({"t": 2, "memory": "40GB", "zero": 1})
    # {"t": 2, "memory": "40GB", "zero": 1, "sequence_parallel": "auto", "recompute": "auto"}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keywords that only go with some choices; if one of them is set, the choice is not made here.
NEEDS_ZERO, NEEDS_RECOMPUTE = ("dp_shard", "reduce_dtype"), ("recompute_num_layers",)


def relieved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords with the choices that a memory budget leaves open."""
    if given.get("memory") is None:
        return dict(given)
    chosen = {"sequence_parallel": "auto"}
    if not any(given.get(name) for name in NEEDS_ZERO):
        chosen["zero"] = "auto"
    # torch's compiler decides itself what to save within a layer.
    if given.get("fuse") != "inductor" and not any(given.get(name) for name in NEEDS_RECOMPUTE):
        chosen["recompute"] = "auto"
    return {**chosen, **given}


__all__ = ["relieved"]
