"""The fused norms against their plain forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoptd.kernels.norms import layer_norm, layer_norm_plain, rms_norm, rms_norm_plain
from tests.kernels.compare import (
    check_errors,
    check_gradients,
    check_same,
    few,
    kept_bytes,
    layer,
    layouts,
    random,
    rms,
    seeds,
    small_tiles,
)

Tensor = torch.Tensor
shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@few
@given(shapes, st.booleans(), st.booleans(), st.sampled_from([0.0, 1.0]), layouts, layouts, seeds)
def test_equals_plain(
    shape: tuple[int, ...], weighted: bool, adds: bool, offset: float, layout: str, other: str, seed: int
) -> None:
    x = random(*shape, seed=seed, layout=layout)
    residual = random(*shape, seed=seed + 1, layout=other) if adds else None
    weight, bias = (random(shape[-1], seed=seed + i) if weighted else None for i in (2, 3))
    with small_tiles():
        check_same(rms(rms_norm), rms(rms_norm_plain), [x, weight, residual], 3, offset=offset)
    check_same(layer(layer_norm), layer(layer_norm_plain), [x, weight, bias, residual], 4)


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_only(used: int) -> None:
    """Backward through the norm alone, or through the sum alone."""
    tensors = [random(3, 4), random(4, seed=1), random(3, 4, seed=2)]
    of = lambda form: lambda *x: form(*x)[used]  # noqa: E731
    check_same(of(rms(rms_norm)), of(rms(rms_norm_plain)), tensors, 3)
    tensors.insert(2, random(4, seed=3))
    check_same(of(layer(layer_norm)), of(layer(layer_norm_plain)), tensors, 4)


def test_dtypes_are_those_of_the_plain_form() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for other in (torch.float32, torch.bfloat16):
            for residual in (None, random(3, 4, seed=2).to(dtype), random(3, 4, seed=2).to(other)):
                inputs = random(3, 4).to(dtype), random(4, seed=1).to(other), residual
                found, wanted = rms(rms_norm)(*inputs), rms(rms_norm_plain)(*inputs)
                found, wanted = (x if isinstance(x, tuple) else (x,) for x in (found, wanted))
                assert [x.dtype for x in found] == [x.dtype for x in wanted]


def test_gradients() -> None:
    x, weight, bias, residual = (
        random(*size, seed=4).requires_grad_() for size in ((3, 4), (4,), (4,), (3, 4))
    )
    check_gradients(rms(rms_norm, offset=1.0), x, weight, residual)
    check_gradients(rms(rms_norm), x, weight)
    check_gradients(layer(layer_norm), x, weight, bias, residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors(dtype: torch.dtype) -> None:
    x, weight, residual = random(20, 100), random(100, seed=1), random(20, 100, seed=2)
    check_errors(rms(rms_norm), rms(rms_norm_plain), [x, weight], 2, dtype)
    check_errors(rms(rms_norm), rms(rms_norm_plain), [x, weight, residual], 3, dtype)
    check_errors(layer(layer_norm), layer(layer_norm_plain), [x, weight, weight, residual], 4, dtype)


def test_keeps_what_was_normed_and_numbers_of_rows() -> None:
    x, residual = (random(16, 64, seed=i).float().requires_grad_() for i in range(2))
    weight = random(64).float().requires_grad_()
    assert kept_bytes(rms(rms_norm), x, weight) == 16 * 4
    assert kept_bytes(rms(rms_norm), x, weight, residual) == x.nbytes + 16 * 4
    assert kept_bytes(layer(layer_norm), x, weight, weight, residual) == x.nbytes + 2 * 16 * 4
    assert kept_bytes(rms(rms_norm), x.detach(), weight.detach(), residual.detach()) == 0
