"""Helpers of the Triton kernels: block sizes, dtypes, rows as strided [a, b, q, k], cheap divisions, and fast launches.

No kernel is autotuned: Triton's autotuner keeps its state in the kernel object, which ranks that are threads
share.

    launched(_forward, (rows,), x)(x, y, width, EPS=eps, BLOCK=1024, num_warps=4)

Imported only where Triton is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction, driver

from autoptd.kernels.forms import wide

Tensor = torch.Tensor


@functools.cache
def row_size(width: int, most: int = 32) -> dict[str, int]:
    """Return the block size that holds a row of `width` elements, and the number of warps, 4 to `most`."""
    block = next_power_of_2(max(width, 16))
    # 512 elements per warp, 16 per thread.
    return {"BLOCK": block, "num_warps": min(most, max(4, block // 512))}


# Triton's cdiv and next_power_of_2 also serve kernels: on the host they take half as long as a launch.
def ceil_div(count: int, size: int) -> int:
    """Return how many pieces of `size` hold `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two that is at least `count`, a positive number."""
    return 1 << (count - 1).bit_length()


def computed(dtype: torch.dtype) -> Any:
    """Return Triton's name of the dtype in which values of `dtype` are computed."""
    return tl.float64 if wide(dtype) == torch.float64 else tl.float32


def four_dims(x: Tensor) -> Tensor:
    """Return x as [a, b, q, k], without a copy if it has at most four dims."""
    return x[(None,) * (4 - x.ndim)] if x.ndim <= 4 else x.reshape(-1, *x.shape[-3:])


def programs(rows: int, warps: int, device: torch.device) -> int:
    """Return the number of programs of a kernel that sums over rows: 16 warps per multiprocessor.

    Each program writes a row of partial sums, which would cost more than the work if it had few rows.
    """
    if device.type != "cuda":
        # Triton's interpreter, in tests: several programs, with more than one row each.
        return min(rows, 3)
    return min(rows, max(1, 16 // warps) * _multiprocessors(device))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def passes(period: int, numbers: int, size: int) -> int:
    """Return how many multiples of `period` a run of `size` numbers may cross: 0, 1, or 2 for more."""
    if period >= numbers:
        return 0
    return 1 if period >= size else 2


@triton.jit
def divided(first, lane, period, TIMES: tl.constexpr):
    """Return quotient and remainder of first + lane by the period; TIMES multiples (`passes`) are crossed.

    Divides only the first number where that is enough: a division takes 20 instructions or more.
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


Grid = tuple[int, ...]

# (kernel, device, kinds of arguments, constants) -> the compiled kernel and its trailing constants.
_known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launched(kernel: Any, grid: Grid, x: Tensor) -> Callable[..., Any]:
    """Return a launcher of `kernel` for tensors like `x`; on the meta device it does nothing.

    The launcher takes the arguments by position, then constants by name in the order of the signature, and
    Triton's options. Triton specializes a kernel on its arguments (dtypes, whether addresses and integers are multiples
    of 16, whether an integer is 1, and the width of integers) and recomputes this at every launch, which is most of the
    launch's host time. Here the specialization is the key of a cache, at least as fine as Triton's.
    """
    if _has_no_values(x):
        return _nothing
    # Triton's interpreter wraps kernels in another class than JITFunction.
    return partial(_launch, kernel, grid) if isinstance(kernel, JITFunction) else kernel[grid]  # type: ignore[no-any-return]


def _has_no_values(x: Tensor) -> bool:
    return x.is_meta


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _launch(kernel: Any, grid: Grid, *arguments: Any, **constants: Any) -> None:
    device = driver.active.get_current_device()
    key = (id(kernel), device, *map(kind, arguments), *constants.items())
    found = _known.get(key)
    if found is not None:
        compiled, rest = found
        compiled[(*grid, 1, 1)](*arguments, *rest, stream=driver.active.get_current_stream(device))
        return
    compiled = kernel[grid](*arguments, **constants)
    names = kernel.arg_names[len(arguments) :]
    if compiled is not None and all(name in constants for name in names):
        _known[key] = compiled, tuple(constants[name] for name in names)


def kind(x: Any) -> Any:
    """Return the specialization key of an argument: arguments of one kind share a compiled kernel."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is int:
        # Triton picks the type by magnitude, specializes on multiples of 16, and makes 1 a constant.
        return -(2**31) <= x < 2**31, x < 2**63, x % 16 == 0, x == 1
    # All floats share a kind; None and bools are their own.
    return float if isinstance(x, float) else x
