"""What Triton kernels share: sizes, dtypes, rows as [a, b, q, k] with strides of their own, and divisions by
few instructions.

No kernel is tuned while it runs: the tuner of Triton keeps what it is at in the kernel, which ranks that are
threads share.

Imported only where Triton is installed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from autoptd.kernels.forms import wide

Tensor = torch.Tensor


@functools.cache
def row_size(width: int, most: int = 32) -> dict[str, int]:
    """Return the block that holds a row of `width` elements, and the warps, of 4 to `most`, that work on it."""
    block = next_power_of_2(max(width, 16))
    # 512 elements a warp, 16 a thread.
    return {"BLOCK": block, "num_warps": min(most, max(4, block // 512))}


# Triton's own cdiv and next_power_of_2 are made for kernels, too: on the host they take half as long as a launch.
def ceil_div(count: int, size: int) -> int:
    """Return how many pieces of `size` hold `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the least power of two that is not below a positive `count`."""
    return 1 << (count - 1).bit_length()


def computed(dtype: torch.dtype) -> Any:
    """Return Triton's name of the dtype that values of `dtype` are computed in."""
    return tl.float64 if wide(dtype) == torch.float64 else tl.float32


def four_dims(x: Tensor) -> Tensor:
    """Return x as [a, b, q, k], without a copy if it has at most four dims."""
    return x[(None,) * (4 - x.ndim)] if x.ndim <= 4 else x.reshape(-1, *x.shape[-3:])


def programs(rows: int, warps: int, device: torch.device) -> int:
    """Return how many programs share the rows where each sums up over its own: as many as give a
    multiprocessor 16 warps.

    Each of them writes a row of sums: one for a few rows would cost more than these.
    """
    if device.type != "cuda":
        # Triton's interpreter, in tests: several, with more than one row each.
        return min(rows, 3)
    return min(rows, max(1, 16 // warps) * _multiprocessors(device))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def passes(period: int, numbers: int, size: int) -> int:
    """Return how often `size` numbers in a row, of `numbers`, pass a multiple of `period`: 0 never, 1
    once at most, 2 more.
    """
    if period >= numbers:
        return 0
    return 1 if period >= size else 2


@triton.jit
def divided(first, lane, period, TIMES: tl.constexpr):
    """Quotient and remainder of first + lane by the period, of which TIMES multiples (see `passes`) are on
    the way.

    Divided is the first number alone, where that is enough: a division takes 20 instructions and more.
    """
    times = first * 0
    rest = first + lane
    if TIMES > 0:
        times = first // period
        rest = first % period + lane
    if TIMES == 1:
        passes = rest >= period
        times = times + passes.to(rest.dtype)
        rest = tl.where(passes, rest - period, rest)
    elif TIMES == 2:
        times = times + rest // period
        rest = rest % period
    return times, rest
