"""What tensor parallelism could not do, as records of a plan and as warnings."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence
from typing import Any

from autoptd.ir.fallback import Fallback
from autoptd.program.program import Program

WORTH_A_WARNING = 0.01


def merged_fallbacks(fallbacks: Sequence[Fallback]) -> list[dict[str, Any]]:
    """One record for all layers that have the same operator and the same fact, with the sum of their
    FLOPs.
    """
    merged: dict[Fallback, int] = {}
    for one in fallbacks:
        key = dataclasses.replace(one, site=any_layer(one.site), flops=0)
        merged[key] = merged.get(key, 0) + one.flops
    return [{**dataclasses.asdict(one), "flops": flops} for one, flops in merged.items()]


def warn_of_checkpoints(modules: Sequence[str]) -> None:
    """Warn once that activation checkpoints in the model are not kept."""
    if modules:
        named = ", ".join(dict.fromkeys(map(any_layer, modules)))
        message = (
            f"activation checkpointing in the model ({named}) is not honoured: these activations are kept, "
        )
        message += "and nothing is computed again. Numbers are the same, memory is that without it"
        warnings.warn(message, stacklevel=3)


def warn_of_fallbacks(program: Program) -> None:
    """Warn once if tensor ranks repeat each other's work to more than a hundredth of all FLOPs of matrix
    products.
    """
    found = [one for one in merged_fallbacks(program.fallbacks) if one["flops"]]
    share = sum(one["flops"] for one in found) / max(1, program.costs.total_flops)
    if share > WORTH_A_WARNING:
        reasons: dict[tuple[str, str], list[str]] = {}
        for one in found:
            reasons.setdefault((one["fact"], one["remedy"]), []).append(one["site"] or "the model")
        told = "; ".join(
            f"{', '.join(dict.fromkeys(sites))}: {fact} ({remedy})"
            for (fact, remedy), sites in reasons.items()
        )
        message = f"{100 * share:.0f} % of the FLOPs of matrix products are done by every tensor rank in full. {told}. "
        warnings.warn(message + "See program.fallbacks", stacklevel=3)


def any_layer(name: str) -> str:
    """`h.*.ln.weight` for `h.3.ln.weight`."""
    return re.sub(r"\b\d+\b", "*", name)
