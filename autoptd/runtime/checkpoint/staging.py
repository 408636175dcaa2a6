"""Copies of a rank's state that a thread writes while training goes on: in buffers that are kept for the run.

In: tensors, as `stage.py` collects them. Out: their values in the host's memory. On CUDA a stream of its own copies them into
pinned memory, beside the next forward and backward: whoever changes a tensor waits for it, on the device.

    staging = staging_of(device)
    staging.begin(); x = staging(parameter); staging.seal()
    staging.release()                                # before an update
    staging.ready()                                  # before x is read, by any thread
"""

from __future__ import annotations

import torch

from autoptd.errors import RuntimeFault


class Staging:
    """On the CPU: a copy is there at once."""

    def __init__(self) -> None:
        # In the order of the copies: each save makes the same ones.
        self._buffers: list[torch.Tensor] = []
        self._count = 0

    def begin(self) -> None:
        """Begin a new save; what the one before copied is not needed any more."""
        self._count = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return what will have the values of `x`, contiguous."""
        buffer = self._buffer_for(x)
        self._copy(buffer, x.detach())
        return buffer

    def seal(self) -> None:
        """Note that all copies were asked for."""

    def release(self) -> None:
        """Let what follows change the tensors."""

    def ready(self) -> None:
        """Wait until the copies are there."""

    def _buffer_for(self, x: torch.Tensor) -> torch.Tensor:
        number, self._count = self._count, self._count + 1
        known = self._buffers[number] if number < len(self._buffers) else None
        if known is None or known.shape != x.shape or known.dtype != x.dtype:
            # Optimizers have no state before their first step: others come later.
            self._buffers[number : number + 1] = [known := self._new(x)]
        return known

    def _new(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device="cpu")

    def _copy(self, buffer: torch.Tensor, x: torch.Tensor) -> None:
        buffer.copy_(x)


class PinnedStaging(Staging):
    """On CUDA: see the module's docstring."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._stream = torch.cuda.Stream(device)
        self._copied: torch.cuda.Event | None = None
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._is_torn = False

    def begin(self) -> None:
        super().begin()
        self._versions, self._is_torn = [], False
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def seal(self) -> None:
        self._copied = torch.cuda.Event()
        self._copied.record(self._stream)

    def release(self) -> None:
        if self._copied is None or not self._versions:
            return
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)
        # Torch counts the writes to a tensor: one that came before this may have come amid the copy.
        self._is_torn |= any(x._version != version for x, version in self._versions)
        self._versions = []

    def ready(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        if self._is_torn:
            fact = "a parameter was changed in place while it was being copied"
            remedy = "change parameters before the call of ckpt.step, or by the optimizer"
            raise RuntimeFault("pm.checkpointer", fact, remedy)

    def _new(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)

    def _copy(self, buffer: torch.Tensor, x: torch.Tensor) -> None:
        if not x.is_cuda:
            buffer.copy_(x)
            return
        self._versions.append((x, x._version))
        with torch.cuda.stream(self._stream):
            buffer.copy_(x, non_blocking=True)


def staging_of(device: torch.device) -> Staging:
    """Return the staging of a rank on this device."""
    return PinnedStaging(device) if device.type == "cuda" else Staging()


__all__ = ["PinnedStaging", "Staging", "staging_of"]
