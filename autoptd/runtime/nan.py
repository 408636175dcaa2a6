"""Notice that the loss of a step was NaN, on all ranks in the same step, without making a CUDA device wait for the host.

In: the global loss of each step, equal on all ranks, and what this rank added to it. Out: the step whose loss was NaN. On a CPU
that is the step itself. On CUDA the answer is copied to the host behind the step's work, and read at the end of the next step:
the host would else stand still, once a step, until the device has caught up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Found(NamedTuple):
    """A step whose loss was NaN; `own` is what this rank had added."""

    step: int
    own: torch.Tensor


class _Asked(NamedTuple):
    found: Found
    flag: torch.Tensor  # on the host
    copied: torch.cuda.Event | None  # when it is there


class NanWatch:
    """Asked at the end of every step, by all ranks alike. `is_late`: the answer is about the step before."""

    def __init__(self, device: torch.device) -> None:
        self.is_late = device.type == "cuda"
        self._asked: _Asked | None = None

    def look(self, step: int, loss: torch.Tensor, own: torch.Tensor) -> Found | None:
        """The step that is told of now, if its loss was NaN."""
        asked: _Asked | None = _ask(Found(step, own), loss.isnan())
        if self.is_late:
            asked, self._asked = self._asked, asked
        if asked is None:
            return None
        if asked.copied is not None:
            asked.copied.synchronize()
        if not bool(asked.flag):
            return None
        self._asked = None
        return asked.found


def _ask(found: Found, flag: torch.Tensor) -> _Asked:
    if not flag.is_cuda:
        return _Asked(found, flag, None)
    host = torch.empty((), dtype=torch.bool, pin_memory=True)
    host.copy_(flag, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return _Asked(found, host, copied)


__all__ = ["Found", "NanWatch"]
