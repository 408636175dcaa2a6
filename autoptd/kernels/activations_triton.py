"""Implement `kernels.activations` in Triton, with one pass over the inputs in forward and one in backward.

Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoptd.kernels.rows_triton import ceil_div, computed, divided, launched, passes

Tensor = torch.Tensor
# Elements per program.
SIZE = 1024
# By `kind` of `kernels.activations`: the compile-time constant KIND.
KINDS = {"none": 0, "tanh": 1, "silu": 2}


def bias_gelu_forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """Return gelu(x + bias)."""
    x, bias = x.contiguous(), bias.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        launched(_bias_gelu, _grid(x), x)(
            x,
            bias,
            # Placeholder for the gradient, which is never read with BACK=False.
            x,
            out,
            x.numel(),
            len(bias),
            KIND=KINDS[approximate],
            BACK=False,
            BIASES=passes(len(bias), x.numel(), SIZE),
            WIDE=computed(x.dtype),
            SIZE=SIZE,
        )
    return out


def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """Return the gradient of x."""
    x, bias, grad = x.contiguous(), bias.contiguous(), grad.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        launched(_bias_gelu, _grid(x), x)(
            x,
            bias,
            grad,
            out,
            x.numel(),
            len(bias),
            KIND=KINDS[approximate],
            BACK=True,
            BIASES=passes(len(bias), x.numel(), SIZE),
            WIDE=computed(x.dtype),
            SIZE=SIZE,
        )
    return out


def gated_forward(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Return act(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if gate.numel():
        launched(_gated, _grid(gate), gate)(
            gate, up, out, gate.numel(), KIND=KINDS[kind], WIDE=computed(gate.dtype), SIZE=SIZE
        )
    return out


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        launched(_gated_backward, _grid(gate), gate)(
            grad, gate, up, d_gate, d_up, gate.numel(), KIND=KINDS[kind], WIDE=computed(gate.dtype), SIZE=SIZE
        )
    return d_gate, d_up


def _grid(x: Tensor) -> tuple[int]:
    return (ceil_div(x.numel(), SIZE),)


@triton.jit
def _act(x, KIND: tl.constexpr):
    """Return the activation at x and its derivative."""
    if KIND == 2:
        s = 1.0 / (1.0 + tl.exp(-x))
        return x * s, s * (1.0 + x * (1.0 - s))
    elif KIND == 1:
        # sqrt(2 / pi)
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # 0.134145 below is 3 * 0.044715, of the derivative of `inner`.
        # (1 + tanh(inner)) / 2.
        s = 1.0 / (1.0 + tl.exp(-2.0 * inner))
        return x * s, s + 2.0 * x * s * (1.0 - s) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    else:
        s = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        # 1 / sqrt(2 pi)
        return x * s, s + x * tl.exp(-0.5 * x * x) * 0.3989422804014327


@triton.jit
def _bias_gelu(
    x,
    bias,
    grad,
    out,
    count,
    width,
    KIND: tl.constexpr,
    BACK: tl.constexpr,
    BIASES: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
):
    # 64 bits: a tensor may have more than 2**31 elements.
    first = tl.program_id(0).to(tl.int64) * SIZE
    at = first + tl.arange(0, SIZE)
    inside = at < count
    # The column of each element, without a division per element.
    _, place = divided(first, tl.arange(0, SIZE), width, BIASES)
    value = tl.load(x + at, mask=inside, other=0.0).to(WIDE) + tl.load(
        bias + place, mask=inside, other=0.0
    ).to(WIDE)
    # The slope is cheap compared with the loads, so forward and backward share one function.
    y, slope = _act(value, KIND)
    if BACK:
        y = slope * tl.load(grad + at, mask=inside, other=0.0).to(WIDE)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated(gate, up, out, count, KIND: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    y, _ = _act(tl.load(gate + at, mask=inside, other=0.0).to(WIDE), KIND)
    y *= tl.load(up + at, mask=inside, other=0.0).to(WIDE)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(
    grad, gate, up, d_gate, d_up, count, KIND: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    g = tl.load(grad + at, mask=inside, other=0.0).to(WIDE)
    y, slope = _act(tl.load(gate + at, mask=inside, other=0.0).to(WIDE), KIND)
    other = tl.load(up + at, mask=inside, other=0.0).to(WIDE)
    tl.store(d_gate + at, (g * other * slope).to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + at, (g * y).to(d_up.dtype.element_ty), mask=inside)
