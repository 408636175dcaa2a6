"""Compute the norm of a model's gradients in one collective, and clip gradients by norm or by value.

In: a rank's parameters, with the gradients of a step. Out: the p-norm over all of them (2, inf, 1, or any p >
0), every shard, copy and tied parameter counted once.

    norm = clip_gradients(params, max_norm=1.0)       # like torch.nn.utils.clip_grad_norm_
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf

import torch

from autoptd.errors import PlanError, RuntimeFault
from autoptd.kernels.forms import wide
from autoptd.runtime.params.guard import unguarded
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.params.parts import by_dtype

# The site of its collective.
SITE = "gradient norm"


@unguarded()
def grad_norm(params: RankParameters, p: float = 2.0) -> torch.Tensor:
    """Return the p-norm of all gradients of the model, every parameter counted once, on every rank (float64, 0-d).

    Over an axis where the storage is S every rank counts its shard, over others the first rank counts it; a tied
    parameter is counted by its first owner. One collective of all ranks.
    """
    return _norm(params, _gradients(params), p)


def _gradients(params: RankParameters) -> dict[str, torch.Tensor]:
    """Return this rank's parts of all gradients, by name."""
    found = {name: params.gradient(name) for name in params.stored}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def _norm(params: RankParameters, held: Mapping[str, torch.Tensor], p: float) -> torch.Tensor:
    world = params.world
    # In the same order in every run, since it is the order of summation.
    counted = [spec.name for spec in params.specs if spec.name in params.counted]
    gradients = [held[name] for name in counted if name in held]
    if p == inf:
        # Backends treat NaN in a maximum differently, so a NaN is sent as a number.
        own = largest(gradients, world.device)
        both = torch.stack([own.nan_to_num(0.0, posinf=inf), own.isnan().double()])
        size, is_nan = world.everyone().all_reduce(both, SITE, op="max").unbind()
        return torch.where(is_nan > 0, torch.nan, size)
    total = world.everyone().all_reduce(sum_of_powers(gradients, world.device, p), SITE)
    return total.sqrt() if p == 2 else total.pow(1 / p)


def checked_norm_type(norm_type: float | str) -> float:
    """Return the p of a p-norm, as torch reads it: a number above 0, inf or "inf"; else PlanError."""
    try:
        p = float(norm_type)
    except (TypeError, ValueError):
        p = 0.0
    if not p > 0:
        fact = f"norm_type={norm_type!r} is not a valid norm type"
        raise PlanError(
            "clip_grad_norm_", fact, "norm_type=2 (the default), inf, 1, or any other number above 0"
        )
    return p


def checked_clip_value(clip_value: float) -> float:
    """Return the bound for clipping by value; raise PlanError unless it is a non-negative number."""
    try:
        value = float(clip_value)
    except (TypeError, ValueError):
        value = -1.0
    if not value >= 0:
        raise PlanError(
            "clip_grad_value_", f"clip_value={clip_value!r} is not a valid bound", "a number above 0"
        )
    return value


def check_finite(norm: torch.Tensor) -> None:
    """Raise RuntimeFault on all ranks if the norm of all gradients is NaN or infinite."""
    if not norm.isfinite():
        remedy = "look at this batch and the learning rate, or leave out error_if_nonfinite=True"
        raise RuntimeFault("clip_grad_norm_", f"the norm of all gradients is {norm.item()}", remedy)


@unguarded()
@torch.no_grad()
def clip_gradients(params: RankParameters, max_norm: float, p: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their global p-norm is at most `max_norm`; return the norm before.

    The factor is that of `torch.nn.utils.clip_grad_norm_`: min(1, max_norm / (norm + 1e-6)).
    """
    with changed_gradients(params) as gradients:
        norm = _norm(params, gradients, p)
        # On the device: a comparison on the host would synchronize.
        factor = rounded((max_norm / (norm + 1e-6)).clamp(max=1.0))
        for same in by_dtype(gradients.values()):
            torch._foreach_mul_(same, factor.to(same[0].dtype))
    return norm


@unguarded()
@torch.no_grad()
def clip_values(params: RankParameters, value: float) -> None:
    """Clamp every entry of all gradients to [-value, value], alike in all copies."""
    with changed_gradients(params) as gradients:
        for same in by_dtype(gradients.values()):
            torch._foreach_clamp_min_(same, -value)
            torch._foreach_clamp_max_(same, value)


@contextmanager
def changed_gradients(params: RankParameters) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's parts of all gradients, by name, to be changed in place in the block."""
    gradients = _gradients(params)
    yield gradients
    for name in [name for name in gradients if name not in params.plain]:
        # `parameter.grad` is a rounded copy there.
        params.set_gradient(name, gradients[name])


def rounded(x: torch.Tensor, bits: int = 36) -> torch.Tensor:
    """Round a float64 to `bits` significant bits; 36 bits give a relative error of 7e-12.

    The order of summation depends on how ranks divide the squares; the clipping factor must not.
    """
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**bits).round() / 2.0**bits, exponent)


def sum_of_powers(tensors: Sequence[torch.Tensor], device: torch.device, p: float = 2.0) -> torch.Tensor:
    """Return the sum of |x|^p over all entries, in float64."""
    return norms_of(tensors, device, p).pow(p).sum()


def largest(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the largest |x| of all entries, in float64: 0 for no entries, NaN if any is NaN."""
    return torch.cat(
        [norms_of(tensors, device, inf), torch.zeros(1, dtype=torch.float64, device=device)]
    ).amax()


def norms_of(tensors: Sequence[torch.Tensor], device: torch.device, p: float) -> torch.Tensor:
    """Return the p-norm of each tensor that has entries, in float64."""
    norms: list[torch.Tensor] = []
    for same in by_dtype(x.abs() if x.is_complex() else x for x in tensors if x.numel()):
        # CUDA's sums are trees, exact enough in float32; float64 would write a copy of every tensor first.
        dtype = wide(same[0].dtype) if device.type == "cuda" else torch.float64
        norms += torch._foreach_norm(same, p, dtype)
    if not norms:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.stack([norm.double() for norm in norms])
