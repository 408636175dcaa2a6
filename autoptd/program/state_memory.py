"""The ledger: the bytes that a rank holds for the model's parameters, by purpose.

`state_memory` of `buckets.py` predicts them, padding included, as the runtime allocates them; `pm.memory()` counts the
same kinds on existing tensors. Activations are not included: `summarize(program)` has their peak.

    program.memory(rank=0).total
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class StateMemory:
    """Bytes of a rank.

    parameters: tensors that stages compute with.
    gradients: buffers that accumulate the gradients of a step, and rounded copies for the user.
    masters: tensors that the optimizer steps, if stages compute with others.
    moments: optimizer state of the parameters' shapes; predictions assume AdamW's two.
    """

    parameters: int
    gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        return sum(getattr(self, kind.name) for kind in fields(self))
