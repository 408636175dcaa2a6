"""A kernel that does nothing but stay for a while on k multiprocessors: what a communication that waits, or runs, takes away.

stay = Spin(device, blocks=16, microseconds=200.0)
with device.side_stream(): stay()
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from benchmarks.gpu.device import Device

SIZE = 512
SAMPLE = 20_000  # rounds of the kernel that is timed to know how many take a microsecond


@triton.jit
def _stay(out, rounds, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    x = lanes.to(tl.float32)
    for _ in range(rounds):
        x = x * 0.999 + 0.5
    tl.store(out + tl.program_id(0) * SIZE + lanes, x)


class Spin:
    """Calling it launches the kernel, which then stays for about `microseconds` on `blocks` multiprocessors."""

    def __init__(self, device: Device, blocks: int, microseconds: float) -> None:
        self.blocks, self._out = blocks, torch.empty(max(1, blocks) * SIZE, device=device.name)
        if not device.is_cuda:  # the interpreter takes longer for one round
            self.rounds = 1
            return
        self.rounds = SAMPLE
        self.rounds = max(1, round(SAMPLE * microseconds / device.microseconds(self, 0.05)))

    def __call__(self) -> None:
        if self.blocks:
            _stay[(self.blocks,)](self._out, self.rounds, SIZE=SIZE, num_warps=16)
