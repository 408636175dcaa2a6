"""Tell rounding from a fault if a trace and its model differ in their compute dtype.

In: a model and its trace that differ. Out: the fault, or None for rounding. Both are run in float64, where
rounding is negligible: a trace that differs there is a fault. One that agrees may still round more than the
model, so the errors of both in their own dtype are measured against float64. They need not round alike:
torch's batch norm computes x * a + b, ours (x - mean) * scale, and where x equals its mean, one gives 1e-9 and
the other 0, and a ReLU then has different gradients in 16 bits. Such a tie depends on the weights: a larger
error only counts as a fault if it also occurs with other weights.

    fault = fault_of(pair, Fault("loss", "...", STATE), tolerance=2**-7, share=1.0)      # None: rounding
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from autoptd.trace.differences import Reference
from autoptd.trace.kept_buffers import distance
from autoptd.trace.pair import Pair

# In float64; constants of the graph may have been rounded to float32.
TOLERANCE = 1e-5
# The error of the trace may be this many times that of the model.
FACTOR = 2
# Runs with the model's weights, and with others in case these are a tie.
TRIES = 6
# Most parameters: float64 copies of more would exhaust host memory.
MOST_ENTRIES = 1 << 29
STATE = "look for Python state, torch.compiler.is_compiling(), custom backward code or hooks in the forward"
WIDER = "compute this part in float32 (x.float()), or precision=None"


@dataclass(frozen=True)
class Fault:
    """Name where a trace and its model differ, the fact and the remedy."""

    what: str
    fact: str
    remedy: str


def fault_of(pair: Pair, found: Fault, tolerance: float, share: float) -> Fault | None:
    """Return the fault of a trace that was `found` to differ; None if the difference is rounding.

    Raises the model's error if it fails in float64.
    """
    exact = _Exact.of(pair, share)
    if exact.has_other_value():
        return replace(found, fact=f"{found.fact}, in float64 as well")
    faults = exact.other_rounding(pair, tolerance)
    for number in range(1, TRIES):
        if not faults:
            return None
        moved = pair.moved(number)
        again = _Exact.of(moved, share).other_rounding(moved, tolerance)
        faults = {what: fault for what, fault in faults.items() if what in again}
    return next(iter(faults.values()), None)


@dataclass(frozen=True)
class _Exact:
    """Hold the results of a model in float64."""

    wide: Pair
    reference: Reference
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, pair: Pair, share: float) -> _Exact:
        if sum(p.numel() for p in pair.model.parameters()) > MOST_ENTRIES:
            raise MemoryError(f"its copy would have more than {MOST_ENTRIES:,} entries")
        wide = pair.in_float64()
        return cls(wide, *wide.of_model(lambda loss, parameters: Reference(loss, parameters, share)))

    def has_other_value(self) -> bool:
        """Tell whether the trace computes another value in float64."""
        return not max(self._errors(*self.wide.of_graph(self.reference.differences)).values()) <= TOLERANCE

    def other_rounding(self, pair: Pair, tolerance: float) -> dict[str, Fault]:
        """Return where the trace is further from float64 than the model, in their own dtype."""
        ours = self._errors(*pair.of_graph(self.reference.differences))
        theirs = self._errors(*pair.of_model(self.reference.differences))
        found: dict[str, Fault] = {}
        for what, error in ours.items():
            if not error <= max(tolerance, FACTOR * theirs.get(what, 0.0)):
                fact = (
                    f"the traced graph rounds more than the model: it is off by {error:.1e} of the largest entry, the "
                    f"model by {theirs.get(what, 0.0):.1e}; in float64 both are equal"
                )
                found[what] = Fault(what, fact, WIDER)
        return found

    def _errors(self, differences: Mapping[str, float], updated: Mapping[str, Tensor]) -> dict[str, float]:
        errors = dict(differences)
        for name, new in updated.items():
            exact = self.buffers.get(name, self.wide.buffers[name])
            errors[f"buffer {name}"] = distance(exact, new.to(exact.dtype))
        return errors


__all__ = ["STATE", "Fault", "fault_of"]
