"""Detect a NaN loss on all ranks in the same step, without synchronizing a CUDA device with the host.

In: the global loss of each step, equal on all ranks, and what this rank added to it. Out: the step whose loss was NaN.
On a CPU that is the step itself. On CUDA the flag is copied to the host asynchronously, and read at the end of the next
step: otherwise the host would wait for the device once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from autoptd.errors import RuntimeFault
from autoptd.runtime.world.flags import HostValue


class StepLoss(NamedTuple):
    """A step's number, and the part of its loss that this rank computed."""

    step: int
    own: torch.Tensor


class NanWatch:
    """The check that all ranks make at the end of every step; with `is_late`, of the step before."""

    def __init__(self, device: torch.device) -> None:
        self.is_late = device.type == "cuda"
        self._pending: tuple[StepLoss, HostValue] | None = None

    def look(self, step: int, loss: torch.Tensor, own: torch.Tensor) -> StepLoss | None:
        """Return the step whose check is due, if its loss was NaN, else None."""
        check: tuple[StepLoss, HostValue] | None = StepLoss(step, own), HostValue(loss.isnan())
        if self.is_late:
            check, self._pending = self._pending, check
        if check is None or not check[1].read():
            return None
        # The step since then used the NaN gradients: its own check would only report the same fault again.
        self._pending = None
        return check[0]


__all__ = ["NanWatch", "StepLoss"]


def nan_fault(now: int, step: int, ranks: Sequence[int]) -> RuntimeFault:
    """Return the fault of a loss that was NaN in `step` on `ranks`, and is reported in step `now`."""
    where = f"NaN on rank {', '.join(map(str, ranks))} (last stage)"
    if step == now:
        remedy = "look at this batch and the learning rate, or pass ranks=RankOptions(nan='ignore')"
        return RuntimeFault(f"step {step}", f"the loss is {where}; its gradients were dropped", remedy)
    fact = f"the loss of step {step} was {where}, which on CUDA is seen one step later: its gradients were handed over"
    remedy = (
        "go back to a checkpoint from before it, and look at that batch and the learning rate; "
        "or pass ranks=RankOptions(nan='ignore')"
    )
    return RuntimeFault(f"step {now}", fact, remedy)
