"""The fused rotary embedding against its plain form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoptd.errors import InternalError
from autoptd.kernels.rotary import rotary, rotary_plain
from tests.kernels.compare import (
    check_errors,
    check_gradients,
    check_same,
    few,
    kept_bytes,
    layouts,
    random,
    seeds,
    sizes,
    small_tiles,
)


@few
@given(sizes, sizes, sizes, sizes, st.integers(0, 3), st.integers(0, 15), st.booleans(), layouts, seeds)
def test_equals_plain(
    a: int, b: int, s: int, pairs: int, rest: int, ones: int, interleaved: bool, layout: str, seed: int
) -> None:
    """Tables of any numbers that broadcast, `rest` elements that pass through."""
    x = random(a, b, s, 2 * pairs + rest, seed=seed, layout=layout)
    shape = [1 if ones >> i & 1 else size for i, size in enumerate((a, b, s))]
    cos, sin = (random(*shape[ones >> 3 :], 2 * pairs, seed=seed + i) for i in (1, 2))
    check_same(rotary, rotary_plain, [x, cos, sin], interleaved=interleaved)
    with small_tiles():
        check_same(rotary, rotary_plain, [x, cos, sin], interleaved=interleaved)


def test_tables_that_widen_the_value() -> None:
    check_same(rotary, rotary_plain, [random(1, 3, 4), random(2, 3, 4), random(2, 3, 4)])


def test_tables_of_another_dtype() -> None:
    x, cos, sin = random(2, 3, 4), random(3, 4, seed=1), random(3, 4, seed=2)
    for dtype, other in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        inputs = x.to(dtype), cos.to(other), sin.to(other)
        found, wanted = rotary(*inputs), rotary_plain(*inputs)
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)


def test_gradients() -> None:
    for interleaved in (False, True):
        check_gradients(
            lambda x, interleaved=interleaved: rotary(
                x, random(3, 4), random(3, 4, seed=1), interleaved=interleaved
            ),
            random(2, 3, 5).requires_grad_(),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors(dtype: torch.dtype) -> None:
    check_errors(
        rotary, rotary_plain, [random(5, 9, 8), random(9, 8, seed=1), random(9, 8, seed=2)], 1, dtype
    )


def test_keeps_its_tables() -> None:
    x, cos, sin = random(4, 9, 8).requires_grad_(), random(9, 8), random(9, 8)
    assert kept_bytes(rotary, x, cos, sin) == 0
    assert kept_bytes(rotary, x.float().detach().requires_grad_(), cos, sin) == 0


def test_what_cannot_be_turned_is_refused() -> None:
    for cos, sin in (((3, 6), (3, 6)), ((3, 3), (3, 3)), ((3, 4), (3, 2))):
        with pytest.raises(InternalError, match="turn"):
            rotary(random(3, 4), random(*cos), random(*sin))
    with pytest.raises(InternalError, match="sines"):
        rotary(random(3, 4), random(3, 4), random(3, 4).requires_grad_())
