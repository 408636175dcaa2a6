"""What the tests of fused operators share: a fused form against the plain one, its errors, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from autoptd.kernels import forms

Tensor = torch.Tensor
Operator = Callable[..., Any]
LAYOUTS = ["as it is", "transposed", "sliced", "expanded"]
try:
    from hypothesis import settings
    from hypothesis import strategies as st
except ImportError:  # a machine with a GPU may have pytest only: the tests that are marked gpu draw nothing
    pass
else:
    few = settings(deadline=None, max_examples=30, derandomize=True)
    sizes = st.integers(1, 7)
    layouts = st.sampled_from(LAYOUTS)
    seeds = st.integers(0, 99)


def random(*shape: int, seed: int = 0, layout: str = "as it is") -> Tensor:
    """Normal numbers in float64 that lie in memory as `layout` says."""
    generator = torch.Generator().manual_seed(seed)
    if layout == "expanded" and shape:
        return torch.randn(1, *shape[1:], dtype=torch.float64, generator=generator).expand(shape)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        return torch.stack((x, x), -1).flatten(-2)[..., ::2]
    return x


def cotangent(x: Tensor, seed: int) -> Tensor:
    """What a result is given in backward, where it is."""
    return random(*x.shape, seed=seed).to(x.device, x.dtype)


def small_tiles() -> AbstractContextManager[Any]:
    """Tiles of a few elements, so that small values have many."""
    return mock.patch.object(forms, "TILE", 8)


def results(operator: Operator, tensors: Sequence[Tensor | None], grads: int, **options: Any) -> list[Tensor]:
    """Results, then the gradients of the first `grads` tensors; nothing that was given may change."""
    given = [None if x is None else x.detach() for x in tensors]
    before = [None if x is None else x.clone() for x in given]
    leaves = [x.requires_grad_() if x is not None and i < grads else x for i, x in enumerate(given)]
    found = operator(*leaves, **options)
    found = list(found) if isinstance(found, tuple) else [found]
    cotangents = [cotangent(x, seed=50 + i) for i, x in enumerate(found)]
    kept = [x.clone() for x in found]
    torch.autograd.backward(found, cotangents)
    for x, y in zip([*given, *found, *cotangents], [*before, *kept, *cotangents], strict=True):
        assert x is None or y is None or torch.equal(x.detach().nan_to_num(), y.detach().nan_to_num())
    with torch.no_grad():
        again = operator(*given, **options)
    for x, y in zip(again if isinstance(again, tuple) else [again], kept, strict=True):
        assert not x.requires_grad and torch.equal(x.nan_to_num(), y.detach().nan_to_num())
    return [x.detach() for x in kept] + [
        x.grad for x in leaves[:grads] if x is not None and x.grad is not None
    ]


def check_same(
    fused: Operator,
    plain: Operator,
    tensors: Sequence[Tensor | None],
    grads: int = 1,
    more: dict[str, Any] | None = None,
    atol: float = 1e-11,
    **options: Any,
) -> None:
    """The fused form (with the options `more`) and the plain one: results, and gradients of the first `grads` tensors."""
    wanted = results(plain, tensors, grads, **options)
    found = results(fused, tensors, grads, **options, **(more or {}))
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol, equal_nan=True)


def check_gradients(operator: Operator, *tensors: Tensor) -> None:
    """`gradcheck`, of the tensors that require a gradient."""
    with small_tiles():
        assert torch.autograd.gradcheck(operator, tensors)


def check_errors(
    fused: Operator,
    plain: Operator,
    tensors: Sequence[Tensor],
    grads: int,
    dtype: torch.dtype,
    slack: float = 2.0,
) -> None:
    """The error of the fused form in `dtype` against float64: at most `slack` times the plain form's and one rounding."""
    narrow = [x.to(dtype) if x.is_floating_point() else x for x in tensors]
    exact = results(plain, [x.double() if x.is_floating_point() else x for x in narrow], grads)
    for found, other, true in zip(
        results(fused, narrow, grads), results(plain, narrow, grads), exact, strict=True
    ):
        assert found.dtype == other.dtype
        error, allowed = ((x.double() - true).abs().max() for x in (found, other))
        assert error <= slack * allowed + torch.finfo(dtype).eps * true.abs().max()


def kept_bytes(operator: Operator, *tensors: Tensor | None) -> int:
    """Bytes that autograd keeps for backward beside the tensors that are given."""
    given = {x.untyped_storage().data_ptr() for x in tensors if x is not None}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        held = operator(*tensors)
    assert held is not None
    return sum(kept.values())


def rms(form: Operator, **options: Any) -> Operator:
    """A norm of (x, weight, what is added to x)."""
    return lambda x, weight=None, residual=None, **more: form(
        x, weight, residual=residual, eps=1e-3, **options, **more
    )


def layer(form: Operator) -> Operator:
    """A norm of (x, weight, bias, what is added to x)."""
    return lambda x, weight, bias, residual=None, **more: form(
        x, weight, bias, residual=residual, eps=1e-3, **more
    )
