"""The fused end of a block against its plain form, and its mask against that of dropout alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoptd.kernels.dropout import bias_dropout_add, bias_dropout_add_plain, drop
from autoptd.kernels.dropout_mask import Places, keys
from tests.kernels.compare import (
    check_errors,
    check_gradients,
    check_same,
    few,
    kept_bytes,
    layouts,
    random,
    seeds,
)

PLACES = Places(*keys(0, 1, 2), first_row=3)
shapes = st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple)


@few
@given(shapes, st.booleans(), st.sampled_from([0.0, 0.4]), layouts, layouts, seeds)
def test_equals_plain(
    shape: tuple[int, ...], biased: bool, rate: float, layout: str, other: str, seed: int
) -> None:
    x, residual = random(*shape, seed=seed, layout=layout), random(*shape, seed=seed + 1, layout=other)
    bias = random(shape[-1], seed=seed + 2) if biased else None
    for size in (None, (shape[0], shape[1], x[0, 0].numel())):
        options = {"rate": rate, "places": PLACES, "size": size}
        check_same(bias_dropout_add, bias_dropout_add_plain, [x, bias, residual], 3, **options)


def test_the_mask_is_that_of_dropout() -> None:
    x, zero = random(4, 5, 6), torch.zeros(4, 5, 6, dtype=torch.float64)
    wanted = drop(x.view(1, 4, 30), 0.3, PLACES).view(x.shape)
    assert torch.equal(bias_dropout_add(x, None, zero, rate=0.3, places=PLACES), wanted)
    assert torch.equal(bias_dropout_add(x, None, zero, rate=0.3), x)


def test_tensors_that_do_not_fit_take_the_plain_form() -> None:
    check_same(bias_dropout_add, bias_dropout_add_plain, [random(3, 4), random(3, 1), random(4)], 3)
    assert bias_dropout_add(random(3, 4).bfloat16(), None, random(3, 4)).dtype == torch.float64


def test_gradients() -> None:
    tensors = random(2, 3, 4), random(4, seed=1), random(2, 3, 4, seed=2)
    check_gradients(
        lambda *x: bias_dropout_add(*x, rate=0.4, places=PLACES), *(x.requires_grad_() for x in tensors)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors(dtype: torch.dtype) -> None:
    def of(form):  # type: ignore[no-untyped-def]
        return lambda *x: form(*x, rate=0.4, places=PLACES)

    tensors = [random(9, 30), random(30, seed=1), random(9, 30, seed=2)]
    check_errors(of(bias_dropout_add), of(bias_dropout_add_plain), tensors, 3, dtype)


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_keeps_nothing(rate: float) -> None:
    tensors = [x.requires_grad_() for x in (random(4, 30), random(30, seed=1), random(4, 30, seed=2))]
    assert kept_bytes(lambda *x: bias_dropout_add(*x, rate=rate, places=PLACES), *tensors) == 0
