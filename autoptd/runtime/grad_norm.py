"""The norm of a model's gradients, and clipping by it: the same number on every rank, from one collective.

In: a rank's parameters, whose gradients a step has left. Out: the 2-norm over all of them, every shard, copy and tied
parameter counted once.

    norm = clip_gradients(params, max_norm=1.0)       # as torch.nn.utils.clip_grad_norm_ does it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from autoptd.errors import PlanError
from autoptd.kernels.forms import wide
from autoptd.runtime.guard import unguarded
from autoptd.runtime.parameters import RankParameters


@unguarded()
def grad_norm(params: RankParameters) -> torch.Tensor:
    """Return the 2-norm of all gradients of the model, every parameter counted once, on every rank (float64, 0-d).

    Over an axis where the storage is S every rank counts its shard, over others the first rank counts it; a tied
    parameter is counted by its first owner. One collective of all ranks.
    """
    world = params.world
    # In one order on every run: it is that of the sum.
    found = [params.gradient(spec.name) for spec in params.specs if spec.name in params.counted]
    total = sum_of_squares([gradient for gradient in found if gradient is not None], world.device)
    return world.everyone().all_reduce(total, "gradient norm").sqrt()


@unguarded()
@torch.no_grad()
def clip_gradients(params: RankParameters, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; return the norm before.

    The factor is that of `torch.nn.utils.clip_grad_norm_`: min(1, max_norm / (norm + 1e-6)).
    """
    if norm_type != 2:
        raise PlanError(f"norm_type={norm_type}", "only the 2-norm is there", "norm_type=2")
    norm = grad_norm(params)
    # On the device: comparing on the host would make it wait.
    factor = rounded((max_norm / (norm + 1e-6)).clamp(max=1.0))
    found = {name: params.gradient(name) for name in params.stored}
    gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
    for same in by_dtype(gradients.values()):
        torch._foreach_mul_(same, factor.to(same[0].dtype))
    for name, gradient in gradients.items():
        # `parameter.grad` is a rounded copy there.
        if name not in params.plain:
            params.set_gradient(name, gradient)
    return norm


def rounded(x: torch.Tensor, bits: int = 36) -> torch.Tensor:
    """Round a float64 to so many significant bits, relative to 7e-12 with 36 of them.

    The order in which a norm's squares are added depends on how ranks divide them; the factor must not.
    """
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**bits).round() / 2.0**bits, exponent)


def sum_of_squares(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of the squares of all entries, in float64."""
    norms: list[torch.Tensor] = []
    for same in by_dtype(torch.view_as_real(x) if x.is_complex() else x for x in tensors):
        # CUDA's sums are trees, exact enough in float32; float64 would write a copy of every tensor first.
        dtype = wide(same[0].dtype) if device.type == "cuda" else torch.float64
        norms += torch._foreach_norm(same, 2, dtype)
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([norm.double() for norm in norms]).square().sum()


def by_dtype(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield lists of tensors of one dtype: torch's operators on mixed lists fall back to one tensor after the other."""
    lists: dict[torch.dtype, list[torch.Tensor]] = {}
    for x in tensors:
        lists.setdefault(x.dtype, []).append(x)
    yield from lists.values()
