"""Report a value that a forward has changed.

Change("layers.0.calls", "0", "1", "net.py:41").refuse()
# TraceError: layers.0.calls (net.py:41): is changed by the forward (0 before it, 1 after it), ...
"""

from __future__ import annotations

from dataclasses import dataclass

from autoptd.errors import TraceError
from autoptd.trace.draws import RANDOM

STATELESS = (
    "keep no Python state in forward: count in the training loop, and pass what the model needs as an input"
)


@dataclass(frozen=True)
class Change:
    """Describe a value that a call has changed: its `path` (`layers.0.calls`) and the `line` of the write."""

    path: str
    before: str
    after: str
    line: str = ""
    how: str = "is changed"
    remedy: str = STATELESS

    def refuse(self) -> TraceError:
        """Make the error for this change."""
        if self.path in RANDOM:
            fact = f"the forward draws from {RANDOM[self.path]} (LayerDrop does): the traced graph would repeat one outcome"
            return TraceError(
                "model", fact, "switch it off (layerdrop=0), or draw outside and pass the numbers as an input"
            )
        values = f" ({self.before} before it, {self.after} after it)" if self.before or self.after else ""
        values = "" if " 0x" in values else values
        fact = f"{self.how} by the forward{values}, which the traced graph would not do"
        return TraceError(f"{self.path} ({self.line})" if self.line else self.path, fact, self.remedy)


def of_weights(made: list[Change]) -> Change:
    """Describe caches as a change where one depends on weights: the trace recomputes it in every step."""
    named = dict.fromkeys(change.path for change in made if not change.path.startswith("["))
    paths = ", ".join(named) or made[0].path
    remedy = (
        "compute it in every forward, or keep what is made of today's weights in a buffer (register_buffer)"
    )
    return Change(paths, "", "", made[0].line, "is made of the weights, once and for good,", remedy)


__all__ = ["Change", "of_weights"]
