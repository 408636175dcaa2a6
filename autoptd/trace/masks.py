"""Run a model with given dropout masks and random numbers, however it draws them.

Every dropout of torch, including the one in attention, draws its random numbers with one of two operators.
These are intercepted here, and so are the noise operators (`noise.py`), in the order of the calls, which is
the order of the sites in a traced graph.

    with given_masks(lambda site, x, keep: torch.rand(x.shape) < keep):
        loss = model(ids, targets)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoptd.compat import TorchDispatchMode, plain_checkpoints
from autoptd.trace.noise import kind_of, steps_of

aten = torch.ops.aten
# (site, a tensor of that size, fraction that is kept) -> boolean mask
MaskOf = Callable[[int, torch.Tensor, float], torch.Tensor]
# (site, a tensor of the size and dtype, "uniform", "normal" or "exponential") -> standard numbers of that kind
NoiseOf = Callable[[int, torch.Tensor, str], torch.Tensor]


@contextmanager
def given_masks(
    mask_of: MaskOf, sites: Iterable[int] | None = None, noise_of: NoiseOf | None = None
) -> Iterator[None]:
    """Make dropouts use the masks of `mask_of`, and noise the numbers of `noise_of` (default `any_noise`).

    `sites` are the site numbers of the calls (default 0, 1, 2 ...). Activation checkpoints do not recompute, as
    that would consume the masks of other sites.
    """
    masks = _Masks(mask_of, noise_of or any_noise, iter(sites if sites is not None else itertools.count()))
    with written_out_attention(), plain_checkpoints(), masks:
        yield


def written_out_attention() -> AbstractContextManager[None]:
    """Run attention with math operators, on all threads: fused kernels draw masks internally, and round
    differently.
    """
    return sdpa_kernel(SDPBackend.MATH)  # type: ignore[no-any-return]


def any_mask(site: int, x: torch.Tensor, keep: float) -> torch.Tensor:
    """Return a mask that depends only on the site."""
    generator = torch.Generator(x.device).manual_seed(site)
    return torch.rand(x.shape, generator=generator, device=x.device) < keep


def any_noise(site: int, x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return numbers that depend only on the site."""
    generator = torch.Generator(x.device).manual_seed(site)
    u = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float64)
    if kind == "normal":
        u = torch.special.ndtri(u.clamp(1e-9, 1 - 1e-9))
    elif kind == "exponential":
        u = -torch.log1p(-u.clamp(min=1e-9))
    return u.to(x.dtype)


class _Masks(TorchDispatchMode):
    def __init__(self, mask_of: MaskOf, noise_of: NoiseOf, sites: Iterator[int]) -> None:
        super().__init__()
        self._mask_of, self._noise_of, self._sites = mask_of, noise_of, sites

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Dropout on the CPU and in attention; the fused dropout of CUDA uses the other operator.
        if func is aten.bernoulli_.float:
            # A default rate is not among the arguments.
            x, keep = args[0], args[1] if len(args) > 1 else 0.5
            return x.copy_(self._mask_of(next(self._sites), x, keep))
        if func is aten.native_dropout.default:
            x, rate = args[:2]
            kept = self._mask_of(next(self._sites), x, 1.0 - rate)
            return x * kept / (1.0 - rate), kept
        drawn = kind_of(func)
        if drawn is not None and (kwargs or {}).get("generator") is None:
            return self._drawn(func, drawn, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _drawn(self, func: Any, kind: str, args: Any, kwargs: Any) -> Any:
        """Return the result of a noise operator, by its kind of numbers."""
        is_in_place = func._schema.is_mutable
        if is_in_place:
            x = args[0]
        elif isinstance(args[0], torch.Tensor):
            x = torch.empty_like(args[0], dtype=kwargs.get("dtype"))
        else:
            x = torch.empty(args[0], dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        numbers = self._noise_of(next(self._sites), x, kind)
        for target, number in steps_of(func, kind, args, kwargs):
            numbers = target(numbers, number)
        return x.copy_(numbers) if is_in_place else numbers
