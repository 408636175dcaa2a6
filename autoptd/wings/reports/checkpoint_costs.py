"""What a checkpoint of a program is: its bytes, the seconds to write it, and how often to.

In: a program, and where they are known the storage's bytes a second and the mean hours between faults of the whole job. Out:
`CheckpointCosts`, whose text is a line of `autoptd show`.

    print(checkpoint_costs(program, bandwidth=273e9, mtbf=3.1))

The bytes are those of the parameters as they are stored and of AdamW's two moments, as `pm.save` writes them; buffers, step
counts and the headers of items come on top. An optimizer that keeps other state has other bytes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from autoptd.ir.placement import itemsize
from autoptd.program.pieces import checkpoint_bytes
from autoptd.program.program import Program
from autoptd.wings.words import count_text, seconds_text

# The tensors that AdamW keeps of a parameter's shape.
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class CheckpointCosts:
    """`bandwidth` is in bytes a second, `mtbf` in hours; None where nobody said."""

    weight_bytes: int
    moment_bytes: int
    bandwidth: float | None = None
    mtbf: float | None = None

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.moment_bytes

    @property
    def seconds(self) -> float | None:
        """How long the storage takes to write it."""
        return self.total_bytes / self.bandwidth if self.bandwidth else None

    @property
    def interval_seconds(self) -> float | None:
        """Young's interval, where training stops for all of the write."""
        if self.seconds is None or self.mtbf is None:
            return None
        # As in `runtime/checkpoint/pace.py`.
        return math.sqrt(2 * self.seconds * 3600 * self.mtbf)

    def record(self) -> dict[str, Any]:
        """Return all numbers as plain data."""
        return {
            **asdict(self),
            "total_bytes": self.total_bytes,
            "seconds": self.seconds,
            "interval_seconds": self.interval_seconds,
        }

    def __str__(self) -> str:
        sizes = (self.total_bytes, self.weight_bytes, self.moment_bytes)
        total, weights, moments = (count_text(size, "B") for size in sizes)
        text = f"Checkpoint: {total} (weights {weights}, AdamW's moments {moments})"
        if self.bandwidth and self.seconds is not None:
            text += f", {seconds_text(self.seconds)} at {count_text(self.bandwidth, 'B/s')}"
        if self.interval_seconds is not None:
            minutes = self.interval_seconds / 60
            text += (
                f"; if training waits for it and fails every {self.mtbf:g} h, save every {minutes:.3g} min"
            )
        return text


def checkpoint_costs(
    program: Program, bandwidth: float | None = None, mtbf: float | None = None
) -> CheckpointCosts:
    """Return what a checkpoint of a program is."""
    keys = {
        spec.name: dict.fromkeys(MOMENTS, itemsize(spec.storage.dtype))
        for spec in program.params
        if spec.requires_grad
    }
    return CheckpointCosts(*checkpoint_bytes(program, keys), bandwidth, mtbf)


__all__ = ["CheckpointCosts", "checkpoint_costs"]
