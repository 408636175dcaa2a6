"""The keyword `recompute`: which values saved for backward are dropped, and recomputed there.

In: "auto", "full", "full:1/2", "selective", or globs of modules. Out: the same, checked.

    check_recompute("full:1/2", num_layers=1, fuse="eager")
    full_share("full:1/2")      # Fraction(1, 2)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from autoptd.errors import PlanError
from autoptd.ir.kept import KeepPin

# False: nothing, not even the model's own `torch.utils.checkpoint` calls.
Recompute = str | list[str] | bool | None


def check_recompute(
    asked: str | Sequence[str] | bool | None, num_layers: int, fuse: Any, pins: Sequence[KeepPin] = ()
) -> Recompute:
    """Return the request as a plan stores it; PlanError if it is invalid or contradicts other keywords.

    `num_layers` share one kept input; `fuse` is the fusion backend; `pins` are the plan's.
    """
    site = f"recompute={asked!r}"
    if asked is None or asked is False:
        pass
    elif isinstance(asked, str):
        if asked not in ("auto", "selective") and full_share(asked) is None:
            remedy = "'auto', 'full', 'selective', 'full:1/2', or a list of globs of modules: ['*.mlp']"
            raise PlanError(site, "no such choice", remedy)
    elif asked is True:
        raise PlanError(
            site, "does not select anything to recompute", "'auto', 'full', 'selective' or 'full:1/2'"
        )
    elif not isinstance(asked, Sequence) or not asked or not all(isinstance(glob, str) for glob in asked):
        raise PlanError(
            site,
            "does not select anything to recompute",
            "'auto', 'full', 'selective', 'full:1/2', or a list of globs: ['*.mlp']",
        )
    if asked and fuse == "inductor":
        fact = "torch's compiler decides itself what to save within a layer"
        raise PlanError(site, fact, "fuse='triton' or 'eager', or leave recompute out")
    for pin in pins:
        if pin.way == "again" and (asked is False or fuse == "inductor"):
            other = "recompute=False" if asked is False else "fuse='inductor'"
            raise PlanError(f"plan: keep, and {other}", f"the plan has {pin}", "leave one of them out")
    if num_layers > 1 and asked != "full":
        fact = f"layers share a kept input with recompute='full' only, not {asked!r}"
        raise PlanError(f"recompute_num_layers={num_layers}", fact, "leave it out")
    return list(asked) if isinstance(asked, (list, tuple)) else asked  # type: ignore[return-value]


def full_share(asked: Any) -> Fraction | None:
    """Return the share of layers that are fully recomputed: 1 for "full", 1/2 for "full:1/2", else None."""
    found = re.fullmatch(r"full(?::(\d+)/(\d+))?", asked) if isinstance(asked, str) else None
    if found is None:
        return None
    above, below = int(found[1] or 1), int(found[2] or 1)
    return Fraction(above, below) if 0 < above <= below else None


__all__ = ["Recompute", "check_recompute", "full_share"]
