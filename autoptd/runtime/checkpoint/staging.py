"""Copy a rank's state into buffers kept for the run, so that a thread can write it while training continues.

In: the tensors that `stage.py` collects. Out: their values in host memory. On CUDA a separate stream copies
them into pinned memory during the next forward and backward; the stream that changes a tensor waits for the
copy.

    staging = Staging(device)
    staging.begin(); x = staging(parameter); staging.seal()
    staging.release()                                # before an update
    staging.ready()                                  # before x is read, by any thread

torch.distributed.checkpoint's stagers copy all memory that a view is part of, leave the wait to the loop, and
do not notice a parameter that is changed before it.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from autoptd.errors import RuntimeFault


class Staging:
    """See the module's docstring; on the CPU a copy is there at once."""

    def __init__(self, device: torch.device) -> None:
        # In the order of the copies: each save makes the same ones.
        self._buffers: list[torch.Tensor] = []
        self._count = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._is_torn = False

    def begin(self) -> None:
        """Begin a new save; the copies of the one before are not needed any more."""
        self._count, self._versions, self._is_torn = 0, [], False
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return what will have the values of `x`, contiguous."""
        x = x.detach()
        buffer = self._buffer_for(x)
        if x.is_cuda:
            self._versions.append((x, x._version))
        with torch.cuda.stream(self._stream) if x.is_cuda else nullcontext():
            buffer.copy_(x, non_blocking=x.is_cuda)
        return buffer

    def seal(self) -> None:
        """Note that all copies were asked for."""
        if self._stream is not None:
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def release(self) -> None:
        """Let what follows change the tensors."""
        if self._stream is None or self._copied is None or not self._versions:
            return
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)
        # Torch counts the writes to a tensor: one that came before this may have come amid the copy.
        self._is_torn |= any(x._version != version for x, version in self._versions)
        self._versions = []

    def ready(self) -> None:
        """Wait until the copies are there."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._is_torn:
            fact = "a parameter was changed in place while it was being copied"
            remedy = "change parameters before the call of ckpt.step, or by the optimizer"
            raise RuntimeFault("pm.checkpointer", fact, remedy)

    def _buffer_for(self, x: torch.Tensor) -> torch.Tensor:
        number, self._count = self._count, self._count + 1
        known = self._buffers[number] if number < len(self._buffers) else None
        if known is None or known.shape != x.shape or known.dtype != x.dtype:
            # Optimizers have no state before their first step: others come later.
            known = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
            self._buffers[number : number + 1] = [known]
        return known


__all__ = ["Staging"]
