"""The fused activations against their plain forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoptd.errors import InternalError
from autoptd.kernels.activations import (
    bias_gelu,
    bias_gelu_plain,
    geglu,
    geglu_plain,
    swiglu,
    swiglu_plain,
)
from tests.kernels.compare import (
    check_errors,
    check_gradients,
    check_same,
    few,
    kept_bytes,
    layouts,
    random,
    seeds,
    small_tiles,
)

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)
kinds = st.sampled_from(["none", "tanh"])
PAIRS = {
    "bias_gelu": (bias_gelu, bias_gelu_plain, [random(5, 30), random(30, seed=1)]),
    "swiglu": (swiglu, swiglu_plain, [random(5, 30), random(5, 30, seed=1)]),
    "geglu": (geglu, geglu_plain, [random(5, 30), random(5, 30, seed=1)]),
}


@few
@given(shapes, kinds, layouts, layouts, seeds)
def test_equals_plain(shape: tuple[int, ...], kind: str, layout: str, other: str, seed: int) -> None:
    x, y = random(*shape, seed=seed, layout=layout), random(*shape, seed=seed + 1, layout=other)
    bias = random(shape[-1], seed=seed + 2)
    with small_tiles():
        check_same(bias_gelu, bias_gelu_plain, [x, bias], 2, approximate=kind)
        check_same(geglu, geglu_plain, [x, y], 2, approximate=kind)
        check_same(swiglu, swiglu_plain, [x, y], 2)


def test_tensors_that_do_not_fit_take_the_plain_form() -> None:
    check_same(swiglu, swiglu_plain, [random(3, 1), random(3, 4)], 2)
    check_same(bias_gelu, bias_gelu_plain, [random(3, 4), random(3, 1)], 2)
    assert bias_gelu(random(3, 4).float(), random(4)).dtype == torch.float64


@pytest.mark.parametrize("name", PAIRS)
def test_gradients(name: str) -> None:
    fused, _, tensors = PAIRS[name]
    check_gradients(fused, *(x[..., :4].clone().requires_grad_() for x in tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PAIRS)
def test_errors(name: str, dtype: torch.dtype) -> None:
    fused, plain, tensors = PAIRS[name]
    check_errors(fused, plain, tensors, 2, dtype)


@pytest.mark.parametrize("name", PAIRS)
def test_keeps_its_inputs(name: str) -> None:
    fused, plain, tensors = PAIRS[name]
    tensors = [x.clone().requires_grad_() for x in tensors]
    assert kept_bytes(fused, *tensors) == 0 < kept_bytes(plain, *tensors)


def test_one_gradient_only() -> None:
    x, bias = random(3, 4), random(4).requires_grad_()
    (found,) = torch.autograd.grad(bias_gelu(x, bias).sum(), bias)
    (wanted,) = torch.autograd.grad(bias_gelu_plain(x, bias).sum(), bias)
    torch.testing.assert_close(found, wanted)


def test_an_unknown_approximation_is_refused() -> None:
    with pytest.raises(InternalError, match="approximation"):
        geglu(random(3), random(3), approximate="sigmoid")
