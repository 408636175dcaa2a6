"""Choose the form of a fused operator, and tile its eager form.

*plain*: the operator as models spell it, in torch operators; this defines it. *eager*: one autograd function
in torch operators, with fewer passes over memory and fewer saved activations. *triton*: the same function
with Triton kernels as its passes. `backend` names the form ("eager" or "triton"). Triton needs tensors on a
GPU or its interpreter (TRITON_INTERPRET=1); otherwise the eager form runs. On the meta device the Triton form
allocates the outputs and launches nothing.

    forward = swiglu_triton if takes_triton(backend, gate, "swiglu") else swiglu_torch
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import os

import torch

from autoptd.errors import InternalError
from autoptd.ir.fusion import WIDEST

# Elements per tile on a CPU: few enough to stay in its caches, enough to amortize the calls.
TILE = 1 << 17
Index = tuple[int | slice, ...]


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def takes_triton(backend: str, x: torch.Tensor, site: str, width: int = 0) -> bool:
    """Return whether the operator `site` on tensors like `x` runs its Triton form.

    `width` is the width of rows that the kernel must hold whole: above WIDEST they take the eager form.
    """
    if backend not in ("eager", "triton"):
        raise InternalError(site, f"has no form {backend!r}")
    if backend == "eager" or width > WIDEST.get(site, width) or not has_triton():
        return False
    return x.is_cuda or x.is_meta or (x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def tiles(x: torch.Tensor) -> list[Index]:
    """Return indices that cut `x` into pieces of about TILE elements along its leading dims.

    The last dim stays whole. On other devices than the CPU there is one piece, for the fewest calls.
    """
    if x.device.type != "cpu" or x.numel() <= TILE or x.ndim < 2:
        return [()]
    # [4, 1024, 512] has tiles of 256 rows: (0, 0:256), (0, 256:512), ..., (3, 768:1024).
    dim, width = 0, math.prod(x.shape[1:])
    while width > TILE and dim < x.ndim - 2:
        dim += 1
        width //= x.shape[dim]
    depth = max(1, TILE // width)
    cuts = [slice(start, start + depth) for start in range(0, x.shape[dim], depth)]
    return [(*before, cut) for before in itertools.product(*map(range, x.shape[:dim])) for cut in cuts]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and statistics: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scaled(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x times a 0-d number, rounded to `dtype` once: rounding the number first would bias all of x."""
    out = torch.empty_like(x, dtype=dtype)
    for at in tiles(x):
        # As a 0-d tensor it would be rounded to the dtype of x.
        factor = scale.reshape((1,) * x[at].ndim)
        torch.mul(x[at], factor, out=out[at])
    return out


def needs_no_grad(x: torch.Tensor | None, name: str, site: str) -> None:
    """Raise InternalError if `x` wants a gradient that the operator does not give."""
    if x is not None and x.requires_grad and torch.is_grad_enabled():
        raise InternalError(site, f"gives no gradient to its {name}, which requires one")
