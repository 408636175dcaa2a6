"""Let ranks act independently, and raise an error on all of them if one fails.

    found = agree(world, "pm.load", lambda: read(folder))

Used between calls that all ranks make: a rank that raised alone would leave the others waiting in the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from autoptd.errors import AutoptdError, PlanError, RuntimeFault
from autoptd.runtime.world.world import World

Result = TypeVar("Result")


def agree(world: World, site: str, act: Callable[[], Result]) -> Result:
    """Return the result of `act`; if it raises on any rank, raise the same error on all ranks. A collective."""
    result, fault = None, None
    error: Exception | None = None
    try:
        result = act()
    except AutoptdError as caught:
        error = caught
        fault = (type(caught) is PlanError, caught.site, caught.fact, caught.remedy)
    except Exception as caught:
        error, fact = caught, f"{type(caught).__name__}: {caught}"
        fault = (False, site, fact, "check the folder and its disk")
    faults = world.everyone().gather_objects(fault, site)
    first = next(((rank, found) for rank, found in enumerate(faults) if found is not None), None)
    if first is not None:
        rank, (is_plan, where, fact, remedy) = first
        kind = PlanError if is_plan else RuntimeFault
        if all(found == faults[0] for found in faults):
            raise kind(where, fact, remedy) from error
        raise kind(where, f"{fact} (on rank {rank})", remedy) from error
    return result  # type: ignore[return-value]


def attempted(act: Callable[[], Any]) -> Callable[[], Any]:
    """Call a function now; return a function that returns its result, or raises its error, at every call."""
    try:
        result = act()
    except Exception as error:
        caught = error

        def fail() -> Any:
            raise caught

        return fail
    return lambda: result
