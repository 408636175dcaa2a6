"""The wrapper of torch's fused attention against softmax(q k^T * scale + mask) v."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoptd.kernels.attention import attention, attention_plain
from tests.kernels.compare import check_errors, check_same, few, kept_bytes, layouts, random, seeds, sizes

Tensor = torch.Tensor
LEADING = [
    ((2, 3), (2, 3)),
    ((2, 3), (2, 1)),
    ((4,), (4,)),
    ((), ()),
    ((2, 1, 3), (2, 2, 1)),
    ((1, 3), (2, 3)),
]


@few
@given(
    st.sampled_from(LEADING),
    sizes,
    sizes,
    sizes,
    st.sampled_from(["none", "bool", "float"]),
    st.booleans(),
    layouts,
    seeds,
)
def test_equals_plain(
    leading: tuple[tuple[int, ...], tuple[int, ...]],
    s: int,
    n: int,
    k: int,
    kind: str,
    causal: bool,
    layout: str,
    seed: int,
) -> None:
    q = random(*leading[0], s, k, seed=seed, layout=layout)
    keys, values = (
        random(*leading[1], n, k, seed=seed + 1),
        random(*leading[1], n, k, seed=seed + 2, layout=layout),
    )
    whole = torch.broadcast_shapes(*leading)
    for shape in ((s, n), (n,), (s, 1), (*whole[:-1], *(1 for _ in whole[-1:]), s, n)):
        mask = None if kind == "none" else random(*shape, seed=seed + 3)
        if mask is not None and kind == "bool":
            mask = mask > 0
            mask[..., 0] = True  # every query attends to something
        check_same(attention, attention_plain, [q, keys, values, mask], grads=3, causal=causal)
        check_same(attention, attention_plain, [q, keys, values, mask], grads=3, causal=causal, scale=0.2)


def test_values_of_another_width() -> None:
    check_same(
        attention, attention_plain, [random(2, 3, 4, 6), random(2, 3, 5, 6), random(2, 3, 5, 2)], grads=3
    )


def test_least_numbers_of_a_wider_dtype_stay_finite() -> None:
    """A row that is masked by float32's least number attends to all keys alike, in bfloat16 as well."""
    q, k, v = (random(1, 2, 3, 8, seed=i).bfloat16() for i in range(3))
    mask = torch.full((3, 3), torch.finfo(torch.float32).min)
    torch.testing.assert_close(
        attention(q, k, v, mask), v.mean(-2, keepdim=True).expand(v.shape), rtol=0, atol=2e-2
    )


def test_a_row_that_attends_to_nothing_gives_zeros() -> None:
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    y = attention(random(1, 2, 3, 4), random(1, 2, 3, 4), random(1, 2, 3, 4), mask)
    assert not y[:, :, 1].any() and bool(y[:, :, 0].all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors(dtype: torch.dtype) -> None:
    mask = random(20, 20, seed=4)
    check_errors(
        attention, attention_plain, [*(random(2, 3, 20, 16, seed=i) for i in range(3)), mask], 3, dtype
    )


def test_keeps_no_scores() -> None:
    q, k, v = (random(1, 2, 64, 8, seed=i).float().requires_grad_() for i in range(3))
    assert kept_bytes(lambda q, k, v: attention(q, k, v, causal=True), q, k, v) <= q.nbytes + 2 * 64 * 4 + 64
