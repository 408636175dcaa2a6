"""Fused MLP activations: bias + GELU, SwiGLU and GEGLU.

In: the outputs of the first linear layers. Saved for backward: the inputs only; intermediates are recomputed.

    x = swiglu(F.linear(x, w_gate), F.linear(x, w_up))          # silu(gate) * up
    x = bias_gelu(F.linear(x, w_fc), b_fc, approximate="tanh")  # gelu(x + bias)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from autoptd.errors import InternalError
from autoptd.kernels.forms import takes_triton, tiles, wide

Tensor = torch.Tensor
aten = torch.ops.aten


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "none", backend: str = "eager") -> Tensor:
    """Return gelu(x + bias) of x [..., h] and bias [h]; `approximate` is that of `F.gelu`."""
    # Promotion and broadcasting are left to torch's operators.
    if x.dtype != bias.dtype or bias.shape != x.shape[-1:]:
        return bias_gelu_plain(x, bias, approximate=approximate)
    return _BiasGelu.apply(x, bias, _known(approximate), takes_triton(backend, x, "bias_gelu"))  # type: ignore[no-any-return, no-untyped-call]


def bias_gelu_plain(x: Tensor, bias: Tensor, *, approximate: str = "none") -> Tensor:
    """Compute `bias_gelu` as models spell it."""
    return F.gelu(x + bias, approximate=approximate)


def swiglu(gate: Tensor, up: Tensor, *, backend: str = "eager") -> Tensor:
    """Return silu(gate) * up, of two tensors of one shape."""
    return _gated(gate, up, "silu", backend)


def swiglu_plain(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `swiglu` as models spell it."""
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor, *, approximate: str = "none", backend: str = "eager") -> Tensor:
    """Return gelu(gate) * up, of two tensors of one shape; `approximate` is that of `F.gelu`."""
    return _gated(gate, up, _known(approximate), backend)


def geglu_plain(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    """Compute `geglu` as models spell it."""
    return F.gelu(gate, approximate=approximate) * up


def _known(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise InternalError("gelu", f"has no approximation {approximate!r}")
    return approximate


def _gated(gate: Tensor, up: Tensor, kind: str, backend: str) -> Tensor:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        return (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate=kind)) * up
    return _Gated.apply(gate, up, kind, takes_triton(backend, gate, "gated activation"))  # type: ignore[no-any-return, no-untyped-call]


def _act(x: Tensor, kind: str, out: Tensor) -> Tensor:
    """Compute out = silu(x) or gelu(x)."""
    return aten.silu.out(x, out=out) if kind == "silu" else aten.gelu.out(x, approximate=kind, out=out)  # type: ignore[no-any-return]


def _act_backward(grad: Tensor, x: Tensor, kind: str, out: Tensor) -> Tensor:
    """Compute out = grad times the derivative of the activation at x."""
    if kind == "silu":
        return aten.silu_backward.grad_input(grad, x, grad_input=out)  # type: ignore[no-any-return]
    return aten.gelu_backward.grad_input(grad, x, approximate=kind, grad_input=out)  # type: ignore[no-any-return]


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, approximate: str, triton: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.approximate, ctx.triton = approximate, triton
        if triton:
            from autoptd.kernels.activations_triton import bias_gelu_forward

            return bias_gelu_forward(x, bias, approximate)
        out = torch.empty_like(x)
        for at in tiles(x):
            _act(x[at] + bias, approximate, out[at])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, bias = ctx.saved_tensors
        if ctx.triton:
            from autoptd.kernels.activations_triton import bias_gelu_backward

            dx = bias_gelu_backward(grad, x, bias, ctx.approximate)
            return dx, dx.reshape(-1, dx.shape[-1]).sum(0), None, None
        dx = torch.empty_like(x)
        db = torch.zeros_like(bias, dtype=wide(x.dtype)) if ctx.needs_input_grad[1] else None
        for at in tiles(x):
            # grad * gelu'(x + bias) is the gradient of x; summed over rows, that of the bias.
            part = _act_backward(grad[at], x[at] + bias, ctx.approximate, dx[at])
            if db is not None:
                db += part.reshape(-1, part.shape[-1]).sum(0, dtype=db.dtype)
        return dx, None if db is None else db.to(bias.dtype), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str, triton: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind, ctx.triton = kind, triton
        if triton:
            from autoptd.kernels.activations_triton import gated_forward

            return gated_forward(gate, up, kind)
        out = torch.empty_like(gate)
        for at in tiles(gate):
            _act(gate[at], kind, out[at]).mul_(up[at])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        if ctx.triton:
            from autoptd.kernels.activations_triton import gated_backward

            return *gated_backward(grad, gate, up, ctx.kind), None, None
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        for at in tiles(gate):
            # d_up = grad * act(gate) and then d_gate, each computed in its output buffer.
            _act(gate[at], ctx.kind, d_up[at]).mul_(grad[at])
            _act_backward(grad[at] * up[at], gate[at], ctx.kind, d_gate[at])
        return d_gate, d_up, None, None
