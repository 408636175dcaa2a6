"""A yes or no that the device computes, for the host to read later: without it, the host would wait for the device.

In: a 0-d tensor. Out: its truth, once the device has come there. On CUDA it is copied into pinned memory asynchronously.

    flag = HostFlag(loss.isnan())
    ...                                             # the next step
    if flag.read():
"""

from __future__ import annotations

import torch


class HostFlag:
    """A flag on its way to the host."""

    def __init__(self, flag: torch.Tensor) -> None:
        self._flag, self._copied = flag, None
        if flag.is_cuda:
            # Pinned memory makes the copy asynchronous.
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._flag.copy_(flag, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> bool:
        """Return it; waits for the device if that has not come there yet."""
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._flag)


__all__ = ["HostFlag"]
