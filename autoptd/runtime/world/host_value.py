"""A number that the device computes, for the host to read later: without it, the host would wait for the device.

In: a 0-d tensor. Out: its value, once the device has come there. On CUDA it is copied into pinned memory asynchronously.

    flag = HostValue(loss.isnan())
    ...                                             # the next step
    if flag.read():
"""

from __future__ import annotations

from typing import Any

import torch


class HostValue:
    """A number on its way to the host."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x, self._copied = x, None
        if x.is_cuda:
            # Pinned memory makes the copy asynchronous.
            self._x = torch.empty((), dtype=x.dtype, device="cpu", pin_memory=True)
            self._x.copy_(x, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Any:
        """Return it; waits for the device if that has not come there yet."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._x.item()


__all__ = ["HostValue"]
